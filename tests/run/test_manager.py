"""A run of checkpoints in one process: when it saves, what it keeps, where it resumes."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY, data_key, new_nonce
from dcp_objstore.cli.ls import print_checkpoints
from dcp_objstore.observe.events import Event, Planned
from dcp_objstore.run import claim_run as claiming, housekeeping as retaining, manager
from dcp_objstore.run.steps import check_step, step_name, step_number
from dcp_objstore.run.sweep import SweepReport
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.threads import run_into
from dcp_objstore.write import api, async_save as async_api
from tests.support.checkpoints import numbers
from tests.support.wrapped_stores import RecordingStore


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(6)}/run"


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((4,), float(step)), "step": step}


def loaded(run_or_url: Any, step: int | None = None) -> tuple[int | None, dict[str, Any]]:
    found = {"weight": torch.zeros(4), "step": -1}
    return run_or_url.load(found, step), found


def train(run: dos.CheckpointManager, steps: range, **values: Any) -> None:
    for step in steps:
        run.step(step, state(step), **values)


def save_steps(url: str, steps: Iterable[int]) -> None:
    with dos.CheckpointManager(url) as run:
        for step in steps:
            run.save(step, state(step))


def names(url: str) -> list[str]:
    return [step.name for step in dos.steps(url)]


def down(*args: Any, **settings: Any) -> Any:
    """In place of what saves."""
    raise dos.errors.StoreUnavailableError("down")


def damage(url: str, options: Any = None) -> None:
    """Change a byte of a checkpoint's data, in place."""
    store = StoreSpec(url, options).open()
    key = next(meta.key for meta in store.list() if meta.key.endswith(".distcp"))
    body, _ = store.get(key, max_size_bytes=2**20)
    # Of the tensor, whose payload is the only place with a run of this float.
    at = body.index(torch.full((4,), 1.0).mul(_step_of(url)).numpy().tobytes())
    changed = bytearray(body)
    changed[at] ^= 0xFF
    store.put(key, bytes(changed))


def _step_of(url: str) -> float:
    return float(url.rpartition("-")[2])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background saves wait until the test sets this."""
    go = threading.Event()
    really = async_api.run_save

    def later(*args: Any) -> Any:
        assert go.wait(60)
        return really(*args)

    monkeypatch.setattr(async_api, "run_save", later)
    yield go
    go.set()


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_saves_every_n_steps_and_the_next_job_goes_on(bucket):
    options = bucket.storage_options
    with dos.CheckpointManager(bucket.url, save_every=3, storage_options=options) as run:
        assert loaded(run)[0] is None
        train(run, range(1, 8))
    with dos.CheckpointManager(bucket.url, save_every=3, storage_options=options) as run:
        assert numbers(run) == (3, 6, 7)
        assert run.latest() == 7

        start, found = loaded(run)
        assert (start, found["step"]) == (7, 7)
        assert torch.equal(found["weight"], state(7)["weight"])
        train(run, range(8, 11))
    assert [step.name for step in dos.steps(bucket.url, storage_options=options)] == [
        "step-3",
        "step-6",
        "step-7",
        "step-9",
        "step-10",
    ]


def test_steps_that_are_not_called_one_by_one_are_saved_when_a_multiple_was_passed(url):
    with dos.CheckpointManager(url, save_every=25) as run:
        saved = [step for step in range(0, 120, 10) if run.step(step, state(step))]
    assert saved == [30, 50, 80, 100]
    assert run.url == url
    for every, first, is_due in ((25, 25, True), (25, 26, False), (1, 0, False)):
        with dos.CheckpointManager(f"{url}-{first}", save_every=every, save_last=False) as run:
            assert run.step(first, state(first)) is is_due
    with dos.CheckpointManager(url, save_every=25) as run:
        assert numbers(run) == (30, 50, 80, 100, 110)
        loaded(run, 50)
        # The first step after a load counts from there: 75 was passed.
        assert run.step(76, state(76))


def test_saves_when_the_time_has_come_and_not_before(url):
    with dos.CheckpointManager(url, save_every=timedelta(hours=1)) as run:
        train(run, range(1, 50))
        assert run.latest() is None
    with dos.CheckpointManager(url, save_every=timedelta(milliseconds=1)) as run:
        step = 50
        while not run.step(step, state(step)):
            step += 1
    with dos.CheckpointManager(url) as run:
        assert run.latest() == step


def agreed(run: dos.CheckpointManager) -> None:
    """Wait until the ranks, which is this one, have agreed to do something at the next step."""
    consensus = run._consensus
    assert consensus is not None
    with consensus._state:
        assert consensus._state.wait_for(lambda: consensus._agreed is not None, 60)


@pytest.mark.parametrize("delay", ["a claim that takes long", "another save"])
def test_the_timer_fires_once_for_a_save(url, delay, monkeypatch):
    """It asks again until the save begins, and that agreement comes after the save."""
    really = manager.run_claim.claim_run
    with dos.CheckpointManager(url, save_every=timedelta(milliseconds=1), save_last=False) as run:

        def slowly(*args: Any, **settings: Any) -> Any:
            agreed(run)
            return really(*args, **settings)

        monkeypatch.setattr(manager.run_claim, "claim_run", slowly)
        agreed(run)
        if delay == "another save":
            run.save(1, state(1))
        else:
            assert run.step(1, state(1))
        assert not run.step(2, state(2))
    assert names(url) == ["step-1"]


def test_the_timer_does_not_hold_up_training_until_a_save_has_ended(url, held):
    with dos.CheckpointManager(url, save_every=timedelta(milliseconds=1), on_busy="raise") as run:
        agreed(run)
        assert run.step(1, state(1))
        assert run._saves is not None
        assert run._saves._pending is not None
        run._saves.begun_at -= 60
        assert run._ask() == frozenset()
        held.set()
        assert run._saves._pending[1].exception(60) is None
        assert run._ask() != frozenset()
        step = 2  # where the ranks have agreed once more on the first save, nothing is to be done
        while not run.step(step, state(step)):
            step += 1
    assert names(url) == ["step-1", f"step-{step}"]


def test_the_time_until_the_next_save_begins_anew_with_a_load(url):
    with dos.CheckpointManager(url, save_every=timedelta(hours=1), save_last=False) as run:
        run.save(1, state(1))
        assert run._saves is not None
        run._saves.begun_at -= 7200
        loaded(run)
        assert run._ask() == frozenset()


def test_a_step_can_be_saved_again_after_a_load_that_found_none(url):
    with dos.CheckpointManager(url) as run:
        run.save(1, state(1))
        dos.delete(f"{url}/step-1", allow_newest=True)
        assert run.load(state(0)) is None
        run.save(1, state(1))
    assert names(url) == ["step-1"]


@pytest.mark.parametrize("on_busy", ["skip", "raise"])
def test_a_timed_save_waits_for_ranks_that_have_not_seen_the_last_one_end(
    url, on_busy, monkeypatch
):
    """The timer has asked when rank 0 had ended that save."""
    with dos.CheckpointManager(url, on_busy=on_busy, save_last=False) as run:  # type: ignore[arg-type]
        run.save(1, state(1))
        saves, consensus = run._saves, run._consensus
        assert saves is not None
        assert consensus is not None
        monkeypatch.setattr(saves, "is_idle", lambda: False)
        monkeypatch.setattr(consensus, "reached", lambda: frozenset({manager._timer(saves)}))
        assert run.step(2, state(2))
    assert names(url) == ["step-1", "step-2"]


def test_newest_that_verifies_is_loaded_and_the_others_are_reported(bucket, caplog):
    options = bucket.storage_options
    with dos.CheckpointManager(bucket.url, save_every=1, storage_options=options) as run:
        train(run, range(1, 8))
    for step in range(2, 8):  # more than are looked at first
        damage(bucket.at(f"step-{step}"), options)
    with dos.CheckpointManager(bucket.url, storage_options=options) as run:
        start, found = loaded(run)
        assert (start, found["step"]) == (1, 1)
        assert torch.equal(found["weight"], state(1)["weight"])
        assert run.last_resume is not None
        skipped = run.last_resume.skipped
        assert [one.step for one in skipped] == [7, 6, 5, 4, 3, 2]
        assert all(isinstance(one.error, dos.errors.CheckpointCorruptError) for one in skipped)
        assert "step 7 cannot be loaded" in caplog.text
        # What is done again may be saved again.
        assert run.step(2, state(20)) is False
        run.save(2, state(20))
        found = {"weight": torch.zeros(4), "step": -1}
        assert run.load(found, 2) == 2
        assert found["step"] == 20
    with pytest.raises(dos.errors.CheckpointCorruptError):
        dos.load(
            {"weight": torch.zeros(4)}, bucket.at("step-7"), storage_options=options, progress=False
        )


def test_step_whose_marker_is_damaged_is_skipped_and_saved_again(bucket):
    """A job that has yet to claim the run is refused, because the step might count."""
    options = bucket.storage_options
    with dos.CheckpointManager(bucket.url, save_every=1, storage_options=options) as run:
        train(run, range(1, 4))
    store = StoreSpec(bucket.at("step-3"), options).open()
    marker, _ = store.get("_COMMIT", max_size_bytes=2**16)
    store.put("_COMMIT", b"damaged")
    with (
        pytest.raises(dos.errors.CheckpointCorruptError, match="remove this object by hand"),
        dos.CheckpointManager(bucket.url, storage_options=options) as run,
    ):
        loaded(run)
    store.put("_COMMIT", marker)
    with dos.CheckpointManager(bucket.url, save_every=1, storage_options=options) as run:
        assert loaded(run)[0] == 3
        store.put("_COMMIT", b"damaged")
        assert loaded(run)[0] == 2
        assert run.last_resume is not None
        assert [skip.step for skip in run.last_resume.skipped] == [3]
        assert run.step(3, state(30))
    with dos.CheckpointManager(bucket.url, storage_options=options) as run:
        start, found = loaded(run)
        assert (start, found["step"]) == (3, 30)


def test_a_damaged_step_is_saved_again_without_a_claim_too(url):
    for step in (1, 2):
        dos.save(state(step), f"{url}/step-{step}", progress=False)
    damage(f"{url}/step-2")
    with dos.CheckpointManager(url, claim_run=False) as run:
        assert loaded(run)[0] == 1
        run.save(2, state(20))
        assert loaded(run)[1]["step"] == 20


@pytest.mark.parametrize(("step", "looks"), [(None, 0), (2, 1)])
def test_a_job_looks_for_later_steps_once_before_its_first_save_if_it_chose_its_step(
    url, monkeypatch, step, looks
):
    save_steps(url, [1, 2])
    with dos.CheckpointManager(url, sweep=False) as run:
        loaded(run, step)
        claim = run.claim
        stores = recorded_stores(monkeypatch)
        run.save(3, state(3))
        run.save(4, state(4))
        assert run.claim == claim, "there were none"
    of_run = [one for store in stores if store.url == url for one in store.requests]
    assert [one.verb for one in of_run].count("list") == looks
    assert [store.url for store in stores].count(f"{url}/step-1") == 0, "only the newest is read"


def test_after_a_load_the_steps_before_the_loaded_one_cannot_be_saved_again(url):
    with dos.CheckpointManager(url) as run:
        for step in (1, 2, 3):
            run.save(step, state(step))
        loaded(run, 2)
        for step in (1, 2):
            with pytest.raises(dos.errors.CheckpointExistsError, match="this job"):
                run.save(step, state(9))
        run.save(3, state(30))
        with pytest.raises(dos.errors.ConfigError, match="on_busy"):
            run.async_save(4, state(4), on_busy="perhaps")  # type: ignore[arg-type]
    assert names(url) == ["step-1", "step-2", "step-3"]


# --- going back


def test_steps_later_than_the_one_gone_back_to_do_not_count_after_the_first_save(url):
    """So neither retention nor the job that comes after a crash takes them for this one's."""
    save_steps(url, range(1, 9))
    with (
        pytest.raises(ZeroDivisionError),
        dos.CheckpointManager(url, keep=dos.KeepLatest(2), sweep=False) as run,
    ):
        assert loaded(run, 3)[1]["step"] == 3
        assert loaded(run, 5)[1]["step"] == 5
        assert numbers(run) == tuple(range(1, 9)), "looking at an old step changes nothing"
        run.save(6, state(60))
        assert run.latest() == 6
        run.async_save(7, state(70))
        raise ZeroDivisionError
    with dos.CheckpointManager(url) as run:
        start, found = loaded(run)
        assert (start, found["step"]) == (7, 70)
        assert set(numbers(run)) <= {1, 2, 3, 4, 5, 6, 7}
        assert {5, 6, 7} <= set(numbers(run)), "where it came from, and what it has saved"
    for step in (8, 6):  # what does not count is still there, what was replaced is replaced
        found = {"step": -1}
        dos.load(found, f"{url}/step-{step}", progress=False)
        assert found["step"] == {8: 8, 6: 60}[step]


