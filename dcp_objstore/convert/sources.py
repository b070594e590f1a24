"""Sources of a conversion: tensors in slabs, and values, from a checkpoint or from files."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_objstore.errors import UnsupportedError
from dcp_objstore.inspect.checkpoint import Checkpoint, TensorEntry
from dcp_objstore.inspect.fill import new_tensor
from dcp_objstore.inspect.selection import Patterns
from dcp_objstore.inspect.slabs import Slab, read_ahead
from dcp_objstore.read.geometry import narrow
from dcp_objstore.state.record import is_whole
from dcp_objstore.state.state_dict import literal_name
from dcp_objstore.write.planner import AgreeingSavePlanner

# The place of each flattened key in the nested dict, as DCP's planners have it.
Paths: TypeAlias = Mapping[str, tuple[str | int, ...]]


class TensorInfo(NamedTuple):
    """A tensor of a source.

    Attributes:
        shape: shape of the whole tensor.
        dtype: its dtype.
        starts: first rows of its stored chunks, ascending.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    starts: tuple[int, ...] = ()


class Source(Protocol):
    """A source of a conversion.

    Attributes:
        keys: all keys, in their order.
        tensors: the tensors by key.
        values: everything else by key, in memory.
        paths: the place of each key in the nested dict; a key without one stands at the top.
    """

    keys: Sequence[str]
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, Any]
    paths: Paths

    def read(self, slabs: Sequence[Slab]) -> list[torch.Tensor]:
        """Read slabs of different tensors."""
        ...

    def stream(
        self, slabs: Sequence[Slab], check: Callable[[], object]
    ) -> Generator[torch.Tensor, None, None]:
        """Yield the tensor of each slab, in their order, while the next ones are read.

        Args:
            slabs: the slabs to read.
            check: a function that is called from time to time while this waits; what it raises ends
                the wait.
        """
        return read_ahead(slabs, self.read, check)


class CheckpointSource(Source):
    """A checkpoint, by this or another library, or safetensors.

    Args:
        checkpoint: the opened checkpoint.
        keys: the keys to convert, as in `Checkpoint.matching`.
        values: whether to read the values, too.

    Raises:
        UnsupportedError: a tensor cannot be converted.
        DcpObjstoreError: any other error of `Checkpoint.read`, for the values.
    """

    def __init__(
        self, checkpoint: Checkpoint, keys: Patterns = None, *, values: bool = True
    ) -> None:
        self._checkpoint = checkpoint
        tensors: dict[str, TensorInfo] = {}
        self.keys = checkpoint.matching(keys)
        checkpoint._check_whole(self.keys)  # refuses those of which elements are missing
        for key in self.keys:
            entry = checkpoint[key]
            if not isinstance(entry, TensorEntry):
                continue
            if entry.dtype is None:
                raise UnsupportedError("this version does not know the dtype", key=key)
            new_tensor(key, (), entry.dtype, "meta")  # raises if no tensor of the dtype can be made
            starts = tuple(sorted({offsets[0] for offsets, _ in entry.chunks if offsets}))
            tensors[key] = TensorInfo(entry.shape, entry.dtype, starts)
        self.tensors = tensors
        value_keys = [key for key in self.keys if values and key not in self.tensors]
        self.values = checkpoint.read(value_keys, progress=False) if value_keys else {}
        self.paths = checkpoint.paths

    def read(self, slabs: Sequence[Slab]) -> list[torch.Tensor]:
        """Read slabs with one parallel read, and verify their blocks."""
        return self._checkpoint._read_slabs(slabs)


class TorchSource(Source):
    """A state dict in memory, or mapped from a `torch.save` file.

    Args:
        url: the URL of the file, for errors.
        state: the state dict.
        check: raises if somebody has changed the mapped file. Default: nobody can.

    Raises:
        StateMismatchError: two of its keys get the same name.
        RankFailedError: it cannot be flattened: it contains itself, for example.
    """

    def __init__(
        self, url: str, state: dict[str, Any], check: Callable[[], object] | None = None
    ) -> None:
        self._check_unchanged = check
        with suppress(RecursionError):  # it contains itself, which the planner says better
            state = _with_names(state)
        # The planner of a save flattens the dict, and so gives each key its name and its path.
        planner = AgreeingSavePlanner(url, state, ranks=1)
        planner.set_up_planner(state, StorageMeta(), is_coordinator=True)
        flat = planner.state_dict
        self.keys = list(flat)
        self._tensors = {
            key: value.detach() for key, value in flat.items() if isinstance(value, torch.Tensor)
        }
        self.tensors = {
            key: TensorInfo(tuple(tensor.shape), tensor.dtype)
            for key, tensor in self._tensors.items()
        }
        self.values = {key: value for key, value in flat.items() if key not in self._tensors}
        self.paths = planner.mappings

    def read(self, slabs: Sequence[Slab]) -> list[torch.Tensor]:
        """Return views of the tensors in memory; copies if the file may change.

        The file is checked after the copies were made: if it is unchanged then, no later change can
        reach them.
        """
        views = [narrow(self._tensors[slab.key], slab.box) for slab in slabs]
        if self._check_unchanged is None:
            return views
        copies = [view.clone() for view in views]
        self._check_unchanged()
        return copies


def _with_names(value: Any) -> Any:
    """Return a state dict with the names of its keys, from which a read makes the keys again."""
    if isinstance(value, list) and not is_whole(value):
        return [_with_names(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    named = {
        key if type(key) is str else literal_name(key): _with_names(item)
        for key, item in value.items()
    }
    return named if len(named) == len(value) else value  # two have one name: the planner refuses it
