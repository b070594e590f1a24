"""Draw the results of `all` as bars, for light and for dark pages.

python -m benchmarks.picture results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.peers import PEERS

# Of one group of bars: its label, and a bar for each peer.
_BAR, _GAP, _GROUP_GAP = 15, 3, 16
_LEFT, _PLOT, _RIGHT, _TOP, _BETWEEN = 118, 250, 56, 64, 20
_FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
_ORDER = ("dcp_objstore", "raw", "s3torchconnector", "multi-storage-client", "fsspec")


class Theme(NamedTuple):
    """Colours of a page: of text, of lines, and of the peers in the order of `_ORDER`."""

    text: str
    faint: str
    bars: tuple[str, ...]


THEMES = {
    "light": Theme("#1f2328", "#d0d7de", ("#0969da", "#8c959f", "#d4a72c", "#bf8700", "#9a6700")),
    "dark": Theme("#e6edf3", "#30363d", ("#58a6ff", "#6e7681", "#d29922", "#bb8009", "#9e6a03")),
}


def draw(found: dict[str, Any], results: str) -> list[str]:
    """Draw one picture for each theme beside the file of results; return their names."""
    names = []
    for name, theme in THEMES.items():
        path = Path(results).with_name(f"{Path(results).stem}-{name}.svg")
        path.write_text(picture(found, theme))
        names.append(str(path))
    return names


def picture(found: dict[str, Any], theme: Theme) -> str:
    """Return an SVG: throughput of saves on the left, of loads on the right."""
    actions = ("save", "load")
    shown = [peer for peer in _ORDER if any(peer in one["peers"] for one in found["results"])]
    names = list(dict.fromkeys(one["name"] for one in found["results"]))
    group = len(shown) * (_BAR + _GAP) + _GROUP_GAP
    panel = _LEFT + _PLOT + _RIGHT
    width, height = len(actions) * panel + _BETWEEN, _TOP + len(names) * group + 8
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}'"
        f" height='{height}' role='img'>",
        "<title>Throughput of saves and loads, in GiB/s, by library and by connection</title>",
    ]

    def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "400") -> None:
        parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' fill='{theme.text}' {_FONT} font-size='12'"
            f" font-weight='{weight}' text-anchor='{anchor}'>{escape(words)}</text>"
        )

    at = 0.0
    for peer in shown:
        label, colour = PEERS[peer].label, theme.bars[_ORDER.index(peer)]
        parts.append(f"<rect x='{at}' y='6' width='11' height='11' rx='2' fill='{colour}'/>")
        text(at + 16, 16, label, weight="600" if peer == _ORDER[0] else "400")
        at += 16 + 6.6 * len(label) + 22
    for column, action in enumerate(actions):
        left = column * (panel + _BETWEEN) + _LEFT
        text(left, 48, f"{action}, GiB/s", weight="600")
        of = {one["name"]: one["peers"] for one in found["results"] if one["command"] == action}
        for row, name in enumerate(names):
            top = _TOP + row * group
            text(left - 10, top + (group - _GROUP_GAP) / 2 + 4, name, "end")
            figures = {
                peer: of[name][peer]["gib_per_second"] for peer in shown if peer in of.get(name, {})
            }
            # Each condition has a scale of its own: what is compared stands together.
            most = max(figures.values(), default=1)
            for number, peer in enumerate(shown):
                y = top + number * (_BAR + _GAP)
                if peer not in figures:
                    text(left + 6, y + 12, "not measured")
                    continue
                length = max(1.0, _PLOT * figures[peer] / most)
                parts.append(
                    f"<rect x='{left}' y='{y}' width='{length:.1f}' height='{_BAR}' rx='2'"
                    f" fill='{theme.bars[_ORDER.index(peer)]}'/>"
                )
                weight = "600" if peer == _ORDER[0] else "400"
                text(left + length + 6, y + 12, f"{figures[peer]:.2f}", weight=weight)
        parts.append(
            f"<line x1='{left - 0.5}' y1='{_TOP - 6}' x2='{left - 0.5}' y2='{height - 16}'"
            f" stroke='{theme.faint}'/>"
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    print(*draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[1]), sep="\n")
