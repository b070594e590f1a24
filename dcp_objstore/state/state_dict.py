"""The user's state to a plain state dict and back: modules, optimizers and Stateful objects.

`torch.distributed.checkpoint.state_dict` does the work for modules and optimizers: it names
parameters the same under FSDP2, DDP (`module.`) and torch.compile (`_orig_mod.`), and it keys
optimizer state by parameter name instead of by position, which is what lets a checkpoint be
loaded by another number of ranks. (DCP itself would take a module too, as a Stateful, and store
the wrappers' names.)
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private
from dcp_objstore.errors import StateMismatchError, UnsupportedError
from dcp_objstore.state.per_rank import PerRank

# Keys of dicts as the user has them, and numbers in lists.
Path: TypeAlias = tuple[Any, ...]

# The same with keys as str, as DCP has them.
Place: TypeAlias = tuple[str, ...]

# Asked first, because lists can be long and isinstance(..., Stateful) takes a microsecond.
_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class _Part:
    """A value of the state that is not a dict or a list to descend into.

    Attributes:
        given: its state dict as it was, for the types of its containers and keys; for a plain
            value or a tensor, itself.
        module: an optimizer's module, else None.
    """

    path: Path
    value: Any
    given: Any
    module: torch.nn.Module | None = None


class ConvertedState:
    """A user's state in DCP's terms, and the way back.

    Tensors are the live ones, so loading into them loads in place. An optimizer that has not
    stepped has no state yet. For a load it gets one, as DCP does it, so that there is something to
    load into (also if it lacks the state of some parameters only); `undo` puts things back after a
    load that failed. A save stores that same state with no step counted, and leaves the optimizer
    as it is.

    Args:
        state: dict, nested as you like, of modules, optimizers, Stateful objects, tensors and
            plain values.
        loading: it is loaded into; otherwise it is saved.

    Attributes:
        state_dict: nested dicts with str keys, and lists, of tensors and plain values.
        optimizers: for the place of each optimizer, that of its module.
        per_rank: for the place of each `PerRank`, whether the values of all ranks are wanted.

    Raises:
        StateMismatchError: the state cannot be converted; says what to pass instead.
        UnsupportedError: tensors to load into are on the meta device.
    """

    def __init__(self, state: Mapping[str, Any], *, loading: bool) -> None:
        if not isinstance(state, Mapping):
            raise StateMismatchError(
                f"the state must be a dict of names to modules, optimizers, tensors or values, got"
                f" {type(state).__name__}; wrap it as {{'model': ...}}"
            )
        for name in state:
            if not isinstance(name, str):
                raise StateMismatchError(f"the names in the state must be str, got {name!r}")
        self._state = state
        leaves = list(_leaves(state))
        modules = {path: value for path, value in leaves if isinstance(value, torch.nn.Module)}
        if loading:
            for path, module in modules.items():
                _refuse_module_on_meta(path, module)
        # Optimizers that get a state for now, with what they had.
        self._set_aside = [
            (value, dict(value.state))
            for _, value in leaves
            if isinstance(value, torch.optim.Optimizer)
            and (not value.state or (loading and _lacks_state(value)))
        ]
        for optimizer, _ in self._set_aside:
            optimizer.state.clear()
        self.optimizers: dict[Place, Place] = {}
        self.per_rank: dict[Place, bool] = {}
        self._loading = loading
        self._parts: list[_Part] = []
        self.state_dict: dict[str, Any] = {}
        try:
            for path, value in leaves:
                self._parts.append(self._convert(path, value, modules))
            if loading:
                _refuse_tensors_on_meta(self._parts)
            self._check_names_of_ranks()
            converted = {part.path: _plain(part.given, part.path) for part in self._parts}
            self.state_dict = _rebuilt(state, converted)
        except BaseException:
            self.undo()
            raise
        if not loading:
            self.undo()

    def _convert(self, path: Path, value: Any, modules: Mapping[Path, torch.nn.Module]) -> _Part:
        if isinstance(value, torch.nn.Module):
            return _Part(path, value, _module_state(value))
        if isinstance(value, torch.optim.Optimizer):
            place = _module_of(value, modules, path)
            self.optimizers[_place(path)] = _place(place)
            given = _optimizer_state(value, modules[place], path)
            return _Part(path, value, given, modules[place])
        if isinstance(value, PerRank):
            return _Part(path, value, self._convert_per_rank(path, value))
        if isinstance(value, Stateful):
            return _Part(path, value, value.state_dict())
        if isinstance(value, tuple) and _has_parts(value):
            raise StateMismatchError(
                "a tuple is stored as one pickled value; put modules, optimizers, Stateful objects"
                " and sharded tensors into a list or a dict",
                key=_name(path),
            )
        return _Part(path, value, value)

    def _check_names_of_ranks(self) -> None:
        """Refuse a value that has the name of some rank's value of a `PerRank`."""
        for place in self.per_rank:
            prefix = _name(place) + "."
            for part in self._parts:
                name = _name(part.path)
                if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
                    raise StateMismatchError(
                        f"{_shown(part.path)} has the name under which a rank saves its value of"
                        f" the PerRank at {_shown(place)}; rename one of them",
                        key=name,
                    )

    def _convert_per_rank(self, path: Path, value: PerRank) -> dict[str, Any]:
        self.per_rank[_place(path)] = value.choice == "list"
        if self._loading:
            return value.to_fill()
        entry = value.to_save()
        if any(_has_parts(item) for item in entry.values()):
            raise StateMismatchError(
                "a PerRank is stored as one pickled value for each rank; modules, optimizers,"
                " Stateful objects and sharded tensors inside one cannot be",
                key=_name(path),
            )
        return entry

    def undo(self) -> None:
        """Optimizers have the state again that they had before."""
        for optimizer, before in self._set_aside:
            optimizer.state.clear()
            optimizer.state.update(before)

    def restore(self, without_state: Collection[tuple[Place, str]] = ()) -> None:
        """Put what was loaded into `state_dict` back: modules, optimizers and Stateful objects in
        place, and plain values into the caller's dicts and lists.

        Args:
            without_state: (optimizer's place, parameter's name in its module) for which the
                checkpoint has no optimizer state; they are left without.

        Raises:
            StateMismatchError: a list of Stateful objects was saved with another length.
            Whatever a `load_state_dict` raises.
        """
        loaded = [(part, _at(self.state_dict, part.path)) for part in self._parts]
        # Modules first: an optimizer's state is matched to its module's parameters.
        for kinds in ((torch.nn.Module,), (torch.optim.Optimizer,), ()):
            for part, found in loaded:
                first = isinstance(part.value, torch.nn.Module | torch.optim.Optimizer)
                if isinstance(part.value, kinds) if kinds else not first:
                    if isinstance(part.value, PerRank):
                        part.value.fill(found)
                    else:
                        self._restore_one(part, _alike(part.given, found), without_state)

    def _restore_one(
        self, part: _Part, loaded: Any, without_state: Collection[tuple[Place, str]]
    ) -> None:
        if isinstance(part.value, torch.nn.Module):
            if loaded:
                set_model_state_dict(part.value, loaded)
        elif isinstance(part.value, torch.optim.Optimizer):
            assert part.module is not None
            for optimizer, parameter in without_state:
                if optimizer == _place(part.path):
                    del loaded["state"][parameter]
            # Not strict: the planner has checked what is there, parameter by parameter.
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(part.module, part.value, loaded, options=options)
        elif isinstance(part.value, Stateful):
            part.value.load_state_dict(loaded)
        elif isinstance(part.value, list) and isinstance(loaded, list):
            part.value[:] = loaded
        elif loaded is not part.value:
            _at(self._state, part.path[:-1], by_str=False)[part.path[-1]] = loaded


