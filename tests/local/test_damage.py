"""Damage to copies: no wrong value, and the store gives what is damaged and no more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcp_objstore as dos
from dcp_objstore.errors import CorruptDataError
from tests.support.campaign import cases
from tests.support.node_copies import Node, restart
from tests.support.wrapped_stores import ChangingStore, RecordingStore, Request

MIB = 1024 * 1024


def flip(path: Path, *positions: int) -> None:
    with path.open("rb+") as file:
        for at in positions:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0xFF]))


def put_back(copy: Path, body: bytes) -> None:
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(body)


def payload_gets(requests: list[Request]) -> list[Request]:
    return [one for one in requests if one.verb == "open_range" and one.key.endswith(".distcp")]


# --- every byte of a small one

SMALL_ROWS = 4  # 6 KiB with frames


@pytest.mark.parametrize("stride", cases([1, 211], default=[211]))
@pytest.mark.parametrize("damage", [flip, os.truncate])
@pytest.mark.timeout(1800)
def test_no_damaged_copy_loads_a_wrong_value(node, stride, damage):
    node.rows = SMALL_ROWS
    node.save(1)
    copy = node.copy_of(1)
    body = copy.read_bytes()
    fetched = []
    for at in range(0, len(body), stride):
        damage(copy, at)
        fetched.append(node.load(1).fetched_bytes)
        # What was found damaged is removed, so that no later load asks twice for it.
        assert damage is os.truncate or copy.exists() != bool(fetched[-1])
        put_back(copy, body)
    assert node.load(1).fetched_bytes == 0
    assert 0 < sum(map(bool, fetched)) < len(fetched)  # what frames the payload is not read
    assert damage is flip or all(fetched[: -len(fetched) // 3])


# --- what it costs

LARGE_REQUESTS = dos.TransferConfig(request_size_bytes=32 * MIB)


@pytest.fixture
def large(node: Node) -> Node:
    """A checkpoint of 15 blocks, in one object and one request or a few."""
    node.rows = 60 * 1024
    node.save(1)
    return node


@pytest.mark.parametrize(("places",), cases([((0,),), ((58,),), ((9, 41),)], default=[((9, 41),)]))
def test_damage_costs_what_is_left_of_its_request_and_no_more(large, requests, places):
    """By what the report counts, and by the requests of the store. The next load finds no copy."""
    restart()
    requests.clear()
    report = large.load(1)
    assert payload_gets(requests) == []
    assert report.fetched_bytes == 0
    assert report.local_bytes == report.total_bytes > 15 * MIB
    assert large.load(1, verify=False).local_bytes == 0, "nothing would find damage there"
    restart()
    flip(large.copy_of(1), *(place * MIB + 77_777 for place in places))
    requests.clear()
    report = large.load(1, config=LARGE_REQUESTS)
    assert report.requests <= 3
    fetched = sum(one.bytes for one in payload_gets(requests))
    assert report.fetched_bytes == fetched
    assert report.local_bytes == report.total_bytes - fetched
    assert len(payload_gets(requests)) == len(places)
    assert all(one.bytes <= 32 * MIB for one in payload_gets(requests))
    assert not large.copies


# --- damage of the store, too


@pytest.mark.parametrize("answers", [1, 2])
def test_damage_in_the_copy_and_in_an_answer_of_the_store(large, through, answers):
    """One damaged answer is asked for again, as without copies; a second one is an error."""
    flip(large.copy_of(1), 9 * MIB)
    left = [answers]

    def change(key: str, at: int, body: memoryview) -> None:
        if key.endswith(".distcp") and at <= 9 * MIB < at + len(body) and left[0]:
            left[0] -= 1
            body[9 * MIB - at] ^= 1

    requests: list[Request] = []
    through(lambda store: RecordingStore(ChangingStore(store, change), requests))
    if answers == 2:
        with pytest.raises(CorruptDataError):
            large.load(1, config=LARGE_REQUESTS)
        return
    report = large.load(1, config=LARGE_REQUESTS)
    assert left == [0]
    damaged, rest = payload_gets(requests)
    assert damaged.start == rest.start
    assert report.fetched_bytes == rest.bytes, "the range counts once"
    assert report.local_bytes == report.total_bytes - rest.bytes >= 8 * MIB


# --- files in the place of others


def of_another_step(node: Node) -> bytes:
    return node.copy_of(2).read_bytes()


def longer(node: Node) -> bytes:
    return node.copy_of(1).read_bytes() + b"more"


@pytest.mark.parametrize("content", [of_another_step, longer])
def test_another_file_in_the_place_of_a_copy(node, content):
    for step in (1, 2):
        node.save(step)
    node.copy_of(1).write_bytes(content(node))
    report = node.load(1)
    assert (report.local_bytes == 0) == (content is not longer)
    assert node.load(2).fetched_bytes == 0


# --- changes while it is read


def during_reads(patched: pytest.MonkeyPatch, at_read: int, act: Callable[[], None]) -> None:
    read, count = os.preadv, [0]

    def acting(file: int, buffers: Any, at: int) -> int:
        count[0] += 1
        if count[0] == at_read:
            act()
        return read(file, buffers, at)

    patched.setattr(os, "preadv", acting)


@pytest.mark.parametrize("at_read", cases([1, 3, 15], default=[3]))
def test_a_copy_that_a_save_writes_over_while_it_is_read(large, monkeypatch, at_read):
    number = large.copy_of(1).stat().st_ino

    saved = threading.Event()

    def save_twice() -> None:
        large.save(2)
        large.save(3)
        saved.set()

    during_reads(monkeypatch, at_read, save_twice)
    report = large.load(1)
    assert saved.wait(60)  # a read that takes so long may be left behind
    assert large.copy_of(3).stat().st_ino == number
    assert 0 < report.fetched_bytes <= report.total_bytes
