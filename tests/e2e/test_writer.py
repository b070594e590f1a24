"""One writer over many saves, in the foreground and in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_objstore as dos
from dcp_objstore.errors import PermissionDeniedError, SaveInProgressError, UnsupportedError
from dcp_objstore.stores import open_store
from dcp_objstore.write.staging.state import staging_memory
from tests.support.campaign import cases
from tests.support.checkpoints import (
    HookPlanner,
    Options,
    assert_nothing_visible,
    cause,
    edition,
    edition_in,
    memory_url,
)
from tests.support.launcher import say
from tests.support.ranks import run_ranks, start_workers, wait_for


def save_three(rank: int, world_size: int, cached: bool, root: str, options: Options) -> list[str]:
    writer = dos.ObjectStoreWriter(storage_options=options, progress=False)
    commit_ids = []
    for number in range(3):
        dcp.save(
            dict(edition(f"step-{number}", "shard0")),
            storage_writer=writer,
            checkpoint_id=f"{root}/step-{number}",
            planner=DefaultSavePlanner(enable_plan_caching=cached),
        )
        report = writer.last_save
        assert report is not None
        assert report.url == f"{root}/step-{number}"
        assert report.total_bytes > 0
        assert report.objects > 0
        if rank == 0:
            commit_ids.append(str(report.commit_id))
    return commit_ids


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("cached", [False, True])
def test_one_writer_saves_many_checkpoints_also_with_cached_plans(bucket, cached):
    commit_ids, _ = run_ranks(2, save_three, cached, bucket.url, bucket.storage_options)
    assert len(set(commit_ids)) == 3
    names = [f"step-{number}" for number in range(3)]
    seen: set[str] = set()
    for name in names:
        assert edition_in(bucket.at(name), bucket.storage_options, names) == name
        data = {key for key in bucket.keys(name) if key.endswith(".distcp")}
        assert data
        assert not data & seen, "plans carry no names from one save to the next"
        seen |= data
    assert bucket.uploads() == []


def save_async_in_a_row(
    rank: int, world_size: int, kind: str, root: str, options: Options
) -> list[int]:
    """Begin each save at once; how often staging memory had been allocated after each call."""
    writer = dos.ObjectStoreWriter(storage_options=options)
    futures, made = [], []
    for number in range(3):
        state = dict(edition(f"step-{number}", "shard0"))
        response = dcp.async_save(
            state,
            storage_writer=writer,
            checkpoint_id=f"{root}/step-{number}",
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        for value in state.values():  # training goes on: what is saved must be the staged state
            value.zero_()
        made.append(staging_memory().allocations)
        futures.append(getattr(response, "upload_completion", response))
    for future in futures:
        future.result(timeout=50)
    return made


@pytest.mark.parametrize("kind", cases(["thread", "process"], default=["thread"]))
@pytest.mark.backends("seaweed")
def test_async_saves_in_a_row_commit_the_states_of_their_calls_in_the_memory_of_one(bucket, kind):
    made = run_ranks(
        2, save_async_in_a_row, kind, bucket.url, bucket.storage_options, timeout_seconds=120
    )
    names = ["step-0", "step-1", "step-2"]
    for name in names:
        assert edition_in(bucket.at(name), bucket.storage_options, names) == name
    # How much the ranks had before is theirs: they are used by other tests, too.
    assert all(len(set(of_rank)) == 1 for of_rank in made), made


class PausedPlanner(HookPlanner):
    """Stops once, in planning or in uploading, until `go_on` is set."""

    def __init__(self, where: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.where = where
        super().__init__(lambda item: self.pause("uploading"))

    def pause(self, where: str) -> None:
        if where == self.where:
            self.reached.set()
            assert self.go_on.wait(timeout=40)

    def create_local_plan(self) -> Any:
        self.pause("planning")
        return super().create_local_plan()


def end_of(save: Callable[[], Any]) -> str:
    """`saved`, or `refused` if the writer was busy with another save; anything else is raised."""
    try:
        save()
    except SaveInProgressError:
        return "refused"
    except CheckpointException as error:
        assert isinstance(cause(error), SaveInProgressError), repr(error)
        return "refused"
    return "saved"


def overlap(rank: int, world_size: int, where: str, root: str, options: Options) -> tuple[str, str]:
    """Start a second save on a writer whose first is under way; how both ended."""
    writer = dos.ObjectStoreWriter(storage_options=options)
    planner = PausedPlanner(where)
    second_group = dist.new_group()
    first = dcp.async_save(
        dict(edition("first", "shard0")),
        storage_writer=writer,
        checkpoint_id=f"{root}/first",
        planner=planner,
    )
    assert planner.reached.wait(timeout=40)

    def save_second() -> None:
        dcp.async_save(
            dict(edition("second", "shard0")),
            storage_writer=writer,
            checkpoint_id=f"{root}/second",
            process_group=second_group,
        ).result(timeout=40)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(end_of, save_second)
        # It may be refused now, or wait for the first to end; then the first has to go on.
        concurrent.futures.wait([second], timeout=0.2)
        planner.go_on.set()
        return end_of(lambda: first.result(timeout=40)), second.result(timeout=40)


@pytest.mark.parametrize("where", ["planning", "uploading"])
def test_overlapping_saves_on_one_writer_never_mix(bucket, where):
    ends = run_ranks(2, overlap, where, bucket.url, bucket.storage_options)
    assert ends[0] == ends[1], "both ranks agree on how each save ended"
    assert "saved" in ends[0]
    names = ("first", "second")
    for name, end in zip(names, ends[0], strict=True):
        if end == "saved":
            assert edition_in(bucket.at(name), bucket.storage_options, list(names)) == name
        else:
            assert_nothing_visible(bucket, name)
    assert bucket.uploads() == []


def call_blocked(rank: int, world: int, saving: Options, loading: Options) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    state = {"t": torch.zeros(10)}
    url = "s3://bucket/step-1"
    try:
        dcp.save(state, storage_writer=dos.ObjectStoreWriter(url, storage_options=saving))
    except BaseException as error:  # noqa: BLE001 - DCP puts it into a CheckpointException
        say("ended", "KeyboardInterrupt" in "".join(traceback.format_exception(error)))
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=loading))


@pytest.mark.parametrize("kind", [PermissionDeniedError, UnsupportedError])
def test_a_save_that_the_probe_refuses_leaves_nothing(kind, monkeypatch):
    """As `dcp.save` has it, which tells the writer of no failure."""
    refuse = Mock(side_effect=kind("refused"))
    monkeypatch.setattr("dcp_objstore.checkpoint.probe.require_fencing", refuse)
    writer = dos.ObjectStoreWriter(url := memory_url(), progress=False)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    assert isinstance(cause(caught.value), kind)
    assert list(open_store(url).list()) == []


def test_ctrl_c_ends_a_call_that_waits_for_the_store():
    """The servers, one for the save and one for the load, take the connection and never answer."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in ("save", "load")
        ]
        options = [
            {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{one.getsockname()[1]}"}
            for one in listeners
        ]
        crew = stack.enter_context(start_workers())
        job = crew.start(1, call_blocked, *options, grouped=False)
        for listener in listeners:
            listener.settimeout(60)
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(1), "the request is under way"
                job.signal(signal.SIGINT)
                if listener is listeners[0]:
                    assert wait_for(job, "ended")[0].message == ("ended", True)
                else:
                    (ended,) = job.end()
    assert "KeyboardInterrupt" in ended.text
