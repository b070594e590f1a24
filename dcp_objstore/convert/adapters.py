"""The adapters of PEFT in a checkpoint: what PEFT itself would write beside their tensors.

`integrations.peft` saves this, and an export reads it. It is the link between rooms, in a format
that stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcp_objstore.errors import InputError, UnsupportedError, UntrustedPickleError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dcp_objstore.inspect.checkpoint import Checkpoint

# Keys of the state: the value that describes the adapters, and the module that has them.
DESCRIPTION_KEY = "peft"
MODULE_KEY = "model"

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True):
    """An adapter, as PEFT would write it.

    Attributes:
        config: the text of its `adapter_config.json`.
        names: its tensors: their names in the module, mapped to PEFT's.
    """

    config: str
    names: dict[str, str]


def encode(adapters: Mapping[str, Adapter]) -> str:
    """Return the value to save for these adapters, by their names."""
    return msgspec.json.encode(adapters).decode()


class ChosenAdapter(NamedTuple):
    """The adapter that an export writes.

    Attributes:
        config: the text of its `adapter_config.json`.
        names: PEFT's names of its tensors, by their keys in the checkpoint.
    """

    config: str
    names: dict[str, str]


def adapter_in(checkpoint: Checkpoint, keys: Collection[str] | None) -> ChosenAdapter | None:
    """Return the adapter to export; None if the checkpoint describes none.

    Args:
        checkpoint: the opened checkpoint.
        keys: the keys to export; None to take the adapter that is called "default", or the first.

    Raises:
        InputError: the keys are of several adapters.
    """
    adapters = {
        name: ChosenAdapter(
            adapter.config,
            {
                key: short
                for long, short in adapter.names.items()
                if (key := f"{MODULE_KEY}.{long}") in checkpoint
            },
        )
        for name, adapter in _described(checkpoint).items()
    }
    if keys is None:
        first = adapters.get("default", next(iter(adapters.values()), None))
        if first is not None and not first.names:
            raise UnsupportedError(
                "what PEFT writes of this adapter it computes from other tensors; load them into"
                " the model, and call its save_pretrained",
                url=checkpoint.url,
            )
        return first
    chosen = {name: one for name, one in adapters.items() if not one.names.keys().isdisjoint(keys)}
    if len(chosen) > 1:
        raise InputError(
            f"these keys are of several adapters ({', '.join(chosen)}), and a folder has one; pass"
            f" keys= for one of them, such as '*.{next(iter(chosen))}*'",
            url=checkpoint.url,
        )
    return next(iter(chosen.values()), None)


def _described(checkpoint: Checkpoint) -> dict[str, Adapter]:
    if DESCRIPTION_KEY not in checkpoint:
        return {}
    try:
        value = checkpoint[DESCRIPTION_KEY].read()
        return msgspec.json.decode(value, type=dict[str, Adapter])
    except (UntrustedPickleError, TypeError, msgspec.DecodeError):  # it is somebody else's
        return {}
