"""A run of checkpoints in one process: when it saves, what it refuses, how it ends.

`test_manager_histories` compares what a job is told, and what is then on the store, with a model.
Here is what the model does not know: time, threads, errors of the store, and runs without a claim.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.read import api as load_api
from dcp_objstore.run import claim_run as claiming, housekeeping, manager, saves
from dcp_objstore.run.steps import check_step
from dcp_objstore.stores import StoreSpec
from dcp_objstore.write import api, async_save as async_api
from tests.support.checkpoints import numbers
from tests.support.managers import (
    damage,
    down,
    end_of,
    end_of_upkeep,
    interrupted,
    loaded,
    names,
    noticed_at_each_step,
    run_url,
    save_each,
    save_steps,
    state,
)
from tests.support.wrapped_stores import RecordingStore


def payload(step: int) -> bytes:
    """The bytes of the tensor of `state`."""
    return state(step)["weight"].numpy().tobytes()


@pytest.fixture
def held(hold: Any) -> threading.Event:
    """Background saves wait until the test sets this."""
    go: threading.Event = hold(async_api, "run_save")
    return go


def soon(held: threading.Event) -> None:
    threading.Timer(0.05, held.set).start()


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_a_run_is_saved_resumed_and_saved_on(bucket):
    options: dict[str, Any] = {"storage_options": bucket.storage_options}
    settings: dict[str, Any] = {"save_every": 3, "user_metadata": {"model": "tiny"}, **options}
    with dos.CheckpointManager(bucket.url, **settings) as run:
        assert loaded(run) == (None, -1)
        for step in range(1, 8):
            run.step(step, state(step), metrics={"loss": step / 2}, user_metadata={"lr": 1})
    assert run.latest() == 7, "it can be asked after the block, too"
    assert numbers(run) == (3, 6, 7)
    with dos.CheckpointManager(bucket.url, **settings) as run:
        assert loaded(run) == (7, 7)
        for step in range(8, 11):
            run.step(step, state(step))
    steps = dos.steps(bucket.url, **options)
    assert [step.step for step in steps] == [3, 6, 7, 9, 10]
    assert [one.user_metadata for one in steps[:3]] == [
        {"step": step, "model": "tiny", "lr": 1, "metrics": {"loss": step / 2}}
        for step in (3, 6, 7)
    ]


def test_a_step_is_saved_when_a_multiple_was_passed(url):
    with dos.CheckpointManager(url, save_every=25, save_last=False) as run:
        saved = [step for step in range(0, 120, 10) if run.step(step, state(step))]
        assert saved == [30, 50, 80, 100]
        loaded(run, 50)
        assert run.step(76, state(76)), "75 was passed since the load"
    for every, first, is_due in ((25, 25, True), (25, 26, False), (1, 0, False)):
        with dos.CheckpointManager(run_url(), save_every=every, save_last=False) as run:
            assert run.step(first, state(first)) is is_due


# --- timed saves


class Clock:
    """A clock that a test sets; `look` has the ranks agree on what is due now."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.now, self.look = 0.0, look

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with noticed_at_each_step() as look:
        clock = Clock(look)
        monkeypatch.setattr(saves, "time", clock)
        yield clock


def timed(url: str, **settings: Any) -> dos.CheckpointManager:
    every = timedelta(seconds=10)
    return dos.CheckpointManager(url, save_every=every, save_last=False, **settings)


def test_a_timed_save_begins_so_long_after_the_last_save_or_load(url, clock):
    with timed(url) as run:

        def is_saved(step: int, after_seconds: float) -> bool:
            clock.now += after_seconds
            return run.step(step, state(step))

        assert [is_saved(1, 9), is_saved(2, 1), is_saved(3, 9)] == [False, True, False]
        run.save(4, state(4))
        assert not is_saved(5, 9)
        assert loaded(run) == (4, 4)
        assert [is_saved(5, 9), is_saved(6, 1)] == [False, True]
    assert names(url) == ["step-2", "step-4", "step-6"]


