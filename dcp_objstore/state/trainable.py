"""`trainable`: the part of a module that trains, for checkpoints without the frozen rest."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.marker import LeftOut
from dcp_objstore.errors import ConfigError, UnsupportedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trainable:
    """A module of which only a part is saved and loaded; `trainable` makes it.

    Attributes:
        module: the module.
        buffers: whether buffers and extra state belong to the part.
        frozen: names of entries of its state dict that belong to the part although they are frozen.
    """

    module: torch.nn.Module
    buffers: bool = True
    frozen: Collection[str] = ()

    def __reduce__(self) -> str:
        """Refuse to be pickled, as `dcp.save` would: the value would be the whole module.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "dos.trainable stands for a part of a module only in the states of dcp_objstore.save,"
            " async_save, load and CheckpointManager, not in those of torch's own dcp.save"
        )

    def part_of(self, entries: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of the part, of a dict whose keys are the names in the module."""
        trains = {
            name: parameter.requires_grad
            for name, parameter in torch_private.all_parameters(self.module)
        }

        def belongs(name: str) -> bool:
            # The parameter that an entry belongs to; None for a buffer. It is looked for among the
            # prefixes, because a quantized parameter has further entries below its name.
            owner = next((prefix for prefix in prefixes(name) if prefix in trains), None)
            if name in self.frozen:  # a frozen one that the user wants all the same
                return True
            return self.buffers if owner is None else trains[owner]

        return {name: entry for name, entry in entries.items() if belongs(name)}


def prefixes(name: str) -> Iterator[str]:
    """Yield `a`, `a.b` and `a.b.c` of `a.b.c`."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def trainable(module: torch.nn.Module, *, buffers: bool = True) -> Trainable:
    """Stand for the part of a module that trains, in a state to save or to load.

        state = {"model": dos.trainable(model), "optimizer": optimizer}
        dos.save(state, "s3://bucket/run/step-1560")
        dos.load(state, "s3://bucket/run/step-1560")  # into a model that has the frozen weights

    It has the parameters with `requires_grad` at the time of the save or load, under the names that
    they have in the whole module, and buffers. The other parameters are not written; the commit
    marker counts them, and `dcp-objstore inspect` shows that. The optimizer's state of frozen
    parameters is left out, too.

    It works in the state of `dcp_objstore.save`, `async_save`, `load` and `CheckpointManager` (not
    in that of `dcp.save`), on any number of ranks and under any wrapper (FSDP, DDP, torch.compile).
    A load needs the very set that was saved: a parameter that trains now and was frozen then is an
    error, and so is one that was saved and is frozen, or missing in the module, now. `strict=False`
    leaves both kinds as they are.

    Args:
        module: the module.
        buffers: save the persistent buffers of the whole module (and what `get_extra_state`
            returns), also those beside frozen parameters: the running statistics of a BatchNorm
            change without gradients. False saves no buffer, for a base model that keeps its
            quantized weights in them. Default True.

    Raises:
        ConfigError: `module` is not a module.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"trainable takes a torch.nn.Module, got {type(module).__name__}")
    return Trainable(module, buffers)


def count_left_out(whole: Mapping[str, Any], part: Mapping[str, Any]) -> LeftOut:
    """Count the tensors of a state dict that a part of it lacks."""
    sizes = [
        torch_private.size_in_checkpoint(entry).numel()
        for name, entry in whole.items()
        if name not in part and isinstance(entry, torch.Tensor)
    ]
    return LeftOut(tensors=len(sizes), elements=sum(sizes))
