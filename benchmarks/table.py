"""The one way in which figures are shown: a table (by rich where installed), or JSON."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A title, column names, rows of text (None: not measured), lines and tables below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | None]]
    notes: Sequence[str] = field(default=())
    below: Sequence[Table] = field(default=())

    @classmethod
    def of(
        cls,
        title: str,
        what: str,
        columns: Mapping[str, tuple[str, str]],
        figures: Mapping[str, Mapping[str, float | None]],
        notes: Sequence[str] = (),
    ) -> Table:
        """Make one of figures.

        Args:
            title: above it.
            what: heading of the first column.
            columns: the figure and its format, by the heading of the column.
            figures: of each row, by what the row says first; those it lacks were not measured.
            notes: lines below it.
        """
        rows = [
            [label, *(number(own.get(key), form) for key, form in columns.values())]
            for label, own in figures.items()
        ]
        return cls(title, [what, *columns], rows, notes)

    def show(self) -> None:
        """Print it; the first column to the left, the others to the right."""
        print(self.title)
        rows = [["-" if cell is None else cell for cell in row] for row in self.rows]
        if not rows:
            pass  # every peer failed: the notes say why
        elif importlib.util.find_spec("rich") is not None:
            self._show_rich(rows)
        else:
            self._show_plain(rows)
        for note in self.notes:
            print(note)
        for table in self.below:
            print()
            table.show()

    def _show_rich(self, rows: list[list[str]]) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable()
        for number, name in enumerate(self.columns):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console = Console()
        # A pipe or a log has no width of its own; a cut table is of no use there.
        Console(width=None if console.is_terminal else 200).print(table)

    def _show_plain(self, rows: list[list[str]]) -> None:
        lines = [list(self.columns), *rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        for line in lines:
            first, *others = (
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            print("  ".join([first, *others]).rstrip())


def number(value: float | None, form: str = ".2f") -> str | None:
    """A figure as text."""
    return None if value is None else format(value, form)


Result = dict[str, Any]
