"""`dos.follow`: each commit that counts comes once, in order, whatever happens to the run.

`test_manager_histories` has a follower, too, and a model of what comes and what is dropped.
Time stands still but for the waits of the follower, in which the run goes on as a test says.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.checkpoint import catalogue
from dcp_objstore.checkpoint.names import CLAIM_KEY, MARKER_KEY
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    CredentialsError,
    PermissionDeniedError,
    StoreUnavailableError,
)
from dcp_objstore.run import follow as following
from dcp_objstore.stores import StoreSpec
from tests.support.managers import down, run_url, state
from tests.support.servers import READ_ONLY
from tests.support.upkeep import save as save_bytes
from tests.support.wrapped_stores import Fault, FaultStore, Through


def names(steps: Iterable[dos.reports.ListedCheckpoint]) -> list[str]:
    return [step.name for step in steps]


class Time:
    """The time of the follower: `later` happens, one after the other, at its waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.later: list[Callable[[], object]] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.waits.append(seconds)
        self.now += seconds
        assert self.later or len(self.waits) < 100, "it waits for ever"
        if self.later:
            self.later.pop(0)()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(following, "wait_until", lambda _, seconds: clock.sleep(seconds))
    monkeypatch.setattr(following, "monotonic", lambda: clock.now)
    return clock


def train(url: str, steps: Iterable[int], *, back_to: int | None = None, **settings: Any) -> None:
    """A job that saves these steps, after it went back, and leaves the run open."""
    with dos.CheckpointManager(url, sweep=False, **settings) as run:
        run.load(state(0), back_to)
        for step in steps:
            run.save(step, state(step))


def pins(url: str, **settings: Any) -> dict[str, tuple[str, ...]]:
    listed = dos.list_checkpoints(url, **settings).checkpoints
    return {one.name: one.pins for one in listed if one.pins}


# --- order and end


def finish(url: str, *steps: int, **settings: Any) -> None:
    """A job that saves these steps, and finishes the run."""
    with dos.CheckpointManager(url, sweep=False, **settings) as run:
        run.load(state(0))
        for step in steps:
            run.step(step, state(step))
        run.finish()
    with pytest.raises(ConfigError, match="closed"):
        run.finish()


def test_each_step_comes_once_in_order_until_the_run_is_finished(url, time, caplog):
    """Without any step, the URL may be mistyped, and nothing else would ever tell."""
    with caplog.at_level(logging.WARNING, "dcp_objstore"):
        time.later = [
            lambda: train(url, [1, 9]),
            lambda: None,
            lambda: train(url, [10]),
            lambda: finish(url, 11),
        ]
        steps = list(dos.follow(url))
    (record,) = caplog.records
    assert url in record.getMessage() and "no step yet" in record.getMessage()
    assert names(steps) == ["step-1", "step-9", "step-10", "step-11"]
    assert {step.state for step in steps} == {"committed"}
    assert [dos.read_state_dict(step.url)["step"] for step in steps] == [1, 9, 10, 11]
    assert names(dos.follow(url)) == names(steps)
    assert len(time.waits) == 4  # of a finished run, nothing is waited for


def test_a_job_without_a_claim_finishes_nothing(url, time):
    train(url, [1])
    with (
        pytest.raises(ConfigError, match="claim_run"),
        dos.CheckpointManager(url, claim_run=False) as run,
    ):
        run.finish()
    assert names(dos.follow(url, timeout_seconds=10)) == ["step-1"]
    assert sum(time.waits) == 10


def test_leaving_the_block_or_a_failed_save_is_no_end(url, time, monkeypatch):
    train(url, [1])
    run = dos.CheckpointManager(url)
    run.load(state(0))
    run.step(2, state(2))
    monkeypatch.setattr("dcp_objstore.write.api.run_save", down)
    with pytest.raises(StoreUnavailableError):
        run.finish()
    assert names(dos.follow(url, timeout_seconds=1)) == ["step-1"]
    assert time.waits == [1]


