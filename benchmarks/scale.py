"""`scale`: what a save and a resume of a very large job cost apart from the transfer of its data.

The coordinator's stages run for all ranks, each rank's own for a sample of them, at several numbers
of ranks. A straight line through these gives the figures beyond what was measured.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prices import Prices
from benchmarks.processes import run_module
from benchmarks.scale_state import MODELS, ScaledState
from benchmarks.settings import GIB, MIB
from benchmarks.table import Result, Table, number
from dcp_objstore.config import TransferConfig
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.ranges import Span, grown_request_size, plan_requests

_JOB = "benchmarks.scale_job"
_SIZES = 4
# Of the coordinator's memory, measured.
_BYTES_PER_CHUNK = 3300
# The part of the free memory that is used.
_MEMORY_PART = 0.7
# Growth as a power of the chunks from which a line does not describe it.
_STEEP = 1.25
_NOTED_SECONDS = 1.0
_COLUMNS = ("stage", "of", "on", "s", "MiB", "us/chunk", "off %", "power")


@dataclass(frozen=True)
class Stage:
    """One stage: what it does, whether DCP's own code or this library does it, and where."""

    name: str
    text: str
    of: str
    on: str


STAGES = [
    Stage("local_plan", "create_local_plan (save)", "DCP", "rank"),
    Stage("send_plan", "pickle the plan (save)", "ours", "rank"),
    Stage("dcp_gather_plans", "unpickle all plans (save)", "DCP", "coord."),
    Stage("dcp_global_plan", "create_global_plan (save)", "DCP", "coord."),
    Stage("dcp_scatter_plans", "pickle all plans (save)", "DCP", "coord."),
    Stage("gather_plans", "unpickle all plans (save)", "ours", "coord."),
    Stage("global_plan", "create_global_plan (save)", "ours", "coord."),
    Stage("scatter_plans", "pickle all plans (save)", "ours", "coord."),
    Stage("send_results", "pickle the results", "ours", "rank"),
    Stage("gather_results", "unpickle all results", "ours", "coord."),
    Stage("build_index", "build the index", "ours", "coord."),
    Stage("encode_index", "encode, decode it", "ours", "coord."),
    Stage("commit", "LIST, put index, marker", "ours", "coord."),
    Stage("dot_metadata", "write .metadata", "ours", "coord."),
    Stage("send_metadata", "pickle Metadata for all", "DCP", "coord."),
    *(
        Stage(f"again_{name}", f"{text}, layout known", "ours", "coord.")
        for name, text in (
            ("gather_plans", "unpickle all plans"),
            ("global_plan", "create_global_plan"),
            ("scatter_plans", "pickle all plans"),
            ("gather_results", "unpickle all results"),
            ("build_index", "build the index"),
            ("encode_index", "encode, decode it"),
            ("commit", "LIST, put index, marker"),
            ("dot_metadata", "write .metadata"),
            ("send_metadata", "pickle Metadata for all"),
        )
    ),
    Stage("open", "read marker and index", "ours", "rank"),
    Stage("local_read_plan", "create_local_plan (load)", "DCP", "rank"),
    Stage("plan_ranges", "plan blocks", "ours", "rank"),
    Stage("send_read_plan", "pickle the plan (load)", "ours", "rank"),
    Stage("dcp_gather_read_plans", "unpickle all plans (load)", "DCP", "coord."),
    Stage("dcp_scatter_read_plans", "pickle all plans (load)", "DCP", "coord."),
    Stage("gather_read_plans", "unpickle all plans (load)", "ours", "coord."),
    Stage("share_out", "who fetches what", "ours", "coord."),
    Stage("scatter_read_plans", "pickle all plans (load)", "ours", "coord."),
    Stage("plan_requests", "plan requests", "ours", "rank"),
]


def scale(
    model: str,
    ranks: int,
    tensors: int | None,
    measured_ranks: int | None,
    prices: Prices,
    plot: str | None,
    *,
    collector: bool,
) -> tuple[Table, Result]:
    """Measure with up to `measured_ranks` ranks, and extrapolate to `ranks`.

    Args:
        model: one of `MODELS`.
        ranks: number of ranks that is asked about.
        tensors: tensors of the state; None for all of the model. Each parameter has four.
        measured_ranks: largest number of ranks to measure; None for what the memory allows.
        prices: what requests cost.
        plot: file for the plot; None for none.
        collector: leave Python's cyclic garbage collector on.
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib")
    state = ScaledState.of(model, ranks, tensors or MODELS[model].tensors)
    most = min(ranks, measured_ranks or _fitting(state))
    sizes = [
        _measure(model, ScaledState(state.parameters, size), collector=collector)
        for size in sorted({max(2, most // 4**step) for step in range(_SIZES)})
    ]
    fits = {stage.name: _fit(sizes, stage.name) for stage in STAGES}
    result: Result = {
        "command": "scale",
        "model": model,
        "tensors": len(state.tensors),
        "ranks": ranks,
        "chunks": state.chunks,
        "collector": collector,
        "prices": prices.name,
        "sizes": sizes,
        "fits": fits,
    }
    if plot is not None:
        from benchmarks.scale_plot import draw

        draw(result, plot)
    return _table(result, state, prices), result


def _fitting(state: ScaledState) -> int:
    """Return the largest halving of the ranks for which there is memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_bytes = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    ranks = state.ranks
    while (
        ranks > 2
        and ScaledState(state.parameters, ranks).chunks * _BYTES_PER_CHUNK
        > free_bytes * _MEMORY_PART
    ):
        ranks //= 2
    return ranks


