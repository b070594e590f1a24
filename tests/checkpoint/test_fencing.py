"""A job that was paused and wakes up too late does no damage, and is told the truth.

Real processes, stopped by SIGSTOP at a request of theirs that the proxy holds back. What is said
here of pauses holds for a job on a machine that lost its network, too: the request arrives late.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.errors import CheckpointNotFoundError, CommitLostError, LostRaceError
from dcp_objstore.stores import ObjectStore, StoreSpec
from tests.support.checkpoints import edition, edition_in, save_edition_here
from tests.support.launcher import Job, Outcome, Ranks
from tests.support.proxy import Meant, NetworkProxy
from tests.support.ranks import pause as pause_job, run_ranks, start_workers
from tests.support.servers import Bucket
from tests.support.upkeep import AgedStore, Ages, loose, named, tear

Options = Mapping[str, object]

pytestmark = pytest.mark.backends("seaweed")


def save(
    rank: int, world_size: int, name: str, url: str, options: Options, overwrite: bool
) -> None:
    state = dict(edition(name, "shard0"))
    dos.save(state, url, storage_options=options, overwrite=overwrite, progress=False)


def sweep(rank: int, world_size: int, url: str, direct: Options, options: Options) -> Any:
    """In a world where everything that is there when it begins is two days old."""
    ages: Ages = {}
    really_open = StoreSpec.open

    def open_aged(spec: StoreSpec) -> ObjectStore:
        return AgedStore(really_open(spec), ages)

    AgedStore(StoreSpec(url, direct).open(), ages).age()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoreSpec, "open", open_aged)
        (done,) = dos.sweep(url, storage_options=options).checkpoints
    return done


def delete(rank: int, world_size: int, url: str, options: Options, now: bool) -> Any:
    return dos.delete(
        url, storage_options=options, allow_newest=True, grace_seconds=0 if now else math.inf
    )


@pytest.fixture(scope="module")
def crew() -> Iterator[Ranks]:
    with start_workers() as crew:
        yield crew


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[NetworkProxy]:
    with NetworkProxy(bucket.storage_options) as proxy:
        yield proxy


def asks(method: str, ending: str) -> Meant:
    return lambda asked: asked.method == method and asked.name.endswith(ending)


def pause(
    proxy: NetworkProxy, meant: Meant, begin: Callable[[], Job]
) -> Callable[[], list[Outcome]]:
    """Start a job, and stop its processes at the first request that is meant.

    Returns what wakes it up and waits for its end.
    """
    held = proxy.hold(meant)
    job = begin()
    held.wait()
    pause_job(job)

    def wake() -> list[Outcome]:
        held.release()
        job.signal(signal.SIGCONT)
        return job.end()

    return wake


def zombie_at(
    crew: Ranks, proxy: NetworkProxy, url: str, options: Options, meant: Meant, there: bool
) -> Callable[[], list[Outcome]]:
    """A paused save, of a first checkpoint or over one that is there; returns what wakes it up."""
    if there:
        save_edition_here("first", url, options)
    return pause(
        proxy, meant, lambda: crew.start(2, save, "zombie", url, proxy.storage_options, there)
    )


def assert_lost(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome.error, CommitLostError), str(outcome)


def assert_whole(bucket: Bucket, name: str, wanted: str, others: list[str]) -> None:
    """It loads whole, every object that it names is there, and stock readers see the same."""
    url, options = bucket.at(name), bucket.storage_options
    assert edition_in(url, options, [wanted, *others]) == wanted
    named(StoreSpec(url, options).open())
    assert dos.repair(url, storage_options=options, dry_run=True).dot_metadata is None


@pytest.mark.parametrize(
    ("moment", "there"),
    [(asks("PUT", ".distcp"), False), (asks("PUT", "_COMMIT"), True)],
    ids=["begun", "at its commit"],
)
def test_a_zombie_cannot_commit_over_its_successor(bucket, proxy, crew, moment, there):
    url, options = bucket.at("step-1"), bucket.storage_options
    wake = zombie_at(crew, proxy, url, options, moment, there)
    run_ranks(3, save, "successor", url, options, there)
    before = bucket.keys("step-1")
    assert_lost(wake())
    assert_whole(bucket, "step-1", "successor", ["zombie", "first"])
    left = {key for key in before if not key.startswith(".save-")}
    assert left <= set(bucket.keys("step-1")), "the loser removed nothing but its beacon"
    assert bucket.uploads() == []


@pytest.mark.parametrize(
    ("moment", "there"),
    [(lambda asked: asked.is_listing, True), (asks("PUT", "_COMMIT"), False)],
    ids=["uploaded", "at its commit"],
)
def test_a_writer_that_wakes_up_after_a_sweep_cannot_commit_onto_swept_data(
    bucket, proxy, crew, moment, there
):
    url, options = bucket.at("run/step-1"), bucket.storage_options
    wake = zombie_at(crew, proxy, url, options, moment, there)
    # The index, which is sent at the same time as the listing, may come when a sweep has begun.
    sweeps = (run_ranks(1, sweep, url, options, options)[0] for _ in range(3))
    swept = next(one for one in sweeps if one.outcome != "waiting")
    assert (swept.outcome, swept.fenced) == ("swept", True)
    assert_lost(wake())
    if there:
        assert_whole(bucket, "run/step-1", "first", ["zombie"])
    else:
        with pytest.raises(CheckpointNotFoundError):
            dos.open(url, storage_options=options)
        assert ".metadata" not in bucket.keys("run/step-1")


@pytest.mark.parametrize("name", ["_COMMIT", ".metadata"])
def test_a_job_that_is_superseded_right_after_its_commit_leaves_the_successor_alone(
    bucket, proxy, crew, name
):
    """Its answer is lost, or its `.metadata` is late; it has committed, and is told so."""
    url, options = bucket.at("step-1"), bucket.storage_options
    held = proxy.hold(asks("PUT", name), "answer" if name == "_COMMIT" else "request")
    job = crew.start(2, save, "first", url, proxy.storage_options, False)
    held.wait()
    pause_job(job)
    run_ranks(3, save, "successor", url, options, True)
    held.release()
    job.signal(signal.SIGCONT)
    for outcome in job.end():
        assert outcome.value is None, str(outcome)
        assert not outcome.failed, str(outcome)
    assert_whole(bucket, "step-1", "successor", ["first"])


@pytest.mark.parametrize(
    ("meant", "there", "outcome"),
    [(asks("PUT", "_COMMIT"), True, "lost"), (asks("DELETE", ".distcp"), False, "swept")],
    ids=["at its fence", "at its first removal"],
)
def test_a_sweeper_that_wakes_up_after_a_new_save_removes_nothing_of_it(
    bucket, proxy, crew, meant, there, outcome
):
    url, options = bucket.at("run/step-1"), bucket.storage_options
    store = StoreSpec(url, options).open()
    if there:
        save_edition_here("first", url, options)
        save_edition_here("second", url, options, overwrite=True)
    else:
        tear(store)
    garbage = loose(store)
    wake = pause(proxy, meant, lambda: crew.start(1, sweep, url, options, proxy.storage_options))
    run_ranks(2, save, "successor", url, options, there)
    (woken,) = wake()
    assert not woken.failed, str(woken)
    assert woken.value.outcome == outcome
    assert_whole(bucket, "run/step-1", "successor", ["first", "second"])
    assert (garbage <= set(bucket.keys("run/step-1"))) == (outcome == "lost")


@pytest.mark.parametrize(
    ("meant", "now", "begun"),
    [(asks("PUT", "_COMMIT"), True, False), (asks("DELETE", ".metadata"), False, True)],
    ids=["before the marker says so", "before it removes .metadata"],
)
def test_a_deleter_that_wakes_up_after_a_new_save_does_it_no_damage(
    bucket, proxy, crew, meant, now, begun
):
    url, options = bucket.at("run/step-1"), bucket.storage_options
    save_edition_here("first", url, options)
    wake = pause(proxy, meant, lambda: crew.start(1, delete, url, proxy.storage_options, now))
    # A save that finds a deletion under way finishes it.
    run_ranks(2, save, "successor", url, options, True)
    (woken,) = wake()
    if begun:
        assert not woken.failed, str(woken)
        assert woken.value.superseded
    else:
        assert isinstance(woken.error, LostRaceError), str(woken)
    assert_whole(bucket, "run/step-1", "successor", ["first"])
