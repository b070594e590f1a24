"""Optimizers: their state by the names of parameters, and back.

`Optimizer.state_dict` numbers the parameters. A checkpoint names them, as torch's
`get_optimizer_state_dict` does, so that other ranks and other groups can load it:
`state.<parameter>.<entry>` and `param_groups.<number>.<setting>`. The numbered groups are those of
one rank. So a job of several ranks also stores the groups of each set of parameters, as
`groups.<digest of their names>`: ranks of a pipeline, or with experts of their own, differ.

A load makes the destinations from what was saved, then calls the optimizer's own `load_state_dict`
once. No step is made, no hook of a step is called, and no gradient or weight is touched.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import LiteralKey
from dcp_objstore.errors import StateMismatchError
from dcp_objstore.observe.report import first_few, logger
from dcp_objstore.state.record import alike, nested, split
from dcp_objstore.state.trainable import prefixes

if TYPE_CHECKING:
    from dcp_objstore.state.record import Path, Place, Record

_OWN = ("params", "param_names")  # entries of a group that say which parameters it has


class NamedOptimizer:
    """An optimizer whose state is named by the parameters of its module.

    Args:
        optimizer: the optimizer.
        module: a module that has all of its parameters.
        names: those names in the module of which state is saved and loaded.

    Attributes:
        state_dict: its state dict by names. The tensors are the optimizer's own.
        lacking: names of trainable parameters that were saved without state, while others had some.
        not_needed: keys of settings of other groups.
        has_names: whether the optimizer's state dict has torch's form. Otherwise nothing is named.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        names: Collection[str],
    ) -> None:
        self._outer, self._optimizer = optimizer, _inner(optimizer)
        self._packed: dict[str, Any] = self._optimizer.state_dict()
        self.lacking: list[str] = []
        self.not_needed: set[str] = set()
        self._wanted: dict[str, Any] | None = None
        self.has_names = "state" in self._packed and "param_groups" in self._packed
        if not self.has_names:
            return
        of_id: dict[int, list[str]] = {}
        for name, parameter in torch_private.all_parameters(module):
            of_id.setdefault(id(parameter), []).append(name)
        pairs = zip(self._optimizer.param_groups, self._packed["param_groups"], strict=True)
        self._parameters = {
            number: parameter
            for group, packed in pairs
            for number, parameter in zip(packed["params"], group["params"], strict=True)
        }
        self._group_of = {
            number: group for group in self._packed["param_groups"] for number in group["params"]
        }
        self._names = {number: of_id[id(p)] for number, p in self._parameters.items()}
        self._number_of = {
            name: number for number, all_ in self._names.items() for name in all_ if name in names
        }
        self._groups = [
            {**group, "params": [self._names[number][0] for number in group["params"]]}
            for group in self._packed["param_groups"]
        ]
        self._state = {
            self._names[key][0] if key in self._names else key: value
            for key, value in self._packed["state"].items()
            if key not in self._names or self._names[key][0] in names
        }

    @property
    def state_dict(self) -> dict[str, Any]:
        """The state dict by names, for a save; for a load into it if nothing was saved there."""
        named = {**self._packed, "state": self._state, "param_groups": self._groups}
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            named["groups"] = {self._digest: (self._groups,)}
        return named

    @property
    def _digest(self) -> str:
        names = [group["params"] for group in self._groups]
        return str(xxhash.xxh3_64_hexdigest(repr(names).encode()))

    def ask(
        self, record: Record, place: Place, module: Place, *, strict: bool
    ) -> dict[str, Any] | None:
        """Return what to load into, by the rest of the key; None if nothing was saved there."""
        saved = record.below(place)
        if not saved:
            return None
        # By the rest of the key: number of the parameter and path in its state; number or parameter
        # of the group, and path in it; path in the state dict.
        self._entries: dict[str, tuple[Any, Path]] = {}
        self._settings: dict[str, tuple[str, Path]] = {}
        self._beside: dict[str, Path] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._taken: dict[str, torch.Tensor] = {}
        self._wanted = {}
        self._record, self._place, self._module, self._strict = record, place, module, strict
        own_groups = f"groups.{self._digest}"
        is_gone: dict[str, bool] = {}
        for rest, path in saved.items():
            kind, _, tail = rest.partition(".")
            key = ".".join((*place, rest))
            if kind == "groups":
                if rest == own_groups or own_groups not in saved:
                    self._wanted[rest] = None
            elif kind == "param_groups":
                name = self._own_name(tail) or tail.partition(".")[0]
                if name.isdecimal() or name in self._number_of:
                    inner = path[2:] if len(path) > 2 else (*tail[len(name) + 1 :].split("."),)
                    self._settings[rest] = name, inner
                    self._wanted[rest] = record.destination(key, self._setting(name, inner))
            elif kind != "state":
                self._beside[rest] = beside = split(path)
                self._wanted[rest] = record.destination(key, self._current(key, beside))
            elif (own := self._own_name(tail)) is not None:
                number = self._number_of[own]
                inner = path[2:] if path[1:2] == (own,) else (*tail[len(own) + 1 :].split("."),)
                self._entries[rest] = number, inner
                self._wanted[rest] = self._destination(key, number, inner)
            else:
                # The state of another rank's parameter or of one that is gone, or a counter.
                name = str(path[1]) if len(path) > 2 else tail
                if name not in is_gone:
                    is_gone[name] = len(path) > 2 and any(map(record.names, prefixes(tail)))
                if not is_gone[name]:
                    self._beside[rest] = beside = split(path)
                    self._wanted[rest] = record.destination(key, self._current(key, beside))
        self.not_needed = {
            ".".join((*place, rest))
            for rest in saved
            if rest not in self._wanted and rest.startswith(("groups.", "param_groups."))
        }
        self._note_lacking()
        return self._wanted

    def _own_name(self, tail: str) -> str | None:
        """Return the own parameter whose name this text begins with."""
        return next((name for name in prefixes(tail) if name in self._number_of), None)

    def _setting(self, number: str, path: Path) -> torch.Tensor | None:
        """Return a new tensor like that which a group has as a setting now."""
        group = self._groups[int(number)] if number in map(str, range(len(self._groups))) else {}
        now = group.get(path[0])
        return torch.empty_like(now) if isinstance(now, torch.Tensor) else None

    def _destination(self, key: str, number: Any, path: Path) -> torch.Tensor | None:
        """Return the current tensor, or a new one, of the device that `load_state_dict` chooses."""
        current = self._current(key, ("state", number, *path))
        if current is not None:
            return self._record.destination(key, current)
        parameter = self._parameters[number]
        group = self._group_of[number]
        on_host = path[-1:] == ("step",) and not (group.get("capturable") or group.get("fused"))
        like = None if on_host else parameter.detach()
        made = self._record.destination(key, None, like)
        if made is not None:
            self._made[key] = made
        return made

    def _current(self, key: str, path: Path) -> torch.Tensor | None:
        """Return the tensor that the optimizer has now, if it has the stored size."""
        current: Any = self._packed
        for step in path:
            if isinstance(current, Mapping):
                current = current.get(step.value if isinstance(step, LiteralKey) else step)
            elif isinstance(current, list) and type(step) is int and step < len(current):
                current = current[step]
            else:
                return None
        saved: Any = self._record.entries[key]
        is_alike = isinstance(current, torch.Tensor) and current.size() == getattr(saved, "size", 0)
        return current if is_alike else None

    def _note_lacking(self) -> None:
        """Note parameters whose state is lacking: they were saved, and others have state."""
        stated = {number for number, _ in self._entries.values()}
        self._known = {
            number
            for number, names in self._names.items()
            if any(name in self._number_of for name in names)
            and any(self._record.names(name, self._module) for name in names)
        }
        if stated:
            self.lacking = [
                self._names[number][0]
                for number in sorted(self._known - stated)
                if self._parameters[number].requires_grad and self._parameters[number].numel()
            ]

    def takes(self, key: str, tensor: torch.Tensor, sizes: tuple[int, ...]) -> bool:
        """Take a stored tensor of a class of its own in place of the plain one that `ask` has made.

        Raises:
            StateMismatchError: this rank needs another part of the tensor than one rank has saved.
        """
        made = self._made.get(key)
        if made is None:
            return False
        if not tuple(torch_private.local_tensor(made).size()) == tuple(tensor.size()) == sizes:
            raise StateMismatchError(
                f"saved as parts of class {type(tensor).__name__}, of which this rank needs another"
                " one than was saved; step the optimizer once before the load, so that it has"
                " tensors to fill",
                key=key,
            )
        taken = tensor.to(made.device)
        self._taken[key] = (
            torch_private.dtensor_alike(taken, made) if isinstance(made, DTensor) else taken
        )
        return True

    def restore(self, values: Mapping[str, Any]) -> None:
        """Put loaded values, by the rest of the key, into the optimizer by its `load_state_dict`.

        Raises:
            StateMismatchError: parameters of one group were saved with different settings. If not
                strict, the group keeps its own.
        """
        if self._wanted is None:
            return
        start = len(".".join((*self._place, "")))
        values = {**values, **{key[start:]: taken for key, taken in self._taken.items()}}
        parts: dict[Any, list[tuple[Path, Any]]] = {}
        for rest, (number, path) in self._entries.items():
            parts.setdefault(number, []).append((path, values[rest]))
        before = self._packed["state"]
        state = {}
        for number in self._parameters:
            if number in parts:
                state[number] = alike(before.get(number, {}), nested(parts[number]))
            elif number in before and number not in self._known:
                state[number] = before[number]
        if not self._strict:  # counters, too
            state |= {key: value for key, value in before.items() if key not in self._names}
        beside = nested((path, values[rest]) for rest, path in self._beside.items())
        state |= beside.pop("state", {})
        loaded = {
            **alike(self._packed, {**self._packed, **beside}),
            "state": state,
            "param_groups": self._loaded_groups(values),
        }
        self._optimizer.load_state_dict(loaded)
        if self._outer is not self._optimizer:  # its groups have the parameters of all ranks
            for group, own in zip(self._outer.param_groups, loaded["param_groups"], strict=True):
                group.update({key: own[key] for key in own if key not in _OWN})

    def _loaded_groups(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the settings that were saved for their parameters."""
        saved = [
            group
            for rest in self._wanted or ()
            if rest.startswith("groups.")
            for group in values[rest][0]
        ]
        parts: dict[str, list[tuple[Path, Any]]] = {}
        for rest, (name, path) in self._settings.items():
            parts.setdefault(name, []).append((path, values[rest]))
        numbers = [name for name in parts if name not in self._number_of]
        saved += [nested(parts.pop(number)) for number in sorted(numbers, key=int)]
        sources: dict[str, dict[str, Any]] = {}
        for group in saved:
            for name in group.get("params", ()):
                sources.setdefault(name, group)
        sources |= {name: nested(settings) for name, settings in parts.items()}
        empty = iter([group for group in saved if not group.get("params")])
        groups, unknown = [], []
        defaults = getattr(self._optimizer, "defaults", {})  # PostLocalSGDOptimizer has none
        for at, own in enumerate(self._packed["param_groups"]):
            names = [self._names[number] for number in own["params"]]
            found = [sources[name] for all_ in names for name in all_ if name in sources]
            if not names:
                found = [*itertools.islice(empty, 1)]
            if not found:
                unknown.append(at)
            settings, differing = _common(found)
            if differing and self._strict:
                raise StateMismatchError(
                    f"parameters of group {at} of this optimizer were saved in groups with other"
                    f" settings than each other ({first_few(differing, 3)}): group them as they"
                    " were saved, or pass strict=False, and the group keeps its own",
                    key=".".join((*self._place, "param_groups", str(at))),
                )
            if differing:
                logger.warning(
                    "group %d of the optimizer %s keeps its own %s: its parameters were saved with"
                    " different ones",
                    at,
                    ".".join(self._place),
                    first_few(differing, 3),
                )
            # A setting that the constructor knows stays: an older version may not have saved it.
            kept = {k: own[k] for k in own if not found or k in defaults}
            groups.append(
                {**kept, **copy.deepcopy(settings), **{key: own[key] for key in _OWN if key in own}}
            )
        if unknown:
            logger.warning(
                "the checkpoint has no settings for %d groups of the optimizer %s, which keep their"
                " own (%s)",
                len(unknown),
                ".".join(self._place),
                first_few(list(map(str, unknown)), 5),
            )
        return groups


def _common(groups: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that these groups agree on, and the names of those that differ."""
    first, *others = {id(group): group for group in groups}.values() or ({},)
    names = dict.fromkeys(itertools.chain(first, *others))
    differing = [
        name
        for name in names
        if name not in _OWN
        and any(name not in group or not _same(first.get(name), group[name]) for group in others)
    ]
    kept = {key: first[key] for key in first if key not in _OWN and key not in differing}
    return kept, differing


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds this rank's state: ZeroRedundancyOptimizer has one inside."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    zero = getattr(module, "ZeroRedundancyOptimizer", ())
    return optimizer.optim if isinstance(optimizer, zero) else optimizer
