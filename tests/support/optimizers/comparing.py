"""What there is to compare in a training, and how: every bit, every type, every key."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.states import same_bits

_SHOWN = 3


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:  # noqa: PLR0912
    """Yield where two values differ, and how."""
    if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
        yield from _tensor_differences(expected, actual, path)
    elif type(expected) is not type(actual) and not _both(Mapping, expected, actual):
        yield f"{path}: {type(expected).__name__} became {type(actual).__name__} ({actual!r:.40})"
    elif isinstance(expected, Mapping):
        for key in expected:
            if key not in actual:
                yield f"{path}.{key}: lost"
            else:
                yield from differences(expected[key], actual[key], f"{path}.{key}")
        yield from (f"{path}.{key}: not in the reference" for key in actual if key not in expected)
    elif isinstance(expected, list | tuple | deque):
        if len(expected) != len(actual):
            yield f"{path}: {len(expected)} items became {len(actual)}"
        else:
            for number, pair in enumerate(zip(expected, actual, strict=True)):
                yield from differences(*pair, f"{path}.{number}")
    elif isinstance(expected, float):
        if expected != actual and not (math.isnan(expected) and math.isnan(actual)):
            yield f"{path}: {expected!r} became {actual!r}"
    elif hasattr(expected, "__dict__") and not callable(expected):
        yield from differences(vars(expected), vars(actual), path)
    elif not callable(expected) and expected != actual:
        yield f"{path}: {expected!r:.30} became {actual!r:.30}"


def _both(kind: type, one: object, other: object) -> bool:
    return isinstance(one, kind) and isinstance(other, kind)


def _tensor_differences(  # noqa: PLR0912
    expected: Any, actual: Any, path: str
) -> Iterator[str]:
    if not _both(torch.Tensor, expected, actual):
        yield f"{path}: {type(expected).__name__} became {type(actual).__name__}"
        return
    kinds = [type(one) for one in (expected, actual)]
    parameter = torch.nn.Parameter
    if kinds[0] is not kinds[1] and not set(kinds) <= {torch.Tensor, parameter}:
        yield f"{path}: {kinds[0].__name__} became {kinds[1].__name__}"
    elif isinstance(expected, DTensor):
        if (expected.placements, expected.shape) != (actual.placements, actual.shape):
            yield f"{path}: {expected.placements} became {actual.placements}"
        yield from _tensor_differences(expected.to_local(), actual.to_local(), path)
    elif hasattr(expected, "__tensor_flatten__"):
        parts, context = expected.__tensor_flatten__()
        other_parts, other_context = actual.__tensor_flatten__()
        yield from differences((parts, context), (other_parts, other_context), path)
        for part in parts:
            yield from differences(getattr(expected, part), getattr(actual, part), f"{path}.{part}")
    elif (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        was, now = (f"{one.dtype} {tuple(one.shape)}" for one in (expected, actual))
        yield f"{path}: {was} became {now}"
    elif expected.device != actual.device and not _may_stay(actual, path):
        yield f"{path}: {expected.device} became {actual.device}"
    elif expected.is_inference() != actual.is_inference():
        yield f"{path}: is an inference tensor now"
    elif expected.layout != torch.strided or actual.layout != torch.strided:
        if expected.layout != actual.layout:
            yield f"{path}: {expected.layout} became {actual.layout}"
        else:
            yield from _tensor_differences(expected.to_dense(), actual.to_dense(), path)
    elif not same_bits(expected, actual):
        yield f"{path}: other values ({actual.flatten()[:2].tolist()})"


def _may_stay(actual: torch.Tensor, path: str) -> bool:
    """Whether it is a `step` on the CPU, which torch's own load leaves where it is.

    A checkpoint does not know on which device it was: ASGD counts on the GPU, others on the CPU.
    """
    return path.endswith(".step") and not actual.ndim and actual.device.type == "cpu"


def first(found: Iterator[str]) -> str:
    """The first few differences as one text; empty if there are none."""
    texts = list(found)
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def copied(value: Any) -> Any:
    """A deep copy, also of tensor subclasses that cannot be cloned."""
    if isinstance(value, DTensor):
        own = value.detach().to_local().clone()
        return DTensor.from_local(
            own,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        parts, context = value.__tensor_flatten__()
        inner = {part: copied(getattr(value, part)) for part in parts}
        return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
    if isinstance(value, torch.Tensor):
        detached = value.detach()  # a gradient may be no leaf
        # To clone takes a fifth of the time of a deep copy.
        is_plain = type(detached) is torch.Tensor and value.layout is torch.strided
        return detached.clone() if is_plain else copy.deepcopy(detached)
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        return type(value)((key, copied(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return copy.deepcopy(value)


def contiguous(value: Any) -> Any:
    """A copy in which each plain tensor lies in the order of its dimensions."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: contiguous(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(contiguous(item) for item in value)
    return copied(value)


def state_of(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The state by parameter name; what belongs to no parameter, by its key. No empty entries."""
    found = {
        names.get(id(key), "?") if isinstance(key, torch.Tensor) else str(key): value
        for key, value in optimizer.state.items()
    }
    return {name: _named(value, names) for name, value in found.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _named(value: Any, names: Mapping[int, str]) -> Any:
    """A copy in which parameters that are keys are their names."""
    if isinstance(value, Mapping):
        return {
            names.get(id(key), "?") if isinstance(key, torch.Tensor) else key: _named(item, names)
            for key, item in value.items()
        }
    return copied(value)


def groups_of(optimizer: Any, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The settings of each group, with the names of its parameters."""
    return [
        copied({key: value for key, value in group.items() if key != "params"})
        | {"names": [names.get(id(parameter), "?") for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
