"""`PerRank`: a separate value for each rank, such as the state of a random number generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

from torch.distributed.checkpoint.stateful import Stateful

from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import ConfigError


class PerRank:
    """A value to save once per rank. Without it, DCP stores the value of one rank for all ranks.

        state = {"rng": dos.PerRank(torch.get_rng_state()), "data": dos.PerRank(loader)}
        dos.save(state, "s3://bucket/run/step-1560")
        dos.load(state, "s3://bucket/run/step-1560")
        torch.set_rng_state(state["rng"].value)

    It works anywhere in the state of `dcp_objstore.save`, `async_save`, `load` and
    `CheckpointManager`. It is stored as one pickled value per rank, under `<key>.<rank>`. Use it
    for kilobytes, not for a model's tensors.

    A load, also from a checkpoint of another number of ranks, gives a rank:

    - `choice="own"` (default): the value that the rank with the same (global) number saved. If
      there was no such rank, the value stays as it was. `restored` tells the two cases apart.
    - `choice="list"`: the list `values` of what all ranks saved, in the order of the ranks. It is
      the same on each rank, which can choose from it; `value` stays as it was.

    Args:
        value: the value to save. An object with `state_dict` and `load_state_dict` (a data loader)
            is saved with the first method and, with "own", restored in place with the second;
            any other value is replaced. Tensors and plain values load without `trust_pickle`.
        choice: the saved values that a load gives this rank: "own" or "list". It is not stored.

    Attributes:
        value: the value as given, or as loaded.
        values: the values that all ranks saved, after a load with "list"; otherwise None.
        restored: whether a load has found this rank's own value or, with "list", any values.

    Raises:
        ConfigError: `choice` is neither "own" nor "list".
    """

    def __init__(self, value: Any, *, choice: Literal["own", "list"] = "own") -> None:
        if choice not in ("own", "list"):
            raise ConfigError(f"choice must be 'own' or 'list', got {choice!r}")
        self.value = value
        self.choice = choice
        self.values: list[Any] | None = None
        self.restored = False

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, choice={self.choice!r})"

    def to_save(self) -> dict[str, Any]:
        """Return this rank's entry of the state dict, in a tuple, which DCP stores as one value."""
        value = self.value
        return {own_name(): (value.state_dict() if is_stateful(value) else value,)}

    def fill(self, loaded: Mapping[str, tuple[Any, ...]]) -> None:
        """Take the loaded values: a 1-tuple for each requested rank."""
        values = {int(name): packed[0] for name, packed in loaded.items() if packed}
        own = int(own_name())
        if self.choice == "list":
            self.values = [values[rank] for rank in sorted(values)] if values else None
            self.restored = bool(values)
        else:
            self.restored = own in values
            if own in values and is_stateful(self.value):
                self.value.load_state_dict(values[own])
            elif own in values:
                self.value = values[own]


def own_name() -> str:
    """Return the name under which this rank saves its values."""
    return str(current_rank() or 0)


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Whether a value has a state dict. To compare with the protocol takes 100 times as long."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
