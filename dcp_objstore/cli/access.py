"""How the commands reach a store: what was said before the command's name holds for all of them.

Credentials are not among it: a command line is seen by others. They come from the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

_chosen: ContextVar[Mapping[str, str]] = ContextVar("storage_options")


def choose(options: Mapping[str, str]) -> None:
    """Keep what was said, for the command that follows."""
    _chosen.set(options)


def chosen() -> dict[str, str]:
    """The `storage_options` for every store that a command opens."""
    return dict(_chosen.get({}))


def chosen_arguments() -> list[str]:
    """The same as words of a command line."""
    return [word for name, value in chosen().items() for word in (f"--{name}", value)]
