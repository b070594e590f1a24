"""The entries of a checkpoint below a place of the state, and what a load makes of them.

A load of a value that restores itself (an optimizer, a Stateful object) is decided by what was
saved: each stored entry gets a destination, whether the value has such an entry already or not.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import with_own_keys
from dcp_objstore.errors import StateMismatchError
from dcp_objstore.state.per_rank import PerRank, is_stateful
from dcp_objstore.state.trainable import Trainable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A path in the state: keys of dicts as the user has them, and numbers in lists.
Path: TypeAlias = tuple[Any, ...]

# The same path with keys as str, as DCP has them.
Place: TypeAlias = tuple[str, ...]


class Empty:
    """Stands for a dict without entries until the save's planner has flattened the state.

    DCP has no key for such a dict. (As a class, it is the same object in each copy.)
    """


class _Destination(NamedTuple):
    """Where a new tensor to load into stands, so that another can take its place."""

    holder: dict[str, Any]
    name: str


_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


class Record:
    """The keys of a checkpoint, by place.

    Args:
        metadata: what DCP's planners get.
        paths: the place of each key in the nested dict that was saved, as far as it is known.

    Attributes:
        destinations: by key, where the load put a new tensor to load into, since the value has
            none there yet.
    """

    def __init__(self, metadata: Metadata, paths: Mapping[str, Path]) -> None:
        self.entries = metadata.state_dict_metadata
        self.destinations: dict[str, _Destination] = {}
        self._paths = paths
        self._sorted = sorted(self.entries)

    def below(self, place: Place) -> dict[str, Path]:
        """Return what was saved below a place: the rest of each key, with its path from there."""
        name = ".".join(place)
        # In sorted order, the keys that begin with "<name>." stand from "<name>." up to "<name>/",
        # because "/" is the character after ".".
        start, end = (bisect_left(self._sorted, name + sign) for sign in "./")
        length = len(name) + 1
        return {
            key[length:]: below(self._paths.get(key, (key,)), length)
            for key in self._sorted[start:end]
        }

    def names(self, name: str, place: Place) -> bool:
        """Whether a module at this place has a parameter of this name."""
        return ".".join((*place, name)) in self.entries

    def places_beside(self, place: Place) -> set[str]:
        """Return this place and all others at the same depth, by name.

        The places beside ("model", "0") are "model.0", "model.1", "optimizer.state" and so on.
        """
        depth = ".".join(place).count(".") + 1  # a step of a place may have dots, too
        return {".".join(key.split(".", depth)[:depth]) for key in self._sorted}

    def takes(self, key: str, tensor: torch.Tensor, sizes: tuple[int, ...]) -> bool:
        """Put a stored tensor of a subclass in place of the plain tensor to load into.

        Args:
            key: its key.
            tensor: the stored tensor.
            sizes: the sizes of the part of it that this rank needs.

        Returns:
            True if it was replaced. False if the user's value has a tensor, which is to be filled.

        Raises:
            StateMismatchError: this rank needs another part of the tensor than one rank has saved.
        """
        if key not in self.destinations:
            return False
        holder, name = self.destinations[key]
        plain = holder[name]
        if not tuple(torch_private.local_tensor(plain).size()) == tuple(tensor.size()) == sizes:
            raise StateMismatchError(
                f"saved as parts of a {type(tensor).__name__}, of which this rank needs another",
                advice="step the optimizer once before the load, so that it has tensors to fill",
                key=key,
            )
        stored = tensor.to(plain.device)
        if isinstance(plain, DTensor):
            stored = torch_private.dtensor_alike(stored, plain)
        holder[name] = stored
        return True


def below(path: Path, length: int) -> Path:
    """Return the part of a path below a prefix of its name; `length` counts the dot after it.

    If the prefix ends inside a key of the path, that key is several names joined by dots, as in
    torch's flattened form.
    """
    for number, step in enumerate(path):
        length -= len(str(step)) + 1
        if length < 0:  # ("a.b.c", "d") below "a." is ("b", "c", "d")
            return (*str(step)[length + 1 :].split("."), *path[number + 1 :])
        if not length:
            return path[number + 1 :]
    return path


class Asked:
    """The request of a load at the place of a value that restores itself.

    Args:
        current: the value's state dict, with str keys.
        record: what the checkpoint has.
        place: the value's place.

    Attributes:
        own: what the value has, by its name below the place.
        saved: the path of each saved entry, by its name.
        paths: the path of each entry that is asked for, in what `loaded` returns.
        wanted: what to load into, by the name; None for a plain value, which DCP puts in its place.
    """

    def __init__(self, current: Any, record: Record, place: Place) -> None:
        own_entries = {_name(path): (path, item) for path, item in leaves(current)}
        self.own = {name: item for name, (_, item) in own_entries.items()}
        # Where the value has an entry of the same name, its path is taken in place of the recorded
        # one: a checkpoint may not say how its keys were nested.
        self.saved = {
            name: own_entries[name][0] if name in own_entries else path
            for name, path in record.below(place).items()
        }
        self.paths: dict[str, Path] = {}
        self.wanted: dict[str, Any] = {}
        self._own_entries, self._record, self._place = own_entries, record, place

    def ask(self, name: str, path: Path, current: Any, like: Any = None) -> None:
        """Ask for a saved entry.

        Args:
            name: its name.
            path: its path in what `loaded` returns.
            current: what the value has there. A tensor is loaded into; otherwise one is made.
            like: a tensor whose device and mesh a new one gets. One of the same shape gets its
                order of dimensions in memory, too, and its placements.
        """
        key = _name((*self._place, name))
        saved = self._record.entries[key]
        if not isinstance(saved, TensorStorageMetadata):
            current = None  # DCP puts the value there
        elif not isinstance(current, torch.Tensor):
            # `Record.takes` may put another tensor in the place of this one.
            self._record.destinations[key] = _Destination(self.wanted, name)
            current = _destination(saved, like)
        self.paths[name], self.wanted[name] = path, current

    def ask_for_all(self) -> None:
        """Ask for all that was saved, and for what the value has and the checkpoint lacks.

        The planner reports what the checkpoint lacks. But an own entry is not asked for if the save
        decided otherwise: by the length of a list, or by whether something is one entry or several.
        """
        for name, path in self.saved.items():
            # In a list, a new tensor is made like the last own tensor up to its place: the saved
            # list may be longer.
            numbers = range(path[-1], -1, -1) if type(path[-1]) is int else ()
            entries = (self.own.get(_name((*path[:-1], number))) for number in numbers)
            like = next((entry for entry in entries if isinstance(entry, torch.Tensor)), None)
            self.ask(name, path, self.own.get(name), like)
        containers = {
            _name(path[:number]) for path in self.saved.values() for number in range(len(path))
        }
        for name, (path, item) in self._own_entries.items():
            # Each container around the entry, with the step that leads on from it.
            outers = [(_name(path[:number]), step) for number, step in enumerate(path)]
            # The save decided otherwise if it has entries below this one, or a single value in
            # place of a container around it, or, of a list around it, only other entries.
            is_decided = name in containers or any(
                outer in self.saved or (outer in containers and type(step) is int)
                for outer, step in outers
            )
            if name not in self.saved and not is_decided:
                self.paths[name], self.wanted[name] = path, item

    def loaded(self, values: Mapping[str, Any]) -> Any:
        """Return the loaded values at their paths, in plain dicts and lists."""
        return _nested((path, values[name]) for name, path in self.paths.items())


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def is_sharded(saved: Any) -> bool | None:
    """Whether a saved tensor was a DTensor or the like; None if the save did not note it."""
    return getattr(getattr(saved, "chunks", None), "is_sharded", None)


def _destination(saved: TensorStorageMetadata, like: Any) -> torch.Tensor:
    """Return a new tensor to load into. `like` is that of `Asked.ask`."""
    dtype = saved.properties.dtype or torch.uint8  # one that is unknown is refused when it is read
    device = getattr(like, "device", "cpu")
    if not isinstance(like, torch.Tensor) or like.size() != saved.size:
        # What an optimizer computes with a DTensor is a DTensor, too. A scalar may be one or not.
        if isinstance(like, DTensor) and (saved.size or is_sharded(saved)):
            return torch.distributed.tensor.empty(
                saved.size,
                dtype=dtype,
                device_mesh=like.device_mesh,
                placements=_placements(saved, like.device_mesh),
            )
        return torch.empty(saved.size, dtype=dtype, device=device)
    local = torch_private.local_tensor(like)
    if torch_private.is_wrapper(local):  # plain, as other ranks or versions may have saved it
        shard = torch.empty(local.size(), dtype=dtype, device=device)
    else:
        shard = torch.empty_like(local, dtype=dtype)
    return torch_private.dtensor_alike(shard, like) if isinstance(like, DTensor) else shard


def _placements(saved: TensorStorageMetadata, mesh: DeviceMesh) -> list[Placement]:
    """Return placements like those of the saved tensor, which may be of another mesh.

    A tensor that was split along one dimension is split on a mesh of one dimension; any other is
    whole on each rank.
    """
    split_dims = {dim for chunk in saved.chunks for dim, start in enumerate(chunk.offsets) if start}
    can_split = len(split_dims) == mesh.ndim == 1
    return [Shard(split_dims.pop())] if can_split else [Replicate()] * mesh.ndim


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
    value: Any,
    path: Path = (),
    is_leaf: Callable[[Any], bool] = lambda _: False,
    whole: list[Path] | None = None,
) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is not a dict or list to descend into, with its path.

    Args:
        is_leaf: whether not to descend into a dict or list.
        whole: gets the path of each list that was descended into, and of each dict without entries.
    """
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping) and not is_leaf(value):
        items = value.items()
        if not value and path and whole is not None:
            whole.append(path)
    elif isinstance(value, list) and not is_whole(value) and not is_leaf(value):
        items = enumerate(value)
        if whole is not None:
            whole.append(path)
    else:
        yield path, value
        return
    for key, item in items:
        if type(item) is torch.Tensor:  # the most by far
            yield (*path, key), item
        else:
            yield from leaves(item, (*path, key), is_leaf, whole)


