"""`dcp-objstore bench`: measure a store and print the figures, and what settings would gain."""

from __future__ import annotations

import math
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
    """Measure saves and loads, and what other settings would gain.

    Saves and loads tensors from one process, sends plain requests for comparison, and tries other
    settings of TransferConfig. Writes under a random name below the URL and removes it again, even
    after Ctrl-C; it touches nothing else. A bucket may bill the requests and the bytes.
    """
    most_bytes = None if size is None else size_bytes("--size", size)
    report = dos.bench(url, size_bytes=most_bytes, seconds=seconds, storage_options=chosen())
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: dos.BenchReport) -> None:
    say(report.url)
    say(f"{size_text(report.size_bytes)} of tensors, one process, {report.seconds:.0f} s in all")
    machine = f"{counted(report.processors, 'processor')}, copy"
    say(f"machine        {machine} {_spread(report.copy_gib_per_second)} GiB/s,")
    say(f"               hash {_spread(report.hash_gib_per_second)} GiB/s")
    say(f"small requests GET {_spread(report.get_ms)} ms, PUT {_spread(report.put_ms)} ms")
    say()
    lines: list[tuple[str, ...]] = [("", *_HEAD)]
    for name, found in (
        ("save", report.save),
        ("plain PUTs", report.plain_puts),
        ("one PUT at a time", report.put_alone),
        ("load", report.load),
        ("plain GETs", report.plain_gets),
        ("one GET at a time", report.get_alone),
    ):
        speed = found.gib_per_second
        figures = (speed.median, speed.lowest, speed.highest, found.cpu_seconds_per_gib)
        counts = str(found.requests), str(found.connections)
        lines.append((name, *map(_figure, figures), *counts))
    say(*aligned(lines, _HEAD))
    say()
    for past, noun, gain in (
        ("saved", "saves", report.save_settings),
        ("loaded", "loads", report.load_settings),
    ):
        _print_wrapped(f"{noun}: {_verdict(past, gain)}")
    for warning in report.warnings:
        _print_wrapped(f"warning: {warning}")


def _verdict(past: str, gain: dos.SettingsGain | None) -> str:
    if gain is None:
        return "no other settings were tried; give it more time or a larger size"
    from dcp_objstore.measure.report import LEAST_GAIN, settings_text

    text = settings_text(gain.settings)
    if gain.is_faster:
        return f"TransferConfig({text}) {past} {gain.gain:.1f} times as fast here"
    if gain.gain <= 1:
        return f"the current settings are as fast as the best of {len(gain.tried)} tried ({text})"
    percent = math.ceil(100 * (1 - 1 / gain.gain))
    unsure = "; this may be chance" if gain.gain >= LEAST_GAIN else ""
    return (
        f"the current settings are within {percent} % of the best of {len(gain.tried)} tried"
        f" ({text}){unsure}"
    )


def _spread(spread: dos.Spread) -> str:
    return f"{_figure(spread.median)} ({_figure(spread.lowest)} to {_figure(spread.highest)})"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _print_wrapped(text: str) -> None:
    say(*wrapped(text, columns(), "  "))