def test_a_refused_save_does_not_put_off_the_next(url, clock):
    save_each(url, 5)
    with timed(url) as run:
        clock.now = 9
        for save in (run.save, run.async_save):
            with pytest.raises(dos.errors.CheckpointExistsError, match="later steps"):
                save(1, state(1))
        assert not run.step(2, state(2))
        clock.now = 10
        with pytest.raises(dos.errors.CheckpointExistsError, match="later steps"):
            run.step(3, state(3))


@pytest.mark.parametrize("delay", ["a claim that takes long", "another save"])
def test_the_timer_fires_once_for_a_save(url, clock, delay, monkeypatch):
    """It asks again until the save begins, and that agreement comes after the save."""
    really = manager.run_claim.claim_run
    with timed(url) as run:
        clock.now = 10
        if delay == "another save":
            clock.look()
            run.save(1, state(1))
        else:

            def slowly(*args: Any, **settings: Any) -> Any:
                clock.look()
                return really(*args, **settings)

            monkeypatch.setattr(manager.run_claim, "claim_run", slowly)
            assert run.step(1, state(1))
        assert not run.step(2, state(2))
    assert names(url) == ["step-1"]


def test_a_timed_save_is_not_due_before_the_last_one_has_ended(url, clock, held):
    with timed(url, on_busy="raise") as run:
        clock.now = 10
        assert run.step(1, state(1))
        clock.now = 20
        assert not run.step(2, state(2))
        held.set()
        end_of("async-save")
        assert run.step(3, state(3))
    assert names(url) == ["step-1", "step-3"]


@pytest.mark.parametrize("on_busy", ["skip", "raise"])
def test_a_timed_save_waits_for_ranks_that_have_not_seen_the_last_one_end(
    url, clock, held, on_busy, monkeypatch
):
    """The timer has asked when rank 0 had ended that save."""
    with timed(url, on_busy=on_busy) as run:
        clock.now = 10
        assert run.step(1, state(1))
        monkeypatch.setattr(manager.RunSaves, "is_time", lambda *_: True)
        soon(held)
        assert run.step(2, state(2))
    assert names(url) == ["step-1", "step-2"]


# --- where it resumes


def test_damaged_steps_are_skipped_and_saved_again(url):
    """A job that has yet to claim the run is refused, because a damaged marker might count."""
    save_steps(url, (1, 2, 3))
    damage(f"{url}/step-2", payload(2))
    last = StoreSpec(f"{url}/step-3").open()
    with dos.CheckpointManager(url, sweep=False) as run:
        assert loaded(run)[0] == 3
        last.put("_COMMIT", b"damaged")
        assert loaded(run) == (1, 1)
        assert run.last_resume is not None
        assert [skip.step for skip in run.last_resume.skipped] == [3, 2]
        run.save(2, state(20))
        run.save(3, state(30))
        assert loaded(run) == (3, 30)
    last.put("_COMMIT", b"damaged")
    with (
        pytest.raises(dos.errors.CheckpointCorruptError, match="by hand"),
        dos.CheckpointManager(url) as run,
    ):
        loaded(run)


def test_a_damaged_step_is_saved_again_without_a_claim_too(url):
    save_each(url, 1, 2)
    damage(f"{url}/step-2", payload(2))
    with dos.CheckpointManager(url, claim_run=False) as run:
        assert loaded(run)[0] == 1
        run.save(2, state(20))
        assert loaded(run) == (2, 20)


@pytest.mark.parametrize(("step", "looks"), [(None, 0), (2, 1)])
def test_a_job_looks_for_later_steps_once_and_only_if_it_chose_its_step(url, through, step, looks):
    save_steps(url, [1, 2])
    with dos.CheckpointManager(url, sweep=False) as run:
        loaded(run, step)
        claim, stores = run.claim, []
        through(lambda store: stores.append(RecordingStore(store)) or stores[-1])
        run.save(3, state(3))
        run.save(4, state(4))
        assert run.claim == claim, "there were none"
    of_run = [one.verb for store in stores if store.url == url for one in store.requests]
    assert of_run.count("list") == looks
    assert f"{url}/step-1" not in {store.url for store in stores}, "only the newest is read"


