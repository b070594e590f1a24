"""`dcp-objstore bench`: measure a store and print the figures."""

from __future__ import annotations

from typing import Annotated

import typer

import dcp_objstore as dos
from dcp_objstore.cli.options import Json, chosen, size_bytes
from dcp_objstore.cli.terminal import aligned, columns, print_json, say, wrapped

_HEAD = ("GiB/s", "lowest", "highest", "CPU-s/GiB", "requests", "at a time")


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
    wanted_bytes = None if size is None else size_bytes("--size", size)
    report = dos.measure.bench(
        url, size_bytes=wanted_bytes, seconds=seconds, storage_options=chosen()
    )
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: dos.measure.BenchReport) -> None:
    """Print a sentence for saves and one for loads, then the figures, then warnings."""
    url, size, about_saves, about_loads, *warnings = str(report).splitlines()
    say(url, size, "")
    for text in (about_saves, about_loads):
        say(*wrapped(text, columns(), "      "))
    say()
    say(f"small requests GET {_spread(report.get_ms)} ms, PUT {_spread(report.put_ms)} ms")
    say()
    rows = (
        ("save", report.save),
        ("plain PUTs", report.plain_puts),
        ("load", report.load),
        ("plain GETs", report.plain_gets),
    )
    table = [("", *_HEAD), *((name, *_cells(throughput)) for name, throughput in rows)]
    say(*aligned(table, _HEAD))
    if warnings:
        say()
    for text in warnings:
        say(*wrapped(text, columns(), "  "))


def _cells(throughput: dos.measure.Throughput) -> tuple[str, ...]:
    """Return the cells below `_HEAD`."""
    speed = throughput.gib_per_second
    figures = (speed.median, speed.lowest, speed.highest, throughput.cpu_seconds_per_gib)
    return (*map(_figure, figures), str(throughput.requests), str(throughput.connections))


def _spread(spread: dos.measure.Spread) -> str:
    return f"{_figure(spread.median)} ({_figure(spread.lowest)} to {_figure(spread.highest)})"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
