"""The adapters of PEFT in a checkpoint: what PEFT itself would write beside their tensors.

`integrations.peft` saves this, and an export reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dcp_objstore.errors import InputError, UnsupportedError, UntrustedPickleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dcp_objstore.inspect.checkpoint import Checkpoint

# Keys of the state: the value that describes the adapters, and the module that has them.
DESCRIPTION_KEY = "peft"
MODULE_KEY = "model"

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True):
    """What a checkpoint says of an adapter.

    Attributes:
        config: the text of its `adapter_config.json`.
        names: PEFT's name of each tensor that it would write, mapped to the tensor's name in the
            module; to None if PEFT computes the tensor.
    """

    config: str
    names: dict[str, str | None]


def encode(adapters: Mapping[str, Adapter]) -> str:
    """Return the value to save for these adapters, by their names."""
    return msgspec.json.encode(adapters).decode()


class AdapterFolder(NamedTuple):
    """What PEFT's folder of an adapter has.

    Attributes:
        config: the text of `adapter_config.json`.
        names: the name of each tensor in `adapter_model.safetensors`, by its key in the checkpoint.
    """

    config: str
    names: dict[str, str]


def adapter_folder(checkpoint: Checkpoint, keys: Iterable[str] | None) -> AdapterFolder | None:
    """Return what to write of an adapter; None if the keys are of no adapter.

    Args:
        checkpoint: the opened checkpoint.
        keys: some keys of the adapter; None for the adapter "default", or the first one.

    Raises:
        InputError: the keys are of several adapters.
        UnsupportedError: PEFT computes a tensor that it would write.
    """
    adapters = _adapters(checkpoint)
    if keys is None:
        wanted = [name for name in ("default", *adapters) if name in adapters][:1]
    else:
        wanted = [name for name in adapters if not _keys(adapters[name]).keys().isdisjoint(keys)]
    if len(wanted) > 1:
        raise InputError(
            f"these keys are of the adapters {' and '.join(wanted)}, and a folder has one; pass"
            f" keys= for one of them, such as '*.{wanted[0]}*'",
            url=checkpoint.url,
        )
    if not wanted:
        return None
    adapter = adapters[wanted[0]]
    if None in adapter.names.values():
        raise UnsupportedError(
            "PEFT computes what it writes of this adapter; load the checkpoint into the model, and"
            " call its save_pretrained",
            url=checkpoint.url,
        )
    return AdapterFolder(adapter.config, _keys(adapter))


def _keys(adapter: Adapter) -> dict[str, str]:
    # A bias of modules_to_save has two names with bias="all"; PEFT looks for the last one.
    return {f"{MODULE_KEY}.{name}": short for short, name in adapter.names.items()}


def _adapters(checkpoint: Checkpoint) -> dict[str, Adapter]:
    if DESCRIPTION_KEY not in checkpoint:
        return {}
    try:
        value: Any = checkpoint[DESCRIPTION_KEY].read()
        return msgspec.json.decode(value, type=dict[str, Adapter])
    except (UntrustedPickleError, TypeError, msgspec.DecodeError):  # it is somebody else's
        return {}