def test_a_step_that_is_being_deleted_is_not_gone_back_to(url, hold):
    """Else the job would go on from a step that is gone a moment later."""
    go = hold(housekeeping, "delete_step")
    with dos.CheckpointManager(url, keep=dos.KeepLatest(1), sweep=False) as run:
        run.save(1, state(1))
        run.save(2, state(2))
        soon(go)
        with pytest.raises(dos.errors.CheckpointNotFoundError):
            loaded(run, 1)


@pytest.mark.parametrize("load", [True, False])
def test_a_job_that_cannot_leave_later_steps_saves_nothing_before_them(url, load):
    """Without a claim, or where it never said where it came from."""
    save_each(url, 1, 2, 5)
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


def test_a_step_of_another_job_is_refused_however_often_a_save_is_tried(url):
    save_each(url, 1)
    with dos.CheckpointManager(url, claim_run=False) as run:
        for _ in range(2):
            with pytest.raises(dos.errors.CheckpointExistsError):
                run.save(1, state(10))
        for _ in range(2):
            run.async_save(1, state(10))
            with pytest.raises(dos.errors.CheckpointExistsError):
                run.load(state(0), 1)
        assert loaded(run) == (1, 1)


def test_looking_at_a_run_changes_nothing(url):
    with dos.CheckpointManager(url, sweep=False) as run:
        run.save(1, state(1))
        with dos.CheckpointManager(url, claim_run=False) as looker:
            assert loaded(looker) == (1, 1)
        run.save(2, state(2))
    assert names(url) == ["step-1", "step-2"]


def test_other_names_below_the_run_are_no_steps_of_it_and_stay(url):
    others = ["zz-best", "step-010"]
    with dos.CheckpointManager(url, keep=dos.KeepLatest(2), sweep=False) as run:
        run.save(10, state(10))
        for name in others:
            dos.save(state(99), f"{url}/{name}", claim=run.claim, progress=False)
        assert run.latest() == 10
        assert numbers(run) == (10,)
        run.load(state(0))
        for step in (11, 12):
            run.save(step, state(step))
        run.load(state(0), 11)
        run.save(12, state(12))
    assert set(names(url)) == {*others, "step-11", "step-12"}, "they go on counting"


# --- saves in the background


@pytest.mark.parametrize("busy", ["wait", "skip", "raise"])
def test_a_second_save_while_one_is_under_way(url, held, busy):
    with dos.CheckpointManager(url, save_every=1, on_busy=busy) as run:
        assert run.step(1, state(1))
        assert run.async_save(2, state(2), on_busy="skip") is None, "as the call says"
        with pytest.raises(dos.errors.ConfigError, match="on_busy"):
            run.async_save(2, state(2), on_busy="perhaps")  # type: ignore[arg-type]
        if busy == "raise":
            with pytest.raises(dos.errors.SaveInProgressError, match="step 1"):
                run.step(2, state(2))
        elif busy == "skip":
            assert run.step(2, state(2)) is False
        else:
            soon(held)
            assert run.step(2, state(2))
        held.set()
    assert names(url) == ["step-1", "step-2"], "what was not saved then is saved on leaving"


def test_managers_of_one_program_neither_wait_nor_raise_for_each_other(url, held, monkeypatch):
    """Such as one for the model and one for its averaged weights."""
    later = async_api.run_save

    def fail(writer: Any, *args: Any) -> Any:
        return (down if "/model/" in writer.checkpoint_id else later)(writer, *args)

    monkeypatch.setattr(async_api, "run_save", fail)
    with dos.CheckpointManager(f"{url}/ema", on_busy="raise") as ema:
        with (
            pytest.raises(dos.errors.StoreUnavailableError),
            dos.CheckpointManager(f"{url}/model") as model,
        ):
            for run in (ema, model):
                run.async_save(1, state(1))
            with pytest.raises(dos.errors.SaveInProgressError, match="step 1"):
                ema.async_save(2, state(2))
            held.set()
            ema.save(2, state(2))
        ema.async_save(3, state(3))
    assert names(f"{url}/ema") == ["step-1", "step-2", "step-3"]
    assert names(f"{url}/model") == []


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
        assert loaded(run) == (1, 10)


