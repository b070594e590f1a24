"""Convert the user's state (modules, optimizers, Stateful objects) to a plain state dict and back.

`torch.distributed.checkpoint.state_dict` does the work for modules and optimizers. It names
parameters the same under FSDP2, DDP (`module.`) and torch.compile (`_orig_mod.`). It keys optimizer
state by parameter name instead of by position, so that another number of ranks can load the
checkpoint. (DCP itself would also accept a module, as a Stateful, and store the wrappers' names.)
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping
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
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private
from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import StateMismatchError, UnsupportedError
from dcp_objstore.observe.report import first_few
from dcp_objstore.state.left_out import LeftOut
from dcp_objstore.state.per_rank import PerRank, is_stateful
from dcp_objstore.state.trainable import Trainable, count_left_out

# A path in the state: keys of dicts as the user has them, and numbers in lists.
Path: TypeAlias = tuple[Any, ...]

# The same path with keys as str, as DCP has them.
Place: TypeAlias = tuple[str, ...]

_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A value of the state that is not a dict or a list to descend into.

    Attributes:
        original: the original state dict of the value, which has the types of its containers and
            keys; the value itself if it is a plain value or a tensor.
        module: the module itself, or that of a `Trainable` or an optimizer; None for other values.
    """

    path: Path
    value: Any
    original: Any
    module: torch.nn.Module | None = None


