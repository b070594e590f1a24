"""`dcp-objstore bench`: measure a store and print the figures."""

from __future__ import annotations

from typing import Annotated

import typer

import dcp_objstore as dos
from dcp_objstore.cli.options import Json, chosen, size_bytes
from dcp_objstore.cli.terminal import aligned, columns, print_json, say, wrapped
from dcp_objstore.observe.report import counted, size_text

_HEAD = ("GiB/s", "lowest", "highest", "CPU-s/GiB", "requests", "at once")


def measure(
    url: Annotated[
        str, typer.Argument(help="The URL below which you save checkpoints.", metavar="URL")
    ],
    size: Annotated[
        str | None,
        typer.Option(
            help="Size of the tensors of one save, such as 4GiB. Default: what moves in a second"
            " or two, 16MiB to 1GiB."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.", min=0.1)] = 45,
    as_json: Json = False,
) -> None:
    """Measure saves and loads, and what limits them.

    Saves and loads tensors from one process, and sends plain requests for comparison. Writes under
    a random name below the URL and removes it again, even after Ctrl-C; it touches nothing else. A
    bucket may bill the requests and the bytes.
    """
    most_bytes = None if size is None else size_bytes("--size", size)
    report = dos.measure.bench(
        url, size_bytes=most_bytes, seconds=seconds, storage_options=chosen()
    )
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: dos.measure.BenchReport) -> None:
    """Print the figures: what all depends on, then a table, then warnings."""
    say(report.url)
    say(f"{size_text(report.size_bytes)} of tensors, one process, {report.seconds:.0f} s in all")
    machine = f"{counted(report.processors, 'processor')}, copy"
    say(f"machine        {machine} {_spread(report.copy_gib_per_second)} GiB/s,")
    say(f"               hash {_spread(report.hash_gib_per_second)} GiB/s")
    say(f"small requests GET {_spread(report.get_ms)} ms, PUT {_spread(report.put_ms)} ms")
    say()
    lines: list[tuple[str, ...]] = [("", *_HEAD)]
    for name, throughput in (
        ("save", report.save),
        ("plain PUTs", report.plain_puts),
        ("one PUT at a time", report.put_alone),
        ("load", report.load),
        ("plain GETs", report.plain_gets),
        ("one GET at a time", report.get_alone),
    ):
        speed = throughput.gib_per_second
        figures = (speed.median, speed.lowest, speed.highest, throughput.cpu_seconds_per_gib)
        counts = str(throughput.requests), str(throughput.connections)
        lines.append((name, *map(_figure, figures), *counts))
    say(*aligned(lines, _HEAD))
    if report.warnings:
        say()
    for warning in report.warnings:
        say(*wrapped(f"warning: {warning}", columns(), "  "))


def _spread(spread: dos.measure.Spread) -> str:
    return f"{_figure(spread.median)} ({_figure(spread.lowest)} to {_figure(spread.highest)})"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