def test_a_step_that_is_being_deleted_is_not_gone_back_to(url, monkeypatch):
    """Else the job would go on from a step that is gone a moment later."""
    go, really = threading.Event(), retaining.delete_step

    def later(*args: Any, **settings: Any) -> Any:
        assert go.wait(60)
        return really(*args, **settings)

    monkeypatch.setattr(retaining, "delete_step", later)
    with dos.CheckpointManager(url, keep=dos.KeepLatest(1)) as run:
        run.save(1, state(1))
        run.save(2, state(2))
        threading.Timer(0.1, go.set).start()
        with pytest.raises(dos.errors.CheckpointNotFoundError):
            loaded(run, 1)


@pytest.mark.parametrize("load", [True, False])
def test_a_job_that_cannot_leave_later_steps_saves_nothing_before_them(url, load):
    """Without a claim, or where it never said where it came from."""
    for step in (1, 2, 5):
        dos.save(state(step), f"{url}/step-{step}", progress=False)
    before = sorted(meta.key for meta in StoreSpec(url).open().list())
    with dos.CheckpointManager(url, claim_run=False, keep=dos.KeepLatest(1)) as run:
        if load:
            assert loaded(run, 2)[0] == 2
        for save in (run.save, run.async_save):
            with pytest.raises(dos.errors.CheckpointExistsError, match="up to 5"):
                save(3, state(30))
        assert sorted(meta.key for meta in StoreSpec(url).open().list()) == before
        assert loaded(run)[0] == 5
        run.save(6, state(6))
        assert run.latest() == 6


@pytest.mark.parametrize("refused", ["pinned", "unpicklable", "background"])
def test_a_save_that_is_refused_after_going_back_leaves_the_later_steps(url, refused):
    """The next save that commits makes them stop counting, or the next job goes on from them."""
    save_steps(url, (1, 2, 3))
    if refused == "pinned":
        dos.pin(f"{url}/step-2", "paper")
    bad = {**state(20), "lock": threading.Lock()} if refused != "pinned" else state(20)
    for mends in (False, True):
        with (
            contextlib.suppress(dos.errors.DcpObjstoreError),
            dos.CheckpointManager(url, sweep=False) as run,
        ):
            loaded(run, 1)
            for _ in range(1 if refused == "background" else 3):
                with pytest.raises(dos.errors.DcpObjstoreError):
                    if refused == "background":
                        handle = run.async_save(2, bad)
                        assert handle is not None
                        handle.result()
                    else:
                        run.save(2, bad)
                assert numbers(run) == (1, 2, 3)
            if mends:
                if refused == "background":
                    with pytest.raises(dos.errors.DcpObjstoreError):
                        run.save(4, state(4))
                run.save(4, state(4))
                assert numbers(run) == (1, 4)
        assert names(url) == (["step-1", "step-4"] if mends else ["step-1", "step-2", "step-3"])
    with dos.CheckpointManager(url, sweep=False) as run:
        assert loaded(run)[0] == 4


# --- the last step


@pytest.mark.parametrize("save_last", [True, False])
def test_leaving_the_block_saves_the_last_step_unless_it_is_not_to(url, save_last):
    with dos.CheckpointManager(url, save_every=3, save_last=save_last) as run:
        for step in range(1, 8):
            run.step(step, state(step), metrics={"loss": 1 / step})
    with dos.CheckpointManager(url, save_every=3, save_last=save_last) as run:
        assert numbers(run) == ((3, 6, 7) if save_last else (3, 6))
        start, found = loaded(run)
        assert start == found["step"]
        if save_last:
            assert dos.steps(url)[-1].user_metadata == {"step": 7, "metrics": {"loss": 1 / 7}}
        run.step(8, state(8))
        loaded(run, 6)  # from here on what the state was at step 8 is gone
    with pytest.raises(ZeroDivisionError), dos.CheckpointManager(url, save_every=3) as run:
        run.step(10, state(10))
        raise ZeroDivisionError
    with dos.CheckpointManager(url) as run:
        assert numbers(run) == ((3, 6, 7) if save_last else (3, 6))


def test_the_last_step_is_saved_although_the_save_before_it_failed(url, monkeypatch):
    monkeypatch.setattr(async_api, "run_save", down)
    with pytest.raises(dos.errors.StoreUnavailableError, match="down"):  # noqa: SIM117
        with dos.CheckpointManager(url, save_every=3) as run:
            train(run, range(1, 5))
    assert names(url) == ["step-4"]


def test_a_manager_that_was_not_used_closes_without_a_request(url, requests):
    run = dos.CheckpointManager(url)
    for _ in range(2):
        run.close()
    with pytest.raises(dos.errors.ConfigError, match="closed"):
        run.latest() or run.save(1, state(1))
    with pytest.raises(ZeroDivisionError), dos.CheckpointManager(url) as run:
        run.close()
        raise ZeroDivisionError
    assert [one.verb for one in requests].count("put") == 0


def test_after_an_error_in_the_body_the_state_of_the_last_step_is_not_kept(url):
    weight = torch.zeros(4)
    alive = weakref.ref(weight)
    with pytest.raises(ZeroDivisionError), dos.CheckpointManager(url) as run:
        run.step(1, {"weight": weight})
        del weight
        assert alive() is not None
        raise ZeroDivisionError
    assert alive() is None


