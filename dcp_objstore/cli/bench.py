"""`dcp-objstore bench`: measure a store and print the figures."""

from __future__ import annotations

from typing import Annotated

import typer

import dcp_objstore as dos
from dcp_objstore.cli.options import Json, chosen, size_bytes
from dcp_objstore.cli.terminal import aligned, columns, print_json, say, wrapped
from dcp_objstore.observe.report import GIB, counted, size_text

_HEAD = ("GiB/s", "lowest", "highest", "CPU-s/GiB", "requests", "at a time")
# If the processors are busy for more than this share of the time, they limit the transfer.
_NEARLY_BUSY = 0.8


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
    """Print a sentence for saves and one for loads, then the figures, then warnings."""
    say(report.url)
    say(f"{size_text(report.size_bytes)} of tensors, one process, {report.seconds:.0f} s in all")
    say()
    directions = (
        ("save", report.save, report.plain_puts),
        ("load", report.load, report.plain_gets),
    )
    for name, transfer, plain in directions:
        text = _in_words(name, transfer, plain=plain, report=report)
        say(*wrapped(text, columns(), "      "))
    say()
    say(f"small requests GET {_spread(report.get_ms)} ms, PUT {_spread(report.put_ms)} ms")
    say()
    lines: list[tuple[str, ...]] = [("", *_HEAD)]
    for name, transfer, plain in directions:
        lines.append((name, *_row(transfer)))
        lines.append(("plain PUTs" if name == "save" else "plain GETs", *_row(plain)))
    say(*aligned(lines, _HEAD))
    if report.warnings:
        say()
    for warning in report.warnings:
        say(*wrapped(f"warning: {warning}", columns(), "  "))


def _in_words(
    name: str,
    transfer: dos.measure.Throughput,
    *,
    plain: dos.measure.Throughput,
    report: dos.measure.BenchReport,
) -> str:
    """Say how fast a save or load is, and what limits it, if the figures are good enough.

    Args:
        name: "save" or "load".
        transfer: the figures of the save or load.
        plain: the figures of plain requests of the same size.
        report: the report that has both.
    """
    speed, plain_speed = transfer.gib_per_second.median, plain.gib_per_second.median
    seconds = 100 / speed
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    if report.warnings:
        limit = "What limits it is not clear: see the warnings."
    elif transfer.cpu_seconds_per_gib * speed > _NEARLY_BUSY * report.processors:
        limit = "The processors are busy all the time: they limit it."
    else:
        limit = "The store, or the way to it, gives no more to one process."
    requests = f"{counted(plain.connections, 'plain request')} at a time"
    return (
        f"{name}  {_rate(speed)}: 100 GiB in {duration}. {requests} reached {_rate(plain_speed)};"
        f" this {name} reached {speed / plain_speed:.0%} of that. {limit}"
    )


def _row(throughput: dos.measure.Throughput) -> tuple[str, ...]:
    speed = throughput.gib_per_second
    figures = (speed.median, speed.lowest, speed.highest, throughput.cpu_seconds_per_gib)
    return (*map(_figure, figures), str(throughput.requests), str(throughput.connections))


def _rate(gib_per_second: float) -> str:
    return f"{size_text(gib_per_second * GIB)}/s"


def _spread(spread: dos.measure.Spread) -> str:
    return f"{_figure(spread.median)} ({_figure(spread.lowest)} to {_figure(spread.highest)})"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