class ConvertedState:
    """A user's state converted to a plain state dict, with the way back.

    Tensors are not copied, so loading into them loads in place. An optimizer that has not stepped
    has no state yet, and a save stores none. For a load it gets one, made as DCP makes it, so that
    there is memory to load into. The same is done if only some parameters lack state. `undo`
    restores the optimizers after a failed load.

    Args:
        state: a dict, nested as you like, of modules, optimizers, Stateful objects, tensors and
            plain values.
        loading: whether the state will be loaded into; if False, it will be saved.

    Attributes:
        state_dict: nested dicts with str keys, and lists, of tensors and plain values.
        optimizers: place of each optimizer, mapped to the place of its module.
        modules: place of each module that is not `Trainable`.
        per_rank: place of each `PerRank`, mapped to whether it wants the values of all ranks.
        left_out: place of each `Trainable`, mapped to what it leaves out of its module.

    Raises:
        StateMismatchError: the state cannot be converted; the message says what to pass instead.
        UnsupportedError: tensors to load into are on the meta device.
    """

    def __init__(self, state: Mapping[str, Any], *, loading: bool) -> None:
        """Convert the state; if that fails, the optimizers are as before."""
        if not isinstance(state, Mapping):
            raise StateMismatchError(
                f"the state must be a dict of names to modules, optimizers, tensors or values, got"
                f" {type(state).__name__}; wrap it as {{'model': ...}}"
            )
        for name in state:
            if not isinstance(name, str):
                raise StateMismatchError(f"the names in the state must be str, got {name!r}")
        self._state = state
        # Sorted, because `state_dict` and `load_state_dict` may be collectives (FSDP1's are), and
        # the dicts of two ranks may differ in their order.
        leaves = sorted(_leaves(state), key=lambda leaf: _place(leaf[0]))
        modules = {
            path: value for path, value in leaves if isinstance(value, torch.nn.Module | Trainable)
        }
        self.modules = [
            _place(path) for path, value in modules.items() if isinstance(value, torch.nn.Module)
        ]
        if loading:
            for path, module in modules.items():
                if isinstance(module, torch.nn.Module):
                    _refuse_module_on_meta(path, module)
        # Optimizers that get a temporary state, with the state that they had.
        self._set_aside = [
            (value, dict(value.state))
            for _, value in leaves
            if loading and isinstance(value, torch.optim.Optimizer) and _lacks_state(value)
        ]
        for optimizer, _ in self._set_aside:
            optimizer.state.clear()
        self.optimizers: dict[Place, Place] = {}
        self.per_rank: dict[Place, bool] = {}
        self.left_out: dict[Place, LeftOut] = {}
        self._loading = loading
        self._leaves: list[_Leaf] = []
        self.state_dict: dict[str, Any] = {}
        try:
            for path, value in leaves:
                self._leaves.append(self._convert(path, value, modules))
            filled = self._leaves if loading else []
            on_meta = [name for leaf in filled for name in _on_meta(leaf.original, leaf.path)]
            if on_meta:
                raise UnsupportedError(
                    f"the state has tensors on the meta device, with no memory to load into"
                    f" ({first_few(on_meta, 3)}); replace each with torch.empty_like(tensor,"
                    " device=...)",
                    key=on_meta[0],
                )
            self._check_names_of_ranks()
            self.state_dict = _plain(state, {leaf.path: leaf.original for leaf in self._leaves})
        except BaseException:
            self.undo()
            raise

    def _convert(
        self, path: Path, value: Any, modules: Mapping[Path, torch.nn.Module | Trainable]
    ) -> _Leaf:
        if isinstance(value, torch.nn.Module):
            return _Leaf(path, value, _module_state(value), value)
        if isinstance(value, Trainable):
            whole = _module_state(value.module)
            part = value.part_of(whole)
            self.left_out[_place(path)] = count_left_out(whole, part)
            return _Leaf(path, value, part, value.module)
        if isinstance(value, torch.optim.Optimizer):
            place = _module_of(value, modules, path)
            self.optimizers[_place(path)] = _place(place)
            owner = modules[place]
            module = _module_in(owner)
            original = _optimizer_state(value, module, path, loading=self._loading)
            if isinstance(owner, Trainable):
                original["state"] = owner.part_of(original["state"])
            return _Leaf(path, value, original, module)
        if isinstance(value, PerRank):
            return _Leaf(path, value, self._convert_per_rank(path, value))
        if is_stateful(value):
            return _Leaf(path, value, value.state_dict())
        if isinstance(value, tuple) and _has_parts(value):
            raise StateMismatchError(
                "a tuple is stored as one pickled value; put modules, optimizers, Stateful objects"
                " and sharded tensors into a list or a dict",
                key=_name(path),
            )
        return _Leaf(path, value, value)

    def _check_names_of_ranks(self) -> None:
        """Refuse a value whose name is also that of a rank's value of a `PerRank`."""
        for place in self.per_rank:
            prefix = _name(place) + "."
            for leaf in self._leaves:
                name = _name(leaf.path)
                if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
                    raise StateMismatchError(
                        f"{_shown(leaf.path)} has the same name as a rank's value of the PerRank at"
                        f" {_shown(place)}; rename one of them",
                        key=name,
                    )

    def _convert_per_rank(self, path: Path, value: PerRank) -> dict[str, Any]:
        self.per_rank[_place(path)] = value.choice == "list"
        if self._loading:
            return value.to_fill()
        entry = value.to_save()
        if _has_parts(entry):
            raise StateMismatchError(
                "a PerRank is stored as one pickled value for each rank, so it cannot contain"
                " modules, optimizers, Stateful objects or sharded tensors",
                key=_name(path),
            )
        return entry

    def undo(self) -> None:
        """Give the optimizers back the state that they had before."""
        for optimizer, before in self._set_aside:
            optimizer.state.clear()
            optimizer.state.update(before)

    def restore(
        self,
        without_state: Collection[tuple[Place, str]] = (),
        unknown: Collection[tuple[Place, str]] = (),
    ) -> None:
        """Put the loaded `state_dict` back into the user's state.

        Modules, optimizers and Stateful objects are restored in place; plain values are put into
        the caller's dicts and lists.

        Args:
            without_state: pairs of an optimizer's place and a parameter's name in its module for
                which the checkpoint has no optimizer state; these parameters get none.
            unknown: such pairs for parameters or optimizers that the checkpoint does not have;
                these keep the state that they had, unless this optimizer lacked some state.

        Raises:
            StateMismatchError: a list of Stateful objects was saved with another length.
            Exception: any error that a `load_state_dict` raises.
        """
        fresh = {id(optimizer) for optimizer, _ in self._set_aside}
        # Modules first: an optimizer's state is matched to its module's parameters.
        kinds = torch.nn.Module | Trainable, torch.optim.Optimizer
        leaves = sorted(
            self._leaves, key=lambda leaf: [not isinstance(leaf.value, kind) for kind in kinds]
        )
        for leaf, loaded in [(leaf, _at(self.state_dict, leaf.path)) for leaf in leaves]:
            if isinstance(leaf.value, PerRank):
                leaf.value.fill(loaded)
            else:
                empty = [*without_state, *(unknown if id(leaf.value) in fresh else ())]
                self._restore_one(leaf, _alike(leaf.original, loaded), empty)

    def _restore_one(
        self, leaf: _Leaf, loaded: Any, without_state: Collection[tuple[Place, str]]
    ) -> None:
        if isinstance(leaf.value, torch.nn.Module | Trainable):
            # Of a part, the planner has checked the names.
            options = StateDictOptions(strict=leaf.value is leaf.module)
            if loaded:
                assert leaf.module is not None
                set_model_state_dict(leaf.module, loaded, options=options)
        elif isinstance(leaf.value, torch.optim.Optimizer):
            assert leaf.module is not None
            for optimizer, parameter in without_state:
                if optimizer == _place(leaf.path):
                    loaded["state"][parameter] = {}  # torch 2.9 needs one for each parameter
            # Not strict: the planner has already checked the state of each parameter.
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(leaf.module, leaf.value, loaded, options=options)
            for key in [key for key, state in leaf.value.state.items() if not state]:
                del leaf.value.state[key]
        elif is_stateful(leaf.value):
            leaf.value.load_state_dict(loaded)
        elif isinstance(leaf.value, list) and isinstance(loaded, list):
            leaf.value[:] = loaded
        elif loaded is not leaf.value:
            _at(self._state, leaf.path[:-1], by_str=False)[leaf.path[-1]] = loaded


