"""The output of the demo: short lines, proofs, and a table that fits the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TextIO

_GREEN, _RED, _BOLD, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
_HEAD = ("phase", "ranks", "step", "MiB", "s", "GiB/s", "proof")
_WIDEST = 100
MIB = 1024**2
GIB = 1024**3


@dataclass
class Printer:
    """Prints to a stream, with colour only on a terminal, and flushes every line.

    Attributes:
        stream: where it prints.
        rows: the lines of the table, as cells, in the order in which they were added.
        proofs: number of proofs that were printed.
    """

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    proofs: int = 0

    def __post_init__(self) -> None:
        """Find out what the stream can show."""
        self._colour = self.stream.isatty()
        try:
            "✓✗…".encode(self.stream.encoding or "ascii")
            self._tick, self._cross = "✓", "✗"
        except UnicodeEncodeError:
            self._tick, self._cross = "ok", "FAILED"

    def headline(self, text: str) -> None:
        """Print a line at the margin."""
        self._print(text, "", _BOLD)

    def title(self, text: str) -> None:
        """Print the headline of a phase, after an empty line."""
        self.stream.write("\n")
        self.headline(text)

    def say(self, text: str) -> None:
        """Print a plain line."""
        self._print(text, "  ")

    def verbatim(self, text: str) -> None:
        """Print a line for the reader to copy: not wrapped, not indented."""
        self._write(text)

    def proof(self, text: str) -> None:
        """Print something that was checked and holds."""
        self.proofs += 1
        self._print(text, f"  {self._tick} ", _GREEN)

    def failure(self, text: str) -> None:
        """Print something that was checked and does not hold."""
        self._print(text, f"  {self._cross} ", _RED)

    def add_row(
        self,
        phase: str,
        ranks: int,
        step: int,
        proof: str,
        *,
        total_bytes: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Add a line to the table; `total_bytes` are those of all ranks together."""
        rate = None if not total_bytes or not seconds else f"{total_bytes / GIB / seconds:.3f}"
        size = None if total_bytes is None else f"{total_bytes / MIB:.1f}"
        time = None if seconds is None else f"{seconds:.2f}"
        figures = (cell or "-" for cell in (size, time, rate))
        self.rows.append((phase, str(ranks), str(step), *figures, proof))

    def table(self) -> None:
        """Print all rows: as columns or, on a narrow terminal, as several lines for each row."""
        lines = [_HEAD, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
        self.stream.write("\n")
        if sum(widths) + 2 * len(widths) <= self._width():
            for number, line in enumerate(lines):
                text = "  ".join(_aligned(line, widths)).rstrip()
                self._write(text, _BOLD if number == 0 else "")
            return
        for line in lines[1:]:
            self._write(line[0], _BOLD)
            named = [f"{name} {cell}" for name, cell in zip(_HEAD[1:-1], line[1:-1], strict=True)]
            self._print(", ".join(one for one in named if not one.endswith(" -")), "  ")
            self._print(line[-1], "  ")

    def _width(self) -> int:
        if not self.stream.isatty():
            return _WIDEST
        return max(20, min(shutil.get_terminal_size().columns, _WIDEST))

    def _print(self, text: str, lead: str, colour: str = "") -> None:
        """Write text with a lead, and wrap it under the text rather than under the lead."""
        wrapped = textwrap.wrap(
            text,
            self._width(),
            initial_indent=lead,
            subsequent_indent=" " * len(lead),
            break_on_hyphens=False,
        )
        for number, line in enumerate(wrapped):
            whole = not lead.strip()
            if whole or number:
                self._write(line, colour if whole else "")
            else:
                mark = colour + lead + _PLAIN if self._colour else lead
                self._write(mark + line[len(lead) :])

    def _write(self, line: str, colour: str = "") -> None:
        if not self._can_encode(line):
            line = line.encode("ascii", "replace").decode()
        self.stream.write(f"{colour}{line}{_PLAIN}\n" if colour and self._colour else f"{line}\n")
        self.stream.flush()

    def _can_encode(self, line: str) -> bool:
        try:
            line.encode(self.stream.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return True


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    """Align text to the left and numbers to the right."""
    last = len(cells) - 1
    return [
        cell.ljust(width) if at in {0, last} else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
