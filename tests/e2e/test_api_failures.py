"""`dos.save`, `load`, `async_save` gone wrong: every rank hears of it, and the next call works."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import logging
import os
import pickle
import secrets
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.distributed.failures import drop_state, raise_on_all, typed_failures
from dcp_objstore.read import planner as read_planner
from dcp_objstore.stores.local import LocalStore
from dcp_objstore.write import async_save as async_api, planner as write_planner
from dcp_objstore.write.staging.state import Staging
from tests.support.checkpoints import cause, memory_url
from tests.support.ranks import run_alone, run_ranks


def call(kind: str, state: dict[str, Any], url: Any, **arguments: Any) -> Any:
    outcome = getattr(dos, kind)(state, url, **arguments)
    return outcome.result(30) if kind == "async_save" else outcome


# A wrong argument on some ranks -----------------------------------------------------------------

Wrong = dict[str, Any]
WRONG: dict[str, Wrong] = {
    "url": {"url": "nonsense://bucket/step"},
    "storage_options": {"storage_options": {"no_such_option": 1}},
    "config": {"config": {"max_retries": 2}},
    "user_metadata": {"user_metadata": {"x": object()}},
    "on_event": {"on_event": "print"},
    "trace": {"trace": "s3://bucket/trace.json"},
    "on_busy": {"on_busy": "skip"},
    "verify": {"verify": "maybe"},
}
# What each call takes, and the first rank that is given something wrong.
TAKES: dict[str, tuple[list[str], int]] = {
    "save": (["url", "storage_options", "config", "user_metadata", "on_event"], 1),
    "async_save": (["url", "config", "user_metadata", "trace", "on_busy"], 0),
    "load": (["url", "config", "verify", "trace"], 1),
}


def wrong_on(rank: int, world: int, root: str) -> list[tuple[str, int | None]]:
    dos.save({"w": torch.ones(2)}, f"{root}/old")
    seen = []
    for kind, (names, first) in TAKES.items():
        for wrong in names:
            url = f"{root}/old" if kind == "load" else f"{root}/{kind}-{wrong}"
            given = {"url": url, **(WRONG[wrong] if rank >= first else {})}
            with pytest.raises(dos.errors.DcpObjstoreError) as caught:
                call(kind, {"w": torch.ones(2)}, **given)
            seen.append((type(caught.value).__name__, caught.value.rank))
            # The ranks are still at the same collectives.
            call(kind, {"w": torch.ones(2)}, url)
    return seen


def test_a_wrong_argument_on_any_rank_is_raised_on_every_rank(tmp_path):
    kinds = {"url": "InvalidUrlError"}
    expected = [
        (kinds.get(wrong, "ConfigError"), first)
        for names, first in TAKES.values()
        for wrong in names
    ]
    assert run_ranks(2, wrong_on, tmp_path.as_uri()) == [expected] * 2


def outside(rank: int, world: int, root: str) -> list[str]:
    group, said = dist.new_group([1]), []
    dos.save({"w": torch.ones(2)}, f"{root}/old")
    for kind in TAKES:
        url = f"{root}/old" if kind == "load" else f"{root}/{kind}"
        for given in (group, init_device_mesh("cpu", (world,))):
            try:
                call(kind, {"w": torch.ones(2)}, url, process_group=given)
            except dos.errors.ConfigError as error:
                said.append(str(error).partition("\n")[0])
    return said


def test_a_rank_outside_the_process_group_is_told_so_and_a_mesh_is_none(tmp_path):
    told, member = run_ranks(2, outside, f"file://{tmp_path}")
    assert [one for one in told if "this rank is not in the process group" in one] == told[::2]
    assert all("must be a ProcessGroup, got DeviceMesh" in one for one in (*told[1::2], *member))
    assert (len(told), len(member)) == (6, 3)


# Errors inside DCP's collectives ----------------------------------------------------------------


class UnfriendlyError(Exception):
    """Does not unpickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


