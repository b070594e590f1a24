"""The one file that Lightning reads, made of a sharded checkpoint of its Trainer or Fabric.

`integrations.lightning` saves these keys, and an export reads them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from dcp_objstore.checkpoint.names import natural_order
from dcp_objstore.compat.values import check_safe, unpickled

META_KEY = "meta.pt"
# A key that the Trainer alone writes.
_TRAINERS = "pytorch-lightning_version"


def nest_for_lightning(
    nest: Callable[[Mapping[str, Any]], dict[str, Any]],
    flat: Mapping[str, Any],
    *,
    trust_pickle: bool,
) -> dict[str, Any]:
    """Return what Lightning's `consolidate_checkpoint` writes of a checkpoint.

    Of a Trainer's, `Trainer.fit(ckpt_path=...)` resumes, and `load_from_checkpoint` makes the
    module.

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
    meta = unpickled(io.BytesIO(body), weights_only=False)
    if _TRAINERS not in meta:
        return {**parts, **meta}
    optimizers = sorted((key for key in parts if key.startswith("optimizer_")), key=natural_order)
    if optimizers:
        meta["optimizer_states"] = [parts.pop(key) for key in optimizers]
    # `FSDPStrategy` calls it so.
    if "model" in parts:
        parts["state_dict"] = parts.pop("model")
    return {**parts, **meta}
