"""`renamed`: what keys are called on the other side of a load, an export or an import."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from dcp_objstore.errors import ConfigError, StateMismatchError

# Pairs of a regular expression and its replacement.
Rename: TypeAlias = Sequence[tuple[str, str]]


def renamed(keys: Iterable[str], rename: Rename) -> dict[str, str]:
    """Return the new name of each key.

    Raises:
        ConfigError: a rule is not a regular expression, or its replacement does not fit it.
        StateMismatchError: two keys get the same name.
    """
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    try:
        if isinstance(rename, Iterator):
            raise TypeError("pass a list, for an iterator could be used only once")
        pairs = [*rename]
        if any(isinstance(pair, str) for pair in pairs):  # of two letters, one could be unpacked
            raise TypeError(f"write [('^module.', 'model.')], not {rename!r}")
        rules = [(re.compile(pattern), replacement) for pattern, replacement in pairs]
        for key in keys:
            name = key
            for pattern, replacement in rules:
                name = pattern.sub(replacement, name)
            if key and not name:
                raise StateMismatchError("the rules of rename= leave no name for this key", key=key)
            if (other := taken.setdefault(name, key)) != key:
                raise StateMismatchError(f"{other!r} and {key!r} both become {name!r}")
            names[key] = name
    except (re.error, TypeError, ValueError) as error:
        raise ConfigError(
            f"rename= takes pairs of a regular expression and its replacement: {error}"
        ) from None
    return names
