"""The ring: a slot is in one place at a time, and not written to while it is copied from."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dcp_objstore.state import ring as ring_module
from dcp_objstore.state.ring import Ring, Slot
from tests.support.lanes import LateLane


def no_wait() -> None:
    """Called where a slot is waited for."""
    raise AssertionError("no slot comes back")


def plain_memory(size_bytes: int) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


def test_a_lent_slot_comes_back_when_the_last_view_of_it_is_gone():
    ring = Ring(1, 16, plain_memory)
    slot = ring.acquire(no_wait)
    slot.array[:] = 7
    lent = ring.lend(slot)
    view = memoryview(lent[2:][:3])
    del lent, slot
    gc.collect()
    assert view.tolist() == [7] * 3
    assert ring.try_acquire() is None
    held = [view]
    del view
    # Wherever the last one is dropped.
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert ring.try_acquire() is not None


def test_a_slot_is_not_written_to_before_its_copies_are_complete():
    lane = LateLane()
    ring = Ring(1, 4, lane.allocate)
    slot = ring.acquire(no_wait)
    slot.array[:] = 1
    copied = torch.zeros(4, dtype=torch.uint8)
    slot.tickets.append(lane.queue(lambda: copied.copy_(slot.memory)))
    ring.release(slot)
    assert not copied.any()
    again = ring.acquire(no_wait)
    again.array[:] = 2
    assert copied.tolist() == [1] * 4


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_slot_is_made_rather_than_waited_for_and_never_more_than_asked_for(count):
    lane = LateLane()
    ring = Ring(count, 4, lane.allocate)
    for _ in range(2 * count):
        slot = ring.acquire(no_wait)
        slot.tickets.append(lane.queue(lambda: None))
        ring.release(slot)
    assert lane.allocated == [4] * count
    slots = [ring.try_acquire() for _ in range(count)]
    assert None not in slots, "all came back"
    assert ring.try_acquire() is None


def test_waiting_for_a_slot_looks_again_and_again_whether_it_is_to_end(monkeypatch):
    monkeypatch.setattr(ring_module, "STEP_SECONDS", 0.001)
    ring = Ring(1, 4, plain_memory)
    taken = ring.acquire(no_wait)
    looks = iter([None, None, KeyError("stopped")])

    def look() -> None:
        if (error := next(looks)) is not None:
            raise error

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
        pool.submit(ring.acquire, look).result()
    ring.release(taken)
    assert ring.acquire(no_wait) is taken


def test_a_slot_that_could_not_be_allocated_is_not_counted():
    errors = [RuntimeError("no memory")]

    def allocate(size_bytes: int) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return plain_memory(size_bytes)

    ring = Ring(1, 4, allocate)
    with pytest.raises(RuntimeError):
        ring.acquire(no_wait)
    assert ring.acquire(no_wait).array.nbytes == 4


def test_a_slot_that_comes_back_while_it_is_waited_for_is_settled():
    lane = LateLane()
    ring = Ring(1, 4, lane.allocate)
    slot = ring.acquire(no_wait)
    copied = torch.zeros(4, dtype=torch.uint8)

    def come_back() -> None:
        slot.array[:] = 1
        slot.tickets.append(lane.queue(lambda: copied.copy_(slot.memory)))
        ring.release(slot)

    assert ring.acquire(come_back) is slot
    assert copied.tolist() == [1] * 4
    assert not slot.tickets


def test_a_slot_is_settled_when_all_of_its_copies_are_complete():
    lane = LateLane()
    slot = Slot(plain_memory(4))
    assert slot.has_copied()
    slot.tickets += [lane.queue(lambda: None) for _ in range(2)]
    slot.tickets[0].synchronize()
    assert not slot.has_copied()
    slot.wait_for_copies()
    assert lane.copied == 2
    assert slot.tickets == []


def test_bytes_are_told_to_lie_in_a_slot_up_to_its_ends():
    around = np.arange(12, dtype=np.uint8)
    slot = Slot(torch.from_numpy(around)[4:8])
    for start, end in [(4, 8), (4, 6), (5, 7), (7, 8)]:
        part = slot.view_of(around[start:end])
        assert part is not None
        assert part.tolist() == list(range(start, end))
    for start, end in [(3, 5), (3, 8), (7, 9), (4, 9), (0, 2), (10, 12)]:
        assert slot.view_of(around[start:end]) is None
