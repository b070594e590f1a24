"""Names in a conversion: where its files lie, and what keys are called on the other side."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from dcp_objstore.errors import ConfigError, StateMismatchError

# The endings of the names of `torch.save` files.
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

# Pairs of a regular expression and its replacement.
Rename: TypeAlias = Sequence[tuple[str, str]]


def folder_and_name(
    path: str | os.PathLike[str], suffixes: tuple[str, ...]
) -> tuple[str, str | None]:
    """Return the URL of a folder and the name of a file in it; None if the path is the folder.

    Args:
        path: a local path or a URL.
        suffixes: how the name of a file ends.
    """
    url = os.fspath(path)
    if "://" not in url:
        local = Path(url).absolute()
        url = f"file://{local.resolve() if '..' in local.parts else local}"
    if not url.endswith(suffixes):
        return url, None
    folder, _, name = url.rpartition("/")
    return folder, name


def options_of_other(
    other_options: Mapping[str, object] | None,
    url: str | os.PathLike[str],
    options: Mapping[str, object] | None,
    other: str | os.PathLike[str],
) -> Mapping[str, object] | None:
    """Return the options of the other side: those given, or `options` if its scheme is the same.

    Args:
        other_options: the options that the caller gave for the other side.
        url: the URL that `options` are for.
        options: credentials and endpoint of `url`.
        other: path or URL of the other side.
    """
    schemes = {os.fspath(address).partition("://")[0] for address in (url, other)}
    return options if other_options is None and len(schemes) == 1 else other_options


def renamed(keys: Iterable[str], rename: Rename) -> dict[str, str]:
    """Return the new name of each key.

    Raises:
        ConfigError: a rule is not a regular expression, or its replacement does not fit it.
        StateMismatchError: two keys get the same name.
    """
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    try:
        rules = [(re.compile(pattern), replacement) for pattern, replacement in rename]
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
