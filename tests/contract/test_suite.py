"""The contract catches stores that lie, and the table in docs/stores.md says what it found."""

from __future__ import annotations

import importlib
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from dcp_objstore.errors import DcpObjstoreError, PreconditionFailedError
from dcp_objstore.stores import IfAbsent, IfVersion, ObjectMeta, Version, open_store
from dcp_objstore.stores.protocol import Capabilities
from tests.contract import CROWD, Endpoint, StoreContract
from tests.contract.preconditions import CREATORS
from tests.support.doc_tables import STORES_PAGE
from tests.support.guarantees import FAILED, GUARANTEES, LACKING, UNTRIED, parse
from tests.support.side_doors import NoDoor, SideDoor


class Liar:
    """A good store, which a subclass makes break one promise while it claims to keep it."""

    def __init__(self) -> None:
        self.inner = open_store(f"memory://{secrets.token_hex(4)}")
        self.uploads: list[str] = []
        self.parts: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def door(self) -> SideDoor:
        return LiarsDoor(self)


class LiarsDoor(NoDoor):
    def __init__(self, liar: Liar) -> None:
        super().__init__(liar.inner)
        self.liar = liar

    def leavings(self) -> list[str]:
        return self.liar.uploads

    def part_sizes(self, key: str) -> list[int] | None:
        return self.liar.parts.get(key)


class IgnoresPreconditions(Liar):
    def put(self, key: str, data: Any, *, precondition: Any = None, retry: bool = True) -> Version:
        return self.inner.put(key, data, retry=retry)


class LetsTwoCreatorsWin(Liar):
    """Looks, then writes: right until two come at once, which here they do."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Barrier(CREATORS)

    def put(self, key: str, data: Any, *, precondition: Any = None, retry: bool = True) -> Version:
        if isinstance(precondition, IfAbsent):
            if any(meta.key == key for meta in self.inner.list()):
                raise PreconditionFailedError("there is one")
            self.looked.wait(60)
            precondition = None
        return self.inner.put(key, data, precondition=precondition, retry=retry)


class TakesAnyVersion(Liar):
    def put(self, key: str, data: Any, *, precondition: Any = None, retry: bool = True) -> Version:
        if isinstance(precondition, IfVersion):
            precondition = None
        return self.inner.put(key, data, precondition=precondition, retry=retry)


class LeavesUploads(Liar):
    def put_stream(self, key: str, buffers: Any, **how: Any) -> Version:
        self.uploads.append(key)
        version = self.inner.put_stream(key, buffers, **how)
        self.uploads.remove(key)
        return version


class ShowsHalfAStream(Liar):
    def put_stream(self, key: str, buffers: Any, **how: Any) -> Version:
        first = next(buffers)
        self.inner.put(key, first)
        return self.inner.put_stream(key, chain([first], buffers), **how)


class SendsUnequalParts(Liar):
    capabilities = Capabilities()

    def put_stream(self, key: str, buffers: Any, **how: Any) -> Version:
        data = [bytes(buffer) for buffer in buffers]
        self.parts[key] = [len(piece) for piece in data]
        return self.inner.put_stream(key, iter(data), **how)


class KeepsAllBuffers(Liar):
    def put_stream(self, key: str, buffers: Any, **how: Any) -> Version:
        return self.inner.put_stream(key, iter(list(buffers)), **how)


class ListsOnePage(Liar):
    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return islice(self.inner.list(prefix), 1000)


class CopiesWhateverIsThere(Liar):
    """Copies in another request than the one that looks at the state."""

    capabilities = Capabilities(multipart=False)

    def copy(self, key: str, sources: Any, *, moved: Any, **how: Any) -> Version:
        body = b"".join(
            self.inner.get(one.url.removeprefix(f"{self.inner.url}/"), max_size_bytes=1 << 30)[0][
                one.start : one.end
            ]
            for one in sources
        )
        moved(len(body))
        return self.inner.put(key, body)


LIES: dict[type[Liar], str] = {
    IgnoresPreconditions: "test_create_only_where_nothing_is",
    LetsTwoCreatorsWin: "test_of_64_creators_exactly_one_wins",
    TakesAnyVersion: "test_update_only_from_the_known_version",
    LeavesUploads: "test_an_error_in_the_iterator_comes_through_and_leaves_nothing",
    ShowsHalfAStream: "test_an_object_is_not_seen_before_its_stream_is_whole",
    SendsUnequalParts: "test_all_parts_but_the_last_have_the_same_size",
    KeepsAllBuffers: "test_buffers_are_let_go_while_the_stream_goes_on",
    ListsOnePage: "test_a_listing_longer_than_a_page_is_whole",
    CopiesWhateverIsThere: "test_nothing_is_copied_of_an_object_in_another_state",
}


def call(name: str, store: Any) -> None:
    """The test of the contract on this store, without pytest's fixtures."""
    test: Callable[..., None] = getattr(StoreContract(), name)
    door = store.door
    given: dict[str, object] = {
        "store": store,
        "capabilities": store.capabilities,
        "side_door": door,
        "measured": (store, door),
        "crowd": store,
    }
    if name == "test_a_listing_longer_than_a_page_is_whole":
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda key: store.put(key, b""), CROWD))
    code = test.__func__.__code__  # type: ignore[attr-defined]
    wanted = code.co_varnames[1 : code.co_argcount]
    test(**{argument: given[argument] for argument in wanted})


@pytest.mark.parametrize("liar", LIES, ids=lambda liar: liar.__name__)
def test_a_store_that_claims_what_it_does_not_keep_fails(liar):
    failures = (AssertionError, pytest.fail.Exception, DcpObjstoreError)
    with pytest.raises(failures):
        call(LIES[liar], liar())
    if liar is not SendsUnequalParts:  # what is below it has no parts
        call(LIES[liar], Liar())


# The table


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, frozenset[str]]:
    """Every endpoint that has a row, and what it declares to lack."""
    for module in sorted(Path(__file__).parents[1].glob("stores/test_*.py")):
        try:
            importlib.import_module(f"tests.stores.{module.stem}")
        except pytest.skip.Exception:
            continue  # an adapter whose library is not installed
    found: dict[str, frozenset[str]] = {}
    classes: list[type[Endpoint]] = [Endpoint]
    while classes:
        one = classes.pop()
        classes.extend(one.__subclasses__())
        if isinstance(one.endpoint, str):
            assert isinstance(one.lacks, frozenset)
            found[one.endpoint] = one.lacks
        elif one.endpoint is not None:
            for kind, endpoint in one.endpoint.items():
                lacks = one.lacks if isinstance(one.lacks, frozenset) else one.lacks[kind]
                if kind != "user":
                    found[endpoint] = lacks
    return found


def test_the_table_of_the_documentation_has_all_endpoints_as_they_are_declared(declared):
    rows = parse(STORES_PAGE.read_text())
    assert set(rows) == set(declared)
    for endpoint, lacks in declared.items():
        for one, cell in zip(GUARANTEES, rows[endpoint], strict=True):
            lacking = bool(lacks & set(one.needs))
            assert (cell == LACKING) == lacking, (endpoint, one.name)
            assert cell not in (FAILED, UNTRIED), (endpoint, one.name)


def test_every_capability_is_behind_a_guarantee():
    behind = {name for one in GUARANTEES for name in one.needs}
    assert behind == set(Capabilities.__dataclass_fields__)