# What our planners call, or inherit, in each method.
PLANNERS: dict[tuple[str, str], tuple[Any, str]] = {
    ("save", "set_up_planner"): (default_planner.DefaultSavePlanner, "set_up_planner"),
    ("save", "create_local_plan"): (write_planner, "create_default_local_save_plan"),
    ("save", "create_global_plan"): (write_planner, "plan_globally"),
    ("load", "create_local_plan"): (read_planner, "create_default_local_load_plan"),
}


def planners_break(rank: int, world: int, root: str) -> list[tuple[str, str, int | None]]:
    dos.save({"w": torch.ones(2)}, f"{root}/old")
    seen = []
    for (kind, method), called in PLANNERS.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == (0 if method == "create_global_plan" else 1):
                patch.setattr(*called, Mock(side_effect=UnfriendlyError("does not", "unpickle")))
            with pytest.raises(dos.errors.DcpObjstoreError, match="Error: does not unp") as caught:
                # What was planned before need not be planned again.
                key, name = ("w", "old") if kind == "load" else (method, "new")
                call(kind, {key: torch.ones(2)}, f"{root}/{name}")
        seen.append((method, type(caught.value).__name__, caught.value.rank))
    return seen


def test_what_a_planner_raises_reaches_every_rank_even_if_it_does_not_unpickle(tmp_path):
    expected = [
        ("set_up_planner", "RankFailedError", 1),
        ("create_local_plan", "UnsupportedError", 1),  # it is the fault of the value
        ("create_global_plan", "RankFailedError", 0),
        ("create_local_plan", "RankFailedError", 1),
    ]
    assert run_ranks(2, planners_break, tmp_path.as_uri()) == [expected] * 2


def test_an_error_raised_again_says_the_same_and_stays_as_its_holder_has_it():
    held = dos.errors.CheckpointExistsError("it is there", key="w")
    texts = []
    for _ in range(2):
        failures: Any = {0: (held, None), 1: (ValueError("x"), None)}
        with (
            pytest.raises(dos.errors.CheckpointExistsError) as caught,
            typed_failures("s3://bucket/step", None),
        ):
            raise CheckpointException("write", failures)
        texts.append(str(caught.value))
        assert str(pickle.loads(pickle.dumps(caught.value))) == texts[-1]
        with pytest.raises(dos.errors.CheckpointExistsError, match="s3://bucket/other"):
            raise_on_all(held, "s3://bucket/other", None)
    assert texts[0] == texts[1]
    assert texts[0].count("also failed: rank 1: ValueError") == 1
    assert str(held) == "it is there\n[key w]"


def test_the_text_of_a_failure_on_very_many_ranks_stays_short():
    failures: Any = {rank: (dos.errors.ConfigError("wrong"), None) for rank in range(1000)}
    with (
        pytest.raises(dos.errors.ConfigError, match="991 more") as caught,
        typed_failures(None, None),
    ):
        raise CheckpointException("write", failures)
    assert len(str(caught.value)) < 400


def test_an_empty_state_is_warned_of(caplog):
    url = memory_url()
    dos.save({}, url)
    assert f"{url}: the state is empty on every rank; nothing is saved" in caplog.text


# Ctrl-C on one rank -----------------------------------------------------------------------------


class InterruptedState:
    """Where the program is when Ctrl-C comes, or when it calls `sys.exit`."""

    def __init__(self, error: BaseException | None, on: str) -> None:
        self.error, self.on = error, on

    def state_dict(self) -> dict[str, int]:
        self._go("state_dict")
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._go("load_state_dict")

    def _go(self, on: str) -> None:
        if self.error is not None and self.on == on:
            raise self.error


