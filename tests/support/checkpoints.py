"""Small sharded checkpoints for the failure tests, and what must hold in the bucket afterwards."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

import dcp_objstore as dos
from dcp_objstore.stores import open_store
from tests.support.servers import Bucket
from tests.support.states import SHAPES, own_part, same_bits, seeded, tensor_state

Options = Mapping[str, object]


def memory_url() -> str:
    """Of a step that nobody has saved yet."""
    return f"memory://{secrets.token_hex(6)}/step-1"


def saved_by(kind: str, folder: Path, state: Mapping[str, Any]) -> str:
    """The URL of a checkpoint that was written by "ours", "stock" torch or "safetensors"."""
    if kind == "ours":
        dos.save(dict(state), folder.as_uri(), progress=False)
    elif kind == "stock":
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    else:
        folder.mkdir(exist_ok=True)
        safetensors.torch.save_file(dict(state), folder / "model.safetensors")
    return folder.as_uri()


def put_weights(url: str, **files: Mapping[str, torch.Tensor] | bytes) -> None:
    """Put files of safetensors, or bytes; `_` in a name stands for a dot before its ending."""
    for name, content in files.items():
        body = content if isinstance(content, bytes) else safetensors.torch.save(dict(content))
        open_store(url).put(f"{name}.safetensors", body)


@contextmanager
def without_collector() -> Iterator[None]:
    """What is dropped here goes at once, or it is kept in a circle of references."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class HookPlanner(DefaultSavePlanner):
    """Calls `hook(n)` before it gives out the n-th item (from 0) that is to be written."""

    def __init__(self, hook: Callable[[int], None], **settings: Any) -> None:
        super().__init__(**settings)
        self.hook = hook
        self.given = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.hook(self.given)
        self.given += 1
        return super().resolve_data(write_item)


def edition(name: str, layout: str = "plain") -> dict[str, torch.Tensor]:
    """The tensors of one edition of a checkpoint; two editions differ in every tensor."""
    state = tensor_state(layout)
    for key, value in state.items():
        full = seeded(f"{name}/{key}", value.shape)
        if layout == "plain":
            value.copy_(full)
        else:
            value.to_local().copy_(own_part(full, value))  # type: ignore[attr-defined]
    return state


def edition_in(url: str, options: Options, names: list[str]) -> str:
    """Which edition is whole at this URL: loads without a group and compares every tensor."""
    state = tensor_state("plain")
    dcp.load(dict(state), storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    found = [
        name
        for name in names
        if all(
            same_bits(value, seeded(f"{name}/{key}", SHAPES[key])) for key, value in state.items()
        )
    ]
    assert len(found) == 1, f"a mixture, or none, of {names}"
    return found[0]


def save_edition(
    rank: int, world_size: int, name: str, url: str, options: Options, overwrite: bool = False
) -> None:
    writer = dos.ObjectStoreWriter(url, storage_options=options, overwrite=overwrite)
    dcp.save(dict(edition(name, "shard0")), storage_writer=writer)


def save_edition_here(name: str, url: str, options: Options, **settings: Any) -> None:
    """Without a process group, in this process."""
    assert not dist.is_initialized()
    writer = dos.ObjectStoreWriter(url, storage_options=options, **settings)
    dcp.save(dict(edition(name)), storage_writer=writer, no_dist=True)


def load_here(url: str, options: Options) -> None:
    reader = dos.ObjectStoreReader(url, storage_options=options)
    dcp.load(dict(tensor_state("plain")), storage_reader=reader)


def causes(error: BaseException | None) -> list[BaseException]:
    """The ranks' own errors in what DCP raised."""
    assert isinstance(error, CheckpointException), repr(error)
    return [failure[0] for _, failure in sorted(error.failures.items())]


def cause(error: BaseException | None) -> BaseException:
    """The one kind of error that DCP reports; it may have come from several ranks."""
    found = causes(error)
    assert len({type(one) for one in found}) == 1, found
    return found[0]


def assert_nothing_visible(bucket: Bucket, name: str, *, uploads: bool = False) -> None:
    """No marker, nothing for stock readers, and no upload left open."""
    keys = bucket.keys(name)
    assert "_COMMIT" not in keys
    assert ".metadata" not in keys
    if not uploads:
        assert bucket.uploads() == []


def numbers(run: dos.CheckpointManager) -> tuple[int | None, ...]:
    """The steps that a manager lists."""
    return tuple(listed.step for listed in run.steps())