def _refuse_module_on_meta(path: Path, module: torch.nn.Module) -> None:
    """Raise if a module has no memory to load into.

    The module does not get memory here, for three reasons: the caller must choose the device, an
    existing optimizer would keep the old parameters, and buffers that are not in the checkpoint
    would contain arbitrary bytes.
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
    then = (
        f". Then compute the buffers that no checkpoint has ({first_few(fill, 3)})" if fill else ""
    )
    raise UnsupportedError(
        f"this module is on the meta device and has no memory to load into ({first_few(saved, 3)});"
        ' before you load, and before you make its optimizer, call to_empty(device="cuda") on it,'
        f" or name another device{then}",
        key=_name(path),
    )


def _on_meta(value: Any, path: Path) -> Iterator[str]:
    """Yield the names of tensors without memory, in a value of the state or its state dict."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _on_meta(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _on_meta(item, (*path, number))
    elif isinstance(value, torch.Tensor) and value.device.type == "meta":
        yield _name(path)


def _module_in(value: torch.nn.Module | Trainable) -> torch.nn.Module:
    return value.module if isinstance(value, Trainable) else value


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    # torch mistakes an empty result for a wrong option and raises. (Parameters are checked first,
    # because under FSDP1 `state_dict` is a collective.)
    if next(module.parameters(), None) is None and not module.state_dict():
        return {}
    state: dict[str, Any] = get_model_state_dict(module)
    return state


def _optimizer_state(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, path: Path, *, loading: bool
) -> dict[str, Any]:
    groups = [group["params"] for group in optimizer.param_groups]
    if sum(not group for group in groups) > 1:
        raise StateMismatchError(
            "this optimizer has several parameter groups without parameters; torch can load at"
            " most one, so remove the others",
            key=_name(path),
        )
    # If there is no state, torch makes one with a step of zero gradients. For a load that is memory
    # to load into. But weight decay, dampening and the rules for a first step leave their marks in
    # it, so a save must not store it.
    with contextlib.ExitStack() as prepared:
        if not optimizer.state:
            prepare = _trial_step if loading else _held_from_stepping
            prepared.enter_context(prepare(optimizer))
        state: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    return state


def _lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a trainable parameter has no state.

    One without elements never gets any under FSDP1, on a rank that has no shard of it.
    """
    return not optimizer.state or any(
        parameter.requires_grad and parameter.numel() and parameter not in optimizer.state
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


class _Stepped(defaultdict[Any, Any]):
    """An empty state that torch does not fill."""

    def __bool__(self) -> bool:
        return True


@contextmanager
def _held_from_stepping(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from making a state for an optimizer that has none."""
    none, optimizer.state = optimizer.state, _Stepped(dict)
    try:
        yield
    finally:
        optimizer.state = none


@contextmanager
def _trial_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch make a state for an optimizer; keep its gradients and settings.

    torch silently makes none if there are gradients, and leaves a learning rate of 0 if it fails.
    """
    groups = optimizer.param_groups
    settings = [dict(group) for group in groups]
    held = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
        for group, before in zip(groups, settings, strict=True):
            group.update(before)


def _module_of(
    optimizer: torch.optim.Optimizer,
    modules: Mapping[Path, torch.nn.Module | Trainable],
    path: Path,
) -> Path:
    """Return the place of the smallest module that has all of the optimizer's parameters."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = {
        place: {id(p) for p in _module_in(module).parameters()} for place, module in modules.items()
    }
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
        "the parameters of this optimizer belong to no module of the state; add the module to the"
        " state (and make the optimizer after fully_shard, which replaces the parameters)",
        key=_name(path),
    )


