"""What others wrote and replace in place is read in one state, or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.convert import copied_files
from dcp_objstore.convert.sources import TorchSource
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    LostRaceError,
    PermissionDeniedError,
    PreconditionFailedError,
)
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.stores import ObjectStore, StoreSpec, open_store
from dcp_objstore.stores.protocol import Capabilities, ObjectMeta, Version
from tests.support.wrapped_stores import Request, Through, WatchedRange, WatchedStore

KEYS = ("a", "b", "c", "d")
ELEMENTS = 800_000  # a request each
ONE_BY_ONE = dos.TransferConfig(request_size_bytes=4 * 1024 * 1024, download_concurrency=1)
Editions = tuple[dict[str, bytes], dict[str, bytes]]


def state(value: float) -> dict[str, torch.Tensor]:
    return {key: torch.full((ELEMENTS,), value) for key in KEYS}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Editions:
    """The objects of two editions of a checkpoint of stock torch: two of data and `.metadata`."""
    made = []
    for value in (1.0, 2.0):
        folder = tmp_path_factory.mktemp("stock")
        writer = dcp.FileSystemWriter(folder, thread_count=2)
        dcp.save(state(value), storage_writer=writer, no_dist=True)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert len(made[-1]) == 3
    return made[0], made[1]


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(6)}/source"


def write(url: str, objects: dict[str, bytes]) -> None:
    store = open_store(url)
    for key, body in objects.items():
        store.put(key, body)


class Replacing(WatchedStore):
    """Has objects replaced before a request."""

    def __init__(self, inner: ObjectStore, before: Callable[[Request], None]) -> None:
        super().__init__(inner)
        self._before = before

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        self._before(request)
        yield


def replaced_at(through: Through, verb: str, nth: int, replace: Callable[[], None]) -> None:
    """Have `replace` called before the n-th request (from 0) of a kind, of all stores together."""
    seen: list[Request] = []

    def before(request: Request) -> None:
        if request.verb == verb:
            seen.append(request)
            if len(seen) == nth + 1:
                replace()

    through(lambda store: Replacing(store, before))


def load(url: str, to: dict[str, torch.Tensor]) -> None:
    dos.load(to, url, config=ONE_BY_ONE, progress=False)


def model_of_two_files(value: float) -> dict[str, bytes]:
    first, second = ({key: state(value)[key] for key in keys} for keys in (KEYS[:2], KEYS[2:]))
    files = {"1.safetensors": first, "2.safetensors": second}
    weight_map = {key: name for name, part in files.items() for key in part}
    index = json.dumps({"weight_map": weight_map}).encode()
    bodies = {name: safetensors.torch.save(part) for name, part in files.items()}
    return bodies | {"model.safetensors.index.json": index}


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


def safetensors_objects(value: float) -> dict[str, bytes]:
    return {"m.safetensors": safetensors.torch.save(state(value))}


def torch_objects(folder: Path, value: float) -> dict[str, bytes]:
    torch.save(state(value), folder / "m.pt")
    return {"m.pt": (folder / "m.pt").read_bytes()}


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "stock"])
def test_a_source_that_is_replaced_is_not_imported(
    through, monkeypatch, stock, url, tmp_path, kind, nth
):
    monkeypatch.setattr(copied_files, "_PIECE_BYTES", 1024 * 1024)
    monkeypatch.setattr(copied_files, "_CONCURRENT_READS", 1)
    old, new = {
        "safetensors": (safetensors_objects(1.0), safetensors_objects(2.0)),
        "pt": (torch_objects(tmp_path, 1.0), torch_objects(tmp_path, 2.0)),
        "stock": stock,
    }[kind]
    write(url, old)
    replaced_at(through, "open_range", nth, lambda: write(url, new))
    source = url if kind == "stock" else f"{url}/{min(old)}"
    target = f"{url}/imported"
    with pytest.raises(LostRaceError):
        dos.import_checkpoint(source, target, config=ONE_BY_ONE, progress=False)
    assert [meta.key for meta in open_store(target).list()] == []


def test_files_of_one_model_are_imported_in_one_state(through, url):
    """The last one is replaced before any of it is read."""
    old, new = (model_of_two_files(value) for value in (1.0, 2.0))
    write(url, old)
    last = {name: new[name] for name in ["2.safetensors"]}
    replaced_at(through, "open_range", 0, lambda: write(url, last))
    with pytest.raises(CheckpointGoneError, match="replaced"):
        dos.import_checkpoint(url, f"{url}/imported", progress=False)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_torch_file_that_is_rewritten_while_it_is_mapped_is_not_imported(
    monkeypatch, tmp_path, nth, in_place
):
    """Renamed over it, the old file would still be read, but which one is meant is not known."""
    torch_objects(tmp_path, 1.0)
    (new := tmp_path / "new").mkdir()
    torch_objects(new, 2.0)
    source, read, reads = tmp_path / "m.pt", TorchSource.read, itertools.count(1)

    def read_and_rewrite(self: TorchSource, slabs: list[object]) -> list[torch.Tensor]:
        if next(reads) == nth:
            if in_place:
                with source.open("r+b") as file:
                    file.write((new / "m.pt").read_bytes())
            else:
                (new / "m.pt").replace(source)
        return read(self, slabs)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchSource, "read", read_and_rewrite)
    monkeypatch.setattr("dcp_objstore.inspect.slabs.WINDOW_BYTES", 2 * 1024 * 1024)
    with pytest.raises(PreconditionFailedError, match="replaced"):
        dos.import_checkpoint(source, (tmp_path / "to").as_uri(), progress=False)
    assert not (tmp_path / "to" / "_COMMIT").exists()


def test_the_state_that_was_opened_travels_to_the_other_ranks(stock, url):
    write(url, stock[0])
    opened = open_stored_checkpoint(StoreSpec(url))
    again = pickle.loads(pickle.dumps(opened))
    assert again.versions == opened.versions
    assert set(opened.versions or ()) == {key for key in stock[0] if key != ".metadata"}