def test_bounds_are_numbers_or_names(url, time):
    train(url, [5, 10, 15, 20])
    assert names(dos.follow(url, after=5, until=15)) == ["step-10", "step-15"]
    assert names(dos.follow(url, after="step-5", until="step-17")) == ["step-10", "step-15"]
    assert names(dos.follow(url, after=20, until=20)) == []
    assert time.waits == []
    time.later = [lambda: train(url, [30], back_to=15), lambda: train(url, [31])]
    assert names(dos.follow(url, after=20, until=25)) == []
    assert names(dos.follow(url, after=20, until=31)) == ["step-30", "step-31"]
    other = run_url()
    for name in ("epoch-9", "epoch-10"):
        save_bytes(StoreSpec(f"{other}/{name}").open())
    assert names(dos.follow(other, after="epoch-9", until="epoch-10")) == ["epoch-10"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"poll_seconds": 0},
        {"poll_seconds": float("nan")},
        {"poll_seconds": True},
        {"timeout_seconds": -1},
        {"timeout_seconds": "1h"},
        {"after": -1},
        {"until": 1.5},
        {"pin": ""},
    ],
)
def test_wrong_arguments_are_refused_before_the_first_request(url, requests, wrong):
    with pytest.raises(ConfigError):
        dos.follow(url, **wrong)
    assert requests == []


def test_the_time_out_is_that_of_a_wait_and_not_of_the_body(url, time, requests):
    train(url, [1])
    time.later = [lambda: train(url, [2])]
    came = []
    for step in dos.follow(url, timeout_seconds=100, poll_seconds=60):
        came.append(step.name)
        time.now += 1000
    assert came == ["step-1", "step-2"]
    # Polled when the body was left, and then in the middle of the wait.
    assert time.waits == [60, 60, 40]
    requests.clear()
    assert names(dos.follow(url, timeout_seconds=0)) == ["step-1", "step-2"]
    assert len(time.waits) == 3
    assert [one.verb for one in requests].count("list") == 1, "for a body that takes no time"


# --- requests


def test_a_poll_sends_one_listing_and_reads_only_markers_that_are_new(url, time, requests):
    def save(number: int) -> None:
        save_bytes(StoreSpec(f"{url}/step-{number}").open())

    for number in range(1, 9):
        save(number)
    requests.clear()
    sent = []

    def count(then: Callable[[], object] = lambda: None) -> None:
        verbs = [one.verb for one in requests]
        keys = [one.key for one in requests if one.verb == "get"]
        sent.append((verbs.count("list"), keys.count(CLAIM_KEY), keys.count(MARKER_KEY)))
        assert len(requests) == sum(sent[-1])
        then()
        requests.clear()

    time.later = [
        count,
        count,
        lambda: count(lambda: save(9)),
        lambda: count(lambda: dos.delete(f"{url}/step-7", grace_seconds=60)),
        count,
        count,
    ]
    came = names(dos.follow(url, timeout_seconds=150))
    assert came == [f"step-{number}" for number in range(1, 10)]
    assert sent == [(1, 2, 8), (1, 2, 0), (1, 2, 0), (1, 2, 1), (1, 2, 1), (1, 2, 0)]
    assert set(time.waits) == {30}


# --- deletions, claims, faults


def test_what_was_yielded_and_stopped_counting_is_said_once(url, time, caplog):
    train(url, [1, 2, 3])
    time.later = [lambda: train(url, [3], back_to=1), lambda: train(url, [4])]
    with caplog.at_level(logging.WARNING, "dcp_objstore"):
        steps = dos.follow(url)
        assert [next(steps).name for _ in range(5)][3:] == ["step-3", "step-4"]
    texts = [record.getMessage() for record in caplog.records if "was yielded" in record.msg]
    assert [text.split()[0] for text in texts] == [f"{url}/step-2", f"{url}/step-3"]


def fail_listings(through: Through, error: Exception, numbers: Iterable[int]) -> None:
    listings = itertools.count(1)

    def fail(verb: str, *_: object) -> Fault | None:
        return Fault("before", error) if verb == "list" and next(listings) in numbers else None

    through(lambda store: FaultStore(store, fail))