def _place(path: Path) -> Place:
    return tuple(map(str, path))


def _name(path: Path) -> str:
    """Return DCP's name for a place in the state."""
    return ".".join(_place(path))


def _has_parts(value: Any) -> bool:
    """Whether a value contains something that is restored in place or has its own name."""
    if isinstance(value, list | tuple):
        return any(_has_parts(item) for item in value)
    if isinstance(value, Mapping):
        return any(_has_parts(item) for item in value.values())
    kinds = torch.nn.Module | Trainable | torch.optim.Optimizer | DTensor | PerRank
    return isinstance(value, kinds) or is_stateful(value)


def _is_whole(value: list[Any]) -> bool:
    """Whether DCP stores this list as one value, which a load may change in length."""
    return not any(
        isinstance(item, Mapping | torch.Tensor)
        or _has_parts(item)
        or (isinstance(item, list) and not _is_whole(item))
        for item in value
        if type(item) not in _SCALARS
    )


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is not a dict or list to descend into, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and not _is_whole(value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, value


class AgreeingPlanner:
    """The part that our planners have in common; a base before one of DCP's default planners.

    Every error is typed and names the rank and `_url`, the checkpoint.
    """

    _url: str

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Override DCP's `set_up_planner` with a typed error for clashing names.

        Args:
            state_dict: the state dict to save or to load into.
            storage_meta: the `StorageMeta` of a save (DCP looks for an argument of this name), the
                `Metadata` of a load.
            is_coordinator: whether this rank is the coordinator.

        Raises:
            StateMismatchError: two values of the state have the same name in a checkpoint.
        """
        with self._typed_errors(), _naming_what_clashes(state_dict):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)  # type: ignore[misc]

    def finish_plan(self, new_plan: Any) -> Any:
        """Override DCP's `finish_plan` with typed errors."""
        with self._typed_errors():
            return super().finish_plan(new_plan)  # type: ignore[misc]

    def _typed_errors(self) -> contextlib.AbstractContextManager[None]:
        return plugin_errors(current_rank(), self._url)


@contextmanager
def _naming_what_clashes(state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Name both values if DCP's flattening raises because they have the same name.

    DCP's ValueError contains only the name.
    """
    try:
        yield
    except ValueError:
        places: dict[str, Path] = {}
        for path, _ in _leaves(state_dict):
            name = _name(path)
            if name in places:
                raise StateMismatchError(
                    f"{_shown(places[name])} and {_shown(path)} have the same name in a checkpoint;"
                    " rename one of them",
                    key=name,
                ) from None
            places[name] = path
        raise


def _shown(path: Path) -> str:
    return "state" + "".join(f"[{step!r}]" for step in path)


def _by_name(value: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """Return the keys by their `str`, which DCP uses as names.

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


def _plain(value: Any, leaves: Mapping[Path, Any], path: Path = ()) -> Any:
    """Rebuild the nesting in new dicts and lists, with these leaves.

    Keys become str: DCP names a value by `str(key)` and puts it back under that name.
    """
    value = leaves.get(path, value)
    if isinstance(value, Mapping):
        return {
            name: _plain(value[key], leaves, (*path, key))
            for name, key in _by_name(value, path).items()
        }
    if isinstance(value, list) and not _is_whole(value):
        return [_plain(item, leaves, (*path, number)) for number, item in enumerate(value)]
    return value


def _alike(original: Any, loaded: Any) -> Any:
    """Return the loaded value in containers and under keys of the types of `original`."""
    if isinstance(original, Mapping) and isinstance(loaded, Mapping):
        items = {key: _alike(item, loaded[str(key)]) for key, item in original.items()}
        if not isinstance(original, MutableMapping):
            return items
        same = copy.copy(original)  # also of a Counter, an OrderedDict, a defaultdict
        same.clear()
        same.update(items)
        return same
    if isinstance(original, list) and isinstance(loaded, list) and not _is_whole(original):
        return [_alike(*items) for items in zip(original, loaded, strict=True)]
    return loaded


def _at(value: Any, path: Path, *, by_str: bool = True) -> Any:
    """Return the value at a path, in dicts with str keys (`by_str`) or with the user's keys."""
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
