"""PEFT: the adapters of a model as a state, of which an export makes PEFT's own folder.

The tensors have the names of the whole model's state dict, so that the optimizer, other wrappers
and other numbers of ranks find them. Beside them are PEFT's names for them, and the
adapters' configurations. PEFT is imported when a model of it is passed.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict

from dcp_objstore.convert.frameworks import (
    CONFIG_FILE,
    DESCRIPTION_KEY,
    MODULE_KEY,
    Adapter,
    encode,
)
from dcp_objstore.errors import ConfigError
from dcp_objstore.state.trainable import Trainable

# The names of modules that wrap others; a state dict lacks them.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def peft_state(model: Any) -> dict[str, Any]:
    """Return the adapters of a model of PEFT as a state for `save`, `load` and runs.

        state = {**peft_state(model), "optimizer": optimizer}
        dos.save(state, "s3://bucket/run/step-10")
        dos.load(state, "s3://bucket/run/step-10")  # into a model with the same adapters
        dos.export_checkpoint("s3://bucket/run/step-10", "adapter")

    `model` has all that PEFT's `save_pretrained` writes, of every adapter, and what else trains;
    the frozen base is left out. `peft` describes the adapters, so that an export needs neither the
    model nor PEFT. Make the state after the model was wrapped (FSDP, DDP, torch.compile). It is
    read when it is saved, so one can be used for a whole run, unless an adapter is added.

    Args:
        model: a `PeftModel`, or a model of transformers after its `add_adapter`, wrapped or not.

    Raises:
        ConfigError: it is neither.
    """
    inner = _unwrapped(model)
    if not is_peft(model):
        raise ConfigError(
            "peft_state takes a PeftModel, or a model of transformers after its add_adapter; got"
            f" {type(inner).__name__}"
        )
    # FSDP1 takes the module that is asked for a state dict first for the root of all. PEFT asks
    # parts of the model, so the whole model is asked here; the result is not needed.
    get_model_state_dict(model)
    adapters = {
        name: Adapter(_config(inner, name), _names(inner, name)) for name in inner.peft_config
    }
    named = frozenset(
        name for adapter in adapters.values() for name in adapter.names.values() if name is not None
    )
    return {
        MODULE_KEY: Trainable(model, buffers=False, frozen=named),
        DESCRIPTION_KEY: encode(adapters),
    }


def is_peft(model: Any) -> bool:
    """Return whether a model, wrapped or not, has adapters that a Trainer saves alone."""
    if "peft" not in sys.modules:
        return False
    inner = _unwrapped(model)
    return _is_peft_model(inner) or bool(getattr(inner, "peft_config", None))


def _is_peft_model(model: Any) -> bool:
    return isinstance(model, sys.modules["peft"].PeftModel)


def _unwrapped(model: Any) -> Any:
    """Return the model inside of FSDP, DDP and torch.compile."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


def _names(model: Any, adapter: str) -> dict[str, str | None]:
    """Return `Adapter.names` of an adapter: by PEFT's names, those of the whole model's state dict.

    None stands for an entry that is not a tensor of the model. Under FSDP1 this is a collective.
    """
    from peft import get_peft_model_state_dict

    tensors = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    entries, names = {}, {}
    for name, tensor in tensors:
        entry = tensor.detach()  # an object for each name, also where several share a tensor
        saved_name = names[id(entry)] = _without_wrappers(name)
        # PEFT looks some entries up by the names of modules, and some by those of the state dict.
        entries[name] = entries[saved_name] = entry
    saved = get_peft_model_state_dict(model, state_dict=dict(entries), adapter_name=adapter)
    # The `save_pretrained` of a model of transformers adds this prefix.
    prefix = "" if _is_peft_model(model) else "base_model.model."
    return {prefix + _without_wrappers(name): names.get(id(entry)) for name, entry in saved.items()}


def _without_wrappers(name: str) -> str:
    """Return a parameter's name in a state dict, without the names of modules that wrap others."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _config(model: Any, adapter: str) -> str:
    """Return the text of an adapter's configuration, to load it for inference as PEFT writes it."""
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    with tempfile.TemporaryDirectory(prefix="dcp-objstore-") as folder:
        config.save_pretrained(folder)
        return Path(folder, CONFIG_FILE).read_text()
