"""Events: what is told is true and whole; who listens breaks nothing; who does not pays nothing."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import logging
import pickle
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_objstore as dos
from dcp_objstore.config import at_most
from dcp_objstore.observe import bar as bars, dispatch, events
from dcp_objstore.observe.bar import StatusLine
from dcp_objstore.observe.dispatch import Channel, EventSettings
from dcp_objstore.observe.events import AnyEvent
from dcp_objstore.observe.trace import _NAMES, TraceFile, trace_events, trace_path
from dcp_objstore.stores import StoreSpec
from dcp_objstore.write import upload_items as uploading
from tests.support.campaign import cases
from tests.support.listening import Heard, heard_channel, of
from tests.support.proxy import Asked, Cut, NetworkProxy
from tests.support.ranks import run_ranks
from tests.support.wrapped_stores import Fault, FaultStore, Plan, Verb

MIB = 1024 * 1024
Through = Callable[[Callable[[Any], Any]], None]
CONFIG = dos.TransferConfig(part_size_bytes=5 * MIB, request_size_bytes=4 * MIB)


def memory_url() -> str:
    return f"memory://events-{secrets.token_hex(4)}/run/step-7"


def state(megabytes: int = 24) -> dict[str, Any]:
    return {"w": torch.rand(megabytes * MIB // 4), "b": torch.ones(3), "step": 7}


# What is told -----------------------------------------------------------------------------------


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("transport", cases(["native", "boto3"], default=["native"]))
def test_a_save_and_a_load_are_told_of_whole_and_in_order(bucket, transport):
    heard, url = Heard(), bucket.at("step-7")
    config = dataclasses.replace(CONFIG, transport=transport)
    given: dict[str, Any] = {"storage_options": bucket.storage_options, "config": config}
    report = dos.save(state(), url, on_event=heard, **given)
    assert {event.url for event in heard} == {url}
    assert {event.rank for event in heard} == {0}
    (plan,), (whole,) = of(events.Planned, heard), of(events.ObjectUploaded, heard)
    assert (plan.operation, plan.items, plan.objects) == ("save", 3, 1)
    assert plan.size_bytes == 24 * MIB + 12
    assert whole.size_bytes == report.total_bytes == len(bucket.get(f"step-7/{whole.object_key}"))
    parts = of(events.PartUploaded, heard)
    assert sorted(part.part for part in parts) == list(range(report.parts))
    assert sum(part.size_bytes for part in parts) == whole.size_bytes
    assert {part.object_key for part in parts} == {whole.object_key}
    assert plan.requests == report.parts
    assert sum(hashed.size_bytes for hashed in of(events.Hashed, heard)) >= 24 * MIB
    assert_rows_do_not_overlap(parts)
    assert len({part.worker for part in parts}) <= at_most(CONFIG.upload_concurrency) + 1
    (commit,), (saved,) = of(events.Committed, heard), of(events.Saved, heard)
    assert (commit.commit_id, commit.attempts) == (report.commit_id, 1)
    assert (saved.report, saved.seconds) == (report, report.seconds)
    assert max(part.end_ns for part in parts) <= whole.end_ns <= commit.start_ns
    assert saved.start_ns <= plan.start_ns <= whole.start_ns
    assert heard[-2:] == [commit, saved]

    heard.clear()
    loaded = dos.load(state(), url, on_event=heard, **given)
    ranges = of(events.RangeRead, heard)
    assert sum(one.size_bytes for one in ranges) == loaded.total_bytes
    assert len(ranges) == loaded.requests == of(events.Planned, heard)[0].requests
    assert_rows_do_not_overlap(ranges)
    assert heard[0] == of(events.Opened, heard)[0]
    assert heard[-1] == of(events.Loaded, heard)[0]
    (end,) = of(events.Loaded, heard)
    assert (end.report, end.seconds) == (loaded, loaded.seconds)
    assert end.report.commit_id == report.commit_id


def test_of_several_objects_each_is_planned():
    heard, config = Heard(), dataclasses.replace(CONFIG, max_object_size_bytes=5 * MIB)
    values = {str(number): torch.ones(MIB) for number in range(3)}
    report = dos.save(values, memory_url(), on_event=heard, config=config)
    (plan,) = of(events.Planned, heard)
    assert plan.objects == report.objects == len(of(events.ObjectUploaded, heard)) == 3
    assert plan.requests == report.parts


def assert_rows_do_not_overlap(told: Sequence[Any]) -> None:
    for worker in {event.worker for event in told}:
        row = sorted((e for e in told if e.worker == worker), key=lambda event: event.start_ns)
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(row))


def test_reads_and_verifications_of_an_opened_checkpoint_are_told_of():
    heard, url = Heard(), memory_url()
    dos.save(state(1), url)
    found = dos.read_state_dict(url, "w", on_event=heard, config=CONFIG)
    assert found["w"].numel() == MIB // 4
    assert [type(event).__name__ for event in heard] == [
        "Opened", "Planned", "RangeRead", "Loaded",
    ]  # fmt: skip
    assert of(events.Planned, heard)[0].operation == "read"
    heard.clear()
    report = dos.open(url, on_event=heard).verify()
    (verified,) = of(events.Verified, heard)
    assert verified.report is report
    assert verified.url == url
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.open(memory_url(), on_event=heard)
    assert (heard[-1].operation, heard[-1].error) == ("open", "CheckpointNotFoundError")


def test_the_report_is_there_when_saved_is_told(monkeypatch):
    pass_on, seen = Channel.pass_on, threading.Event()
    reports: list[tuple[str, dos.reports.SaveReport | None]] = []

    def hear(event: AnyEvent) -> None:
        if isinstance(event, events.Saved):
            reports.append((event.report.commit_id, writer.last_save))
            seen.set()

    def heard_at_once(channel: Channel, event: Any) -> None:
        pass_on(channel, event)
        if isinstance(event, events.Saved):
            assert seen.wait(60)

    monkeypatch.setattr(Channel, "pass_on", heard_at_once)
    writer = dos.ObjectStoreWriter(memory_url(), progress=False, on_event=hear)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    ((commit_id, report),) = reports
    assert report.commit_id == commit_id


def test_every_event_can_be_pickled_and_says_what_it_is():
    for kind in get_args(AnyEvent):
        assert issubclass(kind, events.Event)
        assert kind.__doc__
        values = {field.name: 1 for field in dataclasses.fields(kind)}
        event = kind(**values)
        assert pickle.loads(pickle.dumps(event)) == event
        assert not hasattr(event, "__dict__")


@pytest.mark.backends("seaweed")
def test_boto3s_own_retries_are_told_of_to_whom_they_concern(bucket):
    config = dataclasses.replace(CONFIG, transport="boto3", max_retries=5)
    heard, other = Heard(), Heard()
    bystander = Channel("save", bucket.at("step-77"))
    bystander.add(other, "test", detailed=True)
    with NetworkProxy(bucket.storage_options) as proxy, bystander.watching():
        cut = [Cut("request", 400, "fin"), Cut("answer", 0, "rst")]
        proxy.plan = lambda asked: cut.pop() if cut and "partNumber" in asked.query else None
        dos.save(
            state(),
            bucket.at("step-7"),
            storage_options=proxy.storage_options,
            config=config,
            on_event=heard,
        )
    retried = of(events.Retried, heard)
    assert len(retried) == 2
    assert {one.object_key for one in retried} == {of(events.ObjectUploaded, heard)[0].object_key}
    assert {(one.what, one.attempt >= 2) for one in retried} == {("request", True)}
    assert all(one.error for one in retried)
    assert other == []


@pytest.mark.backends("seaweed")
def test_a_load_counts_and_tells_its_own_retries_whatever_its_url_has(bucket):
    """Not those of a load at the same time whose URL has the same name in it."""
    name, options = "run?lr=1e-3/#7 50%", bucket.storage_options
    urls = [bucket.at(name), bucket.at(f"other/{name}")]
    large = {"w": state()["w"]}  # so that each answer is longer than what comes of one that is cut
    for url in urls:
        dos.save(large, url, storage_options=options, config=CONFIG)
    begin, cut = threading.Barrier(2, timeout=60), set()

    def plan(asked: Asked) -> Cut | None:
        place = asked.key.rpartition("/")[0]
        if not asked.name.endswith(".distcp") or place in cut:
            return None
        cut.add(place)
        return Cut("answer", MIB, "rst")

    def load(url: str) -> None:
        heard = Heard()
        begin.wait()
        into = {"w": torch.empty_like(large["w"])}
        report = dos.load(
            into, url, storage_options=proxy.storage_options, config=CONFIG, on_event=heard
        )
        (retried,) = of(events.Retried, heard)
        assert (retried.what, retried.attempt, report.retries) == ("request", 2, 1)
        assert retried.object_key in {one.object_key for one in of(events.RangeRead, heard)}

    with NetworkProxy(options) as proxy, ThreadPoolExecutor(2) as pool:
        proxy.plan = plan
        for _ in pool.map(load, urls):
            pass


def once(verb: Verb, key: str, fault: Fault) -> Plan:
    """Have the first such request of a key that begins so fail."""
    left = [fault]

    def plan(asked: Verb, at: str, _: int) -> Fault | None:
        return left.pop() if left and asked == verb and at.startswith(key) else None

    return plan


def test_the_commits_second_try_is_told_of(through):
    busy = Fault("before", dos.errors.StoreUnavailableError("busy"))
    through(partial(FaultStore, plan=once("put", "_COMMIT", busy)))
    heard = Heard()
    dos.save(state(1), memory_url(), on_event=heard)
    (retried,) = of(events.Retried, heard)
    assert (retried.what, retried.attempt, retried.object_key) == ("commit", 2, "_COMMIT")
    assert "StoreUnavailableError: busy" in retried.error
    assert of(events.Committed, heard)[0].attempts == 2


def test_a_range_that_comes_damaged_is_counted_and_told_as_a_retry(through):
    url, heard = memory_url(), Heard()
    dos.save(state(), url, config=CONFIG)
    damaged = Fault("after", dos.errors.CorruptDataError("damaged"))
    through(partial(FaultStore, plan=once("open_range", "__0_0", damaged)))
    report = dos.load(state(), url, config=CONFIG, on_event=heard)
    (retried,) = of(events.Retried, heard)
    assert (retried.what, retried.object_key[:5], report.retries) == ("range", "__0_0", 1)


# Who listens breaks nothing ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Exception ignored in")
def test_nothing_is_told_of_parts_and_ranges_where_nobody_listens(monkeypatch):
    def build(*_: object, **__: object) -> None:
        raise AssertionError("an event was built")

    for module, name in (
        ("transfer.upload", "PartUploaded"),
        ("transfer.upload", "ObjectUploaded"),
        ("transfer.download", "RangeRead"),
        ("write.upload_items", "Hashed"),
    ):
        monkeypatch.setattr(f"dcp_objstore.{module}.{name}", build)
    url = memory_url()
    dos.save(state(), url, config=CONFIG)
    dos.load(state(), url, config=CONFIG)
    assert not any("events" in thread.name for thread in threading.enumerate())
    with pytest.raises(dos.errors.DcpObjstoreError, match="an event was built"):
        dos.save(state(), memory_url(), config=CONFIG, on_event=lambda _: None)


@pytest.mark.parametrize("raised", [ValueError("no metric"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_callback_raises_is_logged_once_and_the_save_and_load_go_on(raised, caplog):
    heard, url = Heard(), memory_url()

    def broken(event: AnyEvent) -> None:
        heard(event)
        raise raised

    with caplog.at_level(logging.WARNING, logger="dcp_objstore"):
        dos.save(state(), url, config=CONFIG, on_event=broken)
    (warning,) = caplog.records
    assert "on_event failed; the save goes on" in warning.getMessage()
    assert warning.exc_info is not None
    assert warning.exc_info[1] is raised
    assert isinstance(heard[-1], events.Saved)
    found = {"w": torch.zeros(24 * MIB // 4), "b": torch.zeros(3), "step": 0}
    caplog.clear()
    dos.load(found, url, config=CONFIG, on_event=broken)
    assert len(caplog.records) == 1
    assert found["step"] == 7
    assert torch.equal(found["b"], torch.ones(3))


def test_a_callback_that_never_returns_holds_up_nothing_but_its_own_events(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("dcp_objstore.observe.dispatch._PATIENCE_SECONDS", 0.2)
    let_go, url = threading.Event(), memory_url()
    trace = tmp_path / "save.json"
    dos.save(
        state(), url, config=CONFIG, on_event=lambda _: let_go.wait(60), trace=trace, progress=False
    )
    assert "on_event has not returned" in caplog.text
    let_go.set()
    assert dos.open(url).verify(deep=True).ok
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_slow_callback_delays_no_part(monkeypatch):
    uploaded, waited = threading.Event(), []
    upload = uploading.upload_object

    def uploads(*arguments: Any, **settings: Any) -> Any:
        result = upload(*arguments, **settings)
        uploaded.set()
        return result

    monkeypatch.setattr(uploading, "upload_object", uploads)
    dos.save(
        state(), memory_url(), config=CONFIG, on_event=lambda _: waited.append(uploaded.wait(20))
    )
    assert all(waited)


def test_a_listener_that_fails_at_the_end_harms_no_other(caplog):
    """Such as a progress bar whose terminal has gone."""
    channel, flushed = Channel("load", "memory://x"), []

    def fail() -> None:
        raise ValueError("I/O operation on closed file")

    channel.add(lambda _: None, "the progress bar", detailed=True, flush=fail)
    channel.add(lambda _: None, "trace", detailed=True, flush=lambda: flushed.append(True))
    with channel.watching():
        pass
    assert flushed
    assert "the progress bar failed; the load goes on" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_event": 3},
        *({"trace": text} for text in ("s3://b/t.json", "", 3, "{x}", "{}", "{", "{rank.x}")),
    ],
)
def test_wrong_listeners_are_refused_before_anything_is_saved(wrong):
    url = memory_url()
    with pytest.raises(dos.errors.ConfigError, match=next(iter(wrong))):
        dos.save(state(1), url, **wrong)
    with pytest.raises(dos.errors.ConfigError, match=next(iter(wrong))):
        dos.CheckpointManager(url, **wrong)
    assert not list(StoreSpec(url).open().list())


# Failures ---------------------------------------------------------------------------------------


def test_a_failure_is_told_once_with_all_that_its_error_names():
    channel, heard = heard_channel()
    error = dos.errors.CheckpointCorruptError("torn", key="w", object_key="o", rank=3)
    with channel.watching():
        channel.fail(error)
        channel.fail(ValueError("later"))
    (failed,) = of(events.Failed, heard)
    assert failed == events.Failed(
        rank=0,
        url="memory://heard",
        start_ns=failed.start_ns,
        seconds=failed.seconds,
        operation="save",
        error="CheckpointCorruptError",
        message="torn",
        failed_rank=3,
        key="w",
        object_key="o",
    )


@pytest.mark.parametrize(
    ("url", "own", "others"),
    [
        ("s3://b/run/step-1", "run/step-1/_COMMIT", ["run/step-10/_COMMIT", "run/step-1", "x"]),
        ("s3://b/run/step-1/", "run/step-1/_COMMIT", ["step-1/_COMMIT"]),
        ("s3://b", "_COMMIT", [""]),
    ],
)
def test_retries_are_told_of_by_the_key_in_the_checkpoint_and_others_are_not(url, own, others):
    channel, heard = Channel("save", url), Heard()
    channel.add(heard, "test", detailed=False)
    with channel.watching():
        for attempt, key in enumerate([own, *others], 2):
            dispatch.emit_retry(key, attempt, "slow down", 0.0)
        channel.retried("slow range", "x", attempt=7, error="slow", began_at=0.0)
    dispatch.emit_retry(own, 2, "slow down", 0.0)  # of no save or load
    assert (channel.retries, channel.slow_ranges) == (1, 1)
    assert [(one.what, one.object_key, one.attempt, one.error) for one in heard] == [
        ("request", "_COMMIT", 2, "slow down"),
        ("slow range", "x", 7, "slow"),
    ]


def fails_on_rank_1(rank: int, world: int, root: str) -> list[tuple[str, int | None, str | None]]:
    heard = Heard()
    given: dict[str, Any] = {"on_event": heard, "trace": f"{root}/traces/{{name}}.json"}
    dos.save(state(1), f"file://{root}/step-1", **given)
    assert not of(events.Failed, heard)
    assert len(of(events.Saved, heard)) == (rank == 0)

    class Broken:
        def __reduce__(self) -> Any:
            raise OverflowError("too much")

    with pytest.raises(dos.errors.DcpObjstoreError):
        dos.save(
            {**state(1), f"value{rank}": Broken() if rank == 1 else 0},
            f"file://{root}/step-2",
            **given,
        )
    assert {event.rank for event in heard} == {rank}
    return [(one.error, one.failed_rank, one.url[-6:]) for one in of(events.Failed, heard)]


def test_a_failure_is_told_once_on_every_rank_and_each_has_its_trace(tmp_path):
    told = run_ranks(2, fails_on_rank_1, str(tmp_path))
    assert [one[1:] for (one,) in told] == [(1, "step-2")] * 2
    written = {path.name for path in (tmp_path / "traces").iterdir()}
    assert written == {f"step-{step}.rank{rank}.json" for step in (1, 2) for rank in (0, 1)}
    for rank in (0, 1):
        own = json.loads((tmp_path / "traces" / f"step-1.rank{rank}.json").read_text())
        names = [one["args"]["name"] for one in own["traceEvents"] if one["name"] == "process_name"]
        assert [name.split(" (")[0] for name in names] == [f"dcp_objstore rank {rank}"]
    failed = json.loads((tmp_path / "traces" / "step-2.rank1.json").read_text())["traceEvents"]
    assert any(one["name"].startswith("save failed: ") for one in failed)


def test_a_failed_upload_is_told_under_dcps_own_call_too(through):
    denied = Fault("before", dos.errors.PermissionDeniedError("not you"))
    through(partial(FaultStore, plan=once("put_stream", "", denied)))
    heard = Heard()
    writer = dos.ObjectStoreWriter(memory_url(), config=CONFIG, on_event=heard)
    with pytest.raises(BaseException, match="not you"):
        dcp.save(state(), storage_writer=writer, no_dist=True)
    (failed,) = of(events.Failed, heard)
    assert (failed.error, failed.message) == ("PermissionDeniedError", "not you")


# Saves in the background ------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_the_copy_of_a_background_save_is_told_of(wait):
    heard = Heard()
    handle = dos.async_save(state(), memory_url(), on_event=heard, wait_for_staging=wait)
    handle.result(30)
    (staged,) = of(events.Staged, heard)
    assert heard[0] is staged
    assert (staged.size_bytes, staged.rank) == (24 * MIB + 12, 0)
    assert staged.end_ns <= of(events.Saved, heard)[0].start_ns


class Written:
    """Appends what it hears to a file, in whatever process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, event: AnyEvent) -> None:
        with self.path.open("a") as file:
            file.write(f"{type(event).__name__}\n")


