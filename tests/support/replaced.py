"""Sources that are replaced while they are read: two editions of each kind, and when it happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.stores import ObjectStore, open_store
from tests.support.wrapped_stores import Request, Through, WatchedStore

KEYS = ("a", "b", "c", "d")
ELEMENTS = 800_000  # a request each
ONE_BY_ONE = dos.TransferConfig(request_size_bytes=4 * 1024 * 1024, download_concurrency=1)


def state(value: float) -> dict[str, torch.Tensor]:
    """Return tensors that all have this value."""
    return {key: torch.full((ELEMENTS,), value) for key in KEYS}


def stock_objects(folder: Path, value: float) -> dict[str, bytes]:
    """Return the objects of a checkpoint of stock torch: two of data and `.metadata`."""
    writer = dcp.FileSystemWriter(folder, thread_count=2)
    dcp.save(state(value), storage_writer=writer, no_dist=True)
    objects = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(objects) == 3
    return objects


def safetensors_objects(value: float) -> dict[str, bytes]:
    """Return a single file of safetensors."""
    return {"m.safetensors": safetensors.torch.save(state(value))}


def model_of_two_files(value: float) -> dict[str, bytes]:
    """Return two files of safetensors with an index."""
    first, second = ({key: state(value)[key] for key in keys} for keys in (KEYS[:2], KEYS[2:]))
    files = {"1.safetensors": first, "2.safetensors": second}
    weight_map = {key: name for name, part in files.items() for key in part}
    index = json.dumps({"weight_map": weight_map}).encode()
    bodies = {name: safetensors.torch.save(part) for name, part in files.items()}
    return bodies | {"model.safetensors.index.json": index}


def write(url: str, objects: dict[str, bytes]) -> None:
    """Put objects below a URL."""
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
