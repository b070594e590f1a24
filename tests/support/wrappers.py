"""Classes of tensors: wrappers of other tensors, as quantized weights are, and others."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """Has no memory, but the tensors that `NAMES` says. Operators get its `plain` values."""

    NAMES: tuple[str, ...] = ()
    KEPT: tuple[Any, ...] = (aten.detach.default, aten.clone.default)

    def plain(self) -> torch.Tensor:
        raise NotImplementedError

    def context(self) -> Any:
        return None

    @classmethod
    def of(cls, inner: dict[str, torch.Tensor], _context: Any) -> Wrapper:
        return cls(*inner.values())

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.NAMES), self.context()

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, _size: Any, _stride: Any) -> Wrapper:
        return cls.of(inner, context)

    def mapped(self, operator: Any, *args: Any) -> Wrapper:
        inner = {name: operator(getattr(self, name), *args) for name in self.NAMES}
        return self.of(inner, self.context())

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in cls.KEPT:
            return args[0].mapped(op, *args[1:])
        made = pytree.tree_map(lambda x: x.plain() if isinstance(x, cls) else x, args)
        return op(*made, **(kwargs or {}))


class Boxed(Wrapper):
    """One tensor in another. What is done to it is done to that."""

    NAMES = ("inner",)

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Boxed:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def plain(self) -> torch.Tensor:
        return self.inner


class Codes(Wrapper):
    """Numbers of eight bits and a scale for each row, as in the 8-bit state of an optimizer.

    It takes plain values, and can be cut into rows.
    """

    NAMES = ("codes", "scale")
    KEPT = (*Wrapper.KEPT, aten.slice.Tensor)

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, bias: float = 0.0) -> Codes:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: float = 0.0) -> None:
        self.codes, self.scale, self.bias = codes, scale, bias

    def context(self) -> Any:
        return self.bias

    @classmethod
    def of(cls, inner: dict[str, torch.Tensor], context: Any) -> Codes:
        return cls(*inner.values(), context)

    def _by_row(self) -> torch.Tensor:
        return self.scale.view(-1, *[1] * (self.dim() - 1))

    def plain(self) -> torch.Tensor:
        return self.codes.float() * self._by_row() + self.bias

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is aten.copy_.default and isinstance(args[0], Codes):
            to, source = args[:2]
            if type(source) is cls:
                assert to.bias == source.bias
                to.codes.copy_(source.codes)
                to.scale.copy_(source.scale)
            else:
                rows = (source - to.bias).reshape(len(to.scale), -1)
                to.scale.copy_(rows.abs().amax(1).clip(1e-12) / 127)
                to.codes.copy_(((source - to.bias) / to._by_row()).round())
            return to
        if op is aten.slice.Tensor and args[1] != 0:
            raise ValueError("only rows can be cut")
        return super().__torch_dispatch__(op, types, args, kwargs)


class Frozen(Codes):
    """As `Codes`, but takes no plain values: what is copied into it goes to a temporary tensor."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Wrapper.__torch_dispatch__.__func__(cls, op, types, args, kwargs)


class Copying(Codes):
    """As `Codes`, but a part of it is a copy."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(op, types, args, kwargs)
        return made.mapped(torch.clone) if op is aten.slice.Tensor else made


class Pair(Wrapper):
    """A wrapper of wrappers."""

    NAMES = ("first", "second")

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=torch.float32)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def plain(self) -> torch.Tensor:
        return self.first + self.second


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


class Counting(torch.Tensor):
    """Has memory of its own, and code that runs in the place of operators."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            made = op(*args, **(kwargs or {}))
            return made.as_subclass(cls) if op in Wrapper.KEPT else made


class Opaque(torch.Tensor):
    """A wrapper that does not say what it is made of."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*pytree.tree_map(lambda x: x.inner if isinstance(x, cls) else x, args))
        return cls(made) if op in Wrapper.KEPT else made


CLASSES = (Boxed, Codes, Frozen, Pair, Tagged, Counting)


def by_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Return what `torch.save` and `torch.load` make of a tensor."""
    body = io.BytesIO()
    torch.save(tensor, body)
    body.seek(0)
    loaded: torch.Tensor = torch.load(body, weights_only=False)
    return loaded.detach() if isinstance(loaded, Wrapper) else loaded


def inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor is made of."""
    if not isinstance(tensor, Wrapper):
        return [tensor]
    return [part for name in tensor.NAMES for part in inner(getattr(tensor, name))]


def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change the memory of all that a tensor is made of."""
    for part in inner(tensor):
        change(part.detach().untyped_storage())


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same class, dtype and shape, and the same bits."""
    alike = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
    if isinstance(one, Wrapper):
        parts = zip(inner(one), inner(other), strict=True)
        return alike and one.context() == other.context() and all(is_same(*pair) for pair in parts)
    return alike and bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor as bytes."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