@pytest.mark.filterwarnings("ignore")
def test_in_process_mode_events_are_told_in_the_child_or_refused(tmp_path):
    run_ranks(1, process_mode, str(tmp_path))
    told = (tmp_path / "told").read_text().split()
    assert told[0] == "Staged"
    assert told[-1] == "Saved"
    names = {one["name"] for one in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"stage", "plan save", "part 0", "commit", "save"} <= names


def process_mode(rank: int, world: int, root: str) -> None:
    given: Any = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    for on_event in (Written(Path(root) / "told"), lambda _: None):
        writer = dos.ObjectStoreWriter(
            f"file://{root}/{type(on_event).__name__}", on_event=on_event, trace=f"{root}/t.json"
        )
        saved: Any = dcp.async_save(state(1), storage_writer=writer, **given)
        if isinstance(on_event, Written):
            saved.result()
        else:
            with pytest.raises(dos.errors.ConfigError, match="cannot be sent to another process"):
                saved.result()


def test_a_callback_that_cannot_be_sent_is_refused_with_the_reason():
    with pytest.raises(dos.errors.ConfigError) as caught:
        pickle.dumps(EventSettings(lambda _: None, None))
    assert str(caught.value.__cause__) in caught.value.message
    settings = EventSettings(print, "save.json")
    again = pickle.loads(pickle.dumps(settings))
    assert (again.on_event, again.trace) == (print, "save.json")
    assert copy.deepcopy(settings) is settings


