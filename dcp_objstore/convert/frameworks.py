"""The values that frameworks save beside their tensors, and their own files made of these.

`integrations` saves these keys, and an export reads them: the adapters of PEFT, and the one file
that Lightning reads, made of a sharded checkpoint of its Trainer or Fabric.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dcp_objstore.checkpoint.names import natural_order
from dcp_objstore.compat.values import check_safe, unpickled
from dcp_objstore.errors import InputError, UnsupportedError, UntrustedPickleError

if TYPE_CHECKING:
    from dcp_objstore.inspect.checkpoint import Checkpoint

# Keys of the state: the value that describes the adapters, and the module that has them.
DESCRIPTION_KEY = "peft"
MODULE_KEY = "model"

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True):
    """A checkpoint's description of an adapter.

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
    """The content of PEFT's folder of an adapter.

    Attributes:
        config: the text of `adapter_config.json`.
        names: the name of each tensor in `adapter_model.safetensors`, by its key in the checkpoint.
    """

    config: str
    names: dict[str, str]


def adapter_folder(checkpoint: Checkpoint, keys: Iterable[str] | None) -> AdapterFolder | None:
    """Return what to write of an adapter; None if no adapter has the keys.

    Args:
        checkpoint: the opened checkpoint.
        keys: some keys of the adapter; None for the adapter "default", or the first one.

    Raises:
        InputError: the keys are of several adapters.
        UnsupportedError: PEFT computes a tensor that it would write.
    """
    adapters = _adapters(checkpoint)
    if keys is None:  # "default" if there is such an adapter, otherwise the first one
        selected = [name for name in ("default", *adapters) if name in adapters][:1]
    else:
        selected = [name for name in adapters if not {*keys}.isdisjoint(_names(adapters[name]))]
    if len(selected) > 1:
        raise InputError(
            f"these keys are of the adapters {' and '.join(selected)}, and a folder has one; pass"
            f" keys= for one of them, such as '*.{selected[0]}*'",
            url=checkpoint.url,
        )
    if not selected:
        return None
    adapter = adapters[selected[0]]
    if None in adapter.names.values():  # None stands for a tensor that PEFT computes
        raise UnsupportedError(
            "PEFT computes what it writes of this adapter: load it into the model and call"
            " save_pretrained",
            url=checkpoint.url,
        )
    return AdapterFolder(adapter.config, _names(adapter))


def _names(adapter: Adapter) -> dict[str, str]:
    """Return PEFT's name of each tensor of an adapter, by its key in the checkpoint."""
    # A bias of modules_to_save has two names with bias="all"; PEFT looks for the last one.
    return {f"{MODULE_KEY}.{name}": short for short, name in adapter.names.items()}


def _adapters(checkpoint: Checkpoint) -> dict[str, Adapter]:
    """Return the adapters that a checkpoint describes, by name; none if it has no description."""
    if DESCRIPTION_KEY not in checkpoint:
        return {}
    try:
        value: Any = checkpoint[DESCRIPTION_KEY].read()
        return msgspec.json.decode(value, type=dict[str, Adapter])
    except (UntrustedPickleError, TypeError, msgspec.DecodeError):
        # Another program has saved something else under this key: a value that could run code, or
        # that is no text, or text that is no such description.
        return {}


# The key of Lightning's file with all that is not sharded.
META_KEY = "meta.pt"
# A key in it that the Trainer writes, and Fabric does not.
_TRAINER_KEY = "pytorch-lightning_version"


def nest_for_lightning(
    nest: Callable[[Mapping[str, Any]], dict[str, Any]],
    flat: Mapping[str, Any],
    *,
    trust_pickle: bool,
) -> dict[str, Any]:
    """Return what Lightning's `consolidate_checkpoint` writes of a checkpoint.

    `Trainer.fit(ckpt_path=...)` resumes from a Trainer's checkpoint, and `load_from_checkpoint`
    makes the module.

    Args:
        nest: a function that makes the nested dict of a checkpoint.
        flat: the checkpoint by its keys, with the bytes of Lightning's file under `META_KEY`.
        trust_pickle: as for `export_checkpoint`.

    Raises:
        UntrustedPickleError: Lightning's file has a value that could run code.
    """
    parts = nest(flat)
    body = parts.pop(META_KEY)
    check_safe(body, META_KEY, trust_pickle=trust_pickle)
    # Without `trust_pickle`, `check_safe` has made sure that this runs no code.
    meta = unpickled(io.BytesIO(body), weights_only=False)
    if _TRAINER_KEY not in meta:
        return {**parts, **meta}  # a checkpoint of Fabric
    optimizers = sorted((key for key in parts if key.startswith("optimizer_")), key=natural_order)
    if optimizers:
        meta["optimizer_states"] = [parts.pop(key) for key in optimizers]
    # A sharded checkpoint of `FSDPStrategy` has the weights under "model".
    if "model" in parts:
        parts["state_dict"] = parts.pop("model")
    return {**parts, **meta}
