"""`PerRank`: a separate value for each rank. `RandomState`: one such, of random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import ConfigError, StateMismatchError
from dcp_objstore.observe.report import logger


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
        """Take the loaded values.

        Args:
            loaded: for each rank whose value was requested, by its number, a tuple with the value.
                The tuple is empty if the checkpoint has none.
        """
        values = {int(name): packed[0] for name, packed in loaded.items() if packed}
        own_rank = int(own_name())
        if self.choice == "list":
            self.values = [values[rank] for rank in sorted(values)] if values else None
            self.restored = bool(values)
        else:
            self.restored = own_rank in values
            if own_rank in values and is_stateful(self.value):
                self.value.load_state_dict(values[own_rank])
            elif own_rank in values:
                self.value = values[own_rank]


def own_name() -> str:
    """Return the name under which this rank saves its values."""
    return str(current_rank() or 0)


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Whether a value has a state dict. To compare with the protocol takes 100 times as long."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class RandomState:
    """The states of the generators of Python, NumPy (the global one) and torch, CUDA's included.

        state = {"model": model, "random": dos.PerRank(dos.RandomState())}

    After a load, the generators yield the numbers that they would have yielded after the save. The
    object itself holds no state: it reads the generators when it is saved, and sets them when it is
    loaded. It is stored as plain values and tensors, so it loads without `trust_pickle`. It takes
    about 13 KiB, and 16 bytes for each GPU.

    If CUDA is already in use, the generators of the visible devices are saved in the order of their
    numbers. A load sets as many as both sides have.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current states."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        # To read states of CUDA would initialize it.
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if in_use else []
        return {
            "python": (version, torch.tensor(words, device="cpu"), gauss),
            # As int64, because torch does not fully support uint32 yet.
            "numpy": (
                str(kind),
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to saved states.

        Raises:
            StateMismatchError: `state_dict` is not a result of `RandomState.state_dict`; nothing
                was set.
        """
        try:
            version, words, gauss = state_dict["python"]
            python = (version, tuple(words.tolist()), gauss)
            kind, keys, position, has_gauss, cached = state_dict["numpy"]
            numpy = (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached)
            cpu, cuda = state_dict["torch"].cpu(), list(state_dict["cuda"])
            # Try the states on unused generators first.
            random.Random().setstate(python)
            np.random.RandomState().set_state(numpy)
            torch.Generator().set_state(cpu)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StateMismatchError(
                f"this is not the state of a RandomState: {type(error).__name__}: {error}"
            ) from error
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if len(cuda) > torch.cuda.device_count():
            logger.warning(
                "of the random states of %d GPUs, this process with %d cannot set the others",
                len(cuda),
                torch.cuda.device_count(),
            )
        for device, state in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), device)
