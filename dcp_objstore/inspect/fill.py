"""Read boxes of tensors and values into new memory, without a state dict to load into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_objstore.errors import CheckpointCorruptError, ConfigError, UnsupportedError
from dcp_objstore.inspect.selection import check_covered
from dcp_objstore.read.plan import plan_load
from dcp_objstore.read.session import run_load
from dcp_objstore.state.geometry import Box
from dcp_objstore.state.memory import is_quantized, narrow
from dcp_objstore.state.stored import known_dtype, unknown_dtype

if TYPE_CHECKING:
    import io

    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.observe.report import LoadReport
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint
    from dcp_objstore.stores import StoreSpec


# Of what shares memory: a cache line, and more than the size of any element.
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

    It goes back to the system when the last of them dies. Of many pieces below 32 MiB, the C
    library would keep some hundred MiB.

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


def allocate(
    stored: StoredCheckpoint,
    boxes: Mapping[str, Box],
    device: torch.device | str,
    *,
    in_one_piece: bool,
) -> dict[str, torch.Tensor]:
    """Allocate a tensor for each box, with the errors of `new_tensor`.

    Args:
        stored: the opened checkpoint.
        boxes: the box of each tensor.
        device: device to make the tensors on.
        in_one_piece: make them in one piece of CPU memory.

    Raises:
        UnsupportedError: the dtype of a tensor is unknown.
    """
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for key, box in boxes.items():
        saved = stored.items.tensor(key)
        assert saved is not None
        dtype = known_dtype(saved.dtype)
        if dtype is None:
            raise unknown_dtype(saved.dtype, key)
        wanted[key] = box.sizes, dtype
    if in_one_piece:
        return dict(zip(wanted, new_tensors(wanted.values()), strict=True))
    return {key: new_tensor(key, *one, device) for key, one in wanted.items()}


def fill(
    spec: StoreSpec,
    stored: StoredCheckpoint,
    tensors: Mapping[str, tuple[Box, torch.Tensor]],
    values: Iterable[str],
    *,
    verify: bool,
    trust_pickle: bool,
    channel: Channel,
) -> tuple[LoadReport, dict[str, Any]]:
    """Read boxes of tensors into memory of their size, and values, in one parallel read.

    Args:
        spec: the store and settings to read with.
        stored: the opened checkpoint.
        tensors: for each key, the box to read and the tensor to fill.
        values: keys of the values to read.
        verify: whether to check the bytes against their digests.
        trust_pickle: whether to unpickle values that `torch.load(weights_only=True)` refuses.
        channel: channel for the events of the read.

    Returns:
        The report, and the values by key.

    Raises:
        CheckpointCorruptError: objects are missing or differ from what was saved, or the chunks of
            a tensor do not cover its box.
        DcpObjstoreError: any other error of `run_load`.
    """
    items = read_items(stored, {key: box for key, (box, _) in tensors.items()}, values)
    planner = _Filling({key: tensor for key, (_, tensor) in tensors.items()})
    planned = plan_load(stored, items, verify=verify)
    report = run_load(
        spec.open(),
        planned,
        planner,
        spec.config,
        trust_pickle=trust_pickle,
        channel=channel,
    )
    return report, planner.values


def read_items(
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
        found = create_read_items_for_chunk_list(key, saved, [chunk])
        check_covered(key, box, found)
        items += found
    for key in values:
        place = MetadataIndex(key)
        nothing = torch.Size([0])
        items.append(ReadItem(LoadItemType.BYTE_IO, place, nothing, place, nothing, nothing))
    return items


class _Filling(LoadPlanner):
    """A planner that gives out parts of existing tensors, and collects values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.values: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = Box(tuple(read_item.dest_offsets), tuple(read_item.lengths))
        return narrow(self._tensors[read_item.dest_index.fqn], box)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            # The value was test-loaded with `weights_only=True`, or the user trusts it.
            self.values[key] = torch.load(value, map_location="cpu", weights_only=False)
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"the value needs a class that is not installed: {error}", key=key
            ) from error
        except Exception as error:
            raise CheckpointCorruptError(
                f"the value cannot be loaded: {type(error).__name__}: {error}", key=key
            ) from error

    def _no_plan(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("this planner makes no plans")

    set_up_planner = create_local_plan = create_global_plan = finish_plan = _no_plan
