"""Ranges give exactly their bytes; a body that is short, or another one, is an error."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from dcp_objstore.errors import (
    CorruptDataError,
    InputError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.stores.wrappers import PinnedStore
from tests.contract.common import Endpoint
from tests.support.guarantees import guarantee
from tests.support.scripted import Answer, ScriptedServer

_HEADERS = {
    "ETag": '"0123456789abcdef0123456789abcdef"',
    "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    "x-goog-generation": "7",
    "x-ms-version": "2025-01-05",
    "x-ms-blob-type": "BlockBlob",
}
_SENT = b"only this"


class ReadingContract(Endpoint):
    @guarantee("exact ranges")
    def test_ranges_give_exactly_their_bytes(self, store, capabilities, side_door):
        data = np.random.default_rng(0).bytes(1_000_000)
        side_door.write("k", data)
        for start, end in [
            (0, 1),
            (0, 1_000_000),
            (999_999, 1_000_000),
            (1234, 567_890),
            (7, 7),
            (0, 0),
            (1_000_000, 1_000_000),
        ]:
            if not capabilities.ranges and end - start not in (0, len(data)):
                with pytest.raises((CorruptDataError, InputError)):
                    read_range(store, "k", start, end)
                continue
            assert read_range(store, "k", start, end) == data[start:end]

    @guarantee("exact ranges")
    def test_a_range_is_read_in_pieces_of_any_size_into_the_same_memory(
        self, store, capabilities, side_door
    ):
        data = np.random.default_rng(1).bytes(9_000_001)
        side_door.write("k", data)
        start, end = (3, 9_000_000) if capabilities.ranges else (0, len(data))
        memory = memoryview(bytearray(2_000_000))
        for sizes in ([1, 7, 0, 300_000, 2_000_000, 65_537], [1_999_999]):
            came, at = [], start
            with store.open_range("k", start, end) as body:
                for size in cycle(sizes):
                    piece = memory[: min(size, end - at)]
                    body.readinto(piece)
                    came.append(bytes(piece))
                    at += len(piece)
                    if at == end:
                        break
            assert b"".join(came) == data[start:end]

    @guarantee("exact ranges")
    def test_a_range_that_is_closed_early_takes_nothing_from_the_next_ones(self, store, side_door):
        data = np.random.default_rng(2).bytes(3_000_000)
        side_door.write("k", data)
        for size in (0, 5, 2_000_000):
            body = store.open_range("k", 0, len(data))
            into = memoryview(bytearray(size))
            body.readinto(into)
            assert into == data[:size]
            body.close()
            body.close()
            with pytest.raises(InputError):
                body.readinto(memoryview(bytearray(1)))
            assert read_range(store, "k", 0, len(data)) == data

    def test_an_object_that_is_replaced_is_read_in_one_state_only_where_it_is_pinned(
        self, store, capabilities, side_door
    ):
        size = 300_000  # enough for a lane of its own; a few bytes are read in the other way
        before, after = (np.random.default_rng(seed).bytes(size) for seed in (3, 4))
        ends = (size, 100) if capabilities.ranges else (size,)
        side_door.write("k", before)
        tells = capabilities.listed_versions and capabilities.conditional_update
        for first in ("head", *ends, *(["list"] if tells else [])):
            pinned = PinnedStore(store, {})
            if first == "list":
                assert [meta.key for meta in pinned.list()] == ["k"]
                side_door.write("k", after)
                with pytest.raises(PreconditionFailedError):
                    read_range(pinned, "k", 0, size)
                with pytest.raises(PreconditionFailedError):
                    list(pinned.list())
                return
            if isinstance(first, int):
                assert read_range(pinned, "k", 0, first) == before[:first]
            assert pinned.head("k").size_bytes == size
            for end in ends:
                assert read_range(pinned, "k", 0, end) == before[:end]
            side_door.write("k", after)
            for end in ends:
                with pytest.raises(PreconditionFailedError, match="replaced") as caught:
                    read_range(pinned, "k", 0, end)
                assert (caught.value.object_key, caught.value.url) == ("k", store.url)
            with pytest.raises(PreconditionFailedError, match="replaced"):
                pinned.head("k")
            assert read_range(store, "k", 0, size) == after
            before, after = after, before

    def test_memory_that_a_range_cannot_fill_is_refused_and_nothing_is_read(self, store):
        store.put("k", b"0123456789")
        with store.open_range("k", 0, 10) as body:
            memory = bytearray(11)
            with pytest.raises(InputError):
                body.readinto(memoryview(memory))
            body.readinto(memoryview(memory)[:4])
            with pytest.raises(InputError):
                body.readinto(memoryview(memory)[4:11])
            body.readinto(memoryview(memory)[4:10])
        assert memory == b"0123456789\0"

    def test_what_is_wrong_is_raised_when_a_range_is_read(self, store):
        store.put("k", b"0123456789")
        for key, end, error in (("none", 5, ObjectNotFoundError), ("k", 11, CorruptDataError)):
            with store.open_range(key, 0, end) as body, pytest.raises(error) as caught:
                body.readinto(memoryview(bytearray(end)))
            assert (caught.value.object_key, caught.value.url) == (key, store.url)

    def test_an_empty_range_needs_no_request(self):
        if self.dialect is None:
            pytest.skip("no HTTP")
        with ScriptedServer() as server:
            server.answer = lambda *_: (500, {}, b"")
            store = self.store_at(server.endpoint_url)
            assert read_range(store, "k", 7, 7) == b""
            with store.open_range("k", 7, 9) as body:
                body.readinto(memoryview(bytearray()))
            # Some ask for the bucket before anything else.
            assert not [path for _, path, _ in server.requests if path.partition("?")[0][-1] == "k"]

    @guarantee("exact ranges")
    def test_a_range_past_the_end_is_corrupt(self, store):
        store.put("k", b"0123456789")
        store.put("empty", b"")
        for key, start, end in [("k", 0, 11), ("k", 9, 11), ("k", 500, 600), ("empty", 0, 1)]:
            with pytest.raises(CorruptDataError):
                read_range(store, key, start, end)
        for start, end in [(-1, 2), (3, 2)]:
            with pytest.raises(InputError):
                read_range(store, "k", start, end)

    def test_get_refuses_an_object_that_is_too_large(self, store):
        store.put("k", b"0123456789")
        with pytest.raises(CorruptDataError, match="10 bytes"):
            store.get("k", max_size_bytes=9)
        assert store.get("k", max_size_bytes=10)[0] == b"0123456789"

    @guarantee("exact ranges")
    def test_a_body_that_was_not_asked_for_is_an_error(self):
        if self.dialect is None:
            pytest.skip("no HTTP")
        answers: dict[str, Answer] = {
            "cut off": (206, {"Content-Length": "100", "Content-Range": "bytes 0-99/100"}, _SENT),
            "range ignored": (200, {}, _SENT * 30),
            "another beginning": (206, {"Content-Range": "bytes 3-11/300"}, _SENT),
            "another end": (206, {"Content-Range": "bytes 0-8/300"}, _SENT),
            "too long": (206, {"Content-Range": "bytes 0-99/300"}, _SENT * 30),
            "whole, cut off": (200, {"Content-Length": "100"}, _SENT),
        }
        with ScriptedServer() as server:
            store = self.store_at(server.endpoint_url)
            for status, headers, body in answers.values():
                answer = (status, {**_HEADERS, **headers}, body)
                server.answer = lambda *_, answer=answer: answer
                with pytest.raises((CorruptDataError, StoreUnavailableError)):
                    read_range(store, "k", 0, 100)
            with pytest.raises((CorruptDataError, StoreUnavailableError)):
                store.get("k", max_size_bytes=1000)
