"""A picture for light and for dark pages: text, bars and lines in the page's own colours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

_FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


class Theme(NamedTuple):
    """Colours: of text, of what is said by the way, of lines, of our bars, and of the others."""

    text: str
    faint: str
    line: str
    ours: str
    others: tuple[str, str, str]


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", "#0969da", ("#6e7781", "#afb8c1", "#d0a215")),
    "dark": Theme("#e6edf3", "#9198a1", "#3d444d", "#58a6ff", ("#8b949e", "#57606a", "#d29922")),
}


class Drawing:
    """An SVG that is put together.

    Args:
        theme: its colours.
        size: width and height.
        title: what a screen reader says.
    """

    def __init__(self, theme: Theme, size: tuple[float, float], title: str) -> None:
        self.theme = theme
        width, height = size
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
            f' width="{width:g}" height="{height:g}" role="img" font-family="{_FONTS}">',
            f"<title>{escape(title)}</title>",
        ]

    def text(
        self,
        at: tuple[float, float],
        words: str,
        *,
        anchor: str = "start",
        bold: bool = False,
        faint: bool = False,
        size: int = 12,
    ) -> None:
        """Write words; `at` is where their baseline starts, ends or has its middle."""
        colour = self.theme.faint if faint else self.theme.text
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" fill="{colour}" font-size="{size}"'
            f'{weight} text-anchor="{anchor}">{escape(words)}</text>'
        )

    def bar(self, at: tuple[float, float], size: tuple[float, float], colour: str) -> None:
        """Fill a rectangle; `at` is its upper left corner."""
        self._parts.append(
            f'<rect x="{at[0]:.2f}" y="{at[1]:.2f}" width="{size[0]:.2f}" height="{size[1]:.2f}"'
            f' fill="{colour}"/>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw a thin line."""
        self._parts.append(
            f'<path d="M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"'
            f' stroke="{self.theme.line}"/>'
        )

    @property
    def svg(self) -> str:
        """The text of the file."""
        return "\n".join([*self._parts, "</svg>", ""])


def write_both(picture: Callable[[Theme], str], beside: str) -> list[str]:
    """Write a picture in each theme, as `NAME-light.svg` and `NAME-dark.svg`; return their names.

    Args:
        picture: draws it.
        beside: a file `NAME.json`, or any other.
    """
    names = []
    for name, theme in THEMES.items():
        path = Path(beside).with_name(f"{Path(beside).stem}-{name}.svg")
        path.write_text(picture(theme))
        names.append(str(path))
    return names


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at most `most`, three to six of them."""
    step = 1e-6
    while most / step >= 6:
        step *= 2 if f"{step:e}"[0] in "15" else 2.5
    return [step * number for number in range(int(most / step) + 1)]
