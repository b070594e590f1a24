"""`Progress`: every byte counts, stalls are noticed, the first request to stop counts."""

from __future__ import annotations

import threading
import time

import pytest

from dcp_objstore.errors import TransferStalledError
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.threads import spawn
from dcp_objstore.transfer.progress import Progress
from tests.support.listening import Heard, heard_channel
from tests.support.meeting_number import MeetingNumber


def test_bytes_that_two_threads_report_at_once_are_both_counted():
    progress = Progress(60)
    progress.moved_bytes = MeetingNumber(0)
    threads = [threading.Thread(target=progress.moved, args=(count,)) for count in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert progress.moved_bytes == 3


def test_bytes_reported_during_a_report_are_counted():
    """As when a report frees the last reference to a buffer."""
    calls: list[float] = []

    def clock() -> float:
        calls.append(time.monotonic())
        if len(calls) == 2:
            progress.moved(2)
        return calls[-1]

    progress = Progress(60, clock=clock)
    thread = spawn(lambda: progress.moved(1), "finalizer")
    thread.join(10)
    assert not thread.is_alive()
    assert progress.moved_bytes == 3


def test_a_transfer_has_stalled_when_nothing_has_moved_for_longer_than_the_time_out():
    now = 100.0
    progress = Progress(5.0, clock=lambda: now)
    for report in (lambda: progress.moved(1), progress.alive, lambda: None):
        now += 5
        progress.check_stalled("o")
        report()
    now += 0.1
    with pytest.raises(TransferStalledError):
        progress.check_stalled("o")


def test_the_first_request_to_stop_counts():
    progress = Progress(60)
    progress.check_stopped()
    progress.stop(KeyboardInterrupt())
    progress.stop(ZeroDivisionError())
    with pytest.raises(KeyboardInterrupt):
        progress.check_stopped()


def test_a_request_to_stop_waits_for_another_one():
    progress = Progress(60)
    with progress._lock:
        stopping = spawn(lambda: progress.stop(KeyboardInterrupt()), "stops")
        stopping.join(0.05)
        progress.check_stopped()
    stopping.join(30)
    with pytest.raises(KeyboardInterrupt):
        progress.check_stopped()


def test_parts_and_ranges_are_told_only_to_a_channel_that_wants_details():
    detailed, _ = heard_channel()
    assert Progress(60, detailed).channel is detailed
    coarse = Channel("save", "memory://heard")
    coarse.add(Heard(), "test", detailed=False)
    assert Progress(60, coarse).channel is None
    assert Progress(60).channel is None
