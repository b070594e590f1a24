"""Names in a conversion: where its files lie. It needs no torch, as a copy does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


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