# Traces -----------------------------------------------------------------------------------------


def spans(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in document["traceEvents"] if one["ph"] == "X"]


def test_a_trace_lies_on_one_axis_with_that_of_torch_profiler(tmp_path):
    with torch.profiler.profile() as profiler, torch.profiler.record_function("around"):
        dos.save(state(), memory_url(), config=CONFIG, trace=tmp_path / "save.json")
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    ours, theirs = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("save", "torch"))
    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    (around,) = [one for one in spans(theirs) if one["name"] == "around"]
    (saved,) = [one for one in spans(ours) if one["name"] == "save"]
    slack_us = 1000  # Kineto measures with the processor's counter
    assert around["ts"] - slack_us <= saved["ts"]
    assert saved["ts"] + saved["dur"] <= around["ts"] + around["dur"] + slack_us
    assert saved["pid"] != around["pid"]


def test_every_kind_of_event_has_a_row_in_a_trace():
    assert set(get_args(AnyEvent)) == _NAMES.keys()


def test_a_trace_has_a_group_for_each_rank_and_a_row_for_each_worker():
    base_ns = 7_889_238 * 10**9
    shared: dict[str, Any] = {"url": "s3://b/x", "seconds": 0.5, "size_bytes": 6}
    place: dict[str, Any] = {"object_key": "o", "worker": 7}
    plan: dict[str, Any] = {"operation": "save", "items": 1, "objects": 3, "requests": 4}
    told: list[AnyEvent] = [
        events.Planned(rank=8, start_ns=base_ns + 2000, **shared, **plan),
        events.RangeRead(rank=0, start_ns=base_ns + 3000, **shared, **place, offset=5),
        events.PartUploaded(rank=0, start_ns=base_ns + 1000, **shared, **place, part=2),
        events.Hashed(rank=0, start_ns=2 * base_ns, **shared, worker=3),
    ]
    entries, base = trace_events(told)
    assert base == base_ns
    planned, *others = (one for one in entries if one["ph"] == "X")
    assert planned == {
        "ph": "X",
        "cat": "dcp_objstore",
        "name": "plan save",
        "pid": 10_000_008,
        "tid": 0,
        "ts": 2.0,
        "dur": 0.5e6,
        "args": {"url": "s3://b/x", "size_bytes": 6, **plan},
    }
    assert [(one["name"], one["pid"], one["tid"], one["ts"]) for one in others] == [
        ("range", 10_000_000, 1007, 3.0),
        ("part 2", 10_000_000, 107, 1.0),
        ("hash", 10_000_000, 2003, base_ns / 1000),
    ]
    labels = [one for one in entries if one["ph"] == "M"]
    assert [(one["pid"] - 10_000_000, one["tid"]) for one in labels] == [
        *(2 * [(0, 0)] + 2 * [(8, 0)]),
        *(2 * [(0, 107)] + 2 * [(0, 1007)] + 2 * [(0, 2003)] + 2 * [(8, 0)]),
    ]
    names = [one["args"]["name"] for one in labels if one["name"] == "thread_name"]
    assert names == ["upload 7", "read 7", "hash 3", "checkpoint"]
    order = [one["args"].get("sort_index") for one in labels]
    assert order[1::2] == [10_000_000, 10_000_008, 107, 1007, 2003, 0]


