"""Ranges give exactly their bytes; a body that is short, or another one, is an error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dcp_objstore.errors import CorruptDataError, InputError, StoreUnavailableError
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.protocol import Capabilities
from tests.contract.common import Endpoint
from tests.support.guarantees import guarantee
from tests.support.scripted import Answer, ScriptedServer
from tests.support.side_doors import SideDoor

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
    def test_ranges_give_exactly_their_bytes(
        self, store: ObjectStore, capabilities: Capabilities, side_door: SideDoor
    ) -> None:
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
                    store.get_range("k", start, end)
                continue
            assert bytes(store.get_range("k", start, end)) == data[start:end]
            room = memoryview(bytearray(b"?" * (end - start)))
            assert bytes(store.get_range("k", start, end, into=room)) == data[start:end]

    @guarantee("exact ranges")
    def test_a_range_past_the_end_is_corrupt(self, store: ObjectStore) -> None:
        store.put("k", b"0123456789")
        for start, end in [(0, 11), (9, 11), (10, 11), (500, 600)]:
            for room in (None, memoryview(bytearray(end - start))):
                with pytest.raises(CorruptDataError):
                    store.get_range("k", start, end, into=room)

    @guarantee("exact ranges")
    def test_a_range_past_the_end_of_an_empty_object_is_corrupt(self, store: ObjectStore) -> None:
        store.put("k", b"")
        with pytest.raises(CorruptDataError):
            store.get_range("k", 0, 1)

    def test_a_range_that_is_none_is_refused(self, store: ObjectStore) -> None:
        store.put("k", b"0123456789")
        for start, end in [(-1, 2), (3, 2)]:
            with pytest.raises(InputError):
                store.get_range("k", start, end)

    def test_get_refuses_an_object_that_is_too_large(self, store: ObjectStore) -> None:
        store.put("k", b"0123456789")
        with pytest.raises(CorruptDataError, match="10 bytes"):
            store.get("k", max_size_bytes=9)
        assert store.get("k", max_size_bytes=10)[0] == b"0123456789"

    @guarantee("exact ranges")
    @pytest.mark.parametrize("fault", ["cut off", "range ignored", "another range"])
    def test_a_body_that_was_not_asked_for_is_an_error(self, fault: str) -> None:
        if self.dialect is None:
            pytest.skip("no HTTP")
        answers: dict[str, Answer] = {
            "cut off": (206, {"Content-Length": "100", "Content-Range": "bytes 0-99/100"}, _SENT),
            "range ignored": (200, {}, _SENT * 30),
            "another range": (206, {"Content-Range": "bytes 3-11/300"}, _SENT),
        }
        with ScriptedServer() as server:
            status, headers, body = answers[fault]
            server.answer = lambda *_: (status, {**_HEADERS, **headers}, body)
            store = self.store_at(server.endpoint_url)
            wrong = pytest.raises((CorruptDataError, StoreUnavailableError))
            for room in (None, memoryview(bytearray(100))):
                with wrong:
                    store.get_range("k", 0, 100, into=room)

    @guarantee("exact ranges")
    def test_a_whole_body_that_is_cut_off_is_an_error(self) -> None:
        if self.dialect is None:
            pytest.skip("no HTTP")
        with ScriptedServer() as server:
            server.answer = lambda *_: (200, {**_HEADERS, "Content-Length": "100"}, _SENT)
            store = self.store_at(server.endpoint_url)
            calls: list[Callable[[], object]] = [lambda: store.get("k", max_size_bytes=1000)]
            for call in calls:
                with pytest.raises((CorruptDataError, StoreUnavailableError)):
                    call()