def _measure(model: str, state: ScaledState, *, collector: bool) -> dict[str, Any]:
    """Measure one number of ranks, each process by itself."""
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "model": model,
            "ranks": state.ranks,
            "tensors": len(state.tensors),
            "collector": collector,
            "url": (Path(folder) / "checkpoint").as_uri(),
        }

        def run(what: str, rank: int = 0) -> dict[str, Any]:
            found: dict[str, Any] = run_module(_JOB, {**job, "what": what, "rank": rank})
            return found

        save, load = run("save"), run("load")
        sample = sorted({0, state.ranks - 1})
        of_ranks = [run("rank", rank) for rank in sample]
    return combined(state, save, load, of_ranks)


def combined(
    state: ScaledState,
    save: Mapping[str, Any],
    load: Mapping[str, Any],
    of_ranks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the figures of one number of ranks; those of ranks are means of the sample."""
    stages = {**save["stages"], **load["stages"]}
    for name in of_ranks[0]["stages"]:
        stages[name] = {
            unit: statistics.fmean(rank["stages"][name][unit] for rank in of_ranks)
            for unit in ("seconds", "mib")
        }
    gets = statistics.fmean(rank["data_gets"] for rank in of_ranks)
    opened = of_ranks[0]["open_requests"]
    own = save["requests"]
    return {
        "ranks": state.ranks,
        "chunks": state.chunks,
        "sampled_ranks": len(of_ranks),
        "stages": stages,
        "save_peak_mib": save["peak_mib"],
        "load_peak_mib": load["peak_mib"],
        "save_requests": {**own, "PUT": own["PUT"] + save["data_puts"]},
        "coordinator_requests": own,
        "load_requests": {verb: round(count * state.ranks) for verb, count in opened.items()}
        | {"GET": round((opened["GET"] + gets) * state.ranks)},
        **{name: count for name, count in {**save, **load}.items() if name.endswith("_bytes")},
    }


def _fit(sizes: Sequence[Mapping[str, Any]], stage: str) -> dict[str, float]:
    """Fit seconds to the chunks: a line that neither falls nor begins below zero.

    `power` is that of the growth in the last step.
    """
    chunks = np.array([size["chunks"] for size in sizes], dtype=np.float64)
    seconds = np.array([size["stages"][stage]["seconds"] for size in sizes])
    if len(sizes) < 2:
        return {"start": float(seconds[0]), "slope": 0.0, "off": 0.0, "power": 0.0}
    slope, start = np.polyfit(chunks, seconds, 1)
    if slope < 0:
        slope, start = 0.0, seconds.mean()
    elif start < 0:
        slope, start = (chunks @ seconds) / (chunks @ chunks), 0.0
    off = np.abs(start + slope * chunks - seconds).max() / max(seconds.max(), 1e-9)
    last, before = np.maximum(seconds[[-1, -2]], 1e-6)
    power = np.log(last / before) / np.log(chunks[-1] / chunks[-2])
    return {
        "start": float(start),
        "slope": float(slope),
        "off": float(off),
        "power": float(power),
    }


def _table(result: Result, state: ScaledState, prices: Prices) -> Table:
    size, fits, ranks = result["sizes"][-1], result["fits"], result["ranks"]
    beyond = ranks > size["ranks"]
    rows: list[list[str | None]] = []
    for stage in STAGES:
        found, fit = size["stages"][stage.name], fits[stage.name]
        row = [
            *(stage.text, stage.of, stage.on),
            number(found["seconds"], ".3f"),
            number(found["mib"], ".0f"),
            number(1e6 * fit["slope"], ".2f"),
            number(100 * fit["off"], ".0f"),
            number(fit["power"], ".1f"),
        ]
        if beyond:
            row.append(f"~{max(found['seconds'], extrapolated(fit, result['chunks'])):.2f}")
        rows.append(row)
    measured = ", ".join(str(one["ranks"]) for one in result["sizes"])
    title = (
        f"{result['model']}: {size['ranks']} ranks x {result['tensors']} tensors,"
        f" {size['chunks']} chunks, {state.payload_bytes / GIB:.0f} GiB; processor time"
    )
    steep = [
        f"{stage.text} ({fits[stage.name]['power']:.1f})"
        for stage in STAGES
        if fits[stage.name]["power"] > _STEEP
        and size["stages"][stage.name]["seconds"] > _NOTED_SECONDS
    ]
    return Table(
        title,
        [*_COLUMNS, *([f"s at {ranks}"] if beyond else [])],
        rows,
        [
            f"Measured with {measured} ranks, a rank's stages on {size['sampled_ranks']} of them."
            " MiB: peak resident memory",
            "above the end of the stage before. us/chunk: slope of a line through the seconds;"
            " off: its largest",
            "error; power: growth in the last step."
            + ("" if not steep else f" Steeper than a line: {', '.join(steep)}."),
            *([f"~: from the line, at {result['chunks']} chunks."] if beyond else []),
            f"Coordinator: {size['save_peak_mib'] / 1024:.1f} GiB in a save,"
            f" {size['load_peak_mib'] / 1024:.1f} in a load. A rank sends a plan of"
            f" {size['plan_bytes'] / MIB:.2f} MiB,",
            f"results of {size['result_bytes'] / MIB:.2f}, a read plan of"
            f" {size['read_plan_bytes'] / MIB:.2f}.",
            f"Index: {size['index_bytes'] / MIB:.1f} MiB, read by every rank:"
            f" {size['index_bytes'] * size['ranks'] / GIB:.1f} GiB in all.",
        ],
        below=[_requests(result, state, prices)],
    )


def extrapolated(fit: Mapping[str, float], chunks: int) -> float:
    """Return the seconds at this many chunks."""
    return fit["start"] + fit["slope"] * chunks


def _requests(result: Result, state: ScaledState, prices: Prices) -> Table:
    rows: list[list[str]] = []

    def add(what: str, ranks: int, puts: float, gets: float, lists: float, about: str) -> None:
        rows.append(
            [
                f"{what}, {ranks} ranks",
                f"{about}{(puts + gets) / ranks:.1f}",
                *(f"{about}{count:.0f}" for count in (puts, gets, lists)),
                f"{about}{prices.seconds(puts, gets + lists):.1f}",
                f"{about}{prices.usd(puts + lists, gets):.2f}",
            ]
        )

    for size in result["sizes"]:
        for what in ("save", "load"):
            counts = size[f"{what}_requests"]
            gets = counts.get("GET", 0) + counts.get("HEAD", 0)
            add(what, size["ranks"], counts.get("PUT", 0), gets, counts.get("LIST", 0), "")
    ranks = result["ranks"]
    if ranks > result["sizes"][-1]["ranks"]:
        puts, gets = _requests_of_a_rank(state)
        own = result["sizes"][-1]["coordinator_requests"]
        own_gets = own.get("GET", 0) + own.get("HEAD", 0)
        add("save", ranks, ranks * puts + own["PUT"], own_gets, ranks // 1000 + 1, "~")
        add("load", ranks, 0, ranks * (gets + 2), 0, "~")
    gib = state.payload_bytes / GIB
    return Table(
        f"requests; {prices.name}",
        ("", "a rank", "PUT", "GET, HEAD", "LIST", "s at the rates", "USD"),
        rows,
        [
            f"The rates are those of one prefix: {prices.put_per_second:.0f} PUT/s,"
            f" {prices.get_per_second:.0f} GET/s. To keep a checkpoint costs"
            f" {gib * prices.usd_per_gib_month:.2f} USD a month."
        ],
    )


def _requests_of_a_rank(state: ScaledState) -> tuple[int, int]:
    """Estimate the PUTs and GETs for the data of one rank of a job that was not measured.

    It writes and reads one object; what all ranks have lies in the first rank's.
    """
    results = state.results(0, state.save_items(0), "")
    stored = results[0].storage_data.object
    spans: list[Span[None]] = []
    for result in results:
        start = result.storage_data.payload_offset
        end = start + result.storage_data.payload_length
        blocks = range(start, end, BLOCK_SIZE_BYTES)
        spans += [Span(0, at, min(at + BLOCK_SIZE_BYTES, end), None) for at in blocks]
    least = TransferConfig().request_size_bytes
    size = grown_request_size(sum(span.end - span.start for span in spans), least)
    puts = stored.parts + 2 if stored.parts > 1 else 1
    return puts, len(plan_requests(spans, request_size_bytes=size)) + 1
