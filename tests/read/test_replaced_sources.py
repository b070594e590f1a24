"""What others wrote and replace in place is read in one state, or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    PermissionDeniedError,
)
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.stores import ObjectStore, StoreSpec, open_store
from dcp_objstore.stores.protocol import Capabilities, ObjectMeta, Version
from tests.support.odd_servers import BEHAVIOURS, Behaviour, OddServer
from tests.support.replaced import (
    KEYS,
    ONE_BY_ONE,
    Replacing,
    model_of_two_files,
    replaced_at,
    safetensors_objects,
    state,
    stock_objects,
    write,
)
from tests.support.scripted import Answer
from tests.support.wrapped_stores import Request, WatchedRange, WatchedStore

Editions = tuple[dict[str, bytes], dict[str, bytes]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Editions:
    """The objects of two editions of a checkpoint of stock torch."""
    first, second = (stock_objects(tmp_path_factory.mktemp("stock"), value) for value in (1.0, 2.0))
    return first, second


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(6)}/source"


def load(url: str, to: dict[str, torch.Tensor]) -> None:
    dos.load(to, url, config=ONE_BY_ONE, progress=False)


@pytest.mark.parametrize("nth", range(6))
def test_safetensors_that_are_replaced_are_no_mixture(through, url, nth):
    """Also while the headers are read, one of each of two files."""
    old, new = (model_of_two_files(value) for value in (1.0, 2.0))
    write(url, old)
    replaced_at(through, "open_range", nth, lambda: write(url, new))
    with pytest.raises(CheckpointGoneError, match="load it again"):
        load(url, state(0.0))


@pytest.mark.parametrize("what", ["all", "data", "one object"])
@pytest.mark.parametrize("nth", range(4))
def test_a_checkpoint_of_another_library_that_is_replaced_is_no_mixture(
    through, stock, url, nth, what
):
    """Of one object: the one that is read last, also before its first byte is."""
    write(url, stock[0])
    last = open_stored_checkpoint(StoreSpec(url)).object_keys[-1]
    chosen = {
        "all": stock[1].keys(),
        "data": stock[1].keys() - {".metadata"},
        "one object": {last},
    }[what]
    new = {key: stock[1][key] for key in chosen}
    replaced_at(through, "open_range", nth, lambda: write(url, new))
    with pytest.raises(CheckpointGoneError, match="load it again"):
        load(url, state(0.0))


@pytest.mark.parametrize("nth", [0, 3, None])
def test_a_state_dict_is_read_in_one_state(through, stock, url, nth):
    write(url, stock[0])
    if nth is None:
        found = dos.read_state_dict(url, config=ONE_BY_ONE, progress=False)
        assert all(torch.equal(found[key], value) for key, value in state(1.0).items())
        return
    replaced_at(through, "open_range", nth, lambda: write(url, stock[1]))
    with pytest.raises(CheckpointGoneError, match="load it again"):
        dos.read_state_dict(url, config=ONE_BY_ONE, progress=False)


def test_an_opened_checkpoint_stays_in_the_state_in_which_it_was_opened(stock, url):
    write(url, stock[0])
    opened = dos.open(url)
    write(url, stock[1])
    for key in KEYS:
        with pytest.raises(CheckpointGoneError):
            opened.read(key, progress=False)
    assert dos.open(url)["a"][:2].tolist() == [2.0, 2.0]


class ReplacedBetween(WatchedStore):
    """Has objects replaced after `first`, of the two requests that are sent at the same time."""

    def __init__(self, inner: ObjectStore, first: str, replace: Callable[[], None]) -> None:
        super().__init__(inner)
        self._first, self._replace, self._replaced = first, replace, threading.Event()

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        is_one = request.verb == "list" or (request.verb, request.key) == ("get", ".metadata")
        if is_one and request.verb != self._first:
            assert self._replaced.wait(30)
        yield
        if is_one and request.verb == self._first:
            self._replace()
            self._replaced.set()


@pytest.mark.parametrize("first", ["list", "get"])
def test_one_that_is_replaced_while_it_is_opened_is_not_opened(through, stock, url, first):
    write(url, stock[0])
    through(lambda store: ReplacedBetween(store, first, lambda: write(url, stock[1])))
    with pytest.raises(CheckpointGoneError, match="opened"):
        dos.open(url)


def test_one_of_ours_that_is_deleted_while_it_is_opened_names_the_next_step(through, url):
    with dos.CheckpointManager(url, sweep=False) as run:
        for step in (1, 2):
            run.save(step, {"step": step})
    # The marker is read first, then the index.
    replaced_at(through, "get", 1, lambda: dos.delete(f"{url}/step-1"))
    with pytest.raises(CheckpointGoneError, match=r"deleted.*next step of the run is step-2"):
        open_stored_checkpoint(StoreSpec(f"{url}/step-1"))


class Damaging(WatchedStore):
    """Damages the first answers for an object of this name."""

    def __init__(self, inner: ObjectStore, name: str, answers: Iterator[None]) -> None:
        super().__init__(inner)
        self._name, self._answers = name, answers

    def get(self, key: str, *, max_size_bytes: int | None = None) -> tuple[bytes, ObjectMeta]:
        body, meta = super().get(key, max_size_bytes=max_size_bytes)
        return (body[:-3] if self._is_damaged(key) else body), meta

    def open_range(self, key: str, start: int, end: int) -> WatchedRange:
        shift = self._is_damaged(key)
        return super().open_range(key, start + shift, end + shift)

    def _is_damaged(self, key: str) -> bool:
        return key.startswith(self._name) and next(self._answers, self) is None


@pytest.mark.parametrize("what", ["_COMMIT", "index.", ".metadata", "folder", "file"])
def test_what_comes_damaged_is_asked_for_once_more(through, stock, url, what):
    """It may have been the answer, and not the object."""
    name, place = what, url
    if what in ("folder", "file"):
        write(url, objects := safetensors_objects(1.0))
        (name,) = objects
        place = f"{url}/{name}" if what == "file" else url
    elif what == ".metadata":
        write(url, stock[0])
    else:
        dos.save(state(1.0), url, progress=False)
    answers: list[Iterator[None]] = [iter([None])]
    through(lambda store: Damaging(store, name, answers[-1]))
    assert open_stored_checkpoint(StoreSpec(place)).items.tensor("a") is not None
    answers.append(iter([None] * 2))
    with pytest.raises(CheckpointCorruptError):
        open_stored_checkpoint(StoreSpec(place))
    assert list(answers[-1]) == []


@pytest.mark.parametrize("nth", [1, 3])
def test_without_the_right_to_list_the_first_answer_counts(through, stock, url, nth):
    write(url, stock[0])
    store, asked = open_store(url), []

    def before(request: Request) -> None:
        if request.verb == "list":
            raise PermissionDeniedError("no listing")
        asked.extend([request] * (request.verb == "open_range"))
        if request.verb == "open_range" and len(asked) == nth + 1:
            store.put(request.key, stock[1][request.key])

    through(lambda store: Replacing(store, before))
    with pytest.raises(CheckpointGoneError):
        dos.load(state(0.0), url, config=ONE_BY_ONE, progress=False)


class Untold(WatchedStore):
    """Its listing tells of other states than its answers, or nothing can be held to one."""

    def __init__(self, inner: ObjectStore, lacks: str) -> None:
        super().__init__(inner)
        self._capabilities = dataclasses.replace(inner.capabilities, **{lacks: False})

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        for meta in super().list(prefix):
            yield dataclasses.replace(meta, version=Version(e_tag="another"))


@pytest.mark.parametrize("lacks", ["listed_versions", "conditional_update"])
@pytest.mark.parametrize("kind", ["stock", "safetensors"])
def test_where_a_listing_does_not_tell_states_nothing_is_held_to_them(
    through, stock, url, kind, lacks
):
    write(url, stock[0] if kind == "stock" else safetensors_objects(1.0))
    through(lambda store: Untold(store, lacks))
    opened = open_stored_checkpoint(StoreSpec(url))
    assert Version(e_tag="another") not in (opened.versions or {}).values()
    loaded = dos.read_state_dict(url, progress=False)
    assert all(bool(value.eq(1).all()) for value in loaded.values())


def test_ranks_that_open_different_states_are_told_apart(stock, url):
    """Each rank opens the checkpoint itself, and the coordinator compares."""
    write(url, stock[0])
    spec = StoreSpec(url)
    first, again = (open_stored_checkpoint(spec).fingerprint for _ in range(2))
    assert first == again is not None
    changed = []
    for key, body in stock[1].items():  # also where `.metadata` is the old one
        open_store(url).put(key, body)
        changed.append(open_stored_checkpoint(spec).fingerprint)
    assert len({first, *changed}) == 4


def test_the_state_that_was_opened_travels_to_the_other_ranks(stock, url):
    write(url, stock[0])
    opened = open_stored_checkpoint(StoreSpec(url))
    again = pickle.loads(pickle.dumps(opened))
    assert again.versions == opened.versions
    assert set(opened.versions or ()) == {key for key in stock[0] if key != ".metadata"}


# --- servers whose listings and answers have different ETags --------------------------------------

WEIGHT = torch.arange(100_000, dtype=torch.int32)
KEY = "m/model.safetensors"


def weights(behaviour: Behaviour) -> OddServer:
    """An odd server with a folder of weights."""
    server = OddServer(behaviour)
    server.objects[KEY] = save({"w": WEIGHT})
    return server


def loads(server: OddServer) -> bool:
    """Load the weights; return whether they are right."""
    state = dos.read_state_dict("s3://bucket/m", storage_options=server.options())
    return torch.equal(state["w"], WEIGHT)


@pytest.mark.parametrize("behaviour", ["weak ETags", "a CDN's ETags"])
def test_weights_load_where_answers_have_other_etags_than_listings(behaviour):
    with weights(BEHAVIOURS[behaviour]) as server:
        assert loads(server)


def test_weights_that_were_replaced_since_they_were_listed_are_not_loaded():
    """Only a second listing that is as the first one says that nothing was replaced."""
    new = save({"w": WEIGHT + 1})
    tag = hashlib.md5(new).hexdigest()
    with weights(Behaviour(e_tag=lambda _: f'"{tag}"')) as server:
        listing = server._listing

        def changing(query: dict[str, str]) -> Answer:
            if server.listings:
                server.objects[KEY] = new
            return listing(query)

        server._listing = changing  # type: ignore[method-assign]
        with pytest.raises(dos.errors.CheckpointGoneError):
            loads(server)