# --- how it ends


@pytest.mark.parametrize("other", [7, 10, 12])
def test_the_last_step_is_saved_at_the_end_though_an_earlier_one_was_saved_after_it(url, other):
    """A state that was kept, such as the best one. A later step is beyond the last one."""
    with dos.CheckpointManager(url, sweep=False) as run:
        run.step(10, state(10))
        run.save(other, state(other))
    assert names(url) == [f"step-{step}" for step in sorted({other, max(10, other)})]


def test_a_manager_that_was_not_used_closes_without_a_request(url, requests):
    run = dos.CheckpointManager(url)
    for _ in range(2):
        run.close()
    with pytest.raises(dos.errors.ConfigError, match="closed"):
        run.save(1, state(1))
    with pytest.raises(ZeroDivisionError), dos.CheckpointManager(url) as run:
        run.close()
        raise ZeroDivisionError
    assert requests == []


def test_after_an_error_in_the_body_the_last_step_is_neither_saved_nor_kept(url):
    weight = torch.zeros(4)
    alive = weakref.ref(weight)
    with pytest.raises(ZeroDivisionError), dos.CheckpointManager(url) as run:
        run.step(1, {"weight": weight})
        del weight
        assert alive() is not None
        raise ZeroDivisionError
    assert alive() is None
    assert names(url) == []


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_an_error_in_the_body_commits_the_pending_save_and_is_raised(url, held, error):
    with pytest.raises(type(error)) as caught, dos.CheckpointManager(url, save_every=1) as run:
        run.step(1, state(1))
        soon(held)
        raise error
    assert caught.value is error
    assert not getattr(error, "__notes__", ()), "nothing else has failed"
    assert names(url) == ["step-1"]


def test_a_failed_last_save_is_raised_at_the_end_but_not_over_the_error_of_the_body(
    url, monkeypatch
):
    monkeypatch.setattr(async_api, "run_save", down)
    for steps in ((1,), (1, 2)):
        with (
            pytest.raises(dos.errors.StoreUnavailableError) as once,
            dos.CheckpointManager(url, save_every=1) as run,
        ):
            for step in steps:
                run.step(step, state(step))
        assert not getattr(once.value, "__notes__", ()), "it is raised once"
    with pytest.raises(ZeroDivisionError) as caught, dos.CheckpointManager(url) as run:
        run.async_save(1, state(1))
        raise ZeroDivisionError
    assert "down" in "".join(caught.value.__notes__)
    run.close()  # which raises it no second time
    assert names(url) == []


def test_after_an_error_in_the_body_no_rank_waits_for_this_ones_agreement(url, monkeypatch):
    ended: list[str] = []

    def note(where: Any, name: str) -> None:
        really = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args: ended.append(name) or really(*args))

    note(manager.StepConsensus, "close")
    note(manager.RunSaves, "abandon")
    with pytest.raises(ZeroDivisionError), dos.CheckpointManager(url):
        raise ZeroDivisionError
    assert ended[:2] == ["close", "abandon"]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_save_for_which_ctrl_c_ended_one_wait_is_waited_for_at_the_end(
    url, held, leaves, monkeypatch
):
    """On leaving the block, or in a notebook, which goes on and calls `close`."""
    run = dos.CheckpointManager(url, save_last=False)
    with pytest.raises(KeyboardInterrupt):
        if leaves:
            run.__enter__()
        run.async_save(1, state(1))
        with monkeypatch.context() as patched:
            patched.setattr(async_api.AsyncSaveHandle, "exception", interrupted)
            run.save(2, state(2))
    soon(held)
    if leaves:
        run.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    else:
        run.close()
    assert names(url) == ["step-1"]


