"""`transfer.slots`: memory that a neighbour reads, and nobody else."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from dcp_objstore.read.peers import shared_memory as module
from dcp_objstore.read.peers.shared_memory import SharedMemory, SharedMemoryAddress, attach
from tests.support.ranks import PRELOAD
from tests.support.shared_servers import warm_up


def read_there(address: SharedMemoryAddress) -> bytes | None:
    memory = attach(address)
    return None if memory is None else bytes(memory)


def open_slots() -> set[int]:
    """The inodes of the slots that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists them, for one
            if "dcp_objstore-slots" in str(descriptor.readlink()):
                found.add(descriptor.stat().st_ino)
    return found


def test_another_process_reads_what_was_written():
    slots = SharedMemory(3, 4096)
    for number in range(3):
        slots[number][:] = bytes([number + 1]) * 4096
    assert slots.address is not None
    warm_up(PRELOAD)  # as every process of the tests, it is forked from the server of the ranks
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        found = pool.apply(read_there, (slots.address,))
        assert found == b"".join(bytes([n + 1]) * 4096 for n in range(3))
        slots.close_descriptor()
        assert pool.apply(read_there, (slots.address,)) is None


def test_who_has_attached_goes_on_reading_and_cannot_write():
    slots = SharedMemory(2, 4096)
    assert slots.address is not None
    memory = attach(slots.address)
    assert memory is not None
    slots.close_descriptor()
    slots[1][:5] = b"later"
    assert bytes(memory[4096:4101]) == b"later"
    with pytest.raises(TypeError):
        memory[0] = 1
    del slots
    assert bytes(memory[4096:4101]) == b"later"


@pytest.mark.parametrize("change", ["boot_id", "inode", "process_id", "descriptor"])
def test_memory_of_another_host_or_container_is_not_attached(change):
    slots = SharedMemory(1, 4096)
    assert slots.address is not None
    wrong = {"boot_id": "another", "inode": 1, "process_id": 2**22 + 1, "descriptor": 0}
    assert attach(dataclasses.replace(slots.address, **{change: wrong[change]})) is None


def test_nothing_is_left_behind():
    before = open_slots()
    slots = SharedMemory(4, 1 << 20)
    memory = attach(slots.address) if slots.address else None
    del slots, memory
    assert not open_slots() - before


def test_memory_that_cannot_be_shared_serves_its_own_process(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "absent")
    slots = SharedMemory(2, 4096)
    assert slots.address is None
    slots[1][:] = b"x" * 4096
    assert bytes(slots[0]) == bytes(4096)
    assert SharedMemory(0, 0).address is None


def test_memory_that_cannot_be_mapped_has_no_address_where_others_would_read_zeros(monkeypatch):
    really = module.mmap.mmap

    def mapped(descriptor: int, *args: Any, **settings: Any) -> mmap.mmap:
        if descriptor != -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return really(descriptor, *args, **settings)

    monkeypatch.setattr(module.mmap, "mmap", mapped)
    memory = SharedMemory(2, 8)
    memory[1][:] = b"12345678"
    assert (memory.address, bytes(memory[1])) == (None, b"12345678")
