"""Find plain values that differ between ranks, because a save keeps one rank's under a key.

It stands alone, because it decides when two values are equal without sending them. Their pickles
do not suffice: equal values are pickled differently by the order of a dict or a set, and by which
of their parts are one object. So a quick pickle says whether all values of two ranks are equal, and
only where it does not, a slow one of each value says which differ.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from dcp_objstore.compat.archive import ZIP_START
from dcp_objstore.distributed.failures import capture, from_all, global_rank
from dcp_objstore.distributed.groups import is_first
from dcp_objstore.observe.report import first_few, logger
from dcp_objstore.state import tensor_frame

# The state of a generator of random numbers is a tensor of up to so many bytes on the CPU.
_STATE_BYTES = 8192
_NUMBERED_GROUP = re.compile(r"(?:^|\.)param_groups\.\d+\.")
_PICKLES = (ZIP_START, b"\x80")


class SeenValues:
    """The values of a group, as far as earlier saves have shown them.

    Attributes:
        left_out: keys that are not compared any more: a warning has named them, or some rank does
            not have them.
        unordered: keys of values that were equal, although their quick digests were not.
    """

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self.unordered: set[str] = set()

    def compared(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that should be equal on all ranks: no tensors but random states.

        What a module returns as its extra state is left out: the module knows what it is. So are
        bytes that are a pickle or an archive, which differ for equal contents, and the numbered
        groups of an optimizer: the groups of each set of parameters are saved beside them.
        """
        compared: dict[str, Any] = {}
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor):
                # Only what may be the state of a generator of random numbers.
                if value.dtype != torch.uint8 or not value.is_cpu or value.numel() > _STATE_BYTES:
                    continue
            elif isinstance(value, bytes) and value.startswith(_PICKLES):
                continue
            if key in self.left_out or key.endswith("_extra_state") or _NUMBERED_GROUP.search(key):
                continue
            compared[key] = value
        return compared

    def digest(self, values: Mapping[str, Any]) -> bytes | None:
        """Return a digest of all values, or None if one of them cannot be pickled.

        It is the digest of a quick pickle. For keys in `unordered`, whose equal values are pickled
        differently, that pickle has the exact digests of the values in their place.
        """
        return _digest(
            _Quick,
            [
                (key, _digest(_Exact, values[key]) if key in self.unordered else values[key])
                for key in sorted(values)
            ],
        )

    def compare(
        self, values: Mapping[str, Any], url: str, group: dist.ProcessGroup | None
    ) -> BaseException | None:
        """Warn of values that differ; return an error of this rank. A collective.

        Call it if the ranks have different digests of all their values.
        """
        own, failed = capture(
            lambda: {
                key: (_digest(_Exact, value), _digest(_Quick, value))
                for key, value in values.items()
            }
        )
        reports = from_all(own or {}, url, group)
        different: dict[str, str] = {}
        for key in {key: None for report in reports for key in report}:
            digests = [(rank, report[key]) for rank, report in enumerate(reports) if key in report]
            (first, (first_exact, first_quick)), *others = digests
            other = next((rank for rank, (exact, _) in others if exact != first_exact), None)
            if other is not None:  # the values differ
                numbers = (str(global_rank(rank, group)) for rank in (first, other))
                different[key] = f"{key} on ranks {' and '.join(numbers)}"
            elif len(digests) < len(reports):  # some rank has no value with this key
                self.left_out.add(key)
            elif any(quick != first_quick for _, (_, quick) in others):
                # The values are equal, but are pickled differently.
                self.unordered.add(key)
        self.left_out.update(different)
        if different and is_first(group):
            logger.warning(
                "%s: %s not the same on all ranks, and the first rank's is saved for all of them"
                " (%s). Wrap what each rank has for itself in dos.PerRank",
                url,
                "1 value is" if len(different) == 1 else f"{len(different)} values are",
                first_few(list(different.values()), 5),
            )
        return failed


def _digest(pickler: type[_Quick | _Exact], value: object) -> bytes | None:
    """Return a digest of a value's pickle, or None if the value cannot be pickled."""
    digest = xxhash.xxh3_128()
    file = SimpleNamespace(write=digest.update)  # the pickle is hashed and not kept
    value_pickler = pickler(file, protocol=5)
    # Without the memo, equal parts are written alike whether or not they are one object.
    value_pickler.fast = True
    try:
        value_pickler.dump(value)
    except Exception:  # noqa: BLE001 - what cannot be pickled is reported when it is uploaded
        return None
    return digest.digest()


def _reduced(value: object) -> Any:
    """Return what stands for a value in both kinds of pickles, as `reducer_override` does.

    That is NotImplemented for a value that is pickled as usual.
    """
    if isinstance(value, torch.device):  # each rank has its own GPU
        return str, (value.type,)
    payload = tensor_frame.raw_payload(value) if isinstance(value, torch.Tensor) else None
    if payload is None:
        return NotImplemented
    payload = payload.cpu()
    memory = pickle.PickleBuffer(tensor_frame.small_payload(payload, payload.nbytes))
    return tuple, ((str(payload.dtype), tuple(payload.shape), memory),)


class _Quick(pickle.Pickler):
    """Pickles fast; equal values may be pickled differently."""

    def reducer_override(self, value: object) -> Any:
        return _reduced(value)


class _Exact(pickle._Pickler):
    """Pickles equal values alike, whatever the order of their dicts and sets.

    It is Python's own pickler, which asks `reducer_override` for every part, dicts included.
    """

    def reducer_override(self, value: object) -> Any:
        """Return what stands for a value; for a set or dict, the sorted digests of its items."""
        if isinstance(value, set | frozenset):
            return type(value), (sorted(_digest(_Exact, item) or b"" for item in value),)
        if isinstance(value, dict):
            reduced: Any = value.__reduce_ex__(4)  # callable, arguments, state, items
            items = sorted(_digest(_Exact, item) or b"" for item in value.items())
            return tuple, ((*reduced[:3], items),)
        # The pickle of an array depends on the order of its memory, too.
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return tuple, ((str(value.dtype), value.shape, value.tobytes()),)
        if isinstance(value, io.BytesIO):  # its pickle has its position, too
            return io.BytesIO, (value.getvalue(),)
        return _reduced(value)