@pytest.mark.parametrize("how", ["end", "abandon"])
def test_ctrl_c_while_the_end_waits_gives_back_the_handlers_and_closes_the_manager(
    url, monkeypatch, how
):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(manager.RunSaves, how, interrupted)
    with pytest.raises(KeyboardInterrupt), dos.CheckpointManager(url) as run:
        assert signal.getsignal(signal.SIGTERM) != before
        if how == "abandon":
            raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(dos.errors.ConfigError, match="closed"):
        run.pin(1)


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C comes just after this function has ended."""

    def call(*args: Any, **settings: Any) -> None:
        function(*args, **settings)
        raise KeyboardInterrupt

    return call


@pytest.mark.parametrize(
    ("where", "save", "interrupt"),
    [
        (api, "save_planned", interrupted),
        (api, "save_planned", after(api.save_planned)),
        (manager.RunSaves, "save", after(manager.RunSaves.save)),
        (async_api, "begin_save", interrupted),
        (async_api, "begin_save", after(async_api.begin_save)),
        (manager.RunSaves, "async_save", after(manager.RunSaves.async_save)),
    ],
)
def test_ctrl_c_in_a_save_leaves_nothing_that_close_fails_for(
    url, monkeypatch, where, save, interrupt
):
    """As in a notebook, which goes on: before its save begins, just after that, and at its end."""
    run = dos.CheckpointManager(url)
    loaded(run)
    run.step(1, state(1))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(where, save, interrupt)
        (run.save if save in ("save_planned", "save") else run.async_save)(1, state(1))
    run.close()
    assert names(url) == ["step-1"]


def test_a_manager_that_nobody_closes_says_what_is_lost(url, capfd):
    run = dos.CheckpointManager(url)
    run.save(2, state(2))
    assert run.step(3, state(3)) is False
    child = os.fork()
    if child == 0:
        del run
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with dos.CheckpointManager(f"{url}-2") as closed:
        closed.save(4, state(4))
    looker = dos.CheckpointManager(url, claim_run=False)
    assert looker.latest() == 2
    del closed, looker
    gc.collect()
    assert capfd.readouterr().err == "", "the child's is its parent's"
    del run
    assert "step 3, its last one, was NOT saved" in said(capfd)
    run = dos.CheckpointManager(url)
    run.load(state(0))
    run.step(3, state(3))
    run.save(4, state(4))
    del run
    assert "that it began was that of step 4" in said(capfd)


def said(capfd: pytest.CaptureFixture[str]) -> str:
    """What is printed when a manager is collected: its thread may hold it for a moment."""
    text = ""
    while "CheckpointManager" not in text:
        gc.collect()
        threading.Event().wait(0.01)
        text += capfd.readouterr().err
    return text


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
    for group in (None, "some"):
        with pytest.raises(dos.errors.RankFailedError):
            if module is manager:
                dos.CheckpointManager(url, process_group=group).latest()  # type: ignore[arg-type]
            else:
                dos.claim_run(url, process_group=group)  # type: ignore[arg-type]
    assert groups == ["all", "some"]


# --- signals; what a `PreemptionWatch` does is tested in `test_preemption`


def _signal_while_a_save_drains(url: str, held: threading.Event, fails: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.getLogger("dcp_objstore").addHandler(logging.StreamHandler(os.fdopen(2, "w")))

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        soon(held)

    with dos.CheckpointManager(url, save_every=1, sweep=False) as run:
        run.step(1, state(1))
        threading.Timer(0.05, interrupt).start()
        if fails:
            raise ZeroDivisionError
    os._exit(3)  # the program would go on here


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_no_step_has_seen_ends_the_program_after_the_last_commit(
    tmp_path, held, capfd, fails
):
    """It does not cut the save short, and it is not forgotten. An error of the body is logged."""
    url = tmp_path.as_uri()
    assert exit_code(_signal_while_a_save_drains, url, held, fails) == -signal.SIGTERM
    assert names(url) == ["step-1"]
    assert ("ZeroDivisionError" in capfd.readouterr().err) is fails


def _leave_after_a_signal(url: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    managers = [dos.CheckpointManager(f"{url}/{name}", sweep=False) for name in ("model", "ema")]
    with noticed_at_each_step(), managers[0] as model, managers[1] as ema:
        signal.raise_signal(signal.SIGTERM)
        ema.step(1, state(1))
        assert ema.preempted()
        model.step(1, state(1))
        signal.raise_signal(signal.SIGTERM)  # some schedulers send it twice
    os._exit(3)


def test_a_signal_that_the_program_knows_of_does_not_end_it(tmp_path):
    """It may have learned of it from another manager."""
    assert exit_code(_leave_after_a_signal, tmp_path.as_uri()) == 3


@pytest.mark.parametrize("save", [True, False])
def test_the_step_at_which_a_job_must_end_is_saved_before_a_handler_ends_the_program(url, save):
    """Or not, if none is wanted then. Also if the save before it has failed."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    preemption = dos.Preemption(save=save)
    with (
        noticed_at_each_step(),
        pytest.raises(SystemExit, match="143"),
        dos.CheckpointManager(url, preemption=preemption, sweep=False) as run,
    ):
        run.async_save(1, {"lock": threading.Lock()})
        signal.raise_signal(signal.SIGTERM)
        run.step(2, state(2))
    signal.signal(signal.SIGTERM, before)
    assert names(url) == (["step-2"] if save else [])