def test_a_manager_that_nobody_closes_says_what_is_lost(url, capfd, monkeypatch):
    collected, really = threading.Event(), manager._Trained.print_unclosed

    def note(trained: manager._Trained) -> None:
        really(trained)
        collected.set()

    monkeypatch.setattr(manager._Trained, "print_unclosed", note)
    run = dos.CheckpointManager(url)
    run.save(2, state(2))
    assert run.step(3, state(3)) is False
    del run
    gc.collect()
    assert collected.wait(60)  # a thread of its own may have held it for a moment
    told = capfd.readouterr().err
    assert url in told
    assert "step 3" in told
    assert "NOT saved" in told
    collected.clear()
    run = dos.CheckpointManager(url)
    run.load(state(0))
    run.step(3, state(3))
    run.save(4, state(4))
    child = multiprocessing.get_context("fork").Process(target=run._unclosed)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert capfd.readouterr().err == "", "it is its parent's"
    del run, child
    gc.collect()
    assert collected.wait(60)
    assert "the last save that it began was that of step 4" in capfd.readouterr().err
    looker = dos.CheckpointManager(url, claim_run=False)
    assert looker.latest() == 4
    with dos.CheckpointManager(f"{url}-2") as run:
        run.save(4, state(4))
    del looker, run
    gc.collect()
    assert "CheckpointManager" not in capfd.readouterr().err


def test_a_failed_save_that_only_retention_has_looked_at_is_still_to_be_raised(url, monkeypatch):
    run = dos.CheckpointManager(url, keep=dos.KeepLatest(1))
    monkeypatch.setattr(async_api, "run_save", down)
    run.async_save(1, state(1))
    assert run._saves is not None
    assert run._saves._retention is not None
    run._saves._retention.join(60)
    monkeypatch.undo()
    dos.async_save(state(2), f"{url}-of-another").result(30)  # not raised there
    assert async_api._saves.here.unsettled[0]._has_unseen_error
    with pytest.raises(dos.errors.StoreUnavailableError, match="down"):
        run.close()


# --- retention


@pytest.mark.parametrize("owned", [True, False])
def test_retention_of_a_job_that_does_not_have_the_run_deletes_nothing(url, owned, caplog):
    """The run is taken over between its last commit and its deletions."""
    with dos.CheckpointManager(url, claim_run=owned, sweep=False) as old:
        for step in (1, 2, 3):
            old.save(step, state(step))
        retainer = retaining.Retainer(StoreSpec(url), dos.KeepLatest(1), sweeps=False)
        retainer.claim = old.claim
        assert (old.claim is not None) is owned
    dos.claim_run(url)
    retainer.committed(3)
    assert "were not deleted" in caplog.text
    assert names(url) == ["step-1", "step-2", "step-3"]
    dos.load(state(0), f"{url}/step-1", progress=False)


@pytest.mark.parametrize("change", ["deleted", "pinned"])
def test_what_somebody_else_did_to_a_step_does_not_keep_others_from_being_deleted(
    url, monkeypatch, change
):
    """A few are deleted at a time; a step that is gone, or stays, must not fill the next time."""
    monkeypatch.setattr(retaining, "_AT_A_TIME", 1)
    retainer = retaining.Retainer(StoreSpec(url), dos.KeepLatest(3), sweeps=False)
    for step in range(1, 6):
        dos.save(state(step), f"{url}/step-{step}", progress=False)
        retainer.committed(step)  # lists the run at first
        if step == 3 and change == "deleted":
            dos.delete(f"{url}/step-1")
        elif step == 3:
            dos.pin(f"{url}/step-1", "paper")
    pinned = ["step-1"] if change == "pinned" else []
    assert names(url) == [*pinned, "step-3", "step-4", "step-5"]


def test_each_step_has_one_name_so_that_retention_deletes_what_it_means(url):
    alike = ["iter_00000002", "step-002", "step-02", "step-2.0"]
    for name in (*alike, "step-1", "step-2", "step-10"):
        dos.save(state(1), f"{url}/{name}", progress=False)
        number = step_number(name)
        assert number is None or step_name(number) == name
    assert not any(step_number(name) for name in alike)
    retaining.Retainer(StoreSpec(url), dos.KeepLatest(1), sweeps=False).committed(10)
    assert set(names(url)) == {*alike, "step-10"}
    for name in alike:
        dos.load(state(0), f"{url}/{name}", progress=False)


def test_retention_deletes_a_few_steps_a_commit_and_reads_no_marker_twice(
    url, monkeypatch, requests
):
    monkeypatch.setattr(retaining, "_AT_A_TIME", 2)
    retainer = retaining.Retainer(StoreSpec(url), dos.KeepLatest(1), sweeps=False)
    for step in range(1, 6):
        dos.save(state(step), f"{url}/step-{step}", progress=False)
    found, read = [], []
    for step in (5, 6, 7):
        dos.save(state(step), f"{url}/step-{step}", overwrite=True, progress=False)
        requests.clear()
        with monkeypatch.context() as patched:
            patched.setattr(retaining.Retainer, "_delete", lambda *_: None)
            retainer.committed(step)
        read.append([one.verb for one in requests if one.key == MARKER_KEY].count("get"))
        retainer.committed(step)
        found.append([int(name.rpartition("-")[2]) for name in names(url)])
    assert found == [[3, 4, 5], [5, 6], [7]]
    assert read == [5, 1, 1]


@pytest.mark.parametrize("how", ["deleted", "without its index"])
def test_a_step_that_is_gone_displaces_none_that_is_there(url, how):
    """Somebody has deleted it, or removed what it needs, since this job saved it."""

    def lose(step: int) -> None:
        if how == "deleted":
            dos.delete(f"{url}/step-{step}", allow_newest=True)
            return
        store = StoreSpec(f"{url}/step-{step}").open()
        (index,) = (meta.key for meta in store.list() if meta.key.startswith("index."))
        store.delete(index)

    def left() -> list[int]:
        """The steps that can be loaded."""
        found = []
        for name in names(url):
            with contextlib.suppress(dos.errors.DcpObjstoreError):
                dos.load(state(0), f"{url}/{name}", progress=False)
                found.append(int(name.rpartition("-")[2]))
        return found

    with dos.CheckpointManager(url, keep=dos.KeepLatest(2), sweep=False) as run:
        for step in (1, 2):
            run.save(step, state(step))
        lose(2)
        run.save(3, state(3))
    assert left() == [1, 3]
    keep = [dos.KeepLatest(1), dos.KeepBest("loss")]
    with dos.CheckpointManager(url, keep=keep, sweep=False) as run:
        loaded(run, 1)
        for step, loss in ((12, 0.1), (13, 0.6)):
            run.save(step, state(step), metrics={"loss": loss})
        end_of_deletions(run)
        lose(12)
        for step, loss in ((14, 0.3), (15, 0.7), (16, 0.8)):
            run.save(step, state(step), metrics={"loss": loss})
    assert left() == [1, 14, 16]


@pytest.mark.backends("file", "seaweed")
@pytest.mark.parametrize("on_disk", [False, True])
def test_at_its_end_a_run_holds_the_bytes_that_keep_says_and_tombstones(bucket, tmp_path, on_disk):
    options = None if on_disk else bucket.storage_options
    url = (tmp_path / "run").as_uri() if on_disk else bucket.url
    with dos.CheckpointManager(
        url, keep=dos.KeepLatest(2), save_every=2, sweep=False, storage_options=options
    ) as run:
        train(run, range(1, 21))
    sizes: dict[str, int] = Counter()
    for meta in StoreSpec(url, options).open().list():
        step, _, key = meta.key.partition("/")
        if key != MARKER_KEY:
            sizes[step] += meta.size_bytes
    del sizes["_CLAIM"]
    assert sizes.keys() == {"step-18", "step-20"}
    assert dos.open(f"{url}/step-18", storage_options=options).verify(deep=True).ok
    if on_disk:  # all that takes room, whatever a listing leaves out
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        left = [path for path in files if path.parent.name not in sizes and path.stat().st_size]
        assert sorted(path.name for path in left) == ["_CLAIM", *[MARKER_KEY] * 8]


def test_a_grace_period_keeps_objects_and_a_new_save_there_is_whole(url, monkeypatch):
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(retaining, "time", clock)

    def objects(step: int) -> int:
        return sum(1 for _ in StoreSpec(f"{url}/step-{step}").open().list())

    keep, whole = dos.KeepLatest(1), 4  # two of data and index, marker and `.metadata`
    with dos.CheckpointManager(url, keep=keep, grace_seconds=60, sweep=False) as run:
        for step in (1, 2):
            run.save(step, state(step))
        end_of_deletions(run)
        whole = objects(2)
        assert names(url) == ["step-2"]
        assert objects(1) == whole - 1, "all but `.metadata`"
        now += 59
        run.save(3, state(3))
        end_of_deletions(run)
        assert (objects(1), objects(2)) == (whole - 1, whole - 1)
        dos.save(state(1), f"{url}/step-1", progress=False, claim=run.claim)
        dos.pin(f"{url}/step-1", "mine")
        now += 1
        run.save(4, state(4))
        end_of_deletions(run)
        dos.load(state(0), f"{url}/step-1", progress=False)
        assert objects(2) == whole - 1
        now += 59
        run.save(5, state(5))
        end_of_deletions(run)
        assert objects(2) == 1, "the tombstone"
        assert objects(3) == whole - 1
    assert names(url) == ["step-1", "step-5"]