def interrupted(
    rank: int, world: int, root: str, kind: str, on: str, error: BaseException
) -> tuple[str, str]:
    """What the first, interrupted call raises; how the calls after it end."""
    dos.save({"own": {"a": 1}}, f"{root}/old", progress=False)
    state: dict[str, Any] = {"own": InterruptedState(error if rank == 1 else None, on)}
    url = f"{root}/old" if kind == "load" else f"{root}/new"
    first = ""
    try:
        call(kind, state, url)
    except (dos.errors.RankFailedError, type(error)) as raised:
        first = repr(raised)
    state = {"own": {"a": 1}}
    for again in ("save", "load", "async_save"):
        try:
            call(again, state, f"{root}/old" if again == "load" else f"{root}/{again}")
        except dos.errors.RankFailedError as raised:  # an earlier save in the background
            assert (kind, again) == ("async_save", "async_save"), raised
            call(again, state, f"{root}/{again}")
    return first, sorted(found.name for found in dos.steps(root))


@pytest.mark.parametrize(
    ("kind", "on", "error"),
    [
        ("save", "state_dict", KeyboardInterrupt()),
        ("async_save", "state_dict", SystemExit(3)),
        ("load", "load_state_dict", KeyboardInterrupt()),
    ],
)
def test_ctrl_c_in_the_programs_code_on_one_rank_ends_that_call_on_all(tmp_path, kind, on, error):
    (first, after), (second, _) = run_ranks(2, interrupted, f"file://{tmp_path}", kind, on, error)
    assert second == repr(error)
    assert "RankFailedError" in first
    assert type(error).__name__ in first
    assert after == ["async_save", "old", "save"]


# async_save -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name", "does_its_work", "error"),
    [
        (threading.Thread, "start", False, RuntimeError("can't start new thread")),
        (threading.Thread, "start", False, KeyboardInterrupt()),
        (async_api, "_begin_after_earlier", True, KeyboardInterrupt()),  # as it takes its turn
    ],
)
def test_a_background_save_that_cannot_start_does_not_block_the_next(
    monkeypatch, where, name, does_its_work, error
):
    really = getattr(where, name)

    def refused(*args: Any) -> None:
        if does_its_work:
            really(*args)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(where, name, refused)
        with pytest.raises(type(error)):
            dos.async_save({"w": torch.ones(2)}, memory_url())
    with pytest.raises(dos.errors.RankFailedError, match=type(error).__name__):
        dos.async_save({"w": torch.ones(2)}, memory_url())
    dos.async_save({"w": torch.ones(2)}, memory_url()).result(30)