@pytest.mark.parametrize(
    ("pattern", "ranks", "path"),
    [
        ("save.json", 1, "save.json"),
        ("save.json", 2, "save.rank3.json"),
        ("{rank}/{name}.json", 4, "3/step-7.json"),
        ("{name}", 1, "step-7"),
    ],
)
def test_each_rank_has_a_trace_of_its_own(pattern, ranks, path):
    assert EventSettings(None, pattern).trace == pattern
    assert trace_path(pattern, "s3://b/step-7/", 3, ranks) == Path(path)


def test_a_trace_is_what_the_viewers_want(tmp_path):
    file = tmp_path / "new" / "deep" / "save.json"
    report = dos.save(state(), memory_url(), config=CONFIG, trace=file)
    document = json.loads(file.read_text())
    assert (document["schemaVersion"], document["displayTimeUnit"]) == (1, "ms")
    assert file.stat().st_mode & 0o777 == 0o644
    named = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in document["traceEvents"]
        if one["ph"] == "M" and one["name"] == "thread_name"
    }
    for span in spans(document):
        assert span.keys() >= {"name", "cat", "ts", "dur", "args"}
        assert span["ts"] >= 0
        assert span["dur"] >= 0
        assert (span["pid"], span["tid"]) in named
    assert {"checkpoint", "upload 0", "hash 0"} <= set(named.values())
    (saved,) = [span["args"] for span in spans(document) if span["name"] == "save"]
    assert {**saved, "seconds": report.seconds} == dataclasses.asdict(report)
    for row in named:  # spans of a row follow one another or lie within one another
        found = [span for span in spans(document) if (span["pid"], span["tid"]) == row]
        found.sort(key=lambda span: (span["ts"], -span["dur"]))
        open_ends: list[float] = []
        for span in found:
            while open_ends and open_ends[-1] <= span["ts"] + 0.001:
                open_ends.pop()
            end = span["ts"] + span["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.001
            open_ends.append(end)
    assert [path.name for path in file.parent.iterdir()] == ["save.json"]


def test_a_trace_that_cannot_be_written_only_warns_and_leaves_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "save.json", tmp_path / "folder"):
        dos.save(state(1), memory_url(), trace=place)
    assert sum("could not be written" in text for text in caplog.messages) >= 2
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder"}


