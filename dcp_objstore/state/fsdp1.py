"""Optimizers of FSDP1, whose flat parameters only torch can name.

A flat parameter stands for many, and only FSDP knows what a rank's part of it is. So its optimizers
stay with torch's functions: a load asks for the entries that a step with zero gradients makes,
except those of parameters that were saved without any.
"""

from __future__ import annotations

import contextlib
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
        loading: whether to make state for parameters that have none, until `undo` or `restore`.

    Attributes:
        state_dict: its state dict by names.
        lacking: names of parameters that were saved without state, while others had some.
        not_needed: keys of settings of other groups.

    Raises:
        StateMismatchError: it has groups that torch cannot load.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        names: Collection[str],
        *,
        loading: bool,
    ) -> None:
        self._optimizer, self._module = optimizer, module
        groups = [group["params"] for group in optimizer.param_groups]
        if sum(not group for group in groups) > 1:
            raise StateMismatchError(
                "this optimizer has several parameter groups without parameters; under FSDP1, torch"
                " can load at most one, so remove the others"
            )
        self._before = dict(optimizer.state)
        self._is_fresh = loading and _lacks_state(optimizer)
        self.lacking: list[str] = []
        self.not_needed: set[str] = set()
        self._without: list[str] = []
        try:
            if self._is_fresh:
                optimizer.state.clear()
            with contextlib.ExitStack() as prepared:
                if not optimizer.state:
                    prepare = _trial_step if loading else _held_from_stepping
                    prepared.enter_context(prepare(optimizer))
                self.state_dict: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
        except BaseException:
            self.undo()
            raise
        state: dict[str, Any] = self.state_dict["state"]
        self.state_dict["state"] = {name: state[name] for name in state if name in names}

    def undo(self) -> None:
        """Give the optimizer back the state that it had before."""
        if self._is_fresh:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._before)

    def ask(
        self, record: Record, place: Place, module: Place, *, strict: bool
    ) -> dict[str, Any] | None:
        """Return what to load into; parameters that were saved without state are left out."""
        saved = record.below(place)
        self.not_needed = {".".join((*place, rest)) for rest in saved if rest.startswith("groups.")}
        stated = {rest for rest in saved if rest.startswith("state.")}
        state = {}
        for name, entries in self.state_dict["state"].items():
            if not entries or any(f"state.{name}.{entry}" in saved for entry in entries):
                state[name] = entries
            elif record.names(name, module) and (strict or saved):
                self._without.append(name)
                self.lacking += [name] if stated else []
            else:
                state[name] = entries
                self._without += [] if strict or not self._is_fresh else [name]
        return {**self.state_dict, "state": state}

    def restore(self, values: dict[str, Any]) -> None:
        """Put loaded values into the optimizer."""
        for name in self._without:
            values["state"][name] = {}  # torch 2.9 needs one for each parameter
        # Not strict: what the checkpoint lacks was refused, or stays as it is.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(self._module, self._optimizer, values, options=options)
        for key in [key for key, state in self._optimizer.state.items() if not state]:
            del self._optimizer.state[key]


def _lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a trainable parameter has no state.

    One without elements never gets any, on a rank that has no shard of it.
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