def is_numbered_state(value: Any) -> bool:
    """Whether a value is what `Optimizer.state_dict` returns, with numbered parameters."""
    groups = value.get("param_groups") if isinstance(value, dict) and "state" in value else None
    return isinstance(groups, list) and all(
        isinstance(group, dict) and "params" in group for group in groups
    )


class _Node(dict[Any, Any]):
    """A container under construction, which no loaded value can be."""


def _nested(items: Iterable[tuple[Path, Any]]) -> Any:
    """Build the dicts and lists that have these values at these paths."""
    root = _Node()
    for path, value in items:
        node = root
        for step in path[:-1]:
            # Another rank may have saved an empty container there, as a value.
            if not isinstance(node.get(step), _Node):
                node[step] = _Node()
            node = node[step]
        node[path[-1]] = value
    return _built(root)


def _built(value: Any) -> Any:
    """Return a container under construction as a list if all its steps are int, else as a dict."""
    if not isinstance(value, _Node):
        return value
    if value and all(type(step) is int for step in value):
        return [_built(value[number]) for number in sorted(value)]
    return with_own_keys({step: _built(item) for step, item in value.items()})


def alike(original: Any, loaded: Any) -> Any:
    """Return the loaded value in containers and under keys of the types of `original`.

    What the loaded value has, it keeps, also where `original` has less or more.
    """
    if isinstance(original, Mapping) and isinstance(loaded, Mapping):
        pair_of = {str(key): (key, item) for key, item in loaded.items()}
        items = {}
        for key, own in original.items():
            if str(key) in pair_of:
                _, item = pair_of.pop(str(key))
                items[key] = alike(own, item)
            elif isinstance(own, Mapping) and not any(leaves(own)):
                items[key] = own  # a dict without entries is not stored
        items.update(pair_of.values())  # what `original` does not have
        if not isinstance(original, MutableMapping):  # a copy of it could not be filled
            return items
        container = copy.copy(original)  # also of a Counter, an OrderedDict, a defaultdict
        container.clear()
        container.update(items)
        return container
    if isinstance(original, list) and isinstance(loaded, list) and not is_whole(original):
        paired = [alike(*pair) for pair in zip(original, loaded, strict=False)]
        return [*paired, *loaded[len(paired) :]]
    return loaded
