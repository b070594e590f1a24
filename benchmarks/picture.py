"""Draw the results of `all` as bars, for light and for dark pages, and narrow for phones.

python -m benchmarks.picture results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import PEERS, RAW
from benchmarks.svg import Drawing, Theme, ticks, write_both

_OURS = "dcp_objstore"
_LABELS = {RAW: "raw obstore, no digests", "fsspec": "torch FsspecWriter + s3fs"}
_ROW, _BAR = 16, 11
_LEFT, _PLOT, _BETWEEN, _RIGHT = 168, 274, 76, 56
_HEADING, _GROUP_TITLE, _AXIS = 20, 22, 22


class _Group(NamedTuple):
    """The bars of one condition: what it is called, and GiB/s by action and peer."""

    name: str
    figures: dict[str, dict[str, float]]


def draw(found: dict[str, Any], results: str) -> list[str]:
    """Draw a wide and a narrow picture for each theme beside the results; return their names."""
    narrow = Path(results)
    narrow = narrow.with_name(f"{narrow.stem}-narrow{narrow.suffix}")
    return [
        *write_both(lambda theme: picture(found, theme), results),
        *write_both(lambda theme: picture(found, theme, columns=1), str(narrow)),
    ]


def picture(found: dict[str, Any], theme: Theme, columns: int = 2) -> str:
    """Return an SVG: throughput of saves on the left, of loads on the right.

    Args:
        found: the file of results.
        theme: the colours.
        columns: 1 draws the loads below the saves.
    """
    groups = _groups(found["results"])
    measured = {peer for group in groups for own in group.figures.values() for peer in own}
    shown = sorted(measured, key=lambda peer: (peer != _OURS, list(PEERS).index(peer)))
    each = _GROUP_TITLE + len(shown) * _ROW + _AXIS
    panel = _HEADING + len(groups) * each
    width = _LEFT + columns * (_PLOT + _BETWEEN) - _BETWEEN + _RIGHT
    size = (width, panel * (2 // columns))
    drawing = Drawing(theme, size, "Throughput of saves and loads in GiB/s, longer is better")
    for place, action in enumerate(("save", "load")):
        row_of_panels, column = divmod(place, columns)
        left = _LEFT + column * (_PLOT + _BETWEEN)
        start = row_of_panels * panel
        drawing.text((left, start + 14), f"{action}, GiB/s", bold=True, size=13)
        for number, group in enumerate(groups):
            top = start + _HEADING + number * each
            if column == 0:
                drawing.text((_LEFT - 10, top + 14), group.name, anchor="end", bold=True)
                for row, peer in enumerate(shown):
                    y = top + _GROUP_TITLE + row * _ROW + _BAR - 1
                    label = _LABELS.get(peer, PEERS[peer].label)
                    drawing.text((_LEFT - 10, y), label, anchor="end", bold=peer == _OURS)
            _bars(drawing, (left, top + _GROUP_TITLE), shown, group, action)
    return drawing.svg


def _groups(results: list[dict[str, Any]]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for one in results:
        group = groups.setdefault(one["name"], _Group(one["name"], {}))
        group.figures[one["command"]] = {
            peer: figures["gib_per_second"] for peer, figures in one["peers"].items()
        }
    return list(groups.values())


def _bars(
    drawing: Drawing, at: tuple[float, float], shown: list[str], group: _Group, action: str
) -> None:
    """Draw one action's bars. Saves and loads of a condition have one scale, which begins at 0."""
    left, top = at
    most = max(figure for own in group.figures.values() for figure in own.values())
    bottom = top + len(shown) * _ROW
    for tick in ticks(most):
        x = left + _PLOT * tick / most
        drawing.line((x, top - 3), (x, bottom))
        drawing.text((x, bottom + 12), f"{tick:g}", anchor="middle", faint=True, size=10)
    colours = drawing.theme
    for row, peer in enumerate(shown):
        y = top + row * _ROW
        figure = group.figures.get(action, {}).get(peer)
        if figure is None:
            drawing.text((left + 5, y + _BAR - 1), "failed", faint=True)
            continue
        others = colours.others[0 if peer == RAW else 1]
        length = _PLOT * figure / most
        drawing.bar((left, y), (length, _BAR), colours.ours if peer == _OURS else others)
        where = (left + length + 5, y + _BAR - 1)
        drawing.text(where, f"{figure:.2f}", bold=peer == _OURS)


if __name__ == "__main__":
    print(*draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[1]), sep="\n")
