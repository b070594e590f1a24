"""`dcp-objstore bench`: measure a store and print the figures, and what settings would gain."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence

from dcp_objstore.cli.access import chosen
from dcp_objstore.cli.convert import size_bytes
from dcp_objstore.cli.upkeep import print_json
from dcp_objstore.measure.report import (
    LEAST_GAIN,
    BenchReport,
    SettingsGain,
    Spread,
    Throughput,
    settings_text,
)
from dcp_objstore.observe.report import counted, size_text

_HEAD = ("GiB/s", "lowest", "highest", "CPU-s/GiB", "requests", "at once")


def measure(url: str, *, size: str | None, seconds: float, as_json: bool) -> None:
    """Measure and print the report.

    Raises:
        DcpObjstoreError: `dcp_objstore.bench` refused or failed.
    """
    most_bytes = None if size is None else size_bytes("--size", size)
    from dcp_objstore.measure.bench import bench

    report = bench(url, size_bytes=most_bytes, seconds=seconds, storage_options=chosen())
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    print(report.url)
    print(f"{size_text(report.size_bytes)} of tensors, one process, {report.seconds:.0f} s in all")
    machine = f"{counted(report.processors, 'processor')}, copy"
    print(f"machine        {machine} {_spread(report.copy_gib_per_second)} GiB/s,")
    print(f"               hash {_spread(report.hash_gib_per_second)} GiB/s")
    print(f"small requests GET {_spread(report.get_ms)} ms, PUT {_spread(report.put_ms)} ms")
    print()
    _print_table(
        [
            ("save", report.save),
            ("plain PUTs", report.plain_puts),
            ("one PUT at a time", report.put_alone),
            ("load", report.load),
            ("plain GETs", report.plain_gets),
            ("one GET at a time", report.get_alone),
        ]
    )
    print()
    for past, noun, gain in (
        ("saved", "saves", report.save_settings),
        ("loaded", "loads", report.load_settings),
    ):
        _print_wrapped(f"{noun}: {_verdict(past, gain)}")
    for warning in report.warnings:
        _print_wrapped(f"warning: {warning}")


def _print_table(rows: Sequence[tuple[str, Throughput]]) -> None:
    lines: list[tuple[str, ...]] = [("", *_HEAD)]
    for name, found in rows:
        speed = found.gib_per_second
        figures = (_figure(one) for one in (speed.median, speed.lowest, speed.highest))
        cpu, requests = _figure(found.cpu_seconds_per_gib), str(found.requests)
        lines.append((name, *figures, cpu, requests, str(found.connections)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *cells in lines:
        shown = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join((first.ljust(widths[0]), *shown)))


def _verdict(past: str, gain: SettingsGain | None) -> str:
    if gain is None:
        return "no other settings were tried; give it more time or a larger size"
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


def _spread(spread: Spread) -> str:
    return f"{_figure(spread.median)} ({_figure(spread.lowest)} to {_figure(spread.highest)})"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _print_wrapped(text: str) -> None:
    columns = shutil.get_terminal_size().columns
    print("\n".join(textwrap.wrap(text, columns, subsequent_indent="  ", break_on_hyphens=False)))