def test_an_outage_is_waited_for_but_not_at_the_first_poll_or_beyond_the_time_out(
    url, time, through, caplog
):
    save_bytes(StoreSpec(f"{url}/step-1").open())
    fail_listings(through, StoreUnavailableError("slow down"), (1, 3, 4))
    with pytest.raises(StoreUnavailableError):
        next(dos.follow(url))
    time.later = [lambda: None, lambda: None, lambda: save_bytes(StoreSpec(f"{url}/step-3").open())]
    with caplog.at_level(logging.WARNING, "dcp_objstore"):
        assert names(dos.follow(url, until=3)) == ["step-1", "step-3"]
    assert [record.msg for record in caplog.records].count("%s: the next poll tries again: %s") == 2
    fail_listings(through, StoreUnavailableError("down"), range(2, 99))
    with pytest.raises(StoreUnavailableError):
        list(dos.follow(url, timeout_seconds=100))
    assert time.waits == [30, 30, 30, 30, 30, 30, 10]


@pytest.mark.parametrize("error", [StoreUnavailableError("down"), CredentialsError("expired")])
def test_an_outage_that_ends_in_time_is_not_raised_and_other_errors_are(url, time, through, error):
    save_bytes(StoreSpec(f"{url}/step-1").open())
    fail_listings(through, error, [2])
    ends = nullcontext() if isinstance(error, StoreUnavailableError) else pytest.raises(type(error))
    with ends:
        assert names(dos.follow(url, timeout_seconds=60)) == ["step-1"]


# --- pins


def test_a_step_is_pinned_as_long_as_the_body_uses_it(url, time):
    train(url, [1, 2])
    for step in dos.follow(url, pin="evaluator", until=2):
        assert pins(url) == {step.name: ("evaluator",)}
    assert pins(url) == {}
    for _ in dos.follow(url, pin="evaluator"):
        break
    assert pins(url) == {}
    with pytest.raises(ZeroDivisionError):
        for _ in dos.follow(url, pin="evaluator"):
            _ = 1 / 0
    assert pins(url) == {}
    steps = dos.follow(url, pin="evaluator")
    next(steps)
    dos.pin(f"{url}/step-1", "paper")
    steps.close()
    assert pins(url) == {"step-1": ("paper",)}


def test_a_pin_that_a_killed_follower_left_is_removed_at_the_next_start(url, time, monkeypatch):
    train(url, [1, 2, 3])
    for step, name in ((1, "evaluator"), (1, "other"), (2, "evaluator")):
        dos.pin(f"{url}/step-{step}", name)
    unpinned, unpin = [], following.upkeep.unpin
    monkeypatch.setattr(
        following.upkeep,
        "unpin",
        lambda at, *args, **settings: unpinned.append(at) or unpin(at, *args, **settings),
    )
    steps = dos.follow(url, pin="evaluator", after=1)
    assert next(steps).name == "step-2"
    assert unpinned == [f"{url}/step-1"]  # a deletion must not find the other without a pin
    assert pins(url) == {"step-1": ("other",), "step-2": ("evaluator",)}
    steps.close()
    assert pins(url) == {"step-1": ("other",)}
    dos.pin(f"{url}/step-3", "evaluator")
    assert names(dos.follow(url, pin="evaluator", after=3, timeout_seconds=0)) == []
    assert pins(url) == {"step-1": ("other",)}


def test_one_answer_that_a_step_is_not_there_does_not_pass_over_it(url, time, monkeypatch):
    train(url, [1, 2])
    pin, wrong = following.upkeep.pin, [CheckpointNotFoundError("wrong")]

    def pin_at_last(step: str, *args: Any, **settings: Any) -> Any:
        if step.endswith("step-1") and wrong:
            raise wrong.pop()
        return pin(step, *args, **settings)

    monkeypatch.setattr(following.upkeep, "pin", pin_at_last)
    assert names(dos.follow(url, pin="evaluator", timeout_seconds=0)) == ["step-1", "step-2"]


