"""Optimizers of FSDP1, whose flat parameters only torch can name.

A flat parameter stands for many, and only FSDP knows what a rank's part of it is. So its optimizers
stay with torch's functions: a load asks for the entries that a step with zero gradients makes,
except those of parameters that were saved without any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import StateMismatchError

if TYPE_CHECKING:
    import torch

    from dcp_objstore.state.record import Place, Record


class FlatOptimizer:
    """An optimizer of a module under FSDP1, named by torch.

    Args:
        optimizer: the optimizer.
        module: the module that has its parameters.
        names: those names in the module of which state is saved and loaded.
        owner: the module's place in the state.
        loading: whether `state_dict` has what a step makes for parameters without state.

    Attributes:
        state_dict: its state dict by names.
        lacking: names of parameters that were saved without state, while others had some.

    Raises:
        StateMismatchError: it has groups that torch cannot load.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        names: Collection[str],
        owner: Place,
        *,
        loading: bool,
    ) -> None:
        self._optimizer, self._module, self._owner = optimizer, module, owner
        groups = [group["params"] for group in optimizer.param_groups]
        if sum(not group for group in groups) > 1:
            raise StateMismatchError(
                "this optimizer has several parameter groups without parameters; under FSDP1, torch"
                " can load at most one, so remove the others"
            )
        self.lacking: list[str] = []
        self._without_state: list[str] = []  # names that `restore` gives no state
        # Whether a load has to make destinations, because a parameter that trains has no state.
        # (On a rank that has no shard of it, a parameter has no elements, and never has a state.)
        self._is_fresh = not optimizer.state or any(
            parameter.requires_grad and parameter.numel() and parameter not in optimizer.state
            for group in groups
            for parameter in group
        )
        # Only a load into a fresh optimizer has torch make a step, for the destinations.
        with _stepping(optimizer) if loading and self._is_fresh else _not_stepping(optimizer):
            self.state_dict: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
        state: dict[str, Any] = self.state_dict["state"]
        self.state_dict["state"] = {name: state[name] for name in state if name in names}

    def ask(self, _: Any, record: Record, place: Place, *, strict: bool) -> dict[str, Any]:
        """Return what to load into; parameters that were saved without state are left out.

        What is asked for and was not saved, the planner refuses, unless the load is not strict.
        """
        saved = record.below(place)
        has_state = any(rest.startswith("state.") for rest in saved)
        state = {}
        for name, entries in self.state_dict["state"].items():
            is_saved = not entries or any(f"state.{name}.{entry}" in saved for entry in entries)
            # The checkpoint has the parameter itself, but no state of it. (If it has nothing of the
            # optimizer at all, a load that is not strict leaves the optimizer as it is.)
            was_without = not is_saved and record.names(name, self._owner) and (strict or saved)
            if not was_without:
                state[name] = entries
            elif has_state:
                self.lacking.append(name)
            # If the load is not strict, an entry that was not saved keeps its value. But one that
            # `_stepping` made has none to keep.
            is_unfilled = not is_saved and not strict and self._is_fresh
            if was_without or is_unfilled:
                self._without_state.append(name)
        return {**self.state_dict, "state": state}

    def restore(self, values: dict[str, Any]) -> None:
        """Put loaded values into the optimizer."""
        for name in self._without_state:
            values["state"][name] = {}  # torch 2.9 needs an entry for each parameter
        # Not strict: the planner has refused what the checkpoint lacks, or left it as it is.
        options = StateDictOptions(strict=False)
        with _not_stepping(self._optimizer):
            set_optimizer_state_dict(self._module, self._optimizer, values, options=options)
        state = self._optimizer.state
        # Take the empty entries out again: a parameter without state has none.
        for parameter in [parameter for parameter, entries in state.items() if not entries]:
            del state[parameter]


class _Stepped(defaultdict[Any, Any]):
    """A state that torch takes for that of an optimizer that has stepped, even if it is empty."""

    def __bool__(self) -> bool:
        return True


@contextmanager
def _not_stepping(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from making a state, by a step, for an optimizer that has none.

    Its functions for state dicts do so, for a save and for a load, if `optimizer.state` is false.
    """
    before = optimizer.state
    stepped = optimizer.state = _Stepped(dict, before)
    try:
        yield
    finally:
        if optimizer.state is stepped:  # otherwise `load_state_dict` has replaced it in the block
            optimizer.state = before


@contextmanager
def _stepping(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch make a state for an optimizer in the block; keep its own, gradients and settings.

    torch makes it by a step with zero gradients and a learning rate of 0. It silently makes none if
    there are gradients, and leaves the learning rate at 0 if the step fails.
    """
    groups = optimizer.param_groups
    settings = [dict(group) for group in groups]
    gradients = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
    state, optimizer.state = optimizer.state, defaultdict(dict)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        optimizer.state = state
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for group, before in zip(groups, settings, strict=True):
            group.update(before)
