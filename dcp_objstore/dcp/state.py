"""The user's state to a plain state dict and back: modules, optimizers and Stateful objects.

`torch.distributed.checkpoint.state_dict` does the work for modules and optimizers: it names
parameters the same under FSDP2, DDP (`module.`) and torch.compile (`_orig_mod.`), and it keys
optimizer state by parameter name instead of by position, which is what lets a checkpoint be
loaded by another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from dcp_objstore.errors import StateMismatchError

Path = tuple[str | int, ...]


def to_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as DCP takes it: nested dicts and lists of tensors and plain values.

    Tensors are the live ones, so loading into them loads in place. An optimizer that has not
    stepped yet gets its state initialised, as DCP does, so that there is something to load into.

    Raises:
        StateMismatchError: an optimizer whose parameters are not all in one module of the state.
    """
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"the state must be a dict of names to modules, optimizers, tensors or values, got"
            f" {type(state).__name__}; wrap it as {{'model': ...}}"
        )
    modules = [value for _, value in _leaves(state) if isinstance(value, torch.nn.Module)]

    def convert(value: Any, path: Path) -> Any:
        if isinstance(value, torch.nn.Module):
            return get_model_state_dict(value)
        if isinstance(value, torch.optim.Optimizer):
            return get_optimizer_state_dict(_module_of(value, modules, path), value)
        if isinstance(value, Stateful):
            return value.state_dict()
        return value

    converted: dict[str, Any] = _map(state, convert)
    return converted


def restore(state: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put what was loaded back: modules, optimizers and Stateful objects in place, and plain
    values into the caller's dicts and lists.

    Args:
        state: the user's state.
        loaded: what `to_state_dict(state)` gave, loaded into.
    """
    modules = [value for _, value in _leaves(state) if isinstance(value, torch.nn.Module)]
    # Modules first: an optimizer's state is matched to its module's parameters.
    for rank, kind in enumerate((torch.nn.Module, torch.optim.Optimizer, object)):
        for path, value in list(_leaves(state)):
            if not isinstance(value, kind) or (
                rank == 2 and isinstance(value, torch.nn.Module | torch.optim.Optimizer)
            ):
                continue
            _restore_one(state, path, value, _at(loaded, path), modules)


def _restore_one(
    state: MutableMapping[str, Any],
    path: Path,
    value: Any,
    loaded: Any,
    modules: list[torch.nn.Module],
) -> None:
    if isinstance(value, torch.nn.Module):
        set_model_state_dict(value, loaded)
    elif isinstance(value, torch.optim.Optimizer):
        set_optimizer_state_dict(_module_of(value, modules, path), value, loaded)
    elif isinstance(value, Stateful):
        value.load_state_dict(loaded)
    elif loaded is not value:
        _at(state, path[:-1])[path[-1]] = loaded


def _module_of(
    optimizer: torch.optim.Optimizer, modules: list[torch.nn.Module], path: Path
) -> torch.nn.Module:
    """The smallest module of the state that has all of the optimizer's parameters."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sizes = [({id(p) for p in module.parameters()}, module) for module in modules]
    owners = [(len(ids), number) for number, (ids, _) in enumerate(sizes) if wanted <= ids]
    if owners:
        return modules[min(owners)[1]]
    name = ".".join(map(str, path))
    if any(wanted & ids for ids, _ in sizes):
        raise StateMismatchError(
            "the parameters of this optimizer are spread over several modules of the state; pass"
            " the module that contains all of them, or one optimizer per module",
            key=name,
        )
    raise StateMismatchError(
        "the parameters of this optimizer belong to no module of the state; put the module into"
        " the state beside it (and make the optimizer after fully_shard, which replaces the"
        " parameters)",
        key=name,
    )


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a dict or list, with its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, value


def _map(value: Any, convert: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """The same nesting of new dicts and lists, with `convert` applied to the leaves."""
    if isinstance(value, Mapping):
        return {key: _map(item, convert, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_map(item, convert, (*path, n)) for n, item in enumerate(value)]
    return convert(value, path)


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value
