"""What a checkpoint has below a place of the state, and what a load makes of it.

A load of a value that restores itself (an optimizer, a Stateful object) is decided by what was
saved: each stored entry gets a destination, whether the value has such an entry already or not.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import LiteralKey
from dcp_objstore.state.per_rank import PerRank, is_stateful
from dcp_objstore.state.trainable import Trainable

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

# A path in the state: keys of dicts as the user has them, and numbers in lists.
Path: TypeAlias = tuple[Any, ...]

# The same path with keys as str, as DCP has them.
Place: TypeAlias = tuple[str, ...]

_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


class Record:
    """The keys of a checkpoint, by place.

    Args:
        metadata: what DCP's planners get.
        paths: the place of each key in the nested dict that was saved, if it is known.
    """

    def __init__(self, metadata: Metadata, paths: Mapping[str, Path] | None) -> None:
        self.entries = metadata.state_dict_metadata
        self._paths = paths or {}
        self._sorted = sorted(self.entries)
        self._first_names = {key.partition(".")[0] for key in self._sorted}

    def below(self, place: Place) -> dict[str, Path]:
        """Return what was saved below a place: the rest of each key, with its path from there."""
        prefix = ".".join((*place, ""))
        found = {}
        for number in range(bisect_left(self._sorted, prefix), len(self._sorted)):
            key = self._sorted[number]
            if not key.startswith(prefix):
                break
            found[key[len(prefix) :]] = _below(self._paths.get(key, (key,)), len(prefix))
        return found

    def names(self, name: str, place: Place = ()) -> bool:
        """Whether a module at this place, or at any first name, has a parameter of this name."""
        if place:
            return ".".join((*place, name)) in self.entries
        return any(f"{first}.{name}" in self.entries for first in self._first_names)

    def destination(
        self,
        key: str,
        current: Any,
        like: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return what to load an entry into: the current tensor, or one as it was saved.

        Args:
            key: the key of the entry.
            current: what the value has there, if that is a tensor.
            like: a tensor whose device a new one gets. One of the same shape gets its order of
                dimensions in memory, too, its mesh and its placements.

        Returns:
            A tensor, or None for a plain value, which DCP puts in its place.
        """
        saved = self.entries[key]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        if isinstance(current, torch.Tensor):
            return current
        # One of an unknown dtype is refused when it is read.
        dtype = saved.properties.dtype or torch.uint8
        device = "cpu" if like is None else like.device
        if like is None or like.size() != saved.size:
            return torch.empty(saved.size, dtype=dtype, device=device)
        local = torch_private.local_tensor(like)
        if torch_private.is_wrapper(local):
            made = torch.empty(local.size(), dtype=dtype, device=device)
        else:
            made = torch.empty_like(local, dtype=dtype)
        return torch_private.dtensor_alike(made, like) if isinstance(like, DTensor) else made


def _below(path: Path, length: int) -> Path:
    """Return the part of a path below a prefix of its key; `length` counts the last dot."""
    for number, step in enumerate(path):
        length -= len(str(step)) + 1
        if length < 0:  # the prefix ends within this step
            return (str(step)[length + 1 :], *path[number + 1 :]) if length < -1 else path[number:]
        if not length:
            return path[number + 1 :]
    return path


def is_whole(value: list[Any]) -> bool:
    """Whether DCP stores this list as one value, which a load may change in length."""
    return not any(
        isinstance(item, Mapping | torch.Tensor)
        or has_parts(item)
        or (isinstance(item, list) and not is_whole(item))
        for item in value
        if type(item) not in _SCALARS
    )


def has_parts(value: Any) -> bool:
    """Whether a value contains something that is restored in place or has its own name."""
    if isinstance(value, list | tuple):
        return any(has_parts(item) for item in value)
    if isinstance(value, Mapping):
        return any(has_parts(item) for item in value.values())
    kinds = torch.nn.Module | Trainable | torch.optim.Optimizer | DTensor | PerRank
    return isinstance(value, kinds) or is_stateful(value)


