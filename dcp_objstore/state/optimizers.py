"""Optimizers: their state by the names of parameters, and back.

`Optimizer.state_dict` numbers the parameters. A checkpoint names them, as torch's
`get_optimizer_state_dict` does, so that other ranks and other groups can load it:
`state.<parameter>.<entry>` and `param_groups.<number>.<setting>`. The numbered groups are those of
one rank. So a job of several ranks also stores the groups of each set of parameters, as
`groups.<digest of their names>`: ranks of a pipeline, or with different experts, differ.

A load makes the destinations from what was saved, then calls the optimizer's own `load_state_dict`
once. No step is made, no hook of a step is called, and no gradient or weight is touched.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor

from dcp_objstore import torch_private
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import StateMismatchError
from dcp_objstore.observe.report import first_few, logger
from dcp_objstore.state.record import Asked, alike, below, is_numbered_state, is_sharded
from dcp_objstore.state.trainable import prefixes

if TYPE_CHECKING:
    from dcp_objstore.state.record import Path, Place, Record

_MEMBERS = ("params", "param_names")  # entries of a group that say which parameters it has


class _Parameter(NamedTuple):
    """A parameter, its names in the module, and its group in the optimizer's state dict."""

    tensor: torch.Tensor
    names: list[str]
    group: dict[str, Any]


