"""Parts of an opened checkpoint: by index or pattern, and as nested dicts."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from dcp_objstore.checkpoint.index import with_own_keys
from dcp_objstore.errors import CheckpointCorruptError, ConfigError, StateMismatchError
from dcp_objstore.observe.report import first_few
from dcp_objstore.read.geometry import Box
from dcp_objstore.read.mismatch import nearest

Patterns: TypeAlias = str | Iterable[str] | None

_WILDCARDS = re.compile(r"[*?\[]")
# The most entries of rebuilt lists that no key fills (of a partial read): they become None, and a
# hostile checkpoint could ask for any number of them.
_MOST_ABSENT = 100_000


def matching(keys: Collection[str], patterns: Patterns) -> list[str]:
    """Return the keys that equal or match a pattern, in their own order.

    Args:
        keys: the keys, in a collection with a fast `in`.
        patterns: shell patterns (`*`, `?`, `[ab]`), which must match whole keys and are
            case-sensitive. None: all keys.

    Raises:
        StateMismatchError: a pattern matches nothing. The message lists the nearest keys.
        ConfigError: a pattern is not a `str`.
    """
    if patterns is None:
        return list(keys)
    selected: set[str] = set()
    for pattern in _listed(patterns):
        # A key may have brackets in its name, so an exact key counts as itself.
        hits = {pattern} if pattern in keys else set()
        if _WILDCARDS.search(pattern):
            match = re.compile(fnmatch.translate(pattern)).match
            hits.update(key for key in keys if match(key))
        if not hits:
            raise StateMismatchError(f"no key matches {pattern!r}{_hint(keys, pattern)}")
        selected |= hits
    return [key for key in keys if key in selected]


def _listed(patterns: str | Iterable[str]) -> list[str]:
    if isinstance(patterns, str):
        return [patterns]
    listed = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    for pattern in listed:
        if not isinstance(pattern, str):
            raise ConfigError(f"a pattern of keys must be a str, got {pattern!r}")
    return listed


def _hint(keys: Collection[str], pattern: str) -> str:
    """Return what to write after "no key matches `pattern`": what would match, or is nearest."""
    below = sum(key.startswith(f"{pattern}.") for key in keys)
    if below:
        return f"; '{pattern}.*' matches {below}"
    stem = _WILDCARDS.split(pattern)[0].rstrip(".") or pattern
    # For `modl.*` the nearest name is not a whole key but the beginning of keys: `model`.
    heads = dict.fromkeys(".".join(key.split(".")[: stem.count(".") + 1]) for key in keys)
    near = nearest(stem, [*(keys if stem == pattern else ()), *heads])
    return f" (nearest: {first_few(near, 3)})" if near else ""


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole tensor."""
    return Box((0,) * len(shape), shape)


def box_of(index: Any, shape: tuple[int, ...]) -> tuple[Box, list[int]]:
    """Return the box that an index selects, and its shape without the dimensions of integers.

    Raises:
        IndexError: the index is out of range, or its selection is not a box.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    # `in` and `list.count` would compare a tensor or array among the parts with Ellipsis.
    ellipses = [position for position, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can have only one Ellipsis")
    position = ellipses[0] if ellipses else len(parts)  # an index may leave out the last dimensions
    count = len(parts) - len(ellipses)
    if count > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dimensions, got {count}")
    # The Ellipsis, or the end of the index, stands for all dimensions that are not named.
    parts[position : position + 1] = [slice(None)] * (len(shape) - count)
    offsets, sizes, kept_sizes = [], [], []
    for dim, (part, extent) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            if part.step not in (None, 1):
                raise IndexError(
                    f"a slice must have step 1, got {part} for dimension {dim}; read the part that"
                    " contains the elements, and apply the step to that"
                )
            start, stop, _ = part.indices(extent)
            offsets.append(start)
            sizes.append(max(0, stop - start))
            kept_sizes.append(sizes[-1])
            continue
        number = _integer(part)
        if not -extent <= number < extent:
            raise IndexError(f"index {number} is out of range for dimension {dim} of {extent}")
        offsets.append(number % extent)
        sizes.append(1)
    return Box(tuple(offsets), tuple(sizes)), kept_sizes


def _integer(part: Any) -> int:
    """Return an index as an int; raise IndexError if it is not an integer."""
    # torch treats a tensor with one truth value as a mask, although it converts to 0 or 1.
    is_bool = isinstance(part, bool | np.bool_) or str(getattr(part, "dtype", "")) == "torch.bool"
    if not is_bool:
        with suppress(TypeError):  # no number, or an array of several elements or of floats
            return operator.index(part)
    raise IndexError(
        f"only integers, slices and Ellipsis select a part, got a {type(part).__name__}; read the"
        " tensor first for anything else"
    )


def nested(
    flat: Mapping[str, Any], places: Mapping[str, tuple[str | int, ...]] | None
) -> dict[str, Any]:
    """Rebuild the nested dict that was flattened into these keys.

    If only some entries of a list are present, the others are None, as in
    `torch.distributed.checkpoint`.

    Args:
        flat: the values by key.
        places: the place of each key in the nested dict, as `typed_paths` gives them. A key without
            a place stays as it is.

    Raises:
        CheckpointCorruptError: two places contradict each other, or leave too much of lists empty.
    """
    result: dict[str, Any] = {}
    dicts: list[dict[Any, Any]] = [result]
    # The number of entries of lists that may still be filled with None. Each step of a place adds
    # one, because it may use an entry itself.
    room = _MOST_ABSENT
    for key, value in flat.items():
        place = (places or {}).get(key, (key,))
        room += len(place)
        container: Any = result
        for step, following in pairwise(place):
            inner, room = _entry_at(container, step, key, room)
            if inner is None:
                if isinstance(following, str):
                    dicts.append(inner := {})
                else:
                    inner = []
                container[step] = inner
            container = inner
        if not place:  # an empty place is no place in a dict
            raise _contradiction(key)
        present, room = _entry_at(container, place[-1], key, room)
        if present is not None:
            raise _contradiction(key)
        container[place[-1]] = value
    for names in dicts:
        own = with_own_keys(names)
        names.clear()
        names.update(own)
    return result


def _entry_at(container: Any, step: str | int, key: str, room: int) -> tuple[Any, int]:
    """Return the entry of a container at a step of a place, or None, and the room that is left.

    Args:
        container: a dict, or a list, which is made long enough for the entry.
        step: the key or the number of the entry.
        key: the key whose place it is, for the error.
        room: how many more entries of lists may be filled with None.
    """
    if isinstance(container, dict) and isinstance(step, str):
        return container.get(step), room
    if not isinstance(container, list) or not isinstance(step, int):
        raise _contradiction(key)
    absent = max(0, step + 1 - len(container))
    if step < 0 or absent > room:
        raise _contradiction(key)
    container.extend([None] * absent)
    return container[step], room - absent


def _contradiction(key: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        "the checkpoint gives this key an impossible place in the nested dict; read it flat",
        key=key,
    )
