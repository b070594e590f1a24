"""One save's end: what is told of it, and what a save that fails sends and leaves."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.names import is_beacon_key
from dcp_objstore.errors import (
    CommitLostError,
    DcpObjstoreError,
    PermissionDeniedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.observe.events import Committed, Retried, Saved
from dcp_objstore.stores.protocol import Version
from tests.support.checkpoints import memory_url
from tests.support.listening import Heard, of
from tests.support.wrapped_stores import (
    Fault,
    FaultStore,
    RecordingStore,
    Request,
    Verb,
    WatchedStore,
    refusing,
)

MIB = 1 << 20


def keys(url: str) -> list[str]:
    return [meta.key for meta in dos.stores.open_store(url).list()]


def test_the_report_the_event_and_the_marker_say_the_same_of_a_save():
    events = Heard()
    config = dos.TransferConfig(part_size_bytes=5 * MIB, max_object_size_bytes=6 * MIB)
    state = {f"{n}": torch.zeros(6 * MIB // 4) for n in range(2)}
    url = memory_url()
    report = dos.save(state, url, config=config, progress=False, on_event=events)
    (saved,), (committed,) = of(Saved, events), of(Committed, events)
    data = [meta for meta in dos.stores.open_store(url).list() if meta.key.endswith(".distcp")]
    assert (report.objects, report.parts, report.copied_bytes) == (2, 4, 0)
    assert report.total_bytes == sum(meta.size_bytes for meta in data) > 12 * MIB
    assert (saved.report, saved.seconds) == (report, report.seconds)
    opened = dos.open(url)
    assert opened.commit_id == report.commit_id == committed.commit_id
    assert opened.world_size == 1
    assert committed.attempts == 1
    assert report.url == saved.url == url


def test_a_commit_that_is_sent_again_is_told_of(through):
    errors, events = [StoreUnavailableError("lost")], Heard()

    def plan(verb: Verb, key: str, nth: int) -> Fault | None:
        once = (verb, key) == ("put", "_COMMIT") and errors
        return Fault("before", errors.pop()) if once else None

    through(lambda store: FaultStore(store, plan))
    dos.save({"t": torch.ones(3)}, url := memory_url(), progress=False, on_event=events)
    (retried,) = of(Retried, events)
    assert (retried.what, retried.attempt, retried.object_key) == ("commit", 2, "_COMMIT")
    assert retried.error == "StoreUnavailableError: lost"
    assert retried.url == url
    (committed,) = of(Committed, events)
    assert committed.attempts == 2
    assert committed.start_ns <= retried.start_ns


@pytest.mark.parametrize(
    ("error", "removed"),
    [
        (PermissionDeniedError("not you"), True),
        (ZeroDivisionError("a bug"), True),
        (StoreUnavailableError("down"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_save_that_failed_removes_its_beacon_unless_the_store_may_not_answer(
    error, removed, through
):
    requests: list[Request] = []
    refuse = refusing(".distcp", error)
    through(lambda store: RecordingStore(refuse(store), requests))
    url = memory_url()
    config = dos.TransferConfig(max_retries=1, retry_timeout_seconds=1)
    with pytest.raises((DcpObjstoreError, KeyboardInterrupt)):
        dos.save({"t": torch.ones(3)}, url, progress=False, config=config)
    deleted = [one.key for one in requests if one.verb == "delete" and is_beacon_key(one.key)]
    assert len(deleted) == removed
    assert len(keys(url)) == (not removed)


def test_every_step_of_a_save_keeps_to_the_jobs_time_out(monkeypatch):
    deadlines: list[float] = []
    tries = Clock.tries

    def noted(clock: Clock, *args: Any, **settings: Any) -> Any:
        deadlines.append(clock.deadline_seconds)
        return tries(clock, *args, **settings)

    run = memory_url()
    claim = dos.claim_run(run)
    monkeypatch.setattr(Clock, "tries", noted)
    config = dos.TransferConfig(stall_timeout_seconds=33)
    dos.save({"t": torch.ones(3)}, f"{run}/1", claim=claim, config=config, progress=False)
    assert set(deadlines) == {11}


class Deaf(WatchedStore):
    """Ignores conditions, as some servers do."""

    conditional: ClassVar[list[str]] = []

    def put(self, key: str, data: Any, *, precondition: Any = None, retry: bool = True) -> Version:
        if precondition is not None:
            self.conditional.append(key)
        return super().put(key, data, retry=retry)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_store_without_conditions_is_used_only_if_vouched_for_and_unclaimed(claimed, through):
    run = memory_url()
    claim = dos.claim_run(run) if claimed else None
    through(Deaf)
    settings: dict[str, Any] = {"claim": claim, "progress": False}
    state, url = {"t": torch.ones(3)}, f"{run}/step-1"
    with pytest.raises(UnsupportedError):
        dos.save(state, url, **settings)
    assert keys(url) == [], "no beacon either"
    if claimed:
        with pytest.raises(UnsupportedError):
            dos.save(state, url, allow_unfenced=True, **settings)
        assert keys(url) == []
    else:
        Deaf.conditional.clear()
        dos.save(state, url, allow_unfenced=True, **settings)
        assert dos.open(url).keys() == {"t"}
        assert not {"_COMMIT", ".metadata"} & {*Deaf.conditional}, "conditions that mean nothing"
        assert ".metadata" in keys(url)


def test_of_two_jobs_the_one_that_commits_second_reports_nothing_as_saved(through):
    url, theirs = memory_url(), iter([torch.zeros(3)])
    events, ours = Heard(), Heard()

    def race(verb: Verb, key: str, nth: int) -> None:
        if (verb, key) == ("put", "_COMMIT") and (tensor := next(theirs, None)) is not None:
            dos.save({"t": tensor}, url, progress=False, on_event=events)

    through(lambda store: FaultStore(store, race))
    with pytest.raises(CommitLostError):
        dos.save({"t": torch.ones(3)}, url, progress=False, on_event=ours)
    assert of(Saved, ours) == of(Committed, ours) == []
    (saved,) = of(Saved, events)
    assert dos.open(url).commit_id == saved.report.commit_id
    assert sum(is_beacon_key(key) for key in keys(url)) == 0
