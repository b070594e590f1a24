"""`dcp-objstore rm`, `sweep`, `repair`, `pin` and `unpin`: call them and print their reports."""

from __future__ import annotations

import shlex
from typing import Annotated, TypeAlias

import typer

import dcp_objstore as dos
from dcp_objstore.cli.exits import DAMAGED_STATUS, fail
from dcp_objstore.cli.options import Checkpoint, CheckpointOrRun, Json, chosen, seconds
from dcp_objstore.cli.terminal import json_text, print_json, say
from dcp_objstore.observe.report import counted

_PinName: TypeAlias = Annotated[
    str, typer.Argument(help="Name of the pin, such as paper or release-1.", metavar="NAME")
]


def remove(
    url: Checkpoint,
    grace: Annotated[
        str,
        typer.Option(
            help="Keep the objects until the deletion is this old: 90m, 24h, 7d. The same command"
            " removes them then, or a sweep. Without a grace period they are removed now."
        ),
    ] = "0m",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without --yes, print what would be deleted.")
    ] = False,
    allow_newest: Annotated[
        bool,
        typer.Option("--allow-newest", help="Delete it even if it is the newest of its run."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete a checkpoint; a dry run without --yes.

    Its objects are removed, and a job that is reading it gets an error, unless --grace keeps them.
    A pinned checkpoint is refused. After a crash, run the same command again to go on.
    """
    report = dos.delete(
        url,
        grace_seconds=seconds(grace),
        allow_newest=allow_newest,
        dry_run=not yes,
        storage_options=chosen(),
    )
    _print(report, as_json=as_json)
    if not yes and not as_json:
        command = ["rm", report.url, *(["--grace", grace] if seconds(grace) else [])]
        _print_how([*command, *(["--allow-newest"] if allow_newest else [])])


def sweep(
    url: CheckpointOrRun,
    grace: Annotated[
        str,
        typer.Option(
            help="Keep objects that are younger than this: 90m, 24h, 7d. It must be at least 1h,"
            " and longer than any save or load."
        ),
    ] = "24h",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without --yes, print what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove what no checkpoint needs; a dry run without --yes.

    This removes what torn saves, overwritten and deleted checkpoints and unfinished uploads have
    left. It never touches objects with names that dcp-objstore does not write. It also finishes
    what a crash left half done.
    """
    report = dos.sweep(url, grace_seconds=seconds(grace), dry_run=not yes, storage_options=chosen())
    if as_json:
        totals = ("deleted", "deleted_bytes", "uploads_aborted", "uploads_bytes")
        print_json(report, **{name: getattr(report, name) for name in totals})
    else:
        _print(report, as_json=False)
        has_work = any(
            one.outcome in ("swept", "mended") or one.uploads_aborted for one in report.checkpoints
        )
        if report.dry_run and has_work:
            _print_how(["sweep", report.url, *(["--grace", grace] if grace != "24h" else [])])
    if report.damaged:
        count = counted(len(report.damaged), "checkpoint")
        text = f"{count} cannot be read, left alone: {report.damaged[0].url}"
        fail(text, DAMAGED_STATUS)


def repair(
    url: Checkpoint,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Finish a commit or deletion that a crash cut short.

    If a job died right after its commit, stock torch does not see the checkpoint yet: this writes
    its .metadata. If a deletion was begun, this finishes it.
    """
    report = dos.repair(url, dry_run=dry_run, storage_options=chosen())
    _print(report, as_json=as_json)


def pin(url: Checkpoint, name: _PinName, as_json: Json = False) -> None:
    """Protect a checkpoint from deletion and from being overwritten."""
    _print_pins(url, dos.pin(url, name, storage_options=chosen()), as_json=as_json)


def unpin(url: Checkpoint, name: _PinName, as_json: Json = False) -> None:
    """Remove a pin of a checkpoint."""
    _print_pins(url, dos.unpin(url, name, storage_options=chosen()), as_json=as_json)


def _print_pins(url: str, pins: tuple[str, ...], *, as_json: bool) -> None:
    from dcp_objstore.stores import StoreSpec

    where = StoreSpec(url, chosen()).url
    if as_json:
        print(json_text({"url": where, "pins": list(pins)}))
    else:
        say(f"{where}: pinned as {', '.join(pins)}" if pins else f"{where}: not pinned")


def _print(report: object, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        say(*str(report).splitlines())


def _print_how(command: list[str]) -> None:
    """Print the command that does what a dry run has shown, with the options before its name."""
    words = ["dcp-objstore"]
    for name, value in chosen().items():
        words += [f"--{name}", value]
    say("nothing was changed; to do it:")
    say(f"  {shlex.join([*words, *command])} --yes")