def exit_code(act: Callable[..., None], *args: object) -> int | None:
    """How a forked child ends that does this."""
    child = multiprocessing.get_context("fork").Process(target=act, args=args)
    child.start()
    child.join(60)
    return child.exitcode


def test_a_child_forked_inside_the_block_is_ended_by_sigterm_as_elsewhere(url):
    with dos.CheckpointManager(url) as run:
        assert exit_code(signal.raise_signal, signal.SIGTERM) == -signal.SIGTERM
        # This process has not heard of it, and goes on catching its own.
        assert not run.preempted()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_a_manager_that_nobody_has_closed_catches_no_signals_once_it_is_gone(url):
    before = signal.getsignal(signal.SIGTERM)
    dos.CheckpointManager(url).__enter__()
    while signal.getsignal(signal.SIGTERM) is not before:
        gc.collect()
        threading.Event().wait(0.01)


def test_a_loop_that_does_not_ask_whether_it_must_end_is_told_so_once(url, caplog):
    with noticed_at_each_step(), dos.CheckpointManager(url) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(1, 31):
            run.step(step, state(step))
            if step == 10:
                assert run.preempted()
            assert ("has not asked" in caplog.text) is (step >= 20)
    assert names(url) == ["step-1", "step-30"]
    assert caplog.text.count("has not asked run.preempted()") == 1


def test_a_check_of_ones_own_ends_the_job_without_a_save_where_none_is_wanted(url):
    preemption = dos.Preemption(check=lambda: True, signals=(), save=False)
    with dos.CheckpointManager(url, preemption=preemption) as run:
        step = 1
        while not run.preempted():
            run.step(step, state(step))
            step += 1
    assert names(url) == [], "nor on leaving"


# --- requests and settings


def test_steps_are_listed_by_a_request_each_and_deleted_ones_by_none(url, requests):
    """A LIST is one here; on a server it is one for each 1,000 objects."""
    save_steps(url, range(1, 6), keep=dos.KeepLatest(3))
    store = StoreSpec(url).open()
    tombstone, _ = store.get("step-1/_COMMIT", max_size_bytes=2**16)
    for step in range(1000, 1050):
        store.put(f"step-{step}/_COMMIT", tombstone)
    with dos.CheckpointManager(url) as run:
        for look, answer, read in ((run.latest, 5, 1), (lambda: numbers(run), (3, 4, 5), 3)):
            requests.clear()
            assert look() == answer
            assert len(requests) == 2 + 1 + read


