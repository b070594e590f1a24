"""Read boxes of tensors and values into new memory, without a state dict to load into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_objstore.compat.values import unpickled
from dcp_objstore.errors import CheckpointGoneError, ConfigError, UnsupportedError
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.report import LoadReport
from dcp_objstore.read.geometry import Box, check_filled, narrow
from dcp_objstore.read.item_read import Destination
from dcp_objstore.read.plan import plan_load
from dcp_objstore.read.session import report_loaded, run_load
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, name_next
from dcp_objstore.read.tensor_read import is_value
from dcp_objstore.state.memory import is_quantized
from dcp_objstore.state.stored import known_dtype, unknown_dtype
from dcp_objstore.stores import StoreSpec

# The alignment of what shares memory: a cache line, and more than the size of any element.
_ALIGNMENT_BYTES = 64


def new_tensor(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Allocate a tensor to read `key` into.

    Args:
        key: key of the tensor, for errors.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        device: device to make the tensor on.

    Raises:
        ConfigError: torch or this host does not have the device.
        UnsupportedError: the tensor is quantized, or the host does not have enough memory.
    """
    if is_quantized(dtype):
        raise UnsupportedError(
            "a quantized tensor can only be loaded into one with the same scale and zero point:"
            " call dcp_objstore.load with a state that has one",
            key=key,
        )
    try:
        place = torch.device(device)
        if place.type != "cpu":
            # This starts the driver. Without a driver, torch raises errors of many types, such as
            # AssertionError. A lack of memory is reported below, under its own type.
            torch.empty(0, device=place)
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        text = str(error).partition("\n")[0]
        raise ConfigError(
            f"this torch or host does not have the device {device!r}: {text}"
        ) from error
    try:
        return torch.empty(shape, dtype=dtype, device=place)
    except (RuntimeError, MemoryError) as error:
        if place.type != "cpu":
            raise  # torch.OutOfMemoryError says what uses the memory of a GPU
        text = f"no memory for a tensor of shape {shape} and {dtype}, as the checkpoint has it"
        raise UnsupportedError(text, key=key) from error


def new_tensors(
    wanted: Iterable[tuple[Sequence[int], torch.dtype]],
) -> list[torch.Tensor]:
    """Allocate CPU tensors in one piece of memory.

    This memory goes back to the system when the last of the tensors dies. If each tensor had its
    own piece, of less than 32 MiB, the C library would keep some hundred MiB of them.

    Args:
        wanted: shape and dtype of each.
    """
    places: list[tuple[int, int, Sequence[int], torch.dtype]] = []
    end = 0
    for shape, dtype in wanted:
        begin = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        end = begin + math.prod(shape) * dtype.itemsize
        places.append((begin, end, shape, dtype))
    try:
        memory = torch.empty(end, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        text = f"no memory for {end} bytes of tensors, as the checkpoint has them"
        raise UnsupportedError(text) from error
    return [memory[begin:end].view(dtype).view(shape) for begin, end, shape, dtype in places]


def read_new(
    spec: StoreSpec,
    stored: StoredCheckpoint,
    boxes: Mapping[str, Box],
    values: Iterable[str],
    *,
    device: torch.device | str,
    in_one_piece: bool,
    verify: bool,
    trust_pickle: bool,
    channel: Channel,
) -> tuple[LoadReport, dict[str, Any]]:
    """Read boxes of tensors into new memory, and values, in one parallel read.

    Args:
        spec: the store and settings to read with.
        stored: the opened checkpoint.
        boxes: the box to read of each tensor.
        values: keys of the values to read.
        device: device to make the tensors on.
        in_one_piece: make the tensors in one piece of CPU memory.
        verify: whether to check the bytes against their digests.
        trust_pickle: whether to unpickle values that `torch.load(weights_only=True)` refuses.
        channel: channel for the events of the read.

    Returns:
        The report, and the tensors and values by key.

    Raises:
        UnsupportedError: the dtype of a tensor is unknown, or there is no memory for it.
        CheckpointCorruptError: objects are missing or differ from what was saved, or the chunks of
            a tensor do not cover its box.
        DcpObjstoreError: any other error of `new_tensor` or `run_load`.
    """
    dtypes = {key: _dtype_of(stored, key) for key in boxes}
    content: dict[str, Any]
    if in_one_piece:
        shapes = [(box.sizes, dtypes[key]) for key, box in boxes.items()]
        content = dict(zip(boxes, new_tensors(shapes), strict=True))
    else:
        content = {
            key: new_tensor(key, box.sizes, dtypes[key], device) for key, box in boxes.items()
        }

    def destination_of(item: ReadItem) -> Destination:
        key = item.dest_index.fqn
        if is_value(item):
            # `run_load` passes on only values that are safe to unpickle, or that the user trusts.
            return lambda body: content.update({key: unpickled(body, weights_only=False)})
        box = Box(tuple(item.dest_offsets), tuple(item.lengths))
        return narrow(content[key], box)

    items = _read_items(stored, boxes, values)
    try:
        report = run_load(
            stored.open_store(spec),
            plan_load(stored, items, verify=verify),
            list(map(destination_of, items)),
            spec.config,
            trust_pickle=trust_pickle,
            channel=channel,
        )
    except CheckpointGoneError as error:
        name_next(error, spec)
        raise
    report_loaded(channel, report)
    return report, content


def _dtype_of(stored: StoredCheckpoint, key: str) -> torch.dtype:
    saved = stored.items.tensor(key)
    assert saved is not None
    dtype = known_dtype(saved.dtype)
    if dtype is None:
        raise unknown_dtype(saved.dtype, key)
    return dtype


def _read_items(
    stored: StoredCheckpoint, boxes: Mapping[str, Box], values: Iterable[str]
) -> list[ReadItem]:
    """Return the items of DCP's plan that read boxes of tensors, and values.

    Raises:
        CheckpointCorruptError: the chunks of a tensor do not cover its box.
    """
    items: list[ReadItem] = []
    for key, box in boxes.items():
        saved = stored.metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        chunk_items = create_read_items_for_chunk_list(key, saved, [chunk])
        offsets = [item.dest_offsets for item in chunk_items]
        check_filled(key, box.sizes, offsets, [item.lengths for item in chunk_items])
        items += chunk_items
    for key in values:
        place = MetadataIndex(key)
        nothing = torch.Size([0])
        items.append(ReadItem(LoadItemType.BYTE_IO, place, nothing, place, nothing, nothing))
    return items