def test_a_step_that_is_deleted_before_it_is_pinned_does_not_come(url, time):
    train(url, [1, 2, 3, 4])
    steps = dos.follow(url, pin="evaluator", timeout_seconds=0)
    assert next(steps).name == "step-1"
    dos.delete(f"{url}/step-2")
    assert names(steps) == ["step-3", "step-4"]
    steps = dos.follow(url, pin="evaluator", timeout_seconds=0, skip_to_newest=True)
    assert next(steps).name == "step-4"
    train(url, [5, 6])
    time.now += 30
    through_listing = following.upkeep.pin

    def pin(step: str, *args: Any, **settings: Any) -> Any:
        if step.endswith("step-6"):
            dos.delete(step, allow_newest=True)
        return through_listing(step, *args, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(following.upkeep, "pin", pin)
        assert names(steps) == ["step-5"]


def test_a_pin_that_cannot_be_removed_is_said_and_the_next_poll_removes_it(
    url, time, monkeypatch, caplog
):
    train(url, [1])

    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailableError("down")

    steps = dos.follow(url, pin="evaluator", timeout_seconds=60)
    next(steps)
    with monkeypatch.context() as patched:
        patched.setattr(following.upkeep, "unpin", fail)
        time.later = [patched.undo, lambda: train(url, [2])]
        with caplog.at_level(logging.WARNING, "dcp_objstore"):
            assert next(steps).name == "step-2"
    assert caplog.text.count("still pinned") == 1
    assert pins(url) == {"step-2": ("evaluator",)}


def test_a_marker_that_could_not_be_read_is_read_again_at_the_next_poll(url, time, monkeypatch):
    """Two garbled answers prove nothing for ever, though the marker is not written again."""
    train(url, [1, 2])
    read, garbled = catalogue.read_marker, [2]

    def read_marker(store: Any, **settings: Any) -> Any:
        if store.url.endswith("step-2") and garbled:
            garbled.pop()
            raise CheckpointCorruptError("garbled")
        return read(store, **settings)

    monkeypatch.setattr(catalogue, "read_marker", read_marker)
    assert names(dos.follow(url, until=2)) == ["step-1", "step-2"]


def test_each_request_of_a_follower_has_its_settings(url, time, monkeypatch):
    train(url, [1])
    config = dos.TransferConfig(max_retries=3)
    configs: list[object] = []
    opened = StoreSpec.open

    def noted(spec: StoreSpec) -> Any:
        configs.append(spec.config)
        return opened(spec)

    monkeypatch.setattr(StoreSpec, "open", noted)
    assert names(dos.follow(url, pin="evaluator", timeout_seconds=0, config=config)) == ["step-1"]
    assert configs == [config] * len(configs)


def test_a_step_that_was_unpinned_and_deleted_in_the_body_is_no_error(url, time, caplog):
    train(url, [1, 2])
    came = []
    for step in dos.follow(url, pin="evaluator", timeout_seconds=0):
        came.append(step.name)
        if step.name == "step-1":
            dos.unpin(step.url, "evaluator")
            dos.delete(step.url)
    assert came == ["step-1", "step-2"]
    assert "still pinned" not in caplog.text


def test_a_superseded_step_is_told_beside_one_that_was_deleted(url, time):
    def go_back_and_delete() -> None:
        train(url, [3], back_to=1)
        dos.delete(f"{url}/step-1")

    train(url, [1, 2])
    time.later = [go_back_and_delete]
    dropped: list[dos.reports.ListedCheckpoint] = []
    came = names(dos.follow(url, until=3, on_dropped=dropped.append))
    assert came == ["step-1", "step-2", "step-3"]
    assert [step.name for step in dropped] == ["step-2"]


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_a_follower_follows_on_a_server(bucket, time):
    options = {"storage_options": bucket.storage_options}
    url = bucket.at("run")
    time.later = [
        lambda: train(url, [9, 10], **options),
        lambda: train(url, [10, 11], back_to=9, keep=dos.KeepLatest(2), **options),
        lambda: finish(url, **options),
    ]
    dropped: list[dos.reports.ListedCheckpoint] = []
    came = []
    for step in dos.follow(url, pin="evaluator", on_dropped=dropped.append, **options):
        assert pins(url, **options) == {step.name: ("evaluator",)}
        came.append(dos.read_state_dict(step.url, **options)["step"])
    assert came == [9, 10, 10, 11]
    assert [(step.name, step.state) for step in dropped] == [("step-10", "superseded")]
    assert pins(url, **options) == {}
    assert bucket.uploads() == []


@pytest.mark.backends("seaweed")
def test_without_a_pin_the_right_to_read_is_enough(bucket, seaweed, time):
    train(bucket.url, [1], storage_options=bucket.storage_options)
    options = {**bucket.storage_options, **READ_ONLY}
    before = bucket.keys()
    assert names(dos.follow(bucket.url, until=1, storage_options=options)) == ["step-1"]
    with pytest.raises(PermissionDeniedError, match="without one nothing is written"):
        next(dos.follow(bucket.url, pin="evaluator", storage_options=options))
    assert bucket.keys() == before