def test_a_trace_is_written_again_only_when_there_is_more(tmp_path):
    trace = TraceFile(tmp_path / "save.json")
    staged = dispatch.staged_event("memory://x", 0, 5, time.monotonic())
    for number, has_more in enumerate((False, True, False, True)):
        if has_more:
            trace.take(staged)
        trace.flush()
        written = [*tmp_path.iterdir()]
        assert bool(written) is has_more, number
        for path in written:
            path.unlink()


# What is shown ----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_drawn_from_the_events_on_a_terminal_alone(monkeypatch):
    url, out = memory_url(), f"{memory_url()}.pt"
    for shown, screen in ((True, Terminal()), (False, io.StringIO())):
        monkeypatch.setattr(sys, "stderr", screen)
        dos.save(state(), url, config=CONFIG, overwrite=True)
        dos.load(state(), url, config=CONFIG)
        dos.open(url).verify()
        dos.export_checkpoint(url, out, overwrite=True)
        text = screen.getvalue()
        for label in ("save: ", "load: ", "verify: ", "export: "):
            assert (label in text) == shown
        assert (f"saved {url}: 24.00 MiB in " in text) == shown
        assert (f"loaded {url}: 24.00 MiB in " in text) == shown
        assert ("24.0M" in text) == shown
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    dos.save(state(), url, config=CONFIG, overwrite=True, progress=False)
    dos.export_checkpoint(url, out, overwrite=True, progress=False)
    opened = dos.open(url)
    opened.verify(progress=False)
    opened.read(progress=False)
    for entry in opened.values():
        entry.read()
    assert screen.getvalue() == ""
    assert "TMonitor" not in {type(thread).__name__ for thread in threading.enumerate()}
    assert isinstance(bars._quiet_tqdm().get_lock(), type(threading.RLock()))  # of no semaphore
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    assert not bars.Bar.is_seen()


