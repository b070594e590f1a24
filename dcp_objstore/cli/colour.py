"""Colours: only on a terminal, and not if `NO_COLOR` is set (no-color.org)."""

from __future__ import annotations

import os
import sys

import typer


def coloured(text: str, colour: str | None) -> str:
    """Return the text in a colour if standard output shows colours; None for no colour."""
    if colour is None or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return typer.style(text, fg=colour)
