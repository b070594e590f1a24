"""`PerRank`: a value of which each rank has its own, as the state of a random number generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch.distributed.checkpoint.stateful import Stateful

from dcp_objstore.distributed.groups import current_rank
from dcp_objstore.errors import ConfigError


class PerRank:
    """Saves one value for each rank; without it DCP stores that of a single rank for all.

        state = {"rng": dos.PerRank(torch.get_rng_state()), "data": dos.PerRank(loader)}
        dos.load(state, url)
        torch.set_rng_state(state["rng"].value)

    For `dcp_objstore.save`, `async_save`, `load` and `CheckpointManager`; anywhere in the state. It
    is stored as one pickled value for each rank, under `<key>.<rank>`: for kilobytes, not for a
    model's tensors.

    What a rank gets on load, also from a checkpoint of another number of ranks:

    - `choice="own"` (default): what the rank of its own (global) number saved. Where there was no
      such rank, its value stays as it was. `restored` says which.
    - `choice="list"`: `values` is the list of what all ranks saved, in the order of the ranks, the
      same on each rank, for it to choose from; `value` stays as it was.

    Args:
        value: what to save. An object with `state_dict` and `load_state_dict` (a data loader) is
            saved by the one and, with "own", restored in place by the other; anything else is
            replaced. Tensors and plain values load without `trust_pickle`.
        choice: see above; it is made on load, and not stored.

    Attributes:
        value: as given, or as loaded.
        values: what all ranks saved, after a load with "list"; else None.
        restored: whether a load has found this rank's own value, or with "list" the values.

    Raises:
        ConfigError: there is no such choice.
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
        """This rank's entry of the state dict. In a tuple, which DCP stores as one value."""
        value = self.value
        return {own_name(): (value.state_dict() if isinstance(value, Stateful) else value,)}

    @staticmethod
    def to_fill() -> dict[str, Any]:
        """The entry that asks for this rank's value, and is empty until it is loaded."""
        return {own_name(): ()}

    def fill(self, loaded: Mapping[str, tuple[Any, ...]]) -> None:
        """Take what was loaded: a 1-tuple for each rank that was asked for."""
        found = {int(name): value[0] for name, value in loaded.items() if value}
        own = int(own_name())
        if self.choice == "list":
            self.values = [found[rank] for rank in sorted(found)] if found else None
            self.restored = bool(found)
        else:
            self.restored = own in found
            if own in found and isinstance(self.value, Stateful):
                self.value.load_state_dict(found[own])
            elif own in found:
                self.value = found[own]


def own_name() -> str:
    """Under which this rank saves its values."""
    return str(current_rank() or 0)