@pytest.mark.parametrize("step", [-1, 10**18, True, 1.0, "1", None])
def test_what_is_no_number_of_a_step_is_refused(url, requests, step):
    run = dos.CheckpointManager(url)
    acts: list[Callable[[], object]] = [
        lambda: check_step(step),
        lambda: run.step(step, state(1)),
        *((lambda: run.load(state(0), step),) if step else ()),
    ]
    for act in acts:
        with pytest.raises(dos.errors.ConfigError, match="whole number"):
            act()
    assert requests == []
    for save in (run.save, run.async_save):
        with pytest.raises(dos.errors.ConfigError, match="whole number"):
            save(step, state(1))
    assert numbers(run) == ()
    for least_and_most in (0, 10**18 - 1):
        check_step(least_and_most)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"save_every": wrong} for wrong in (0, 1.5, timedelta(0), True, "1")),
        {"preemption": signal.SIGTERM},
        {"on_busy": "perhaps"},
        {"max_failed_saves": -1},
        {"keep": 3},
        {"grace_seconds": "1h"},
        {"user_metadata": {"a": object()}},
        {"base": "s3://bucket/run"},
        {"on_event": 3},
        {"trace": "https://example.com/trace"},
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(url, wrong):
    with pytest.raises(dos.errors.ConfigError):
        dos.CheckpointManager(url, **wrong)


@pytest.mark.parametrize("changed", [False, True])
def test_what_is_saved_and_loaded_has_the_settings_of_the_manager(
    url, tmp_path, monkeypatch, changed
):
    """In the foreground and the background, with these or by default; and so has every store."""
    calls: list[dict[str, Any]] = []
    configs: list[object] = []
    open_store = StoreSpec.open
    monkeypatch.setattr(
        StoreSpec, "open", lambda spec: configs.append(spec.config) or open_store(spec)
    )
    for where, name in ((api, "save_planned"), (async_api, "begin_save"), (load_api, "load")):
        really = getattr(where, name)
        monkeypatch.setattr(
            where, name, lambda *args, f=really, **given: calls.append(given) or f(*args, **given)
        )
    shared: dict[str, Any] = {
        "on_event": lambda _: None,
        "trace": tmp_path / "{name}.json",
        "config": dos.TransferConfig(max_retries=3),
        "storage_options": {},
        "local": dos.Local(str(tmp_path)),
    }
    saving = {"stock_metadata": not changed, "allow_unfenced": changed}
    loading = {"verify": not changed, "trust_pickle": changed}
    with dos.CheckpointManager(url, **shared, **({**saving, **loading} if changed else {})) as run:
        run.save(1, state(1))
        run.async_save(2, state(2))
        run.pin(1)
        run.load(state(0), 2)
        end_of_upkeep()
    for call, own in zip(calls, (saving, saving, loading), strict=True):
        expected = {**shared, **own, "progress": False}
        assert {name: call[name] for name in expected} == expected
    assert set(configs) == {shared["config"]}


@pytest.mark.parametrize(
    ("base", "bases"),
    [
        ("latest", ["latest", "{url}/step-1", "{url}/step-1"]),
        ("{url}/first", ["{url}/first"] * 3),
        (None, []),
    ],
)
def test_only_what_has_changed_since_the_base_is_uploaded(url, caplog, base, bases):
    dos.save(state(0), f"{url}/first", progress=False)
    given = base and base.format(url=url)
    with dos.CheckpointManager(url, base=given, save_last=False) as run:
        for step in (1, 2):
            run.save(step, state(step))
        loaded(run, 1)
        run.save(2, state(2))
    # This store copies nothing, and says of what.
    texts = [one.getMessage() for one in caplog.records if "not changed since" in one.getMessage()]
    assert len(texts) == len(bases)
    for text, known in zip(texts, bases, strict=True):
        assert f"({known.format(url=url)})" in text
