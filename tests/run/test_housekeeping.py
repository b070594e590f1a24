"""What a run deletes after a commit, and when it sweeps: `Retainer`, by itself and in a manager."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY, data_key, new_nonce
from dcp_objstore.run import housekeeping
from dcp_objstore.run.housekeeping import Deletions, Retainer, after_commit
from dcp_objstore.run.sweep import SweepReport
from dcp_objstore.stores import StoreSpec
from dcp_objstore.write import async_save as async_api
from tests.support.checkpoints import numbers
from tests.support.managers import (
    down,
    end_of,
    end_of_upkeep,
    loaded,
    names,
    save_each,
    save_steps,
    state,
)


def retainer(url: str, keep: dos.RetentionPolicy, **settings: Any) -> Retainer:
    return Retainer(StoreSpec(url), keep, sweeps=False, **settings)


def objects(url: str, step: int) -> int:
    return sum(1 for _ in StoreSpec(f"{url}/step-{step}").open().list())


class Seeing(dos.RetentionPolicy):
    """A policy that keeps all and remembers what it was asked about."""

    def keeps(self, steps: Any) -> frozenset[int]:
        self.steps = list(steps)
        return frozenset(one.step for one in steps)


def test_a_policy_sees_the_metrics_and_pins_of_all_steps_that_count(url):
    for step, metrics in ((1, {"loss": 1}), (2, ["of the user"]), (3, {"loss": "low"})):
        described = {"metrics": metrics}
        dos.save(state(step), f"{url}/step-{step}", user_metadata=described, progress=False)
    dos.pin(f"{url}/step-1")
    policy = Seeing()
    retainer(url, policy).committed(3)
    assert policy.steps == [
        dos.StepFacts(step=1, metrics={"loss": 1}, pinned=True),
        dos.StepFacts(step=2),
        dos.StepFacts(step=3, metrics={"loss": "low"}),
    ]


class Broken(dos.RetentionPolicy):
    """A policy of the user's that has an error."""

    def keeps(self, steps: Any) -> frozenset[int]:
        raise KeyError("no such metric")


def test_a_policy_that_fails_is_named_in_the_log_and_nothing_is_deleted(url, caplog):
    save_each(url, 1, 2)
    retainer(url, Broken()).committed(2)
    assert "KeyError('no such metric')" in caplog.text
    assert names(url) == ["step-1", "step-2"]


@pytest.mark.parametrize("owned", [True, False])
def test_retention_of_a_job_that_does_not_have_the_run_deletes_nothing(url, owned, caplog):
    """Another job claims the run between its last commit and its deletions."""
    with dos.CheckpointManager(url, claim_run=owned, sweep=False) as old:
        for step in (1, 2, 3):
            old.save(step, state(step))
        late = retainer(url, dos.KeepLatest(1))
        late.claim = old.claim
        assert (old.claim is not None) is owned
    dos.claim_run(url)
    late.committed(3)
    assert "were not deleted" in caplog.text
    assert names(url) == ["step-1", "step-2", "step-3"]
    dos.load(state(0), f"{url}/step-1", progress=False)


def test_a_few_steps_are_deleted_after_a_commit_and_pinned_ones_take_no_turn(url):
    few = retainer(url, dos.KeepLatest(1), at_a_time=2)
    save_each(url, *range(1, 7))
    dos.pin(f"{url}/step-1", "paper")
    left = []
    for _ in range(3):
        few.committed(6)
        left.append([int(name.rpartition("-")[2]) for name in names(url)])
    assert left == [[1, 4, 5, 6], [1, 6], [1, 6]]


def test_a_step_that_somebody_took_the_index_of_displaces_none_that_is_whole(url):
    save_each(url, 1, 2, 3)
    store = StoreSpec(f"{url}/step-2").open()
    (index,) = (meta.key for meta in store.list() if meta.key.startswith("index."))
    store.delete(index)
    retainer(url, dos.KeepLatest(2)).committed(3)
    assert "step-1" in names(url)


