"""`dcp-objstore verify`: verify a checkpoint or all steps of a run, and print what is damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import chain
from typing import Annotated

import typer

import dcp_objstore as dos
from dcp_objstore.cli.exits import DAMAGED_STATUS, fail
from dcp_objstore.cli.options import JsonLines, chosen
from dcp_objstore.cli.terminal import coloured, columns, json_text, say, wrapped
from dcp_objstore.observe.report import counted


def verify(
    url: Annotated[
        str, typer.Argument(help="URL of a checkpoint; with --run, of a run.", metavar="URL")
    ],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Read no tensors: only marker, index, objects and sizes."),
    ] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Compare also what only stock torch reads (.metadata, what lies around the"
            " tensors), and the counts.",
        ),
    ] = False,
    run: Annotated[
        bool,
        typer.Option("--run", help="Verify all steps of a run, the newest first."),
    ] = False,
    as_json: JsonLines = False,
) -> None:
    """Read a checkpoint, compare every block with its digest.

    Names what is damaged, down to the elements of tensors. The bytes are not kept, so it takes
    little memory. With --run it prints each step as it is done, and at the end the newest whole
    one. Exits with status 4 if something is damaged.
    """
    reports: Iterable[dos.reports.VerifyReport]
    if run:
        reports = dos.verify_run(url, quick=quick, deep=deep, storage_options=chosen())
    else:  # as `Checkpoint.verify`, but damage to marker and index is reported, too
        from dcp_objstore.inspect.verify import verify_at
        from dcp_objstore.observe.dispatch import EventSettings
        from dcp_objstore.stores import StoreSpec

        spec, settings = StoreSpec(url, chosen()), EventSettings(None, None)
        reports = [verify_at(spec, settings, quick=quick, deep=deep, progress=True)]
    damaged: list[str] = []
    whole: str | None = None
    for report in reports:
        if not report.ok:
            damaged.append(report.url)
        elif whole is None:
            whole = report.url
        if as_json:
            print(json_text({"ok": report.ok, **dataclasses.asdict(report)}), flush=True)
        else:
            _print(report)
    if run and not as_json:
        say(f"the newest {'complete' if quick else 'whole'} step: {whole or 'none'}")
    if damaged and run:
        fail(f"{counted(len(damaged), 'step')} damaged: {damaged[0]}", DAMAGED_STATUS)
    if damaged:
        fail(f"{damaged[0]} is damaged", DAMAGED_STATUS)


def _print(report: dos.reports.VerifyReport) -> None:
    """Print a report at once, its first word green if nothing is damaged and red otherwise."""
    word, _, text = str(report).partition(":")
    url, *others = text.splitlines()
    width = max(columns(), 60)
    # URLs and keys are copied from here, so no word is broken.
    lines = [wrapped(line, width, "    ", break_words=False) for line in others]
    say(f":{url}", *chain(*lines), lead=coloured(word, "green" if report.ok else "red"))
    print(end="", flush=True)