@pytest.mark.parametrize("grace", [-1, "1h", None, True, float("nan")])
def test_a_grace_period_that_is_no_time_is_refused(url, grace):
    with pytest.raises(dos.errors.ConfigError, match="grace_seconds"):
        dos.CheckpointManager(url, grace_seconds=grace)
    with pytest.raises(dos.errors.ConfigError, match="grace_seconds"):
        dos.delete(f"{url}/step-1", grace_seconds=grace)


@pytest.mark.parametrize("pinned_at", [1, 2])
def test_a_step_that_was_pinned_is_deleted_once_it_is_unpinned(url, pinned_at):
    """By an evaluator that follows the run, say: before the run was listed, or after that."""
    retainer = retaining.Retainer(StoreSpec(url), dos.KeepLatest(1), sweeps=False)
    for step in range(1, 5):
        dos.save(state(step), f"{url}/step-{step}", progress=False)
        if step == pinned_at:
            dos.pin(f"{url}/step-1", "evaluator")
        elif step == 4:
            assert names(url) == ["step-1", "step-3", "step-4"]
            dos.unpin(f"{url}/step-1", "evaluator")
        if step > 1 or pinned_at > 1:
            retainer.committed(step)  # the first one lists the run
    assert names(url) == ["step-4"]


def test_without_a_policy_or_a_sweep_a_commit_causes_no_requests(url, requests):
    retaining.Retainer(StoreSpec(url), sweeps=False).committed(1)
    assert requests == []


class Sweeps:
    """The sweeps that begin, and a clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[float] = []
        self.now = 100.0
        self.error: Exception | None = None
        self.go: threading.Event | None = None
        monkeypatch.setattr(retaining, "sweep_below", self.sweep)
        monkeypatch.setattr(retaining, "time", SimpleNamespace(monotonic=lambda: self.now))

    def sweep(self, run: StoreSpec, *, is_over: Any) -> SweepReport:
        self.began.append(self.now)
        if self.error is not None:
            raise self.error
        assert self.go is None or self.go.wait(60)
        return SweepReport(url=run.url, checkpoints=())


@pytest.mark.parametrize(
    ("error", "began"),
    [
        (None, [100, 3700, 7300]),
        (dos.errors.StoreUnavailableError("down"), [100, 3700, 7300]),
        (dos.errors.UnsupportedError("cannot be swept"), [100]),
    ],
)
def test_a_run_is_swept_once_an_hour_if_it_can_be(url, monkeypatch, error, began):
    sweeps = Sweeps(monkeypatch)
    sweeps.error = error
    retainer = retaining.Retainer(StoreSpec(url))
    for seconds in (0, 3599, 3600, 7199, 7200):
        sweeps.now = 100.0 + seconds
        retainer.sweep()
    retainer.end()
    sweeps.now += 3600
    retainer.sweep()
    retaining.Retainer(StoreSpec(url), sweeps=False).sweep()
    assert sweeps.began == began


@pytest.mark.parametrize(("deleted", "aborted"), [(0, 0), (1, 0), (0, 1)])
def test_a_sweep_is_logged_if_it_removed_something(url, monkeypatch, caplog, deleted, aborted):
    done = SimpleNamespace(deleted=deleted, deleted_bytes=deleted, uploads_aborted=aborted)
    monkeypatch.setattr(retaining, "sweep_below", lambda *_, **__: done)
    caplog.set_level("INFO", logger="dcp_objstore")
    retaining.Retainer(StoreSpec(url)).sweep()
    assert ("removed" in caplog.text) is bool(deleted or aborted)


def test_a_sweep_that_takes_hours_is_not_begun_again(url, monkeypatch):
    sweeps = Sweeps(monkeypatch)
    sweeps.go = threading.Event()
    retainer = retaining.Retainer(StoreSpec(url))
    for _ in range(2):
        retainer.committed(1)
        assert retainer._sweeper is not None
        sweeps.now += 3600
    sweeps.go.set()
    retainer._sweeper.join(60)
    retainer.committed(1)
    retainer._sweeper.join(60)
    assert len(sweeps.began) == 2


def test_old_steps_go_only_after_a_newer_one_is_durable_and_never_the_source(url, held):
    with dos.CheckpointManager(url) as run:
        for step in (1, 2, 3, 4):
            run.save(step, state(step))
        run.pin(2, "paper")
    with dos.CheckpointManager(url, keep=dos.KeepLatest(1), save_every=5) as run:
        assert loaded(run, 3)[0] == 3
        run.async_save(5, state(5))
        assert numbers(run) == (1, 2, 3, 4), "nothing has been committed in its place"
        held.set()
    with dos.CheckpointManager(url) as run:
        assert numbers(run) == (2, 3, 5)
        run.unpin(2, "paper")
    with dos.CheckpointManager(url, keep=[dos.KeepLatest(1)]) as run:
        run.save(6, state(6))
    assert names(url) == ["step-6"]
    store = StoreSpec(url).open()
    assert [meta.key for meta in store.list("step-5/")] == ["step-5/_COMMIT"]


def end_of_deletions(run: dos.CheckpointManager) -> None:
    """Wait for the deletions that the last commit has begun."""
    assert run._saves is not None
    assert run._saves._retention is not None
    run._saves._retention.join(60)


def end_of_upkeep(run: dos.CheckpointManager) -> None:
    """Wait for the deletions and the sweep that the last commit has begun."""
    end_of_deletions(run)
    sweeper = run._retainer._sweeper
    assert sweeper is not None
    sweeper.join(60)
    assert not sweeper.is_alive()


@pytest.mark.parametrize("sweep", [True, False])
def test_what_died_a_day_ago_is_swept_up_and_what_is_young_stays(tmp_path, sweep):
    old, young = (
        tmp_path / "step-1" / data_key(0, 0, new_nonce()),
        tmp_path / "step-2" / data_key(0, 0, new_nonce()),
    )
    for left in (old, young):
        left.parent.mkdir()
        left.write_bytes(b"a save that died")
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    with dos.CheckpointManager(f"file://{tmp_path}", sweep=sweep) as run:
        run.save(3, state(3))
        end_of_upkeep(run)
    assert old.exists() is not sweep
    assert young.exists()
    assert [step.name for step in dos.steps(f"file://{tmp_path}")] == ["step-3"]


def test_neither_deletions_nor_the_end_of_the_job_wait_for_a_sweep(url, monkeypatch):
    began, go = threading.Event(), threading.Event()
    over: list[bool] = []

    def held_sweep(_run: StoreSpec, *, is_over: Any) -> Any:
        began.set()
        assert go.wait(60)
        over.append(is_over())
        return SweepReport(url=url, checkpoints=())

    monkeypatch.setattr(retaining, "sweep_below", held_sweep)
    with dos.CheckpointManager(url, keep=dos.KeepLatest(1)) as run:
        run.save(1, state(1))
        assert began.wait(60)
        run.save(2, state(2))
        assert loaded(run)[0] == 2
        assert numbers(run) == (2,)
    assert over == []
    go.set()
    end_of_upkeep(run)
    assert over == [True], "it is told to end"


def test_nothing_is_deleted_after_a_save_that_failed(url, monkeypatch):
    with dos.CheckpointManager(url) as run:
        for step in (1, 2, 3):
            run.save(step, state(step))

    monkeypatch.setattr(async_api, "run_save", down)
    with (
        pytest.raises(dos.errors.StoreUnavailableError),
        dos.CheckpointManager(url, keep=dos.KeepLatest(1)) as run,
    ):
        run.async_save(4, state(4))
    assert names(url) == ["step-1", "step-2", "step-3"]


def test_the_end_waits_for_deletions_even_if_the_last_save_has_failed(url, monkeypatch):
    really, go = retaining.Retainer.committed, threading.Event()

    def later(*args: Any) -> None:
        assert go.wait(60)
        really(*args)

    with dos.CheckpointManager(url) as run:
        run.save(1, state(1))
    monkeypatch.setattr(retaining.Retainer, "committed", later)
    with (
        pytest.raises(dos.errors.StoreUnavailableError),
        dos.CheckpointManager(url, keep=dos.KeepLatest(1)) as run,
    ):
        run.save(2, state(2))
        monkeypatch.setattr(async_api, "run_save", down)
        run.async_save(3, state(3))
        threading.Timer(0.5, go.set).start()
    assert names(url) == ["step-2"]


def test_best_steps_by_the_metrics_in_the_marker_survive(url):
    losses = {1: 0.5, 2: torch.tensor(0.1), 3: float("nan"), 4: 0.3, 5: 0.4}
    keep = [dos.KeepLatest(1), dos.KeepBest("loss")]
    with dos.CheckpointManager(url, keep=keep) as run:
        for step, loss in losses.items():
            run.save(step, state(step), metrics={"loss": loss})
    with dos.CheckpointManager(url, keep=keep) as run:
        assert numbers(run) == (2, 5)
        run.save(6, state(6), metrics={"loss": 0.2})
    assert names(url) == ["step-2", "step-6"]


def test_retention_goes_on_whatever_stands_under_metrics(url):
    keep = [dos.KeepLatest(1), dos.KeepBest("loss")]
    with dos.CheckpointManager(url, keep=keep, user_metadata={"metrics": ["loss"]}) as run:
        for step in range(1, 4):
            run.save(step, state(step))
        run.save(4, state(4), user_metadata={"metrics": {"loss": 0.5}})
        run.save(5, state(5))
    assert names(url) == ["step-4", "step-5"]


class Broken(dos.RetentionPolicy):
    """A policy of the user's that has an error."""

    def keeps(self, steps: Any) -> frozenset[int]:
        raise KeyError("no such metric")