def test_retention_reads_no_marker_twice(url, requests):
    keeps = retainer(url, dos.KeepLatest(9))
    read = []
    save_each(url, 1, 2, 3)
    for step in (4, 5):
        save_each(url, step)
        requests.clear()
        keeps.committed(step)
        read.append([one.key for one in requests].count(MARKER_KEY))
    assert read == [4, 1]


def test_without_a_policy_or_a_sweep_a_commit_causes_no_requests(url, requests):
    Retainer(StoreSpec(url), sweeps=False).committed(1)
    assert requests == []


def test_at_its_end_a_run_holds_the_bytes_that_keep_says_and_tombstones(tmp_path):
    """All that takes room on a disk is counted, whatever a listing leaves out."""
    save_steps(tmp_path.as_uri(), range(1, 7), keep=dos.KeepLatest(2))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    left = [path for path in files if path.parent.name not in {"step-5", "step-6"}]
    sizes = {path.relative_to(tmp_path).as_posix() for path in left if path.stat().st_size}
    assert sizes == {"_CLAIM", *(f"step-{step}/{MARKER_KEY}" for step in range(1, 5))}
    assert dos.open(f"{tmp_path.as_uri()}/step-5").verify(deep=True).ok


def test_a_grace_period_keeps_objects_and_a_new_save_there_is_whole(url):
    now = 100.0
    keeps = retainer(url, dos.KeepLatest(1), grace_seconds=60, clock=lambda: now)

    def commit(step: int, after_seconds: float) -> None:
        nonlocal now
        now += after_seconds
        save_each(url, step)
        keeps.committed(step)

    commit(1, 0)
    whole = objects(url, 1)
    commit(2, 0)
    assert names(url) == ["step-2"]
    assert objects(url, 1) == whole - 1, "all but `.metadata`"
    commit(3, 59)
    assert (objects(url, 1), objects(url, 2)) == (whole - 1, whole - 1)
    save_each(url, 1)
    dos.pin(f"{url}/step-1", "mine")
    commit(4, 1)
    dos.load(state(0), f"{url}/step-1", progress=False)
    assert objects(url, 2) == whole - 1
    commit(5, 59)
    assert objects(url, 2) == 1, "the tombstone"
    assert objects(url, 3) == whole - 1
    assert names(url) == ["step-1", "step-5"]


def test_the_next_deletion_removes_what_another_left_to_readers(url):
    now = [0.0]
    save_steps(url, [1, 2, 3])
    deletions = Deletions(10, clock=lambda: now[0])
    for step in (1, 2):
        deletions.delete(StoreSpec(f"{url}/step-{step}"), None, allow_newest=False)
        assert objects(url, step) > 1, "they may still be read"
        now[0] += 11
    assert (objects(url, 1), objects(url, 2) > 1) == (1, True)


@pytest.mark.parametrize("grace", [-1, "1h", None, True, float("nan")])
def test_a_grace_period_that_is_no_time_is_refused(url, grace):
    with pytest.raises(dos.errors.ConfigError, match="grace_seconds"):
        retainer(url, dos.KeepLatest(1), grace_seconds=grace)
    with pytest.raises(dos.errors.ConfigError, match="grace_seconds"):
        dos.delete(f"{url}/step-1", grace_seconds=grace)


# --- in the background of a job


