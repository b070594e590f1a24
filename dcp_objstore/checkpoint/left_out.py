"""What a save has left out of a module, as its marker says it. Needs no torch, as `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, TypeGuard

# The entry of `user_metadata` that says what a save has left out.
LEFT_OUT = "left_out"


class LeftOut(TypedDict):
    """What a save has left out of a module: the number of tensors, and of elements in all ranks."""

    tensors: int
    elements: int


def left_out_of(user_metadata: Mapping[str, object]) -> dict[str, LeftOut]:
    """Return what a save has left out of its modules, by their names in the state."""
    noted = user_metadata.get(LEFT_OUT)
    counts = noted.items() if isinstance(noted, dict) else ()
    return {name: count for name, count in counts if _is_count(count)}


def _is_count(count: object) -> TypeGuard[LeftOut]:
    """Whether a save has written it, and not the user."""
    return (
        isinstance(count, dict)
        and count.keys() == LeftOut.__annotations__.keys()
        and all(isinstance(number, int) for number in count.values())
    )
