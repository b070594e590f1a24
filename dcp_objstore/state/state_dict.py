"""Convert the user's state (modules, optimizers, Stateful objects) to a plain state dict and back.

`torch.distributed.checkpoint.state_dict` does the work for modules and optimizers. It names
parameters the same under FSDP2, DDP (`module.`) and torch.compile (`_orig_mod.`). It keys optimizer
state by parameter name instead of by position, so that another number of ranks can load the
checkpoint. (DCP itself would also accept a module, as a Stateful, and store the wrappers' names.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import LiteralKey, is_literal
from dcp_objstore.checkpoint.marker import LeftOut
from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import (
    DcpObjstoreError,
    RankFailedError,
    StateMismatchError,
    UnsupportedError,
)
from dcp_objstore.observe.report import first_few
from dcp_objstore.state.fsdp1 import FlatOptimizer
from dcp_objstore.state.optimizers import NamedOptimizer
from dcp_objstore.state.per_rank import PerRank, is_stateful, own_name
from dcp_objstore.state.record import (
    Asked,
    Empty,
    Path,
    Place,
    Record,
    alike,
    has_parts,
    is_numbered_state,
    is_whole,
    leaves,
)
from dcp_objstore.state.trainable import Trainable, count_left_out

_MODULES = torch.nn.Module, Trainable


@dataclass(slots=True)
class _Leaf:
    """A value of the state that is not a dict or a list to descend into.

    Attributes:
        original: the original state dict of the value, which has the types of its containers and
            keys; the value itself if it is a plain value or a tensor.
        module: the module itself, or that of a `Trainable`; None for other values.
        optimizer: an optimizer by names.
        is_decided: whether the checkpoint decides what a load asks for.
        asked: what a load asks for of such a value; set by `ask`, if anything was saved of it.
    """

    path: Path
    value: Any
    original: Any
    module: torch.nn.Module | None = None
    optimizer: NamedOptimizer | FlatOptimizer | None = None
    is_decided: bool = False
    asked: Asked | None = None


class ConvertedState:
    """A user's state converted to a plain state dict, with the way back.

    Tensors are not copied, so loading into them loads in place. The checkpoint decides what
    is loaded into an optimizer or a Stateful object: `ask` completes the state dict.

    Args:
        state: a dict, nested as you like, of modules, optimizers, Stateful objects, tensors and
            plain values.
        loading: whether the state will be loaded into; if False, it will be saved.
        strict: whether a load refuses what the checkpoint does not have.

    Attributes:
        state_dict: nested dicts with str keys, and lists, of tensors and plain values.
        optimizers: place of each optimizer.
        whole: places of modules that are not `Trainable`, optimizers, Stateful objects, lists and
            dicts without entries: a load warns of entries saved there that it does not load.
        per_rank: place of each `PerRank`, mapped to whether it wants the values of all ranks.
        left_out: place of each `Trainable`, mapped to what it leaves out of its module.

    Raises:
        StateMismatchError: the state cannot be converted; the message says what to pass instead.
        UnsupportedError: tensors to load into are on the meta device.
    """

    def __init__(self, state: Mapping[str, Any], *, loading: bool, strict: bool = True) -> None:
        """Convert the state; the optimizers stay as they are."""
        if not isinstance(state, Mapping):
            raise StateMismatchError(
                "the state must be a dict of names to modules, optimizers, tensors or values, got"
                f" {type(state).__name__}",
                advice="wrap it as {'model': ...}",
            )
        for name in state:
            if not isinstance(name, str):
                raise StateMismatchError(f"the names in the state must be str, got {name!r}")
        self._state = state
        self._loading, self._strict = loading, strict
        self.whole: list[Place] = []
        self.optimizers: list[Place] = []
        self.per_rank: dict[Place, bool] = {}
        self.left_out: dict[Place, LeftOut] = {}
        self._leaves = self._converted()
        if loading:
            self._check_memory()
        self._check_names_of_ranks()
        self._originals = {leaf.path: leaf.original for leaf in self._leaves}
        # The values of which a load asks for what was saved, not for what they have.
        self._decided = {
            leaf.path
            for leaf in self._leaves
            if leaf.is_decided or isinstance(leaf.optimizer, NamedOptimizer)
        }
        self.state_dict: dict[str, Any] = self._plain(state)

    def _converted(self) -> list[_Leaf]:
        """Convert the leaves of the state; note where there are modules, optimizers and so on.

        Sorted, because `state_dict` and `load_state_dict` may be collectives (FSDP1's are), and the
        dicts of two ranks may differ in their order. Modules first: their state dict gives FSDP2's
        modules back the parameters that the optimizers have.
        """
        whole: list[Path] = []
        values = sorted(
            leaves(self._state, (), self._is_decided, whole),
            key=lambda item: (_turn_of(item[1]), _place(item[0])),
        )
        self.whole += map(_place, whole)
        modules = {path: value for path, value in values if isinstance(value, _MODULES)}
        converted: list[_Leaf] = []
        for path, value in values:
            if type(value) is torch.Tensor:  # the most by far
                converted.append(_Leaf(path, value, value))
                continue
            with _named_errors(value, path, "state_dict"):
                converted.append(self._convert(path, value, modules))
        return converted

    def _is_decided(self, value: Any) -> bool:
        """Whether the checkpoint decides what is loaded into a dict or list.

        It decides for what `Optimizer.state_dict` returns. If that is the whole state, which has
        no place of its own, it decides for the parts: "state" and "param_groups".
        """
        if is_numbered_state(self._state):
            return any(value is part for part in self._state.values())
        return is_numbered_state(value)

    def _convert(
        self, path: Path, value: Any, modules: Mapping[Path, torch.nn.Module | Trainable]
    ) -> _Leaf:
        """Return how to save or load one value of the state, with what DCP gets in its place."""
        place = _place(path)
        if isinstance(value, _MODULES):
            return self._convert_module(path, value)
        if isinstance(value, PerRank):
            return _Leaf(path, value, self._convert_per_rank(path, value))
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(place)
            owner = _module_of(value, modules, path)
            named = self._named(value, modules[owner], _place(owner))
            if named is not None:
                self.whole.append(place)
                return _Leaf(path, value, named.state_dict, optimizer=named)
        if isinstance(value, tuple) and has_parts(value):
            raise StateMismatchError(
                "a tuple is stored as one pickled value",
                advice="put modules, optimizers and sharded tensors into a list or a dict",
                key=_name(path),
            )
        if not is_stateful(value) and not self._is_decided(value):
            return _Leaf(path, value, value)
        # A Stateful object, an optimizer that torch cannot name, or an optimizer's state dict.
        self.whole.append(place)
        original = value.state_dict() if is_stateful(value) else value
        return _Leaf(path, value, original, is_decided=isinstance(original, Mapping | list))

    def _convert_module(self, path: Path, value: torch.nn.Module | Trainable) -> _Leaf:
        """Return how to save or load a module; of a `Trainable`, note what is left out."""
        state = _module_state(_module_in(value))
        if isinstance(value, torch.nn.Module):
            self.whole.append(_place(path))
            return _Leaf(path, value, state, value)
        part = value.part_of(state)
        self.left_out[_place(path)] = count_left_out(state, part)
        return _Leaf(path, value, part, value.module)

    def _named(
        self, optimizer: torch.optim.Optimizer, owner: torch.nn.Module | Trainable, place: Place
    ) -> NamedOptimizer | FlatOptimizer | None:
        """Return the optimizer by names; None if its state dict has another form."""
        module = _module_in(owner)
        names = dict(torch_private.all_parameters(module))
        wanted = owner.part_of(names) if isinstance(owner, Trainable) else names
        if torch_private.has_flat_parameters(module):
            return FlatOptimizer(optimizer, module, wanted, place, loading=self._loading)
        named = NamedOptimizer(optimizer, module, wanted, place)
        return named if named.has_names else None

    def _check_memory(self) -> None:
        """Refuse tensors that have no memory to load into.

        They do not get it here, for three reasons: the caller must choose the device, an existing
        optimizer would keep the old parameters, and buffers that are not in the checkpoint would
        contain arbitrary bytes.
        """
        on_meta = [
            (leaf, _name(path))
            for leaf in self._leaves
            for path, item in leaves(leaf.original, leaf.path)
            if isinstance(item, torch.Tensor) and item.device.type == "meta"
        ]
        if not on_meta:
            return
        leaf, key = on_meta[0]
        advice = "replace each with torch.empty_like(tensor, device=...)"
        if isinstance(leaf.value, torch.nn.Module):
            key = _name(leaf.path)
            advice = (
                "before you load, and before you make an optimizer of the module, call"
                ' to_empty(device="cuda") on it, or name another device'
            )
            empty = [name for name, buffer in leaf.value.named_buffers() if buffer.is_meta]
            unsaved = first_few([name for name in empty if name not in leaf.original], 3)
            if unsaved:
                advice += f". Then compute the buffers that no checkpoint has ({unsaved})"
        raise UnsupportedError(
            "the state has tensors on the meta device, with no memory to load into"
            f" ({first_few([name for _, name in on_meta], 3)})",
            advice=advice,
            key=key,
        )

    def _plain(self, value: Any, path: Path = ()) -> Any:
        """Return a value of the state in new dicts and lists, each leaf by its state dict.

        Keys become str: DCP names a value by `str(key)` and puts it back under that name.

        Raises:
            StateMismatchError: two keys have the same name.
        """
        value = self._originals.get(path, value)
        if isinstance(value, list) and not is_whole(value):
            return [self._plain(item, (*path, number)) for number, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if not value and not self._loading:
            # DCP stores nothing of an empty dict. But a value of which the checkpoint decides gets
            # only what was stored, so there the dict is stored, as `Empty`.
            is_needed = any(path[:number] in self._decided for number in range(1, len(path)))
            return Empty if is_needed else {}
        name_of = str if self._loading else literal_name
        plain: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str else name_of(key)
            if name in plain:
                other = next(other for other in value if str(other) == name)
                raise _clash(f"the keys {other!r} and {key!r} of {_as_code(path)}", (*path, key))
            plain[name] = self._plain(item, (*path, key))
        return plain

    def _check_names_of_ranks(self) -> None:
        """Refuse a value whose name is also that of a rank's value of a `PerRank`."""
        places = {_name(place): place for place in self.per_rank}
        for leaf in self._leaves if places else ():
            outer, _, rank = _name(leaf.path).rpartition(".")
            if outer in places and rank.isdecimal():
                per_rank = f"rank {rank}'s value of the PerRank at {_as_code(places[outer])}"
                raise _clash(f"{_as_code(leaf.path)} and {per_rank}", leaf.path)

    def _convert_per_rank(self, path: Path, value: PerRank) -> dict[str, Any]:
        """Return this rank's entries of a PerRank: to save, or to be filled by a load."""
        self.per_rank[_place(path)] = value.choice == "list"
        if self._loading:
            return {own_name(): ()}  # empty until it is loaded
        entry = value.to_save()
        if has_parts(entry):
            raise StateMismatchError(
                "a PerRank is stored as one pickled value for each rank, so it cannot contain"
                " modules, optimizers, Stateful objects or sharded tensors",
                key=_name(path),
            )
        return entry

    @torch.inference_mode(mode=False)  # so that an optimizer can step the tensors made here
    def ask(self, state_dict: dict[str, Any], record: Record) -> None:
        """Ask for what was saved of each optimizer and Stateful object.

        Args:
            state_dict: `state_dict`, or a shallow copy of it, which DCP makes.
            record: what the checkpoint has.
        """
        for leaf in self._leaves:
            place, current, wanted = _place(leaf.path), _at(state_dict, leaf.path), None
            if leaf.optimizer is not None:
                wanted = leaf.optimizer.ask(current, record, place, strict=self._strict)
            elif leaf.is_decided:
                asked = Asked(current, record, place)
                if asked.saved:
                    asked.ask_for_all()
                    leaf.asked, wanted = asked, asked.wanted
            # Otherwise nothing was saved there, or the state itself decides what to load into.
            if wanted is not None:
                container = _at(state_dict, leaf.path[:-1])
                container[leaf.path[-1] if isinstance(container, list) else place[-1]] = wanted

    @property
    def lacking(self) -> list[str]:
        """Names of parameters that get no optimizer state, while others of the optimizer do."""
        optimizers = [leaf.optimizer for leaf in self._leaves if leaf.optimizer is not None]
        return sorted(name for optimizer in optimizers for name in optimizer.lacking)

    def restore(self) -> None:
        """Put the loaded `state_dict` back into the user's state.

        Modules, optimizers and Stateful objects are restored in place; plain values are put into
        the caller's dicts and lists.

        Raises:
            StateMismatchError: a value does not take what was saved of it.
        """
        for leaf in self._leaves:
            loaded = _at(self.state_dict, leaf.path)
            if isinstance(loaded, torch.Tensor) and loaded is leaf.value:
                continue  # it was loaded into
            with _named_errors(leaf.value, leaf.path, "load_state_dict"):
                self._restore_one(leaf, loaded)

    def _restore_one(self, leaf: _Leaf, loaded: Any) -> None:
        """Put loaded values back into one value of the user's state, by its kind.

        Args:
            leaf: the value, with its state dict from before the load (`original`), which is the
                value itself if it has none.
            loaded: what stands in `state_dict` at the value's place after the load.
        """
        if isinstance(leaf.value, PerRank):
            leaf.value.fill(loaded)
            return
        if leaf.optimizer is not None:
            # A tensor that is made in inference mode could not be changed outside of it later.
            with torch.inference_mode(mode=False):
                leaf.optimizer.restore(loaded)
            return
        if leaf.asked is not None:  # the load asked for each entry that was saved, by its name
            loaded = leaf.asked.loaded(loaded)  # the same entries in nested dicts and lists
            if is_numbered_state(leaf.value):  # torch's own checkpoints have the numbers as str
                loaded["state"] = {
                    int(key) if str(key).isdecimal() else key: entries
                    for key, entries in loaded.get("state", {}).items()
                }
        # In `state_dict`, dicts are plain and have str keys; `original` has the value's own types.
        loaded = alike(leaf.original, loaded)
        if leaf.module is not None:
            # The value is the module, or a `Trainable` of it, whose state dict lacks some of the
            # module's names. torch would refuse that; the planner has checked the names it has.
            options = StateDictOptions(strict=leaf.value is leaf.module)
            if loaded:  # torch refuses an empty one
                set_model_state_dict(leaf.module, loaded, options=options)
        elif is_stateful(leaf.value):  # or an optimizer that has no names
            with torch.inference_mode(mode=False):  # for the reason above
                leaf.value.load_state_dict(loaded)
        elif isinstance(leaf.value, list) and isinstance(loaded, list):  # maybe of another length
            leaf.value[:] = loaded
        elif isinstance(leaf.value, dict):  # an optimizer's state dict; `alike` made a new one
            leaf.value.clear()
            leaf.value.update(loaded)
        elif loaded is not leaf.value:  # a plain value: it stands in one of the user's containers
            _at(self._state, leaf.path[:-1], by_str=False)[leaf.path[-1]] = loaded


def _turn_of(value: Any) -> int:
    """Return where a value stands in the order of conversions and of restoring."""
    if isinstance(value, _MODULES):
        return 0
    return 1 if isinstance(value, torch.optim.Optimizer) else 2


@contextmanager
def _named_errors(value: Any, path: Path, call: str) -> Iterator[None]:
    """Turn what a value's own methods raise into an error that names it.

    What may have broken off a collective passes: FSDP1's state dict is one, and only the caller
    (`typed_failures`) can tell which rank failed.

    Args:
        value: the value.
        path: its path in the state.
        call: the method that is called in the block.
    """
    try:
        yield
    except DcpObjstoreError as error:
        error.at(key=_name(path))
        raise
    except Exception as error:
        if isinstance(error, dist.DistError) or (
            isinstance(value, torch.nn.Module) and torch_private.has_flat_parameters(value)
        ):
            raise
        text = f"{call} of this {type(value).__name__} raised {type(error).__name__}: {error}"
        loads_optimizer = call == "load_state_dict" and isinstance(value, torch.optim.Optimizer)
        if loads_optimizer and isinstance(error, KeyError):
            text = f"another optimizer than {type(value).__name__} wrote this, without {error}"
        if isinstance(error, MemoryError | torch.OutOfMemoryError | OSError):
            # The state may be right: the machine had no memory, or could not read or write.
            raise RankFailedError(text, key=_name(path)) from error
        advice = (
            "; if its hooks rename keys, pass its state_dict() in its place"
            if isinstance(value, torch.nn.Module)
            else ""
        )
        raise StateMismatchError(text + advice, key=_name(path)) from error


def _module_in(value: torch.nn.Module | Trainable) -> torch.nn.Module:
    """Return the module, also of a `Trainable`."""
    return value.module if isinstance(value, Trainable) else value


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's state dict by names that no wrapper changes. Under FSDP1 a collective."""
    # torch mistakes an empty result for a wrong option and raises. (Parameters are checked first,
    # because under FSDP1 `state_dict` is a collective.)
    if next(module.parameters(), None) is None and not module.state_dict():
        return {}
    state: dict[str, Any] = get_model_state_dict(module)
    return state


def _module_of(
    optimizer: torch.optim.Optimizer,
    modules: Mapping[Path, torch.nn.Module | Trainable],
    path: Path,
) -> Path:
    """Return the place of the smallest module that has all of the optimizer's parameters."""
    optimized = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    ids_of = {
        place: {id(tensor) for tensor in _module_in(module).parameters()}
        for place, module in modules.items()
    }
    owners = [place for place, ids in ids_of.items() if optimized <= ids]
    if owners:
        return min(owners, key=lambda place: len(ids_of[place]))
    raise StateMismatchError(
        "no module of the state has all parameters of this optimizer",
        advice="add the module that contains all of them to the state, or make one optimizer per"
        " module (and after fully_shard, which replaces the parameters)",
        key=_name(path),
    )


def _place(path: Path) -> Place:
    """Return a path with its steps as str."""
    return tuple(map(str, path))


def _name(path: Path) -> str:
    """Return DCP's name for a place in the state."""
    return ".".join(_place(path))


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
        with self._typed_errors():
            try:
                super().set_up_planner(state_dict, storage_meta, is_coordinator)  # type: ignore[misc]
            except ValueError:  # DCP's has only the name that two values have
                path_of: dict[str, Path] = {}
                for path, _ in leaves(state_dict):
                    other = path_of.setdefault(_name(path), path)
                    if other != path:
                        raise _clash(f"{_as_code(other)} and {_as_code(path)}", path) from None
                raise  # it has another reason

    def _typed_errors(self) -> contextlib.AbstractContextManager[None]:
        return plugin_errors(current_rank(), self._url)


def _as_code(path: Path) -> str:
    """Return the expression for a value of the state, such as `state["model"][0]`."""
    return "state" + "".join(f"[{step!r}]" for step in path)


def _clash(values: str, path: Path) -> StateMismatchError:
    """Return the error for two values with one name: both, in words, and the path of one."""
    return StateMismatchError(
        f"{values} have the same name in a checkpoint", advice="rename one of them", key=_name(path)
    )


def literal_name(key: Any) -> str:
    """Return the name of a key that is not a plain str.

    If the name is a literal of the key, as "1" is of 1, a load can give back the key itself: then
    the save notes that, by a `LiteralKey`.
    """
    name = str(key)
    is_noted = not isinstance(key, str) and is_literal(name) and LiteralKey(name).value == key
    return LiteralKey(name) if is_noted else name


def _at(value: Any, path: Path, *, by_str: bool = True) -> Any:
    """Return the value at a path, in dicts with str keys (`by_str`) or with the user's keys."""
    for step in path:
        value = value[str(step) if by_str and isinstance(value, Mapping) else step]
    return value