def test_upkeep_follows_a_commit_alone_and_leaves_the_error_of_a_save_to_be_raised(
    url, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(async_api, "run_save", down)
        handle = dos.async_save(state(1), f"{url}/step-1")
        after_commit(handle, lambda: pytest.fail("it has failed")).join(60)
    with pytest.raises(dos.errors.StoreUnavailableError):
        dos.async_save(state(2), f"{url}/step-2")


def test_old_steps_go_only_after_a_newer_one_is_durable_and_never_the_source(url, hold):
    go = hold(async_api, "run_save")
    save_steps(url, (1, 2, 3, 4))
    with dos.CheckpointManager(url, keep=dos.KeepLatest(1), sweep=False) as run:
        loaded(run, 3)
        run.async_save(5, state(5))
        assert numbers(run) == (1, 2, 3, 4), "nothing has been committed in its place"
        go.set()
    assert names(url) == ["step-3", "step-5"]


def test_the_end_waits_for_deletions_even_if_the_last_save_has_failed(url, hold, monkeypatch):
    save_steps(url, (1,))
    go = hold(Retainer, "committed")
    with (
        pytest.raises(dos.errors.StoreUnavailableError),
        dos.CheckpointManager(url, keep=dos.KeepLatest(1)) as run,
    ):
        run.save(2, state(2))
        monkeypatch.setattr(async_api, "run_save", down)
        run.async_save(3, state(3))
        threading.Timer(0.1, go.set).start()
    assert names(url) == ["step-2"]


# --- sweeps


class Sweeps:
    """The sweeps that begin, and a clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[float] = []
        self.over: list[bool] = []
        self.now = 100.0
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()
        monkeypatch.setattr(housekeeping, "sweep_below", self.sweep)

    def sweep(self, run: StoreSpec, *, is_over: Any) -> SweepReport:
        self.began.append(self.now)
        if self.error is not None:
            raise self.error
        assert self.go.wait(60)
        self.over.append(is_over())
        return SweepReport(url=run.url, checkpoints=())

    def clock(self) -> float:
        return self.now


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    return Sweeps(monkeypatch)


@pytest.mark.parametrize(
    ("error", "began"),
    [
        (None, [100, 3700, 7300]),
        (dos.errors.StoreUnavailableError("down"), [100, 3700, 7300]),
        (dos.errors.UnsupportedError("cannot be swept"), [100]),
    ],
)
def test_a_run_is_swept_once_an_hour_if_it_can_be(url, sweeps, error, began):
    sweeps.error = error
    keeper = Retainer(StoreSpec(url), clock=sweeps.clock)
    for seconds in (0, 3599, 3600, 7199, 7200):
        sweeps.now = 100.0 + seconds
        keeper.sweep()
    keeper.end()
    sweeps.now += 3600
    keeper.sweep()
    Retainer(StoreSpec(url), sweeps=False).sweep()
    assert sweeps.began == began


def test_a_sweep_that_takes_hours_is_not_begun_again(url, sweeps):
    sweeps.go.clear()
    keeper = Retainer(StoreSpec(url), clock=sweeps.clock)
    for _ in range(2):
        keeper.committed(1)
        sweeps.now += 3600
    sweeps.go.set()
    end_of("sweep")
    assert len(sweeps.began) == 1
    keeper.committed(1)
    end_of("sweep")
    assert len(sweeps.began) == 2


def test_neither_deletions_nor_the_end_of_the_job_wait_for_a_sweep(url, sweeps):
    sweeps.go.clear()
    with dos.CheckpointManager(url, keep=dos.KeepLatest(1)) as run:
        run.save(1, state(1))
        run.save(2, state(2))
        assert loaded(run)[0] == 2
        assert numbers(run) == (2,)
    assert (len(sweeps.began), sweeps.over) == (1, [])
    sweeps.go.set()
    end_of_upkeep()
    assert sweeps.over == [True], "it is told to end"


@pytest.mark.parametrize("sweep", [True, False])
def test_what_died_a_day_ago_is_swept_up_and_what_is_young_stays(tmp_path, sweep, caplog):
    caplog.set_level("INFO", logger="dcp_objstore")
    died: list[Path] = []
    for step, days in ((1, 2), (2, 0)):
        left = tmp_path / f"step-{step}" / data_key(0, 0, new_nonce())
        left.parent.mkdir()
        left.write_bytes(b"a save that died")
        then = time.time() - days * 86400
        os.utime(left, (then, then))
        died.append(left)
    with dos.CheckpointManager(tmp_path.as_uri(), sweep=sweep) as run:
        run.save(3, state(3))
        end_of_upkeep()
    assert [left.exists() for left in died] == [not sweep, True]
    assert ("1 objects (16 bytes)" in caplog.text) is sweep
    assert names(tmp_path.as_uri()) == ["step-3"]