def _refuse_module_on_meta(path: Path, module: torch.nn.Module) -> None:
    """Raise where a module has no memory to load into.

    It is not given memory here. On which device is the caller's to say, an optimizer made before
    would go on with the old parameters, and buffers that no checkpoint holds would be left with
    whatever was in that memory.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [name for name, tensor in tensors if tensor.device.type == "meta"]
    unsaved = {
        f"{place}.{name}" if place else name
        for place, part in module.named_modules()
        for name in torch_private.non_persistent_buffers(part)
    }
    saved = [name for name in on_meta if name not in unsaved]
    if not saved:
        return
    fill = [name for name in on_meta if name in unsaved]
    then = f". Then compute its buffers that no checkpoint holds ({_first(fill)})" if fill else ""
    raise UnsupportedError(
        f"this module is on the meta device and has no memory to load into ({_first(saved)});"
        ' before you load, and before you make its optimizer, call to_empty(device="cuda") on it,'
        f" or name another device{then}",
        key=_name(path),
    )


def _refuse_tensors_on_meta(parts: Iterable[_Part]) -> None:
    """The same for tensors that stand in the state, or in that of a Stateful object."""
    names = [name for part in parts for name in _on_meta(part.given, part.path)]
    if names:
        raise UnsupportedError(
            f"the state has tensors on the meta device, with no memory to load into"
            f" ({_first(names)}); put torch.empty_like(tensor, device=...) in their place",
            key=names[0],
        )


def _on_meta(value: Any, path: Path) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _on_meta(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _on_meta(item, (*path, number))
    elif isinstance(value, torch.Tensor) and value.device.type == "meta":
        yield _name(path)


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    # torch takes an empty result for a wrong option and raises. (Parameters are asked for first:
    # under FSDP1 `state_dict` is a collective.)
    if next(module.parameters(), None) is None and not module.state_dict():
        return {}
    given: dict[str, Any] = get_model_state_dict(module)
    return given


def _optimizer_state(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, path: Path
) -> dict[str, Any]:
    groups = [group["params"] for group in optimizer.param_groups]
    if sum(not group for group in groups) > 1:
        raise StateMismatchError(
            "this optimizer has several parameter groups without parameters; torch can load at"
            " most one, so remove the others",
            key=_name(path),
        )
    unstepped = not optimizer.state
    # torch initialises the state by a step with zero gradients, and silently leaves that out where
    # there are gradients.
    with _gradients_set_aside(groups) if unstepped else contextlib.nullcontext():
        given: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    if unstepped:
        for values in given["state"].values():
            if "step" in values:
                values["step"] = values["step"] * 0
    return given


def _lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter that is trained has no state."""
    return any(
        parameter.requires_grad and parameter not in optimizer.state
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


@contextlib.contextmanager
def _gradients_set_aside(groups: list[list[torch.nn.Parameter]]) -> Iterator[None]:
    held = [(parameter, parameter.grad) for group in groups for parameter in group]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _module_of(
    optimizer: torch.optim.Optimizer, modules: Mapping[Path, torch.nn.Module], path: Path
) -> Path:
    """Where the smallest module of the state stands that has all of the optimizer's parameters."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = {place: {id(p) for p in module.parameters()} for place, module in modules.items()}
    owners = [place for place, ids in held.items() if wanted <= ids]
    if owners:
        return min(owners, key=lambda place: len(held[place]))
    if any(wanted & ids for ids in held.values()):
        raise StateMismatchError(
            "the parameters of this optimizer are spread over several modules of the state; pass"
            " the module that contains all of them, or one optimizer per module",
            key=_name(path),
        )
    raise StateMismatchError(
        "the parameters of this optimizer belong to no module of the state; put the module into"
        " the state beside it (and make the optimizer after fully_shard, which replaces the"
        " parameters)",
        key=_name(path),
    )


def _place(path: Path) -> Place:
    return tuple(map(str, path))


def _name(path: Path) -> str:
    """As DCP names it."""
    return ".".join(_place(path))


def _has_parts(value: Any) -> bool:
    """Whether something in it is restored in place or has a name of its own."""
    if isinstance(value, list | tuple):
        return any(_has_parts(item) for item in value)
    if isinstance(value, Mapping):
        return any(_has_parts(item) for item in value.values())
    kinds = torch.nn.Module | torch.optim.Optimizer | DTensor | Stateful | PerRank
    return isinstance(value, kinds)


def _is_whole(value: list[Any]) -> bool:
    """Whether DCP stores this list as one value, which may come back with another length."""
    return not any(
        isinstance(item, Mapping | torch.Tensor)
        or _has_parts(item)
        or (isinstance(item, list) and not _is_whole(item))
        for item in value
        if type(item) not in _SCALARS
    )


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a dict or list to descend into, with its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and not _is_whole(value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, value


def same_name(state_dict: Mapping[str, Any]) -> StateMismatchError | None:
    """The error for two values that have one name in a checkpoint; None if all names differ."""
    places: dict[str, Path] = {}
    for path, _ in _leaves(state_dict):
        name = _name(path)
        if name in places:
            return StateMismatchError(
                f"{_shown(places[name])} and {_shown(path)} have the same name in a checkpoint;"
                " rename one of them",
                key=name,
            )
        places[name] = path
    return None


def _shown(path: Path) -> str:
    return "state" + "".join(f"[{step!r}]" for step in path)


def _by_name(value: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """The keys by their `str`, by which DCP names them.

    Raises:
        StateMismatchError: two keys are the same as `str`.
    """
    keys: dict[str, Any] = {}
    for key in value:
        name = str(key)
        if name in keys:
            raise StateMismatchError(
                f"the keys {keys[name]!r} and {key!r} of {_shown(path)} have the same name in a"
                " checkpoint; rename one of them",
                key=_name((*path, key)),
            )
        keys[name] = key
    return keys


def _rebuilt(value: Any, converted: Mapping[Path, Any], path: Path = ()) -> Any:
    """The same nesting of new dicts and lists, with the leaves converted."""
    if path in converted:
        return converted[path]
    if isinstance(value, Mapping):
        return {
            name: _rebuilt(value[key], converted, (*path, key))
            for name, key in _by_name(value, path).items()
        }
    return [_rebuilt(item, converted, (*path, number)) for number, item in enumerate(value)]


def _plain(value: Any, path: Path) -> Any:
    """With dicts of str keys: DCP names a value by `str(key)` and puts it back under that."""
    if isinstance(value, Mapping):
        return {
            name: _plain(value[key], (*path, key)) for name, key in _by_name(value, path).items()
        }
    if isinstance(value, list) and not _is_whole(value):
        return [_plain(item, (*path, number)) for number, item in enumerate(value)]
    return value


def _alike(given: Any, loaded: Any) -> Any:
    """What was loaded, in containers and under keys like those of `given`."""
    if isinstance(given, Mapping) and isinstance(loaded, Mapping):
        items = {key: _alike(item, loaded[str(key)]) for key, item in given.items()}
        if type(given) is dict or not isinstance(given, MutableMapping):
            return items
        same = copy.copy(given)  # a Counter, an OrderedDict, a defaultdict
        same.clear()
        same.update(items)
        return same
    if isinstance(given, list) and isinstance(loaded, list) and not _is_whole(given):
        return [_alike(item, found) for item, found in zip(given, loaded, strict=True)]
    return loaded


def _at(value: Any, path: Path, *, by_str: bool = True) -> Any:
    """The value at a place; in dicts whose keys were made str (`by_str`) or in the user's own."""
    for number, step in enumerate(path):
        if isinstance(value, Mapping):
            value = value[str(step) if by_str else step]
        elif step < len(value):
            value = value[step]
        else:
            raise StateMismatchError(
                f"the list was saved with {len(value)} values, fewer than in the state",
                key=_name(path[:number]),
            )
    return value