def test_a_status_line_replaces_itself_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    for screen, shown, text in (
        (Terminal(), True, "\r\033[Kone\r\033[Ktoo long \r\033[K"),
        (Terminal(), False, ""),
        (io.StringIO(), True, ""),
    ):
        monkeypatch.setattr(sys, "stderr", screen)
        line = StatusLine(shown=shown)
        line.show("one")
        line.show("too long for it")
        line.clear()
        assert screen.getvalue() == text


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_a_bar_counts_what_parts_and_ranges_say_and_leaves_a_line_or_the_log_has_it(
    monkeypatch, caplog, level
):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    drawn: list[object] = []
    made = SimpleNamespace(update=drawn.append, close=lambda: drawn.append("closed"))
    monkeypatch.setattr(bars, "_quiet_tqdm", lambda: lambda **how: drawn.append(how) or made)
    channel = Channel("load", "memory://x")
    channel.show(bar=True, summary=True)
    assert channel.detailed
    place: dict[str, Any] = {"object_key": "o"}
    plan: dict[str, Any] = {"operation": "load", "items": 1, "objects": 1, "requests": 2}
    moved: dict[str, Any] = {"url": "memory://x", "total_bytes": 2 * MIB, "needed_bytes": 5}
    report = dos.reports.LoadReport(**moved, seconds=4, objects=1, requests=3, missing=("a",))
    with caplog.at_level(level, logger="dcp_objstore"):
        with channel.watching():
            channel.emit(events.Planned, 0.0, size_bytes=100, **plan)
            channel.emit(events.RangeRead, 0.0, size_bytes=30, offset=0, worker=0, **place)
            channel.emit(events.PartUploaded, 0.0, size_bytes=50, part=0, worker=0, **place)
            channel.emit(events.PartCopied, 0.0, size_bytes=20, **place)
            channel.emit(events.Loaded, 0.0, seconds=4.25, report=report)
        channel.flush()
    assert drawn == [
        {
            "desc": "load",
            "total": 100,
            "unit": "B",
            "unit_scale": True,
            "unit_divisor": 1024,
            "leave": False,
        },
        *(30, 50, 20, "closed"),
    ]
    line, is_logged = "loaded memory://x: 2.00 MiB in 4.", level == logging.INFO
    assert screen.getvalue() == ("" if is_logged else f"{line}2 s\n")
    logged = f"{line}00 s (512.00 KiB/s), 1 object, 3 requests"
    assert caplog.messages == ([logged] if is_logged else [])
