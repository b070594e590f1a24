"""Digests of a whole training state, which do not depend on how it is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def digest_state(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of every tensor (type, shape and bytes) and every other value, by key.

    Sharded tensors are gathered, so all ranks of their group must call this together.

    Args:
        state: nested dicts and lists of tensors and plain values.
    """
    return {key: _digest(leaf) for key, leaf in _leaves("", state)}


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        pairs: list[tuple[object, object]] = sorted(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = list(enumerate(value))
    else:
        yield key, value
        return
    for name, inner in pairs:
        yield from _leaves(f"{key}.{name}" if key else str(name), inner)


def _digest(leaf: object) -> str:
    if isinstance(leaf, DTensor):
        leaf = leaf.full_tensor()
    if not isinstance(leaf, Tensor):
        return hashlib.sha256(repr(leaf).encode()).hexdigest()
    plain = leaf.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