class Seeing(dos.RetentionPolicy):
    """A policy that keeps all and remembers what it was asked about."""

    def keeps(self, steps: Any) -> frozenset[int]:
        self.steps = list(steps)
        return frozenset(one.step for one in steps)


def test_a_policy_sees_the_metrics_and_pins_of_all_steps_that_count(url):
    with dos.CheckpointManager(url) as run:
        for step in (1, 2):
            run.save(step, state(step), metrics={"loss": step})
        run.pin(1)
    policy = Seeing()
    with dos.CheckpointManager(url, keep=policy) as run:
        run.load(state(0))
        run.save(3, state(3), metrics={"loss": 3})
    assert policy.steps == [
        dos.StepFacts(step=1, metrics={"loss": 1}, pinned=True),
        dos.StepFacts(step=2, metrics={"loss": 2}),
        dos.StepFacts(step=3, metrics={"loss": 3}),
    ]


def test_a_policy_that_fails_is_named_in_the_log_and_nothing_is_deleted(url, caplog):
    with dos.CheckpointManager(url, keep=Broken()) as run:
        run.save(1, state(1))
        run.save(2, state(2))
    assert "KeyError('no such metric')" in caplog.text
    assert names(url) == ["step-1", "step-2"]


def test_metrics_and_config_stand_in_the_marker_and_in_ls(tmp_path, capsys):
    url = (tmp_path / "run").as_uri()
    with dos.CheckpointManager(url, user_metadata={"model": "tiny"}) as run:
        run.save(
            7, state(7), metrics={"loss": 0.5, "odd": float("inf")}, user_metadata={"lr": 1e-3}
        )
    wanted = {"step": 7, "model": "tiny", "lr": 1e-3, "metrics": {"loss": 0.5, "odd": "inf"}}
    assert dos.steps(url)[0].user_metadata == wanted
    print_checkpoints(url, as_json=True)
    shown = [json.loads(line) for line in io.StringIO(capsys.readouterr().out)]
    assert [one["user_metadata"] for one in shown] == [wanted]


@pytest.mark.parametrize("busy", ["wait", "skip", "raise"])
def test_a_second_save_while_one_is_under_way(url, held, busy):
    with dos.CheckpointManager(url, save_every=1, on_busy=busy) as run:
        assert run.step(1, state(1))
        assert run.async_save(2, state(2), on_busy="skip") is None, "as the call says"
        if busy == "raise":
            with pytest.raises(dos.errors.SaveInProgressError, match="step 1"):
                run.step(2, state(2))
        elif busy == "skip":
            assert run.step(2, state(2)) is False
        else:
            threading.Timer(0.1, held.set).start()
            assert run.step(2, state(2))
        held.set()
    with dos.CheckpointManager(url) as run:
        assert numbers(run) == (1, 2), "what was not saved then is saved on leaving"


@pytest.mark.parametrize("busy", ["wait", "skip", "raise"])
def test_the_managers_of_a_program_do_not_wait_for_each_other(url, held, busy):
    """Such as one for the model and one for its averaged weights."""
    urls = [f"{url}/model", f"{url}/ema"]
    with (
        dos.CheckpointManager(urls[0], on_busy=busy) as model,
        dos.CheckpointManager(urls[1], on_busy=busy) as ema,
    ):
        handles = [run.async_save(1, state(1)) for run in (model, ema)]
        assert not any(handle is None or handle.done() for handle in handles)
        if busy == "skip":
            assert ema.async_save(2, state(2)) is None, "its own is under way"
        elif busy == "raise":
            with pytest.raises(dos.errors.SaveInProgressError, match="step 1"):
                ema.async_save(2, state(2))
        held.set()
    for one in urls:
        assert names(one) == ["step-1"]
        assert loaded(dos.CheckpointManager(one))[1]["step"] == 1


def test_a_failed_save_is_raised_by_its_own_manager_alone(url, monkeypatch):
    really = async_api.run_save

    def fail(writer: Any, *args: Any) -> Any:
        if "/model/" in writer.checkpoint_id:
            raise dos.errors.StoreUnavailableError("down")
        return really(writer, *args)

    monkeypatch.setattr(async_api, "run_save", fail)
    with dos.CheckpointManager(f"{url}/ema") as ema:
        with (
            pytest.raises(dos.errors.StoreUnavailableError),
            dos.CheckpointManager(f"{url}/model") as model,
        ):
            for step in (1, 2):
                for run in (model, ema):
                    if step == 1 or run is ema:
                        run.async_save(step, state(step))
        ema.async_save(3, state(3))
    assert names(f"{url}/ema") == ["step-1", "step-2", "step-3"]
    assert names(f"{url}/model") == []


def test_an_error_in_the_body_commits_the_pending_save_and_is_raised(url, held):
    for step, error in ((1, ZeroDivisionError("mine")), (2, KeyboardInterrupt())):
        held.clear()
        with pytest.raises(type(error)) as caught, dos.CheckpointManager(url, save_every=1) as run:
            run.step(step, state(step))
            threading.Timer(0.1, held.set).start()
            raise error
        assert caught.value is error
        assert not getattr(error, "__notes__", ()), "nothing else has failed"
    with dos.CheckpointManager(url) as run:
        assert numbers(run) == (1, 2)


def test_a_save_for_which_ctrl_c_ended_one_wait_is_waited_for_at_the_end(url, held, monkeypatch):
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), dos.CheckpointManager(url) as run:
        handle = run.async_save(1, state(1))
        with monkeypatch.context() as patched:
            patched.setattr(type(handle), "exception", lambda *_: ctrl_c())
            threading.Timer(0.1, held.set).start()
            run.save(2, state(2))
    assert handle is not None
    assert handle.done()
    assert names(url) == ["step-1"]


def test_after_an_error_in_the_body_no_rank_waits_for_this_ones_agreement(url, monkeypatch):
    ended: list[str] = []
    close, abandon = manager.StepConsensus.close, manager.RunSaves.abandon
    monkeypatch.setattr(
        manager.StepConsensus, "close", lambda self: (ended.append("agreeing"), close(self))
    )
    monkeypatch.setattr(
        manager.RunSaves,
        "abandon",
        lambda self, error: (ended.append("saving"), abandon(self, error)),
    )
    with pytest.raises(ZeroDivisionError), dos.CheckpointManager(url) as run:
        run.async_save(1, state(1))
        raise ZeroDivisionError
    assert ended[:2] == ["agreeing", "saving"]
    assert names(url) == ["step-1"]


def test_a_failed_last_save_is_raised_at_the_end_but_not_over_the_error_of_the_body(
    url, monkeypatch
):
    monkeypatch.setattr(async_api, "run_save", down)
    with pytest.raises(dos.errors.StoreUnavailableError, match="down"):  # noqa: SIM117
        with dos.CheckpointManager(url, save_every=1) as run:
            run.step(1, state(1))
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: SIM117
        with dos.CheckpointManager(url, save_every=1) as run:
            run.step(1, state(1))
            raise ZeroDivisionError
    assert "down" in "".join(caught.value.__notes__)
    run.close()  # which raises it no second time
    with pytest.raises(dos.errors.StoreUnavailableError, match="down") as once:  # noqa: SIM117
        with dos.CheckpointManager(url, save_every=1) as run:
            run.step(1, state(1))
            run.step(2, state(2))
    assert not getattr(once.value, "__notes__", ())  # it is the error of that save
    monkeypatch.undo()
    with dos.CheckpointManager(url, save_every=1) as run:
        assert numbers(run) == ()


