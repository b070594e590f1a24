"""Output of commands: tables, wrapped lines, JSON, and colours only where they are seen."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from dcp_objstore.errors import printable

_UNITS_SECONDS = (("d", 86400), ("h", 3600), ("min", 60))


def say(*lines: str, lead: str = "", to_errors: bool = False) -> None:
    """Print lines, in which nothing that a checkpoint or a store has named acts on a terminal.

    Commands print by this, or as JSON, which has escapes for such characters.

    Args:
        lines: the lines.
        lead: a text before the first one, which may be `coloured`.
        to_errors: print to standard error.
    """
    text = lead + "\n".join(map(printable, lines))
    print(text, file=sys.stderr if to_errors else sys.stdout)


def coloured(text: str, colour: str | None) -> str:
    """Return the text in a colour, on a terminal and without `NO_COLOR` (no-color.org)."""
    if colour is None or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return typer.style(text, fg=colour)


def json_text(value: object) -> str:
    """Return a value as JSON, which has no NaN and no infinity: they become text, as in markers."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda text: str(float(text))))


def print_json(report: Any, **more: object) -> None:
    """Print a report, a dataclass, as one JSON object, and more fields after its own."""
    print(json_text({**dataclasses.asdict(report), **more}))


def columns() -> int:
    """Return the width of the terminal; 80 if there is none."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int, indent: str = "", *, break_words: bool = True) -> list[str]:
    """Cut a text into lines, at least one; all but the first begin with the indent."""
    lines = textwrap.wrap(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=break_words,
        break_on_hyphens=False,
    )
    return lines or [""]


def aligned(lines: Sequence[Sequence[str]], to_the_right: Collection[str]) -> Iterator[str]:
    """Format the lines of a table; the first has the titles, some of which align to the right."""
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if title in to_the_right else cell.ljust(width)
            for title, cell, width in zip(lines[0], line, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def age(at: datetime | None) -> str:
    """Return how long ago something was, as `3 h`."""
    if at is None:
        return "-"
    seconds = max(0.0, (datetime.now(UTC) - at).total_seconds())
    for unit, length in _UNITS_SECONDS:
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
