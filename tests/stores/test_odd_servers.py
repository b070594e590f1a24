"""Answers in chunks and keys with an empty segment, over each transport.

`tests/faults/test_odd_servers.py` has every verb on each odd server.
"""

from __future__ import annotations

import pytest

from dcp_objstore.errors import CorruptDataError, UnsupportedError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.ranges import read_range
from tests.support.odd_servers import BEHAVIOURS, Behaviour, OddServer

ALL = pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
BODY = bytes(range(256)) * 1000


def serving(behaviour: Behaviour) -> OddServer:
    """An odd server with one object."""
    server = OddServer(behaviour)
    server.objects["m/x"] = BODY
    return server


@ALL
def test_answers_in_chunks_are_read_and_measured(transport):
    with serving(BEHAVIOURS["chunked answers"]) as server:
        store = open_store("s3://bucket/m", server.options(transport))
        size_bytes = len(BODY)
        assert store.head("x").size_bytes == size_bytes
        body, meta = store.get("x", max_size_bytes=size_bytes)
        assert (body, meta.size_bytes) == (BODY, size_bytes)
        assert read_range(store, "x", 3, 99) == BODY[3:99]
        with pytest.raises(CorruptDataError, match="at most"):
            store.get("x", max_size_bytes=size_bytes - 1)


@ALL
def test_a_key_with_an_empty_segment_hides_no_other(transport):
    with serving(behaviour := BEHAVIOURS["empty segments"]) as server:
        listed = open_store("s3://bucket/m", server.options(transport)).list()
        assert [meta.key for meta in listed] == sorted({*behaviour.strays, "x"})


def test_what_was_listed_before_such_a_key_comes_once(monkeypatch):
    """obstore gives a thousand keys at a time. Without boto3 it is said what to do."""
    names = [f"a{number:04}" for number in range(1001)]
    with serving(Behaviour(strays=(*names, "b//c", "d"))) as server:
        store = open_store("s3://bucket/m", server.options())
        listed = [*names, "b//c", "d", "x"]
        assert [meta.key for meta in store.list()] == listed
        above = open_store("s3://bucket", server.options()).list("m/")
        assert [meta.key for meta in above] == [f"m/{key}" for key in listed]
        monkeypatch.setattr(store, "_over_boto3", None)
        with pytest.raises(UnsupportedError, match="fsspec"):
            list(store.list())
