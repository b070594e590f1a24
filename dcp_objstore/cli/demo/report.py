"""The output of the demo: short lines, proofs, and a table that fits the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import TextIO

from dcp_objstore.cli.terminal import aligned, columns, wrapped

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
        self._tick, self._cross = "✓", "✗"
        try:
            "✓✗…".encode(self.stream.encoding or "ascii")
        except UnicodeEncodeError:
            self._tick, self._cross = "ok", "FAILED"
            if isinstance(self.stream, TextIOWrapper):
                self.stream.reconfigure(errors="replace")

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
        total_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Add a line to the table; `total_bytes` are those of all ranks together."""
        size = f"{total_bytes / MIB:.1f}" if total_bytes else "-"
        time = f"{seconds:.2f}" if seconds else "-"
        rate = f"{total_bytes / GIB / seconds:.3f}" if total_bytes and seconds else "-"
        self.rows.append((phase, str(ranks), str(step), size, time, rate, proof))

    def table(self) -> None:
        """Print all rows: as columns or, on a narrow terminal, as several lines for each row."""
        lines = [_HEAD, *self.rows]
        shown = list(aligned(lines, _HEAD[1:-1]))
        self.stream.write("\n")
        if max(map(len, shown)) <= self._width():
            for number, text in enumerate(shown):
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
        return max(20, min(columns(), _WIDEST))

    def _print(self, text: str, lead: str, colour: str = "") -> None:
        """Write text with a lead, and wrap it under the text rather than under the lead."""
        first, *rest = wrapped(lead + text, self._width(), " " * len(lead))
        if lead.strip():
            mark = f"{colour}{lead}{_PLAIN}" if self._colour else lead
            self._write(mark + first.removeprefix(lead))
            colour = ""
        else:
            self._write(first, colour)
        for line in rest:
            self._write(line, colour)

    def _write(self, line: str, colour: str = "") -> None:
        self.stream.write(f"{colour}{line}{_PLAIN}\n" if colour and self._colour else f"{line}\n")
        self.stream.flush()
