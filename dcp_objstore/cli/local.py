"""`dcp-objstore local ls` and `local rm`: the copies of checkpoints on this node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from dcp_objstore.checkpoint.names import natural_order
from dcp_objstore.cli.options import JsonLines
from dcp_objstore.cli.terminal import age, aligned, json_text, say
from dcp_objstore.config import Local
from dcp_objstore.observe.report import counted, size_text

if TYPE_CHECKING:
    from dcp_objstore.local.folder import Files, LocalRun

Folder: TypeAlias = Annotated[
    str,
    typer.Argument(help="The folder that the job passes as local=.", metavar="FOLDER"),
]


def print_runs(folder: Folder, as_json: JsonLines = False) -> None:
    """List the runs of which this node has copies.

    Shows their checkpoints, the copies that a save is writing or a killed one has left, and whether
    a process that has used them is alive. Nothing is changed.
    """
    from dcp_objstore.local.folder import local_runs

    local = Local(folder)
    runs = local_runs(local)
    if as_json:
        for run in runs:
            print(json_text(_as_json(run)))
        return
    say(local.folder)
    if runs:
        say(*aligned([*_lines(runs)], {"size", "files"}))
    else:
        say("no copies")


def remove_runs(folder: Folder, as_json: JsonLines = False) -> None:
    """Remove the copies of all runs that no process uses.

    The store has everything, so no checkpoint is lost: the next job reads it from there.
    """
    from dcp_objstore.local.folder import remove_local_runs

    local = Local(folder)
    removals = remove_local_runs(local)
    if as_json:
        for run, is_removed in removals:
            print(json_text({**_as_json(run), "removed": is_removed}))
    else:
        say(local.folder)
        for run, is_removed in removals:
            size = f"{counted(run.total.number, 'file')}, {size_text(run.total.total_bytes)}"
            what = "removed" if is_removed else "kept, because a process uses it:"
            say(f"{what} {_name(run)} ({size})")
        if not removals:
            say("no copies")


def _as_json(run: LocalRun) -> dict[str, Any]:
    """Return what `--json` prints of a run."""
    return {
        "url": run.url,
        "endpoint_url": run.endpoint_url,
        "folder": run.folder,
        "in_use": run.in_use,
        "used": None if run.used_at is None else run.used_at.isoformat(timespec="seconds"),
        "bytes": run.total.total_bytes,
        "steps": {name: _figures(run.steps[name]) for name in sorted(run.steps, key=natural_order)},
        "unfinished": _figures(run.unfinished),
    }


def _figures(files: Files) -> dict[str, int]:
    return {"files": files.number, "bytes": files.total_bytes}


def _lines(runs: list[LocalRun]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table: a head, a row for each run and its steps, and the total."""
    yield "", "size", "files", "used", "run"
    for run in runs:
        used = "now" if run.in_use else age(run.used_at)
        state = "in use" if run.in_use else "not in use"
        yield state, *_shown(run.total), used, _name(run)
        for name in sorted(run.steps, key=natural_order):
            yield f"  {name}", *_shown(run.steps[name]), "", ""
        if run.unfinished.number:
            yield "  unfinished", *_shown(run.unfinished), "", ""
    totals = [run.total for run in runs]
    number = sum(files.number for files in totals)
    total_bytes = sum(files.total_bytes for files in totals)
    yield "total", size_text(total_bytes), str(number), "", counted(len(runs), "run")


def _shown(files: Files) -> tuple[str, str]:
    return size_text(files.total_bytes), str(files.number)


def _name(run: LocalRun) -> str:
    name = run.url or f"a run without a URL, {run.folder}"
    return name if run.endpoint_url is None else f"{name} ({run.endpoint_url})"
