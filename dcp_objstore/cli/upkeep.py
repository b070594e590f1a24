"""`dcp-objstore rm`, `sweep`, `repair`, `pin` and `unpin`: call them and print their reports."""

from __future__ import annotations

import shlex
from typing import Annotated, TypeAlias

import typer

import dcp_objstore as dos
from dcp_objstore.cli.exits import DAMAGED_STATUS, fail
from dcp_objstore.cli.options import Checkpoint, CheckpointOrRun, Json, chosen, seconds
from dcp_objstore.cli.terminal import json_text, print_json, say
from dcp_objstore.observe.report import counted, size_text

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
    if as_json:
        print_json(report)
        return
    size = f"{counted(report.objects, 'data object')}, {size_text(report.total_bytes)}"
    say(f"{'deleted' if yes else 'would delete'} {report.url} ({size})")
    if report.finished:
        say("  its deletion had begun before; this finishes it")
    if report.index_damaged:
        say("  its index is damaged: only a sweep can remove its objects, after the grace period")
    elif not report.removed_objects:
        say(
            f"  its objects stay for jobs that are reading it: after {grace} the same command"
            " removes them, or a sweep after 24 h"
        )
    elif yes:
        say(f"  removed {counted(report.removed_objects, 'object')}, the index among them")
    else:
        say("  and remove its objects; a job that is reading it gets an error")
    if report.superseded:
        say("  a new save has been committed here since; it is untouched")
    if not yes:
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
        _print_sweep(report, grace)
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
    if as_json:
        print_json(report)
        return
    would = "would be " if dry_run else ""
    done = []
    if report.finished_delete:
        done.append(f"its deletion, begun before, {would or 'was '}finished")
    if report.dot_metadata is not None:
        done.append(f".metadata {would or 'was '}{report.dot_metadata}")
    say(f"{report.url} ({report.state}): {'; '.join(done) or 'nothing to repair'}")


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


def _print_sweep(report: dos.reports.SweepReport, grace: str) -> None:
    """Print a line for each checkpoint with something to say, then the sums and the advice."""
    say(report.url)
    busy = [
        checkpoint
        for checkpoint in report.checkpoints
        if checkpoint.outcome != "clean" or checkpoint.uploads_aborted
    ]
    lines = [(_name(report, checkpoint), _summary(checkpoint)) for checkpoint in busy]
    width = max((len(name) for name, _ in lines), default=0)
    for name, summary in lines:
        say(f"  {name.ljust(width)}  {summary}")
    removed = "would be removed" if report.dry_run else "were removed"
    clean = len(report.checkpoints) - len(busy)
    if not report.checkpoints:
        say("there is no checkpoint here, and nothing that one has left")
        return
    say(f"{counted(len(report.checkpoints), 'checkpoint')} looked at, nothing to do at {clean}")
    older = f", older than {grace}" if report.deleted else ""
    say(f"{counted(report.deleted, 'object')} ({size_text(report.deleted_bytes)}) {removed}{older}")
    if report.uploads_unseen is None:
        uploads = counted(report.uploads_aborted, "unfinished upload")
        young = sum(checkpoint.uploads_young for checkpoint in report.checkpoints)
        in_progress = f"; {young} in progress, or younger than {grace}" if young else ""
        say(f"{uploads} ({size_text(report.uploads_bytes)}) {removed}{in_progress}")
    else:
        say(f"unfinished uploads were not looked at: {report.uploads_unseen}")
    unknown = [
        f"{_name(report, checkpoint)}/{key}"
        for checkpoint in report.checkpoints
        for key in checkpoint.unknown
    ]
    if unknown:
        count = counted(len(unknown), "object")
        say(f"{count} with unknown names left alone, for example {unknown[0].removeprefix('./')}")
    has_work = any(
        checkpoint.outcome in ("swept", "mended") or checkpoint.uploads_aborted
        for checkpoint in busy
    )
    if report.dry_run and has_work:
        _print_how(["sweep", report.url, *(["--grace", grace] if grace != "24h" else [])])


def _summary(checkpoint: dos.reports.CheckpointSweep) -> str:
    """Say in one line what a sweep did, or would do, at one checkpoint."""
    would = "would be " if checkpoint.dry_run else ""
    parts = []
    if checkpoint.deleted:
        size = size_text(checkpoint.deleted_bytes)
        parts.append(f"{counted(checkpoint.deleted, 'object')}, {size}, {would}removed")
    if checkpoint.uploads_aborted:
        uploads, size = checkpoint.uploads_aborted, size_text(checkpoint.uploads_bytes)
        parts.append(f"{counted(uploads, 'unfinished upload')}, {size}, {would}removed")
    if checkpoint.finished_delete:
        parts.append(f"a deletion begun before {would}finished; its objects later")
    if checkpoint.superseded:
        parts.append(f"a step that a superseded job saved {would}deleted; its objects later")
    if checkpoint.dot_metadata is not None:
        parts.append(f".metadata {would}{checkpoint.dot_metadata}")
        if checkpoint.fenced:
            parts[-1] += "; objects later"
    if checkpoint.outcome in ("waiting", "foreign", "lost", "damaged"):
        label = {"waiting": "not yet", "damaged": "cannot be read"}.get(
            checkpoint.outcome, "left alone"
        )
        parts.append(f"{label}: {checkpoint.reason}")
    return "; ".join(parts)


def _name(report: dos.reports.SweepReport, checkpoint: dos.reports.CheckpointSweep) -> str:
    below = checkpoint.url.removeprefix(report.url).lstrip("/")
    return below or checkpoint.url.rpartition("/")[2]


def _print_how(command: list[str]) -> None:
    before = [word for name, value in chosen().items() for word in (f"--{name}", value)]
    say("nothing was changed; to do it:")
    say(f"  dcp-objstore {shlex.join([*before, *command])} --yes")
