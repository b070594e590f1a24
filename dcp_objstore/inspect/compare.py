"""Compare the contents of two checkpoints: tensors bit for bit, and values."""

from __future__ import annotations

import copyreg
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
import xxhash

from dcp_objstore.errors import UnsupportedError
from dcp_objstore.torch_private import untyped_storage

_PROTOCOL = 4
# The types whose pickles differ if and only if the values do.
_ATOMS = {type(None), type(...), bool, int, float, complex, str, bytes, bytearray}
_NAMED = type, FunctionType, BuiltinFunctionType  # a pickle has only their names
_TENSORS = torch.Tensor, torch.nn.Parameter  # not subclasses, which may hold more


def same(value: Any, other: Any) -> bool:
    """Whether two unpickled values are the same, bit for bit, whatever their `==` says.

    Types, dtypes, shapes, signs of zeros and the types of keys count. The order of a dict or set
    does not, nor do properties of a tensor such as `requires_grad`.

    Raises:
        UnsupportedError: a value cannot be compared.
    """
    try:
        return _Digester().digest(value) == _Digester().digest(other)
    except Exception as error:  # reducing an object may run its class's code
        raise UnsupportedError(
            "this value is nested too deep to be compared, or its class does not say what is in it"
            f" ({type(error).__name__}); leave its key out"
        ) from error


class _Digester:
    """Digests a value by its parts, which for an object are what a pickle of it would hold.

    Each object is digested once, however often it appears: a few nested lists can stand for more
    parts than there is time to look at.
    """

    def __init__(self) -> None:
        # With the objects, because the id of one that is gone may be another's.
        self._known: dict[int, tuple[bytes, Any]] = {}

    def digest(self, value: Any) -> bytes:
        """Return the digest of a value."""
        if type(value) in _ATOMS or isinstance(value, _NAMED):
            return xxhash.xxh3_128_digest(pickle.dumps(value, _PROTOCOL))
        if id(value) not in self._known:
            # If the value contains itself, this number stands for it there. Then the digest takes
            # the number's place.
            self._known[id(value)] = b"%16d" % len(self._known), value
            self._known[id(value)] = self._digest_whole(value), value
        digest, _ = self._known[id(value)]
        return digest

    def _digest_whole(self, value: Any) -> bytes:
        """Return the digest of a value that has parts or memory."""
        kind = type(value)
        if kind is tuple:
            return self._digest_parts("tuple", value)
        if kind in (set, frozenset):
            return _hash(kind.__name__, sorted(map(self.digest, value)))
        if kind in _TENSORS and value.layout is torch.strided and not value.is_quantized:
            # The memory of a view may be in another order, or hold conjugated numbers. That of a
            # contiguous copy has the elements as they are.
            memory = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            bits = memory.reshape(-1).view(torch.uint8).numpy()
            return self._digest_parts("tensor", (kind, value.dtype, tuple(value.shape)), bits)
        if torch.is_storage(value):  # a pickle of it would not always have the same bytes
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
            return self._digest_parts(
                "storage", (kind,), empty.set_(untyped_storage(value)).numpy()
            )
        if kind is np.ndarray and not value.dtype.hasobject:
            return self._digest_parts("array", (value.dtype, value.shape), value.tobytes())
        return self._digest_reduced(value)

    def _digest_reduced(self, value: Any) -> bytes:
        """Return the digest of an object, by what a pickler asks it for."""
        kind = type(value)
        reducer = copyreg.dispatch_table.get(kind)
        reduced = reducer(value) if reducer else value.__reduce_ex__(_PROTOCOL)
        if isinstance(reduced, str):  # the name of a constant in a module
            return _hash(reduced, [self.digest(kind)])
        # A pickler would call the function with the arguments, and then set the state, append the
        # items and set the entries (pairs of a key and a value). The last three may be left out.
        function, arguments, *optional = reduced
        state, items, entries = (*optional, None, None, None)[:3]
        pairs = [self._digest_parts("entry", entry) for entry in entries or ()]
        if not isinstance(value, OrderedDict):  # the order of other dicts does not count
            pairs.sort()
        parts = (function, arguments, state, *(items or ()))
        return _hash("object", [self._digest_parts("made", parts), *pairs])

    def _digest_parts(self, what: str, parts: Iterable[Any], memory: Any = b"") -> bytes:
        """Return the digest of something of this name, with these parts and this memory."""
        return _hash(what, list(map(self.digest, parts)), memory)


def _hash(what: str, digests: list[bytes], memory: Any = b"") -> bytes:
    state = xxhash.xxh3_128(f"{what} {len(digests)} ".encode() + b"".join(digests))
    state.update(memory)
    return state.digest()


def same_bits(slab: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one dtype and shape have the same bits."""
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (slab, other)))