class NamedOptimizer:
    """An optimizer whose state is named by the parameters of its module.

    Args:
        optimizer: the optimizer.
        module: a module that has all of its parameters.
        names: those names in the module of which state is saved and loaded.
        owner: the module's place in the state.

    Attributes:
        state_dict: its state dict by names. The tensors are the optimizer's own.
        lacking: names of trainable parameters that were saved without state, while others had some.
        has_names: whether the optimizer's state dict has torch's form. Otherwise nothing is named.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        names: Collection[str],
        owner: Place,
    ) -> None:
        self._outer, self._optimizer, self._owner = optimizer, _inner(optimizer), owner
        # By numbers, as the optimizer has it: `param_groups` and, by number, `state`.
        self._packed: dict[str, Any] = self._optimizer.state_dict()
        self._asked: Asked | None = None  # until `ask`, and after it if nothing was saved
        self.lacking: list[str] = []
        self.has_names = is_numbered_state(self._packed)
        if not self.has_names:
            return
        # A parameter has several names if modules share it.
        names_of_id: dict[int, list[str]] = defaultdict(list)
        for name, tensor in torch_private.all_parameters(module):
            names_of_id[id(tensor)].append(name)
        pairs = zip(self._optimizer.param_groups, self._packed["param_groups"], strict=True)
        self._parameters = {
            number: _Parameter(tensor, names_of_id[id(tensor)], packed)
            for group, packed in pairs
            for number, tensor in zip(packed["params"], group["params"], strict=True)
        }
        self._number_of = {
            name: number
            for number, parameter in self._parameters.items()
            for name in parameter.names
            if name in names
        }
        self._name_state(names)

    def _name_state(self, names: Collection[str]) -> None:
        """Set `state_dict`, with the state of the parameters of these names."""
        # In `state_dict`, a parameter goes by its first name.
        first_names = {number: parameter.names[0] for number, parameter in self._parameters.items()}
        groups = [
            {**group, "params": [first_names[number] for number in group["params"]]}
            for group in self._packed["param_groups"]
        ]
        # The state of a parameter that is not saved, or that has no entries, is left out. A key
        # that is not a parameter's number stands for something else, such as a counter.
        state = {
            first_names.get(key, key): value
            for key, value in self._packed["state"].items()
            if key not in first_names or (first_names[key] in names and value != {})
        }
        self.state_dict = {**self._packed, "state": state, "param_groups": groups}
        if not state:  # an empty dict would be stored here, as a value
            del self.state_dict["state"]
        members = repr([group["params"] for group in groups])
        digest = xxhash.xxh3_64_hexdigest(members.encode())
        self._own_groups = f"groups.{digest}"
        if rank_and_world_size()[1] > 1:
            self.state_dict["groups"] = {digest: (groups,)}  # DCP stores a tuple as one value

    def ask(
        self, current: Any, record: Record, place: Place, *, strict: bool
    ) -> dict[str, Any] | None:
        """Return what to load into, by the rest of the key; None if nothing was saved there.

        Args:
            current: `state_dict`, with str keys.
            record: what the checkpoint has.
            place: the optimizer's place in the state.
            strict: whether the load is strict; for `restore`.
        """
        asked = Asked(current, record, place)
        if not asked.saved:
            return None
        self._asked, self._place, self._strict = asked, ".".join(place), strict
        # The modules of other ranks may stand at each place beside this rank's module.
        places = record.places_beside(self._owner)
        is_parameter = functools.cache(
            lambda name: any(record.names(name, (place,)) for place in places)
        )
        for rest, saved_path in asked.saved.items():
            path = self._path_of(rest, saved_path, asked, is_parameter)
            if path is None:  # the entry belongs to other ranks, or to a parameter that is gone
                continue
            own = asked.own.get(rest)
            if path[0] == "param_groups":
                asked.ask(rest, path, None, like=own)  # not into `own`: `restore` chooses
            else:
                saved = record.entries[f"{self._place}.{rest}"]
                fits = isinstance(own, torch.Tensor) and own.size() == getattr(saved, "size", None)
                asked.ask(rest, path, own if fits else None, self._like(path, saved, record))
        # The numbers of parameters that the checkpoint has, and the names that have a saved state.
        self._known = {
            number for name, number in self._number_of.items() if record.names(name, self._owner)
        }
        stated = {path[1] for path in asked.paths.values() if len(path) > 2 and path[0] == "state"}
        if not stated.isdisjoint(self._number_of):  # else none has saved state
            self.lacking = [
                names[0]
                for tensor, names, _ in map(self._parameters.__getitem__, sorted(self._known))
                if names[0] not in stated and tensor.requires_grad and tensor.numel()
            ]
        return asked.wanted

    def _path_of(
        self, rest: str, path: Path, asked: Asked, is_parameter: Callable[[str], bool]
    ) -> Path | None:
        """Return where a saved entry belongs in a state dict by first names; None: not here.

        Args:
            rest: the entry's name below the optimizer, such as "state.net.0.weight.exp_avg".
            path: its path there, if the save noted it: ("state", "net.0.weight", "exp_avg").
            asked: the request that it will be part of.
            is_parameter: whether a module of the checkpoint has a parameter of a name.
        """
        kind, _, tail = rest.partition(".")
        # A rank asks for the groups of its own parameters. If no rank of the save had just these,
        # it asks for the groups of all ranks, and `_loaded_groups` looks for its parameters there.
        if kind == "groups":
            is_own = rest == self._own_groups or self._own_groups not in asked.saved
            return path if is_own else None
        if kind not in ("state", "param_groups"):  # an optimizer may have more entries
            return path
        own = next((name for name in prefixes(tail) if name in self._number_of), None)
        # "param_groups.0.lr"; in torch's flattened form, "param_groups.net.0.weight.lr". A
        # parameter may be called "0": then the number in the path decides.
        is_numbered = own is None or (path[0] == kind and type(path[1]) is int)
        if kind == "param_groups" and is_numbered:
            number = tail.partition(".")[0]
            inner = below(path, len(f"{kind}.{number}."))
            return (kind, int(number), *inner) if number.isdecimal() else None
        if own is not None:
            names = self._parameters[self._number_of[own]].names
            return (kind, names[0], *below(path, len(f"{kind}.{own}.")))
        # The entry is not of an own parameter. It is of another rank's or of one that is gone, if a
        # module of the checkpoint has a parameter of such a name, shorter than the entry's; else it
        # is of no parameter, as a counter is.
        is_gone = any(is_parameter(name) for name in prefixes(tail) if name != tail)
        return None if is_gone else (kind, *below(path, len(f"{kind}.")))

    def _like(self, path: Path, saved: Any, record: Record) -> torch.Tensor | None:
        """Return the parameter of an entry, if `load_state_dict` puts the entry on its device.

        If the parameter was saved sharded and the entry as a plain tensor, return the shard.
        """
        if len(path) < 3 or path[0] != "state" or path[1] not in self._number_of:
            return None
        tensor, _, group = self._parameters[self._number_of[path[1]]]
        # `load_state_dict` leaves `step` on its device, except with one of these two settings.
        on_device = group.get("capturable") or group.get("fused")
        if path[-1] == "step" and not on_device:
            return None
        like = tensor.detach()
        if isinstance(like, DTensor) and not is_sharded(saved):
            saved_parameter = record.entries.get(".".join((*self._owner, path[1])))
            like = torch_private.local_tensor(like) if is_sharded(saved_parameter) else like
        return like

    def restore(self, values: Mapping[str, Any]) -> None:
        """Put loaded values, by the rest of the key, into the optimizer by its `load_state_dict`.

        Raises:
            StateMismatchError: parameters of one group were saved with different settings. If not
                strict, the group keeps its own.
        """
        if self._asked is None:  # nothing was saved
            return
        loaded = self._asked.loaded(values)
        groups = self._loaded_groups(loaded.pop("groups", {}), loaded.pop("param_groups", []))
        state = self._loaded_state(loaded.pop("state", {}))
        packed = {
            **self._packed,
            **{key: alike(self._packed.get(key), item) for key, item in loaded.items()},
            "state": state,
            "param_groups": groups,
        }
        self._optimizer.load_state_dict(packed)
        # A ZeroRedundancyOptimizer has groups itself, with the parameters of all ranks. They get
        # the settings, but keep their members.
        if self._outer is not self._optimizer:
            for outer, group in zip(self._outer.param_groups, groups, strict=True):
                outer.update({key: group[key] for key in group if key not in _MEMBERS})

    def _loaded_state(self, by_name: dict[str, Any]) -> dict[Any, Any]:
        """Return the state of the parameters by number, and saved counters by name.

        Args:
            by_name: the loaded state of parameters, by their first names, and counters.
        """
        before, by_number = self._packed["state"], {}
        for number, (_, names, _) in self._parameters.items():
            if names[0] in by_name:
                # In containers of the same types as the state before the load.
                by_number[number] = alike(before.get(number, {}), by_name.pop(names[0]))
            elif number in before and number not in self._known:
                # A parameter that the checkpoint does not have keeps its state. (One that was saved
                # without state loses it.)
                by_number[number] = before[number]
        if not self._strict:  # what belongs to no parameter, such as a counter, stays, too
            by_number |= {key: item for key, item in before.items() if key not in self._parameters}
        return by_number | by_name

    def _loaded_groups(self, of_ranks: Mapping[str, Any], settings: Any) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the settings that were saved for their parameters.

        Args:
            of_ranks: the loaded `groups`: for each set of parameters, a tuple with its list of
                groups.
            settings: the loaded `param_groups`: a list of groups; in torch's flattened form, a dict
                of each parameter's settings.
        """
        by_name = settings if isinstance(settings, dict) else {}
        saved = [group for (groups,) in of_ranks.values() for group in groups]
        saved += [] if by_name else settings
        # If several groups have a parameter, the first counts: `groups` come before the numbered
        # groups, which are those of one rank.
        group_of = {name: group for group in saved[::-1] for name in group.get("params", ())}
        group_of |= by_name  # in the flattened form, each parameter has its own settings
        # Groups without parameters have no names; they are paired in their order.
        empty = iter([group for group in saved if not group.get("params")])
        defaults = getattr(self._optimizer, "defaults", ())  # PostLocalSGDOptimizer has none
        groups, kept = [], []
        for index, own in enumerate(self._packed["param_groups"]):
            names = [name for number in own["params"] for name in self._parameters[number].names]
            named_groups = [group_of[name] for name in names if name in group_of]
            sources = named_groups if names else [*itertools.islice(empty, 1)]
            agreed, differing = _common(sources)
            if differing and self._strict:
                raise StateMismatchError(
                    f"parameters of group {index} of this optimizer were saved in groups with other"
                    f" settings than each other ({first_few(differing, 3)}): group them as they"
                    " were saved, or pass strict=False",
                    key=f"{self._place}.param_groups.{index}",
                )
            if differing or not sources:
                kept.append(f"group {index}: {first_few(differing, 3) or 'all'}")
            # The group's own values of these stay, if no saved value replaces them. A setting that
            # the constructor has may be newer than the version that saved the groups.
            stays = (*_MEMBERS, *differing, *defaults) if sources else own
            groups.append({key: own[key] for key in own if key in stays} | copy.deepcopy(agreed))
        if kept:
            logger.warning(
                "groups of the optimizer %s keep settings of their own, of which the checkpoint has"
                " no value or several (%s)",
                self._place,
                first_few(kept, 5),
            )
        return groups


def _common(groups: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that these groups agree on, and the names of those that differ.

    A setting that some of them lack differs. A group may be listed once for each parameter.
    """
    groups = [*{id(group): group for group in groups}.values()]
    agreed, differing = {}, []
    for name in dict.fromkeys(name for group in groups for name in group if name not in _MEMBERS):
        first, *others = [group[name] for group in groups if name in group]
        if len(others) + 1 == len(groups) and all(_same(first, other) for other in others):
            agreed[name] = first
        else:
            differing.append(name)
    return agreed, differing


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; a tensor equals only a tensor."""
    are_tensors = [isinstance(value, torch.Tensor) for value in (one, other)]
    if any(are_tensors):
        return all(are_tensors) and torch.equal(one, other)
    return bool(one == other)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that holds this rank's state: ZeroRedundancyOptimizer has one inside."""
    is_zero = hasattr(optimizer, "consolidate_state_dict")
    inner: torch.optim.Optimizer = optimizer.optim if is_zero else optimizer
    return inner
