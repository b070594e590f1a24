"""A checkpoint exists whole or not at all: kills, failing ranks, races, overwriting."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.checkpoint.claim import claim_run
from dcp_objstore.checkpoint.names import is_ours
from dcp_objstore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitLostError,
    DcpObjstoreError,
    UnsupportedError,
)
from dcp_objstore.stores import StoreSpec
from tests.support.campaign import cases
from tests.support.checkpoints import (
    HookPlanner,
    Options,
    assert_nothing_visible,
    cause,
    causes,
    edition,
    edition_in,
    load_here,
    save_edition,
    save_edition_here,
)
from tests.support.ranks import run_ranks, try_ranks
from tests.support.scripted import Answer
from tests.support.servers import RcloneServer
from tests.support.tampering import TamperingProxy
from tests.support.wrapped_stores import Request, WatchedStore

MIB = 1024 * 1024


def save_and_fail(
    rank: int, world_size: int, victim: int, dies: bool, url: str, options: Options
) -> None:
    """Two tensors of 6 MiB per rank, so a multipart upload is under way at the second."""

    def fail(item: int) -> None:
        if rank == victim and item == 1:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the tensor cannot be staged")

    config = dos.TransferConfig(part_size_bytes=5 * MIB)
    writer = dos.ObjectStoreWriter(url, storage_options=options, config=config)
    state = {f"{rank}.{number}": torch.full((6 * MIB // 4,), float(rank)) for number in range(2)}
    dcp.save(dict(state), storage_writer=writer, planner=HookPlanner(fail))


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("victim", cases([0, 2], default=[0]))
def test_sigkill_of_a_rank_in_mid_save_leaves_no_checkpoint(bucket, victim):
    url, options = bucket.at("step-1"), bucket.storage_options
    outcomes = try_ranks(3, save_and_fail, victim, True, url, options, timeout_seconds=120)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_signal == signal.SIGKILL
        else:
            assert outcome.error is not None, str(outcome)  # and it did not hang
    # A killed process cannot abort its own upload; nobody else may leave one.
    assert_nothing_visible(bucket, "step-1", uploads=True)
    assert all(f"/__{victim}_" in key for key in bucket.uploads())
    with pytest.raises(CheckpointException) as refused:
        load_here(url, options)
    assert isinstance(cause(refused.value), CheckpointNotFoundError)
    # Nothing is in the way of saving it again.
    run_ranks(2, save_edition, "again", url, options)
    assert edition_in(url, options, ["again"]) == "again"


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("bad", cases([0, 1], default=[1]))
def test_a_rank_that_fails_fails_the_save_on_every_rank_with_its_name(bucket, bad):
    url, options = bucket.at("step-1"), bucket.storage_options
    for outcome in try_ranks(3, save_and_fail, bad, False, url, options):
        (error,) = causes(outcome.error)
        assert isinstance(error, DcpObjstoreError)
        assert error.rank == bad
        assert error.url == url
        assert "the tensor cannot be staged" in str(error)
        assert f"{bad}.1" in str(error), "the state-dict key"
    assert_nothing_visible(bucket, "step-1")


def race(rank: int, world_size: int, url: str, options: Options) -> str:
    """Two jobs of two ranks. All have begun before any uploads, so both may want to commit."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = rank // 2

    def wait_for_the_other_job(item: int) -> None:
        if item == 0:
            dist.barrier()

    writer = dos.ObjectStoreWriter(url, storage_options=options)
    state = {f"own-{rank % 2}": torch.full((5,), float(job)), **edition(f"job-{job}")}
    try:
        dcp.save(
            dict(state),
            storage_writer=writer,
            process_group=groups[job],
            planner=HookPlanner(wait_for_the_other_job),
        )
    except CheckpointException as error:
        assert isinstance(cause(error), CommitLostError), repr(error)
        return "lost"
    return "won"


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_of_two_jobs_racing_for_a_checkpoint_exactly_one_wins_and_is_whole(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    ends = run_ranks(4, race, url, options)
    assert sorted(ends) == ["lost", "lost", "won", "won"]
    assert ends[0] == ends[1], "every rank of a job ends alike"
    winner = f"job-{ends.index('won') // 2}"
    assert edition_in(url, options, ["job-0", "job-1"]) == winner
    assert bucket.uploads() == []


@pytest.mark.backends("seaweed")
def test_a_committed_checkpoint_is_refused_on_every_rank_and_stays(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(2, save_edition, "first", url, options)
    before = {key: bucket.get(f"step-1/{key}") for key in bucket.keys("step-1")}
    for outcome in try_ranks(3, save_edition, "second", url, options):
        error = cause(outcome.error)
        assert isinstance(error, CheckpointExistsError)
        assert error.url == url
    assert before == {key: bucket.get(f"step-1/{key}") for key in bucket.keys("step-1")}
    assert bucket.uploads() == []


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_overwrite_replaces_the_checkpoint_also_by_fewer_ranks(bucket):
    """A save that fails while it overwrites leaves the old one whole."""
    url, options = bucket.at("step-1"), bucket.storage_options
    run_ranks(3, save_edition, "first", url, options)
    planner = HookPlanner(Mock(side_effect=RuntimeError("no")))
    writer = dos.ObjectStoreWriter(url, storage_options=options, overwrite=True)
    with pytest.raises(CheckpointException):
        dcp.save(dict(edition("second")), storage_writer=writer, planner=planner)
    assert edition_in(url, options, ["first", "second"]) == "first"
    run_ranks(2, save_edition, "second", url, options, True)
    assert edition_in(url, options, ["first", "second"]) == "second"
    assert bucket.uploads() == []


def test_a_store_that_ignores_conditions_is_refused_unless_the_user_vouches(tmp_path):
    with RcloneServer(tmp_path) as server:
        url, options = f"s3://{server.bucket}/step-1", server.storage_options
        with pytest.raises(CheckpointException) as caught:
            save_edition_here("first", url, options)
        assert isinstance(cause(caught.value), UnsupportedError)
        assert not list((tmp_path / server.bucket).rglob("*.distcp"))
        # Nor is one whom the run belongs to: without conditions his claim keeps nobody out.
        run = StoreSpec(f"s3://{server.bucket}/run", options)
        claim = dos.RunClaim(run.url, claim_run(run.open(), run.open_child))
        with pytest.raises(CheckpointException) as caught:
            settings = {"allow_unfenced": True, "claim": claim}
            save_edition_here("first", f"{run.url}/step-1", options, **settings)
        assert isinstance(cause(caught.value), UnsupportedError)
        assert not list((tmp_path / server.bucket).rglob("*.distcp"))
        save_edition_here("first", url, options, allow_unfenced=True)
    # Looked at behind the server: it answers ranged GETs with 200, which obstore does not take.
    folder_url = f"file://{tmp_path}/{RcloneServer.bucket}/step-1"
    assert edition_in(folder_url, {}, ["first"]) == "first"


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("status", cases([307, 400, 403], default=[403]))
def test_a_refusal_on_the_way_of_a_commit_that_took_effect_is_no_failure(bucket, status):
    """Each is an error of another kind to the transport, and none of them is the store's."""
    url = bucket.at("step-1")

    def refuse(answer: Answer) -> Answer:
        asked = proxy.asked[-1]
        if asked.method == "PUT" and asked.key.endswith("/_COMMIT"):
            return Answer(status, {}, b"")
        return answer

    with TamperingProxy(bucket.storage_options) as proxy:
        proxy.rewrite = refuse
        save_edition_here("whole", url, proxy.storage_options)
        puts = [one for one in proxy.asked if one.method == "PUT" and one.key.endswith("/_COMMIT")]
        assert len(puts) == 1
    assert edition_in(url, bucket.storage_options, ["whole"]) == "whole"
    assert not [key for key in bucket.keys("step-1") if key.startswith(".save-")]


class MeetingStore(WatchedStore):
    """Requests that are meant to be sent at the same time are answered once all of them are."""

    log: ClassVar[list[str]] = []
    meetings: ClassVar[dict[str, threading.Barrier]] = {}

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        key = request.key
        asked = f"{request.verb} {'index' if is_ours(key) else key.partition('-')[0]}".strip()
        if not key.endswith(".distcp"):
            self.log.append(asked)
            if asked in self.meetings:
                self.meetings[asked].wait(60)
        yield


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_sends_ten_small_requests_in_six_turns(bucket, monkeypatch, overwrite):
    url, options = bucket.at("run/step-1"), bucket.storage_options
    save_edition_here("first", url if overwrite else bucket.at("run/step-0"), options)
    turns = [
        ["get _CLAIM", "head .metadata", "put .save"],
        ["get _COMMIT"],
        ["list", "put index"],
        ["put _COMMIT"],
        ["delete .save", "put .metadata"],
        ["get _COMMIT"],
    ]
    log, meetings, really_open = [], {}, StoreSpec.open
    for turn in turns:
        meetings |= dict.fromkeys(turn, threading.Barrier(len(turn)))
    monkeypatch.setattr(MeetingStore, "log", log)
    monkeypatch.setattr(MeetingStore, "meetings", meetings)
    monkeypatch.setattr(StoreSpec, "open", lambda spec: MeetingStore(really_open(spec)))
    save_edition_here("second", url, options, overwrite=overwrite)
    found = iter(log)
    assert [sorted(islice(found, len(turn))) for turn in turns] == turns
    assert not list(found)
    monkeypatch.undo()
    assert edition_in(url, options, ["first", "second"]) == "second"
