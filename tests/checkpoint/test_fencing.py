"""A job whose request comes late does no damage, and is told the truth.

On a real server: the proxy holds one request back, as a paused process or a broken network does,
and others save, sweep and delete before it goes on. All such orders, in memory, are in
`tests/model/test_model_traces.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest

import dcp_objstore as dos
from dcp_objstore.checkpoint.sweep import sweep
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.errors import CheckpointNotFoundError, CommitLostError, LostRaceError
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import Options, edition, edition_in
from tests.support.proxy import Meant, NetworkProxy
from tests.support.servers import Bucket
from tests.support.upkeep import AgedStore, loose, named, tear

pytestmark = pytest.mark.backends("seaweed")

Begin: TypeAlias = Callable[[Meant, Callable[[Options], Any]], Callable[[], Any]]


@pytest.fixture
def begin(bucket: Bucket) -> Iterator[Begin]:
    """Begins a call, up to a request that is meant; returns what lets it go on to its end."""
    with ThreadPoolExecutor(1) as pool, NetworkProxy(bucket.storage_options) as proxy:

        def begun(meant: Meant, call: Callable[[Options], Any]) -> Callable[[], Any]:
            held = proxy.hold(meant)
            ended = pool.submit(call, proxy.storage_options)
            held.wait()

            def go_on() -> Any:
                held.release()
                return ended.result(60)

            return go_on

        yield begun


def asks(method: str, ending: str) -> Meant:
    return lambda asked: asked.method == method and asked.name.endswith(ending)


def sweep_aged(url: str, options: Options) -> Any:
    """In a world where everything that is there when it begins is two days old."""
    store = AgedStore(StoreSpec(url, options).open())
    store.age()
    return sweep(store, dot_metadata=StockDotMetadata())


def save(name: str, url: str, options: Options, *, overwrite: bool = False) -> None:
    state = dict(edition(name))
    dos.save(state, url, storage_options=options, overwrite=overwrite, progress=False)


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
def test_a_zombie_cannot_commit_over_its_successor(bucket, begin, moment, there):
    url, options = bucket.at("step-1"), bucket.storage_options
    if there:
        save("first", url, options)
    wake = begin(moment, lambda late: save("zombie", url, late, overwrite=there))
    save("successor", url, options, overwrite=there)
    before = bucket.keys("step-1")
    with pytest.raises(CommitLostError):
        wake()
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
    bucket, begin, moment, there
):
    url, options = bucket.at("run/step-1"), bucket.storage_options
    if there:
        save("first", url, options)
    wake = begin(moment, lambda late: save("zombie", url, late, overwrite=there))
    # The index, which is sent at the same time as the listing, may come when a sweep has begun.
    sweeps = (sweep_aged(url, options) for _ in range(3))
    swept = next(one for one in sweeps if one.outcome != "waiting")
    assert (swept.outcome, swept.fenced) == ("swept", True)
    with pytest.raises(CommitLostError):
        wake()
    if there:
        assert_whole(bucket, "run/step-1", "first", ["zombie"])
    else:
        with pytest.raises(CheckpointNotFoundError):
            dos.open(url, storage_options=options)
        assert ".metadata" not in bucket.keys("run/step-1")


def test_a_job_that_is_superseded_as_it_publishes_leaves_the_successor_alone(bucket, begin):
    """It has committed, and is told so."""
    url, options = bucket.at("step-1"), bucket.storage_options
    wake = begin(asks("PUT", ".metadata"), lambda late: save("first", url, late))
    save("successor", url, options, overwrite=True)
    wake()
    assert_whole(bucket, "step-1", "successor", ["first"])


@pytest.mark.parametrize(
    ("meant", "there", "outcome"),
    [(asks("PUT", "_COMMIT"), True, "lost"), (asks("DELETE", ".distcp"), False, "swept")],
    ids=["at its fence", "at its first removal"],
)
def test_a_sweeper_that_wakes_up_after_a_new_save_removes_nothing_of_it(
    bucket, begin, meant, there, outcome
):
    url, options = bucket.at("run/step-1"), bucket.storage_options
    store = StoreSpec(url, options).open()
    if there:
        save("first", url, options)
        save("second", url, options, overwrite=True)
    else:
        tear(store)
    garbage = loose(store)
    wake = begin(meant, lambda late: sweep_aged(url, late))
    save("successor", url, options, overwrite=there)
    assert wake().outcome == outcome
    assert_whole(bucket, "run/step-1", "successor", ["first", "second"])
    assert (garbage <= set(bucket.keys("run/step-1"))) == (outcome == "lost")


@pytest.mark.parametrize(
    ("meant", "begun"),
    [(asks("PUT", "_COMMIT"), False), (asks("DELETE", ".metadata"), True)],
    ids=["before the marker says so", "before it removes .metadata"],
)
def test_a_deleter_that_wakes_up_after_a_new_save_does_it_no_damage(bucket, begin, meant, begun):
    url, options = bucket.at("run/step-1"), bucket.storage_options
    save("first", url, options)
    wake = begin(meant, lambda late: dos.delete(url, storage_options=late, allow_newest=True))
    save("successor", url, options, overwrite=True)  # finishes the deletion that has begun
    if begun:
        assert wake().superseded
    else:
        with pytest.raises(LostRaceError):
            wake()
    assert_whole(bucket, "run/step-1", "successor", ["first"])
