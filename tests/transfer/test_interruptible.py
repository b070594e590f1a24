"""`InterruptibleStore`: each request runs beside the main thread, with all that it was given."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dcp_objstore.errors import InputError
from dcp_objstore.stores import open_store
from dcp_objstore.transfer.interruptible import InterruptibleStore


class Noting:
    """Notes each call, and whether the main thread made it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.in_main = False

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **settings: Any) -> str:
            self.in_main |= threading.current_thread() is threading.main_thread()
            self.calls.append((verb, args, settings))
            return f"of {verb}"

        return call


def test_each_request_is_handed_on_in_another_thread() -> None:
    inner: Any = Noting()
    store: Any = InterruptibleStore(inner)
    precondition: Any = object()
    assert store.put("k", b"v") == "of put"
    assert store.put("k", b"v", precondition=precondition, retry=False) == "of put"
    assert store.get("k", max_size_bytes=7) == "of get"
    assert store.head("k") == "of head"
    store.delete("k")
    assert inner.calls == [
        ("put", ("k", b"v"), {"precondition": None, "retry": True}),
        ("put", ("k", b"v"), {"precondition": precondition, "retry": False}),
        ("get", ("k",), {"max_size_bytes": 7}),
        ("head", ("k",), {}),
        ("delete", ("k",), {}),
    ]
    assert not inner.in_main


def test_a_listing_of_several_pages_is_whole_and_its_errors_are_raised() -> None:
    inner = open_store("memory://transfer/listing")
    names = [f"{'b/' if number == 1000 else 'a/'}{number:04}" for number in range(1001)]
    for name in names:
        inner.put(name, b"")
    assert [meta.key for meta in InterruptibleStore(inner).list()] == names
    assert [meta.key for meta in InterruptibleStore(inner).list("b/")] == names[1000:]

    class Broken(Noting):
        def list(self, prefix: str) -> Any:
            yield from inner.list(prefix)
            raise InputError("the next page")

    broken: Any = Broken()
    with pytest.raises(InputError, match="next page"):
        list(InterruptibleStore(broken).list())