@pytest.mark.parametrize("how", ["end", "abandon"])
def test_ctrl_c_while_the_end_waits_gives_back_the_handlers_and_closes_the_manager(
    url, monkeypatch, how
):
    def ctrl_c(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(manager.RunSaves, how, ctrl_c)
    with pytest.raises(KeyboardInterrupt), dos.CheckpointManager(url) as run:
        assert signal.getsignal(signal.SIGTERM) != before
        if how == "abandon":
            raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(dos.errors.ConfigError, match="closed"):
        run.pin(1)


def test_a_save_that_could_not_begin_leaves_nothing_to_wait_for(url, monkeypatch):
    with dos.CheckpointManager(url) as run:
        for failed in ("begin_save", "run_save", "begin_save"):
            with monkeypatch.context() as patch:
                patch.setattr(async_api, failed, down)
                with pytest.raises(dos.errors.StoreUnavailableError):
                    run.async_save(1, state(1))
                    run.async_save(2, state(2))
        run.async_save(1, state(1))
        run.async_save(2, state(2))
    assert names(url) == ["step-1", "step-2"]


def test_a_save_whose_commit_was_never_answered_is_made_again(url, monkeypatch):
    really = async_api.run_save

    def lose_the_answer(*args: Any) -> Any:
        really(*args)
        raise dos.errors.CommitUnknownError("no answer")

    monkeypatch.setattr(async_api, "run_save", lose_the_answer)
    with dos.CheckpointManager(url) as run:
        run.async_save(1, state(1))
        with pytest.raises(dos.errors.CommitUnknownError):
            run.save(2, state(2))
        run.save(1, state(10))
        assert loaded(run)[1]["step"] == 10


@pytest.mark.parametrize("error", [dos.errors.CommitUnknownError("no answer"), KeyboardInterrupt()])
def test_a_save_in_the_foreground_that_may_be_committed_is_made_again(url, monkeypatch, error):
    really = api.save_planned

    def lose_the_answer(*args: Any, **settings: Any) -> Any:
        really(*args, **settings)
        raise error

    with dos.CheckpointManager(url) as run:
        with monkeypatch.context() as patched:
            patched.setattr(api, "save_planned", lose_the_answer)
            with pytest.raises(type(error)):
                run.save(1, state(1))
        run.save(1, state(10))
        assert loaded(run)[1]["step"] == 10


def test_a_background_save_that_failed_is_not_said_to_have_saved_its_step(url):
    with dos.CheckpointManager(url) as run:
        run.async_save(1, {"lock": threading.Lock()})
        with pytest.raises(dos.errors.UnsupportedError):
            run.save(1, state(1))
        run.save(1, state(1))


def test_a_save_that_failed_lets_no_other_save_replace_a_step_that_was_there(url):
    """It has failed before it looked at the store, so what is there is not its own."""
    save_steps(url, (1,))
    with contextlib.suppress(dos.errors.UnsupportedError), dos.CheckpointManager(url) as run:
        run.async_save(1, {"lock": threading.Lock()})
        for error in (dos.errors.UnsupportedError, dos.errors.CheckpointExistsError):
            with pytest.raises(error):
                run.save(1, state(10))
    with dos.CheckpointManager(url) as run:
        assert loaded(run)[1]["step"] == 1


def test_a_save_that_was_cut_off_is_not_taken_for_the_step_it_was_to_replace(url, monkeypatch):
    """So the next one still goes back past that step."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    save_steps(url, (1, 2, 3))
    with dos.CheckpointManager(url, sweep=False) as run:
        loaded(run, 1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(api, "save_planned", interrupted)
            run.save(3, state(30))
        run.save(4, state(4))
        assert numbers(run) == (1, 4)


@pytest.mark.parametrize("background", [False, True])
def test_a_step_of_another_job_is_refused_however_often_a_save_is_tried(url, background):
    with dos.CheckpointManager(url, claim_run=False) as run:
        run.save(1, state(1))
    with dos.CheckpointManager(url, claim_run=False) as run:
        for _ in range(2):
            with pytest.raises(dos.errors.CheckpointExistsError):
                if background:
                    run.async_save(1, state(10))
                    run.load(state(0), 1)  # raises what that save has met
                else:
                    run.save(1, state(10))
        assert loaded(run)[1]["step"] == 1


@pytest.mark.parametrize("other", [7, 10, 12])
def test_the_last_step_is_saved_at_the_end_though_an_earlier_one_was_saved_after_it(url, other):
    """A state that was kept, such as the best one. A later step is beyond the last one."""
    with dos.CheckpointManager(url) as run:
        run.step(10, state(10))
        run.save(other, state(other))
        assert run._trained.last == ((10, False) if other < 10 else (other, True))
    assert names(url) == [f"step-{step}" for step in sorted({other, max(10, other)})]


def test_a_step_that_was_not_saved_is_not_missed_after_a_load(url):
    save_steps(url, [1])
    with dos.CheckpointManager(url) as run:
        run.step(2, state(2))
        assert loaded(run)[0] == 1
        assert run._trained.last is None
    assert names(url) == ["step-1"]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("moment", ["copied", "begun", "noted"])
def test_ctrl_c_in_a_step_leaves_nothing_that_close_fails_for(url, monkeypatch, moment, background):
    """As in a notebook, which goes on: while its save begins, just after that, and in between."""
    run = dos.CheckpointManager(url)
    loaded(run)
    run.step(1, state(1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> None:
            function(*args, **settings)
            raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if moment == "copied":
            patched.setattr(async_api._StagedSave, "begin_staging", interrupted)
            patched.setattr(api, "run_save", interrupted)
        elif moment == "begun":
            patched.setattr(async_api._StagedSave, "raise_interrupt", interrupted)
            patched.setattr(api, "run_save", after(api.run_save))
        else:
            patched.setattr(manager.CheckpointManager, "_note_saved", interrupted)
        save = run.async_save if background else run.save
        save(1, state(1))
    run.close()
    assert names(url) == ["step-1"]


def test_close_waits_for_the_save_for_which_ctrl_c_ended_a_wait(url, held, monkeypatch):
    run = dos.CheckpointManager(url, save_every=1)
    run.step(1, state(1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(async_api.AsyncSaveHandle, "exception", interrupted)
        run.step(2, state(2))
    threading.Timer(0.1, held.set).start()
    run.close()
    assert names(url) == ["step-1", "step-2"]


@pytest.mark.parametrize("closes", [True, False])
def test_the_error_of_a_save_is_raised_once(url, monkeypatch, closes):
    run = dos.CheckpointManager(url)
    with monkeypatch.context() as patched:
        patched.setattr(async_api, "run_save", down)
        run.async_save(1, state(1))
        with pytest.raises(dos.errors.StoreUnavailableError):
            run.save(2, state(2))
    if closes:
        run.close()
    else:
        error = ZeroDivisionError()
        run.__enter__()
        run.__exit__(ZeroDivisionError, error, None)
        assert not hasattr(error, "__notes__")
    assert names(url) == []


@pytest.fixture
def exits_on_sigterm() -> Iterator[None]:
    """A handler as many scripts have one."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    assert signal.getsignal(signal.SIGTERM) is leave
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("save", [True, False])
def test_a_handler_that_ends_the_program_does_so_after_the_state_was_saved(
    url, exits_on_sigterm, save
):
    """Or at once, if it is not to be saved then."""
    preemption = dos.Preemption(save=save)
    with (
        pytest.raises(SystemExit) as caught,
        dos.CheckpointManager(url, preemption=preemption) as run,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(1, 10**9):
            run.step(step, state(step))
            assert not run.preempted()
    assert caught.value.code == 143
    assert names(url) == ([f"step-{step}"] if save else [])


def test_a_handler_that_ends_the_program_waits_for_the_save_that_drains(
    url, held, exits_on_sigterm
):
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.1, held.set).start()

    with pytest.raises(SystemExit) as caught, dos.CheckpointManager(url) as run:
        run.async_save(1, state(1))
        threading.Timer(0.1, interrupt).start()
    assert caught.value.code == 143
    assert names(url) == ["step-1"]


def _signal_while_a_save_drains(url: str, held: threading.Event, fails: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.getLogger("dcp_objstore").addHandler(logging.StreamHandler(os.fdopen(2, "w")))

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.1, held.set).start()

    with dos.CheckpointManager(url, save_every=1, sweep=False) as run:
        run.step(1, state(1))
        threading.Timer(0.1, interrupt).start()
        if fails:
            raise ZeroDivisionError
    os._exit(3)  # the program would go on here


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_no_step_has_seen_ends_the_program_after_the_last_commit(
    tmp_path, held, capfd, fails
):
    """It does not cut the save short, and it is not forgotten. An error of the body is logged."""
    url = tmp_path.as_uri()
    forking = multiprocessing.get_context("fork")
    child = forking.Process(target=_signal_while_a_save_drains, args=(url, held, fails))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGTERM
    assert names(url) == ["step-1"]
    assert ("ZeroDivisionError" in capfd.readouterr().err) is fails


def _leave_after_a_signal(url: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    managers = [dos.CheckpointManager(f"{url}/{name}") for name in ("model", "ema")]
    with managers[0] as model, managers[1] as ema:
        step = 0
        signal.raise_signal(signal.SIGTERM)
        while not ema.preempted():
            step += 1
            ema.step(step, state(step))
        model.step(step, state(step))
        signal.raise_signal(signal.SIGTERM)  # some schedulers send it twice
    os._exit(3)


def test_a_signal_that_the_program_knows_of_does_not_end_it(tmp_path):
    """It may have learned of it from another manager."""
    forking = multiprocessing.get_context("fork")
    child = forking.Process(target=_leave_after_a_signal, args=(tmp_path.as_uri(),))
    child.start()
    child.join(60)
    assert child.exitcode == 3


def test_a_step_is_saved_once_and_a_job_that_never_loaded_overwrites_no_run(url):
    with dos.CheckpointManager(url, save_every=1) as run:
        assert run.step(1, state(1))
        assert run.step(1, state(1)) is False
        with pytest.raises(dos.errors.CheckpointExistsError, match="this job"):
            run.save(1, state(1))
    with pytest.raises(dos.errors.CheckpointExistsError), dos.CheckpointManager(url) as run:
        run.save(1, state(9))
    with dos.CheckpointManager(url) as run:
        assert loaded(run)[1]["step"] == 1
        with pytest.raises(dos.errors.CheckpointExistsError):
            run.save(1, state(9))


def test_a_process_group_that_is_made_inside_the_block_is_refused(url, monkeypatch):
    """The ranks would save when each of them has to, and wait for each other."""
    with dos.CheckpointManager(url, save_last=False) as run:
        run.step(1, state(1))
        monkeypatch.setattr(manager, "rank_and_world_size", lambda: (0, 2))
        with pytest.raises(dos.errors.ConfigError, match="init_process_group"):
            run.step(2, state(2))


@pytest.mark.parametrize("module", [manager, claiming])
def test_ranks_that_do_not_meet_are_reported_as_such(url, module, monkeypatch):
    """Those of the job, unless others are named."""
    groups: list[object] = []
    really = module.meeting

    def note(of: str, group: Any, *advice: str) -> Any:
        groups.append(group)
        return really(of, None, *advice)

    def closed(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(module, "world_group", lambda: "all")
    monkeypatch.setattr(module, "meeting", note)
    monkeypatch.setattr(module, "sync_group", closed)
    for given in (None, "some"):
        with pytest.raises(dos.errors.RankFailedError):
            if module is manager:
                dos.CheckpointManager(url, process_group=given).latest()  # type: ignore[arg-type]
            else:
                dos.claim_run(url, process_group=given)  # type: ignore[arg-type]
    assert groups == ["all", "some"]


def test_looking_at_a_run_changes_nothing(url):
    with dos.CheckpointManager(url) as run:
        run.save(1, state(1))
        with dos.CheckpointManager(url, claim_run=False) as looker:
            assert looker.latest() == 1
            assert loaded(looker)[0] == 1
        run.save(2, state(2))
    with dos.CheckpointManager(url, claim_run=False) as looker:
        assert numbers(looker) == (1, 2)


def test_other_names_below_the_run_do_not_count(url):
    with dos.CheckpointManager(url) as run:
        run.save(10, state(10))
        for name in ("zz-best", "step-010"):
            dos.save(state(99), f"{url}/{name}", claim=run.claim, progress=False)
    with dos.CheckpointManager(url) as run:
        assert run.latest() == 10
        assert numbers(run) == (10,)
        run.load(state(0))
        for step in (11, 12):
            run.save(step, state(step))
        run.load(state(0), 10)
        run.save(11, state(11))
    counted = sorted(names(url))
    assert counted == ["step-010", "step-10", "step-11", "zz-best"], "they go on counting"


def test_signal_is_taken_at_the_next_step_and_the_handler_given_back(url):
    came = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: came.append(number))
    try:
        with dos.CheckpointManager(url, preemption=dos.Preemption(signals=[signal.SIGUSR2])) as run:
            train(run, range(1, 4))
            assert not run.preempted()
            signal.raise_signal(signal.SIGUSR2)
            step = 4
            while not run.preempted():
                run.step(step, state(step))
                step += 1
            assert run.latest() == step - 1
            assert loaded(run)[1]["step"] == step - 1
            assert run._ask() == frozenset(), "the ranks need not agree on it twice"
            assert not run.step(step, state(step))
        assert run.latest() == step, "saved on leaving"
        assert came == [signal.SIGUSR2]
        signal.raise_signal(signal.SIGUSR2)
        assert came == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The SIGUSR2 that came to the handler that the program had before any manager."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR2, before)


def catching(url: str, name: str = "run") -> dos.CheckpointManager:
    return dos.CheckpointManager(
        f"{url}/{name}", preemption=dos.Preemption(signals=[signal.SIGUSR2])
    )


def chain(number: signal.Signals) -> None:
    """Install a handler that calls the one before it, as many scripts do."""
    before: Any = signal.getsignal(number)

    def handle(*received: Any) -> None:
        before(*received)

    signal.signal(number, handle)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_in_whatever_order_managers_end_a_signal_then_does_what_it_did_before(url, came, first):
    original = signal.getsignal(signal.SIGUSR2)
    managers = [catching(url, name).__enter__() for name in ("model", "ema", "teacher")]
    for place in (first, (first + 2) % 3):
        managers[place].close()
    signal.raise_signal(signal.SIGUSR2)
    (last,) = (run for run in managers if not run._closed)
    assert last._preemption.announced()
    last.close()
    signal.raise_signal(signal.SIGUSR2)
    assert came == [signal.SIGUSR2] * 2
    assert signal.getsignal(signal.SIGUSR2) is original


def test_a_handler_that_the_program_chained_acts_as_before_the_manager(url, came):
    run = catching(url).__enter__()
    chain(signal.SIGUSR2)
    run.close()
    signal.raise_signal(signal.SIGUSR2)
    assert came == [signal.SIGUSR2]


def test_a_manager_that_another_thread_has_closed_catches_no_more_signals(url, came):
    run = catching(url).__enter__()
    closing: Future[None] = Future()
    threading.Thread(target=run_into, args=(closing, run.close)).start()
    closing.result(30)
    signal.raise_signal(signal.SIGUSR2)
    assert not run._preemption.announced()
    assert came == [signal.SIGUSR2]


def test_a_manager_that_nobody_has_closed_catches_no_signals_once_it_is_gone(url, came):
    original = signal.getsignal(signal.SIGUSR2)
    catching(url).__enter__()
    gc.collect()
    assert signal.getsignal(signal.SIGUSR2) is original


def _end_and_signal(url: str, number: signal.Signals, again: bool) -> None:
    signal.signal(number, signal.SIG_DFL)
    run = dos.CheckpointManager(url, preemption=dos.Preemption(signals=[number])).__enter__()
    chain(number)
    handler = signal.getsignal(number)
    run.close()
    if again:
        other = dos.Preemption(signals=[signal.SIGUSR1])
        with (
            dos.CheckpointManager(f"{url}-2", preemption=other),
            dos.CheckpointManager(url, preemption=dos.Preemption(signals=[number])) as run,
        ):
            signal.raise_signal(number)
            assert run._preemption.announced()
    signal.raise_signal(number)
    assert number == signal.SIGWINCH, "SIGTERM did not end the process"
    assert signal.getsignal(number) is handler
    os._exit(3)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGWINCH, 3)]
)
@pytest.mark.parametrize("again", [False, True])
def test_after_the_block_a_chained_signal_has_its_default_action(url, number, code, again):
    forking = multiprocessing.get_context("fork")
    child = forking.Process(target=_end_and_signal, args=(url, number, again))
    child.start()
    child.join(60)
    assert child.exitcode == code