def test_ctrl_c_as_the_thread_has_begun_leaves_the_save_to_the_thread(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    start, run_save = threading.Thread.start, async_api.run_save

    def held(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return run_save(*args)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(30)
        raise KeyboardInterrupt

    url = memory_url()
    monkeypatch.setattr(async_api, "run_save", held)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dos.async_save({"w": torch.ones(2)}, url)
    with pytest.raises(dos.errors.SaveInProgressError):
        dos.async_save({"w": torch.ones(2)}, memory_url(), on_busy="raise")
    go_on.set()
    dos.async_save({"w": torch.ones(2)}, memory_url()).result(30)
    assert dos.open(url)["w"].read().tolist() == [1, 1]


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses attributes, also those that Python sets."""

    worker: int


def refuse_record(record: object) -> bool:
    raise TypeError("this filter takes no tuples")


def end_program(record_or_future: object) -> bool:
    raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("what", ["error", "filter", "callback"])
def test_a_background_save_ends_whatever_the_programs_own_code_raises(what, monkeypatch):
    url = memory_url()
    dos.save({"w": torch.ones(2)}, url)
    go_on, finish = threading.Event(), Staging.finish
    if what == "callback":
        monkeypatch.setattr(Staging, "finish", lambda one: go_on.wait(30) and finish(one))
    if what == "filter":
        monkeypatch.setattr(logging.getLogger("dcp_objstore"), "filters", [end_program])
    state: dict[str, Any] = {"w": torch.ones(2)}
    if what == "error":
        state = {"own": InterruptedState(FrozenError(3), "state_dict")}
    handle = dos.async_save(state, url, wait_for_staging=what == "error")
    if what == "callback":
        handle.staging_completion.add_done_callback(end_program)
        handle.upload_completion.add_done_callback(end_program)
    go_on.set()
    assert handle.exception(30) is not None
    assert handle.upload_completion.exception(0) is handle.exception(0)
    assert handle.staging_completion.done()
    if what == "error":
        assert "FrozenError: 3" in str(handle.exception(0))
    if what == "filter":
        assert type(handle.exception(0)) is dos.errors.CheckpointExistsError
    dos.async_save({"w": torch.ones(2)}, memory_url()).result(30)


def test_a_frozen_error_loses_its_frames_and_keeps_what_it_says():
    def fail() -> None:
        held = secrets.token_bytes()  # as a state is
        raise FrozenError(len(held))

    try:
        fail()
    except FrozenError as error:
        frozen = error
    drop_state(frozen)
    assert frozen.__traceback__ is None
    assert frozen.worker == len(secrets.token_bytes())


def test_a_filter_that_raises_does_not_hide_why_a_save_of_dcp_failed(monkeypatch):
    url = memory_url()
    dos.save({"w": torch.ones(2)}, url)
    monkeypatch.setattr(logging.getLogger("dcp_objstore"), "filters", [refuse_record])
    writer = dos.ObjectStoreWriter(url, progress=False)
    future: Any = dcp.async_save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert type(cause(future.exception(30))) is dos.errors.CheckpointExistsError


# A process group that is gone -------------------------------------------------------------------


def destroy_too_early(rank: int, world: int, url: str, when: str) -> list[Any]:
    """Destroy the group while the save is about to begin, plans, or uploads; how it ended."""
    reached, go_on = threading.Event(), threading.Event()
    held = {
        "begins": (Staging, "finish"),
        "plans": (write_planner.AgreeingSavePlanner, "take"),
        "uploads": (LocalStore, "put"),
    }[when]
    whole: Any = getattr(*held)

    def pause(*args: Any, **settings: Any) -> Any:
        if when != "uploads" or args[1].endswith(".distcp"):
            reached.set()
            assert go_on.wait(30)
        return whole(*args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*held, pause)
        state = {"w": torch.ones(3), "mine": dos.PerRank(rank)}
        # A rank that waits for one that has failed does so until that one's process has ended.
        config = dos.TransferConfig(peer_timeout_seconds=3)
        handle = dos.async_save(state, url, wait_for_staging=False, config=config)
        assert reached.wait(30)
        dist.barrier()
        if when != "begins" or rank == 1:  # on one rank, which the other is told
            dist.destroy_process_group()
        go_on.set()
        error = handle.exception(60)
    return [type(error), str(error)]


@pytest.mark.parametrize("when", ["begins", "plans", "uploads"])
def test_a_save_whose_process_group_was_destroyed_fails_and_commits_no_part(tmp_path, when):
    url = f"file://{tmp_path}/step"
    ended = run_ranks(2, destroy_too_early, url, when, timeout_seconds=120)
    for kind, text in ended:
        assert kind is dos.errors.InputError
        assert "call result() of each save" in text
    assert not list(tmp_path.glob("*/_COMMIT"))


def destroy_before_dcp_saves(rank: int, world: int, url: str) -> list[Any]:
    writer = dos.ObjectStoreWriter(url, progress=False)
    staged = writer.stage({"w": torch.ones(4)})
    dist.destroy_process_group()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # as dcp.async_save goes on
        error = pool.submit(dcp.save, staged, storage_writer=writer).exception(30)
    return [type(cause(error)), str(cause(error))]


def test_a_background_save_of_dcp_commits_no_part_when_its_ranks_are_gone(tmp_path):
    url = f"file://{tmp_path}/step"
    for kind, text in run_ranks(2, destroy_before_dcp_saves, url):
        assert kind is dos.errors.InputError
        assert "call result() of each save" in text
    assert not list(tmp_path.glob("*/_COMMIT"))


def join_late(rank: int, world: int, url: str) -> int:
    """Without a group when the save is called, with one as it runs."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    go_on, finish = threading.Event(), Staging.finish

    def pause(staging: Staging) -> None:
        assert go_on.wait(30)
        finish(staging)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "finish", pause)
        state = {"w": torch.ones(3)}
        handle = dos.async_save(state, f"{url}-{rank}", wait_for_staging=False)
        again = dist.PrefixStore("again", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
        go_on.set()
        return handle.result(30).objects


def test_a_save_that_was_called_without_a_group_stays_alone(tmp_path):
    assert run_ranks(2, join_late, f"file://{tmp_path}/step", timeout_seconds=120) == [1, 1]


# A rank that calls alone ------------------------------------------------------------------------


def call_alone(rank: int, world: int, url: str) -> dict[str, str]:
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
        return {}
    said: dict[str, str] = {}
    patience = datetime.timedelta(seconds=0.5)  # that of init_process_group
    before = store.timeout
    store.set_timeout(patience)
    torch_private.set_group_timeout(dist.group.WORLD, patience)
    try:
        for kind in TAKES:
            with pytest.raises(dos.errors.RankFailedError) as caught:
                call(kind, {"w": torch.ones(2)}, url)
            said[kind] = str(caught.value)
    finally:
        store.set_timeout(before)
        store.set("given up", "")
    return said


def test_a_rank_that_calls_alone_is_told_within_the_groups_time_out_that_all_must(tmp_path):
    told, _ = run_ranks(2, call_alone, f"file://{tmp_path}/step", timeout_seconds=120)
    for kind, text in told.items():
        assert f"every rank has to call dcp_objstore.{kind}" in text
        assert "if rank == 0" in text
        assert ".cc:" not in text, "nothing of gloo's sources"
    assert told.keys() == TAKES.keys()
    assert not list(tmp_path.glob("*"))


def save_and_save_in_a_child(root: str) -> int:
    go_on, run_save = threading.Event(), async_api.run_save
    async_api.run_save = lambda *args: go_on.wait(60) and run_save(*args)
    first = dos.async_save({"w": torch.ones(2)}, f"{root}/parent")
    pid = os.fork()
    if pid == 0:
        go_on.set()
        try:
            dos.async_save({"w": torch.ones(2)}, f"{root}/child", on_busy="raise").result(30)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    go_on.set()
    first.result(30)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path):
    assert run_alone(save_and_save_in_a_child, f"file://{tmp_path}") == 0
    for name in ("parent", "child"):
        state = {"w": torch.zeros(2)}
        dos.load(state, f"file://{tmp_path}/{name}")
        assert state["w"].tolist() == [1.0, 1.0]


def save_view_of_storage(rank: int, world: int, url: str) -> int:
    mesh = init_device_mesh("cpu", (world,))
    storage = torch.arange(20.0) + 100 * rank
    local = storage[3:7]  # begins inside its storage
    view = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    whole = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    handle = dos.async_save({"model": {"view": view, "list": [whole, view]}}, url)
    storage.zero_()  # the save has a copy
    return handle.result(30).total_bytes


def test_a_dtensor_that_is_a_view_into_its_storage_is_saved_in_the_background(tmp_path):
    url = f"file://{tmp_path}/step"
    run_ranks(2, save_view_of_storage, url)
    state = {"model": {"view": torch.zeros(8), "list": [torch.zeros(4), torch.zeros(8)]}}
    dos.load(state, url)
    expected = [3.0, 4.0, 5.0, 6.0, 103.0, 104.0, 105.0, 106.0]
    assert state["model"]["view"].tolist() == expected  # type: ignore[call-overload]
    assert state["model"]["list"][1].tolist() == expected  # type: ignore[index]
