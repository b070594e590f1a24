"""`timeline`: a save in the background and one that is waited for, drawn from their traces."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.child import make_state
from benchmarks.conditions import Conditions
from benchmarks.peers.ours import Ours
from benchmarks.settings import Settings
from benchmarks.svg import Drawing, Theme, ticks, write_both
from benchmarks.table import Result, Table, number
from benchmarks.targets import open_target

_BACKGROUND, _WAITED = "dos.async_save", "dcp.save"
_TITLES = {
    _BACKGROUND: "dos.async_save: training goes on when the copy is made",
    _WAITED: "dcp.save: training waits for the commit",
}
_LEFT, _PLOT, _RIGHT = 168, 640, 22
_ROW, _LANES, _GAP, _TITLE, _AXIS = 14, 112, 7, 28, 22


class _Span(NamedTuple):
    """A time in a trace, in seconds from the beginning of the save."""

    name: str
    lane: int
    start: float
    end: float


class _Rows(NamedTuple):
    """What stands under one label: a bar for each span, in lanes from the top."""

    label: str
    lanes: list[list[_Span]]
    colour: Callable[[Theme], str]

    @property
    def lane_height(self) -> float:
        """Lower where there are many, so that they have room together."""
        return min(_ROW, _LANES / len(self.lanes))

    @property
    def height(self) -> float:
        """Of all lanes together."""
        return max(_ROW, self.lane_height * len(self.lanes))


def timeline(
    target: str, settings: Settings, conditions: Conditions, out: str
) -> tuple[Table, Result]:
    """Save in both ways, each for the second time, and draw what their traces say."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # async_save works in a process group only.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    state = make_state(settings, blank=False)
    with (
        open_target(target, keep=False, conditions=conditions) as place,
        tempfile.TemporaryDirectory() as folder,
    ):
        traces = {name: Path(folder) / f"{name}.json" for name in (_BACKGROUND, _WAITED)}
        for turn in ("warm-up", "measured"):
            peer = Ours(trace=traces[_BACKGROUND])
            peer.async_save(state, place.at(f"{turn}-1"), settings)()
            Ours(trace=traces[_WAITED]).save(state, place.at(f"{turn}-2"), settings)
        saves = {name: _spans(json.loads(path.read_text())) for name, path in traces.items()}
    dist.destroy_process_group()
    size = f"{settings.gib:g} GiB to {conditions.described(target)}"
    names = write_both(lambda theme: picture(saves, theme, size), out)
    rows = [[name, number(max(span.end for span in spans))] for name, spans in saves.items()]
    return Table(f"saves of {size}", ["call", "seconds"], rows, names), {
        "command": "timeline",
        "conditions": conditions.described(target),
        "spans": saves,
    }


def _spans(trace: dict[str, Any]) -> list[_Span]:
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    began = min(event["ts"] for event in events)
    return [
        _Span(
            event["name"].split()[0],
            event["tid"],
            (event["ts"] - began) / 1e6,
            (event["ts"] - began + event["dur"]) / 1e6,
        )
        for event in events
    ]


def _rows(spans: list[_Span]) -> list[_Rows]:
    def lanes(name: str) -> list[list[_Span]]:
        own = [span for span in spans if span.name == name]
        numbers = sorted({span.lane for span in own})
        return [[span for span in own if span.lane == lane] for lane in numbers]

    stage, hashed, parts = lanes("stage"), lanes("hash"), lanes("part")
    found = [
        _Rows("copy and hash", stage, lambda theme: theme.others[2]),
        _Rows("begin and plan", lanes("plan"), lambda theme: theme.others[0]),
        _Rows(f"hash, {len(hashed)} threads", hashed, lambda theme: theme.others[2]),
        _Rows(f"{len(parts)} parts at once", parts, lambda theme: theme.ours),
        _Rows("commit", lanes("commit"), lambda theme: theme.text),
    ]
    return [rows for rows in found if rows.lanes]


def picture(saves: dict[str, list[_Span]], theme: Theme, size: str) -> str:
    """Return an SVG: the saves below one another, on one axis of time."""
    panels = {name: _rows(spans) for name, spans in saves.items()}
    last = max(span.end for spans in saves.values() for span in spans)
    heights = {
        name: _TITLE + sum(rows.height + _GAP for rows in panel) for name, panel in panels.items()
    }
    bottom = sum(heights.values())
    drawing = Drawing(
        theme,
        (_LEFT + _PLOT + _RIGHT, bottom + _AXIS),
        f"What a save of {size} does when, as a background save and as one that is waited for",
    )

    def x(seconds: float) -> float:
        return _LEFT + _PLOT * seconds / last

    for tick in ticks(last):
        drawing.text((x(tick), bottom + 13), f"{tick:g} s", anchor="middle", faint=True, size=10)
    top = 0.0
    for name, panel in panels.items():
        drawing.text((_LEFT, top + 15), _TITLES[name], bold=True)
        for tick in ticks(last):
            drawing.line((x(tick), top + _TITLE - 6), (x(tick), top + heights[name]))
        at = top + _TITLE
        for rows in panel:
            middle = at + rows.height / 2 + 4
            drawing.text((_LEFT - 10, middle), rows.label, anchor="end")
            for lane, spans in enumerate(rows.lanes):
                for span in spans:
                    width = max(1.0, x(span.end) - x(span.start) - 0.6)
                    where = (x(span.start), at + lane * rows.lane_height)
                    drawing.bar(where, (width, rows.lane_height * 0.82), rows.colour(theme))
            at += rows.height + _GAP
        top += heights[name]
    return drawing.svg
