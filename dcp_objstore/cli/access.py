"""The store options that stand before the command's name; every command uses them.

They never include credentials, because other users can see a command line. Credentials come from
the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

_chosen: ContextVar[Mapping[str, str]] = ContextVar("storage_options")


def choose(options: Mapping[str, str]) -> None:
    """Keep these options for the command that follows."""
    _chosen.set(options)


def chosen() -> dict[str, str]:
    """Return the `storage_options` for every store that a command opens."""
    return dict(_chosen.get({}))


def chosen_arguments() -> list[str]:
    """Return the options as words of a command line."""
    return [word for name, value in chosen().items() for word in (f"--{name}", value)]