def _ignore_and_signal(url: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = dos.CheckpointManager(url).__enter__()
    chain(signal.SIGTERM)
    run.close()
    signal.raise_signal(signal.SIGTERM)
    os._exit(3)


def test_after_the_block_a_chained_signal_is_ignored_if_it_was_before(url):
    child = multiprocessing.get_context("fork").Process(target=_ignore_and_signal, args=(url,))
    child.start()
    child.join(60)
    assert child.exitcode == 3


def test_a_child_forked_inside_the_block_is_ended_by_sigterm_as_elsewhere(url):
    forking = multiprocessing.get_context("fork")
    with dos.CheckpointManager(url) as run:
        here, there = forking.Pipe()
        child = forking.Process(target=_report_handler_and_wait, args=(there,), daemon=True)
        child.start()
        try:
            assert here.recv() is True  # it has begun, and has the default handler
            child.terminate()
            child.join(30)
            assert child.exitcode == -signal.SIGTERM
        finally:
            child.kill()
        # This process has not heard of it, and goes on catching its own.
        assert not run.preempted()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def _report_handler_and_wait(connection: Any) -> None:
    connection.send(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    while True:
        signal.pause()


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[dos.CheckpointManager], None]:
    """Makes the ranks of a manager agree that their job must end at the next step."""

    def end(run: dos.CheckpointManager) -> None:
        run.__enter__()
        monkeypatch.setattr(run._consensus, "reached", lambda: frozenset({"preempted"}))

    return end


def test_the_step_at_which_a_job_must_end_is_saved_unless_it_was(url, monkeypatch, ending):
    """Also if the save before it has failed: what is there now is worth more."""
    with dos.CheckpointManager(url) as run:
        with monkeypatch.context() as patched:
            patched.setattr(async_api, "run_save", down)
            run.async_save(1, state(1))
            ending(run)
            assert run.step(2, state(2), metrics={"loss": 0.5}, user_metadata={"lr": 1})
        assert run.preempted()
        (saved,) = dos.steps(url)
        assert saved.user_metadata == {"step": 2, "lr": 1, "metrics": {"loss": 0.5}}
        assert run.step(2, state(2)) is False
    assert names(url) == ["step-2"]


def test_a_check_of_ones_own_ends_the_job_without_a_save_where_none_is_wanted(url):
    with dos.CheckpointManager(
        url, preemption=dos.Preemption(check=lambda: True, signals=(), save=False)
    ) as run:
        step = 1
        while not run.preempted():
            run.step(step, state(step))
            step += 1
        assert run.latest() is None
    assert dos.steps(url) == (), "nor on leaving"


def test_a_check_that_fails_does_not_end_training(url, caplog):
    asked = threading.Semaphore(0)

    def check() -> bool:
        asked.release()
        raise OSError("no metadata server")

    with dos.CheckpointManager(url, preemption=dos.Preemption(check=check)) as run:
        assert asked.acquire(timeout=30)
        assert asked.acquire(timeout=30)  # so the first failure is behind us
        train(run, range(1, 3))
        assert not run.preempted()
    assert "no metadata server" in caplog.text


class Untrusted:
    """What torch loads only with `trust_pickle`."""


def test_loads_trust_and_verify_as_the_manager_was_told(url):
    with dos.CheckpointManager(url) as run, pytest.warns(UserWarning, match="trust_pickle"):
        run.save(1, {**state(1), "own": Untrusted()})
    with dos.CheckpointManager(url) as run, pytest.raises(dos.errors.UntrustedPickleError):
        run.load({"own": None})
    with dos.CheckpointManager(url, trust_pickle=True) as run:
        found: dict[str, Any] = {"own": None}
        run.load(found)
        assert isinstance(found["own"], Untrusted)
    damage(f"{url}/step-1")
    with dos.CheckpointManager(url) as run, pytest.raises(dos.errors.CheckpointCorruptError):
        loaded(run)
    with dos.CheckpointManager(url, verify=False) as run:
        assert loaded(run)[0] == 1


def recorded_stores(monkeypatch: pytest.MonkeyPatch) -> list[RecordingStore]:
    """The stores that are opened from now on, each of which records its requests."""
    really = StoreSpec.open
    stores: list[RecordingStore] = []

    def recorded(spec: StoreSpec) -> Any:
        stores.append(RecordingStore(really(spec)))
        return stores[-1]

    monkeypatch.setattr(StoreSpec, "open", recorded)
    return stores


def test_requests_of_latest_and_steps(url, monkeypatch):
    save_steps(url, range(1, 6))
    stores = recorded_stores(monkeypatch)
    with dos.CheckpointManager(url) as run:
        counts = []
        for look in (run.latest, run.steps):
            stores.clear()
            look()
            counts.append(sum(len(store.requests) for store in stores))
    assert counts == [2 + 1 + 1, 2 + 1 + 5]


def test_after_the_block_the_manager_still_says_what_was_saved(url):
    with dos.CheckpointManager(url, save_every=1) as run:
        run.step(1, state(1))
        run.step(2, state(2))
    assert run.latest() == 2
    assert numbers(run) == (1, 2)


def test_many_steps_are_listed_by_a_request_each_and_the_latest_by_one(url, monkeypatch):
    dos.save(state(1), f"{url}/step-1", progress=False)
    store = StoreSpec(url).open()
    saved = [(meta.key, store.get(meta.key, max_size_bytes=2**16)[0]) for meta in store.list()]
    for step in range(2, 201):
        for key, body in saved:
            store.put(key.replace("step-1/", f"step-{step}/"), body)
    stores = recorded_stores(monkeypatch)
    with dos.CheckpointManager(url) as run:
        assert run.latest() == 200
        # A LIST is one here; on a server it is one for each 1,000 objects.
        assert sum(len(store.requests) for store in stores) == 2 + 1 + 1
        stores.clear()
        assert numbers(run) == tuple(range(1, 201))
        assert sum(len(store.requests) for store in stores) == 2 + 1 + 200


def test_steps_that_were_deleted_cost_no_requests(url, monkeypatch):
    """200 steps of which 3 are left: their tombstones are listed, and not read."""
    with dos.CheckpointManager(url, keep=dos.KeepLatest(3)) as run:
        for step in range(1, 6):
            run.save(step, state(step))
    store = StoreSpec(url).open()
    tombstone, _ = store.get("step-1/_COMMIT", max_size_bytes=2**16)
    for step in range(1000, 1200):
        store.put(f"step-{step}/_COMMIT", tombstone)
    stores = recorded_stores(monkeypatch)
    with dos.CheckpointManager(url) as run:
        assert numbers(run) == (3, 4, 5)
        assert sum(len(store.requests) for store in stores) == 2 + 1 + 3
        stores.clear()
        assert run.latest() == 5
        assert sum(len(store.requests) for store in stores) == 2 + 1 + 1
        # Nor do they cost any when a job begins, or sweeps.
        stores.clear()
        assert loaded(run)[0] == 5
        run.save(6, state(6))
        end_of_upkeep(run)
    assert {store.url for store in stores} == {url, *(f"{url}/step-{n}" for n in (3, 4, 5, 6))}


@pytest.mark.parametrize("step", [-1, 10**18, True, 1.0, "1", None])
def test_what_is_no_number_of_a_step_is_refused(url, requests, step):
    run = dos.CheckpointManager(url)
    refusing: list[Callable[[], object]] = [
        lambda: check_step(step),
        lambda: run.step(step, state(1)),
        *((lambda: run.load(state(0), step),) if step else ()),
    ]
    for act in refusing:
        with pytest.raises(dos.errors.ConfigError, match="whole number"):
            act()
    run.close()
    assert requests == []
    for least_and_most in (0, 10**18 - 1):
        check_step(least_and_most)


@pytest.mark.parametrize("step", [-1, 10**18, True, 1.0, "1", None])
def test_nothing_is_saved_as_what_is_no_number_of_a_step(url, step):
    with dos.CheckpointManager(url) as run:
        for save in (run.save, run.async_save):
            with pytest.raises(dos.errors.ConfigError, match="whole number"):
                save(step, state(1))
        assert numbers(run) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_every": 0},
        {"save_every": 1.5},
        {"save_every": timedelta(seconds=-1)},
        {"preemption": signal.SIGTERM},
        {"save_every": timedelta(0)},
        {"on_busy": "perhaps"},
        {"save_every": True},
        {"save_every": "1"},
        {"keep": 3},
        {"user_metadata": {"a": object()}},
        {"base": "s3://bucket/run"},
        {"on_event": 3},
        {"trace": "https://example.com/trace"},
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(url, wrong):
    with pytest.raises(dos.errors.ConfigError):
        dos.CheckpointManager(url, **wrong)


class Unconditional(WrappedStore):
    """A store that knows no conditions."""

    def put(self, key: str, data: Any, **settings: Any) -> Any:
        return self.inner.put(key, data, retry=settings.get("retry", True))


def test_a_store_without_conditions_is_refused_unless_that_is_allowed(url, through):
    through(Unconditional)
    with (
        pytest.raises(dos.errors.UnsupportedError),
        dos.CheckpointManager(url, claim_run=False) as run,
    ):
        run.save(1, state(1))
    with dos.CheckpointManager(url, claim_run=False, allow_unfenced=True) as run:
        run.save(1, state(1))
    assert names(url) == ["step-1"]


def test_what_is_saved_and_loaded_has_the_settings_of_the_manager(
    url, tmp_path, capsys, monkeypatch
):
    events: list[Event] = []
    configs: list[object] = []
    really = StoreSpec.open
    monkeypatch.setattr(StoreSpec, "open", lambda spec: configs.append(spec.config) or really(spec))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    settings: dict[str, Any] = {
        "on_event": events.append,
        "trace": tmp_path / "{name}.json",
        "config": dos.TransferConfig(max_retries=3),
    }
    with dos.CheckpointManager(url, **settings) as run:
        run.save(1, state(1))
        run.async_save(2, state(2))
        run.pin(1)
        run.load(state(0), 2)
        end_of_upkeep(run)
    assert set(configs) == {settings["config"]}
    assert {(one.operation, one.url) for one in events if isinstance(one, Planned)} == {
        ("save", f"{url}/step-1"),
        ("save", f"{url}/step-2"),
        ("load", f"{url}/step-2"),
    }
    traces = ("step-1", "step-2")
    assert all((tmp_path / f"{name}.json").exists() for name in traces)
    assert capsys.readouterr().err == "", "no progress bar"


@pytest.mark.parametrize("stock_metadata", [None, False])
def test_stock_torch_finds_what_is_saved_unless_it_is_not_to(url, stock_metadata):
    settings = {} if stock_metadata is None else {"stock_metadata": stock_metadata}
    with dos.CheckpointManager(url, sweep=False, **settings) as run:  # type: ignore[arg-type]
        run.save(1, state(1))
    keys = [meta.key for meta in StoreSpec(url).open().list()]
    assert ("step-1/.metadata" in keys) is (stock_metadata is None)


def test_with_the_base_latest_only_what_has_changed_is_uploaded(url, caplog):
    with dos.CheckpointManager(url, base="latest", save_last=False) as run:
        for step in (1, 2):
            run.save(step, state(step))
        loaded(run, 1)
        run.save(2, state(2))
    # This store copies nothing, and says of what.
    said = [one.getMessage() for one in caplog.records if "not changed since" in one.getMessage()]
    assert ["(latest)" in text for text in said] == [True, False, False]
    assert all(f"({url}/step-1)" in text for text in said[1:])