def leaves(
    value: Any, path: Path = (), is_leaf: Callable[[Any], bool] = lambda _: False
) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is not a dict or list to descend into, with its path."""
    if isinstance(value, Mapping) and not is_leaf(value):
        for key, item in value.items():
            yield from leaves(item, (*path, key), is_leaf)
    elif isinstance(value, list) and not is_whole(value):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number), is_leaf)
    else:
        yield path, value


def is_numbered_state(value: Any) -> bool:
    """Whether a value is what `Optimizer.state_dict` returns, with numbered parameters."""
    groups = value.get("param_groups") if isinstance(value, dict) and "state" in value else None
    return isinstance(groups, list) and all(
        isinstance(group, dict) and "params" in group for group in groups
    )


class _Node(dict[Any, Any]):
    """A container under construction, which no loaded value can be."""


def nested(items: Iterable[tuple[Path, Any]]) -> Any:
    """Build the dicts and lists that have these values at these paths."""
    root = _Node()
    for path, value in items:
        node = root
        for step in path[:-1]:
            inner = node.setdefault(step, _Node())
            node = inner if isinstance(inner, _Node) else node
        node[path[-1]] = value
    return _built(root)


def _built(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if value and all(type(step) is int for step in value):
        return [_built(value[number]) for number in sorted(value)]
    return {
        step.value if isinstance(step, LiteralKey) else step: _built(item)
        for step, item in value.items()
    }


def alike(original: Any, loaded: Any) -> Any:
    """Return the loaded value in containers and under keys of the types of `original`.

    What the loaded value has, it keeps, also where `original` has less or more.
    """
    if isinstance(original, Mapping) and isinstance(loaded, Mapping):
        by_name = {str(key): item for key, item in loaded.items()}
        items = {
            key: alike(item, by_name.pop(str(key)))
            for key, item in original.items()
            if str(key) in by_name
        }
        # A dict without entries is not stored.
        items |= {
            key: item
            for key, item in original.items()
            if key not in items and isinstance(item, Mapping) and not any(leaves(item))
        }
        items |= {key: item for key, item in loaded.items() if str(key) in by_name}
        if not isinstance(original, MutableMapping):
            return items
        same = copy.copy(original)  # also of a Counter, an OrderedDict, a defaultdict
        same.clear()
        same.update(items)
        return same
    if isinstance(original, list) and isinstance(loaded, list) and not is_whole(original):
        known = [alike(*pair) for pair in zip(original, loaded, strict=False)]
        return [*known, *loaded[len(known) :]]
    return loaded


class AskedValue:
    """A value with a state dict, of which a load asks for what was saved.

    Args:
        current: its state dict, with str keys.
        record: what the checkpoint has.
        place: its place.

    Attributes:
        wanted: what to load into, by the rest of the key; None if nothing was saved at the place.
    """

    def __init__(self, current: Any, record: Record, place: Place) -> None:
        saved = record.below(place)
        own = {".".join(map(str, path)): (path, item) for path, item in leaves(current)}
        self.wanted: dict[str, Any] | None = None
        if not saved or ".".join(place) in record.entries:
            return
        self._paths = {
            rest: own[rest][0] if rest in own else split(path) for rest, path in saved.items()
        }
        self.wanted = {
            rest: record.destination(
                ".".join((*place, rest)),
                own[rest][1] if rest in own else None,
                _neighbour(own, path),
            )
            for rest, path in self._paths.items()
        }
        # What the value has and the checkpoint lacks stays asked for: the planner says so. But the
        # length of a list, and whether a value is one entry or several, was decided by the save.
        inner = {step[:number] for step in self._paths.values() for number in range(1, len(step))}
        lists = {path[:-1] for path in self._paths.values() if type(path[-1]) is int}
        for rest, (path, item) in own.items():
            replaced = path in inner or any(
                ".".join(map(str, path[:number])) in saved or path[: number - 1] in lists
                for number in range(1, len(path) + 1)
            )
            if rest not in saved and not replaced:
                self.wanted[rest] = item
                self._paths[rest] = path

    def loaded(self, values: Mapping[str, Any]) -> Any:
        """Return the state dict that was loaded, of plain dicts and lists."""
        return nested((path, values[rest]) for rest, path in self._paths.items())


def split(path: Path) -> Path:
    """Return a path; one that is only known as a name becomes that of nested dicts."""
    return tuple(path[0].split(".")) if len(path) == 1 and isinstance(path[0], str) else path


def _neighbour(own: Mapping[str, tuple[Path, Any]], path: Path) -> torch.Tensor | None:
    """Return the tensor before an entry of a list, which has grown."""
    if type(path[-1]) is int:
        for number in range(path[-1], -1, -1):
            _, item = own.get(".".join(map(str, (*path[:-1], number))), (path, None))
            if isinstance(item, torch.Tensor):
                return item
    return None
