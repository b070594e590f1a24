"""`dcp-objstore rm`, `gc`, `repair`, `pin` and `unpin`: call them and print their reports."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from dcp_objstore.cli.access import chosen, chosen_arguments
from dcp_objstore.cli.exits import fail, status_of
from dcp_objstore.errors import CheckpointCorruptError, ConfigError
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores import StoreSpec

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.sweep import CheckpointSweep
    from dcp_objstore.run.gc import SweepReport

_UNITS_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LEAST_TEXT_WIDTH = 40
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")


def remove(url: str, *, now: bool, yes: bool, even_newest: bool, as_json: bool) -> None:
    """Delete one checkpoint, or print what would be deleted and how to do it.

    Raises:
        DcpObjstoreError: `dcp_objstore.delete` refused or failed.
    """
    from dcp_objstore.run.upkeep import delete

    report = delete(
        url, now=now, even_newest=even_newest, dry_run=not yes, storage_options=chosen()
    )
    if as_json:
        print_json(report)
        return
    size = f"{counted(report.objects, 'data object')}, {size_text(report.total_bytes)}"
    print(f"{'deleted' if yes else 'would delete'} {report.url} ({size})")
    if report.finished:
        print("  its deletion had begun before; this finishes it")
    if report.index_damaged:
        print("  its index is damaged: only gc can remove its objects, after the grace period")
    elif now and yes:
        print(f"  removed {counted(report.removed_objects, 'object')}, the index among them")
    elif now:
        print("  and remove its objects at once; a job that is reading it gets an error")
    else:
        print("  its objects stay for jobs that are reading it, until gc removes them after 24 h")
    if report.superseded:
        print("  a new save has been committed here since; it is untouched")
    if not yes:
        command = ["rm", report.url, *(["--now"] if now else [])]
        _print_how([*command, *(["--even-newest"] if even_newest else [])])


def collect(url: str, *, grace: str, yes: bool, as_json: bool) -> None:
    """Sweep below a URL, or print what a sweep would remove; exit with status 4 on damage.

    Raises:
        DcpObjstoreError: `dcp_objstore.sweep` refused or failed.
    """
    from dcp_objstore.run.gc import sweep

    report = sweep(url, grace_seconds=_seconds(grace), dry_run=not yes, storage_options=chosen())
    if as_json:
        totals = ("deleted", "deleted_bytes", "uploads_aborted", "uploads_bytes")
        print_json(report, **{name: getattr(report, name) for name in totals})
    else:
        _print_sweep(report, grace)
    if report.damaged:
        count = counted(len(report.damaged), "checkpoint")
        text = f"{count} cannot be read, left alone: {report.damaged[0].url}"
        fail(text, status_of(CheckpointCorruptError(text)))


def mend(url: str, *, dry_run: bool, as_json: bool) -> None:
    """Repair one checkpoint and print what was done.

    Raises:
        DcpObjstoreError: `dcp_objstore.repair` refused or failed.
    """
    from dcp_objstore.run.upkeep import repair

    report = repair(url, dry_run=dry_run, storage_options=chosen())
    if as_json:
        print_json(report)
        return
    would = "would be " if dry_run else ""
    done = []
    if report.finished_delete:
        done.append(f"its deletion, begun before, {would or 'was '}finished")
    if report.dot_metadata is not None:
        done.append(f".metadata {would or 'was '}{report.dot_metadata}")
    print(f"{report.url} ({report.state}): {'; '.join(done) or 'nothing to repair'}")


def protect(url: str, name: str, *, wanted: bool, as_json: bool) -> None:
    """Set or remove a pin, and print all pins of the checkpoint.

    Raises:
        DcpObjstoreError: `dcp_objstore.pin` refused or failed.
    """
    from dcp_objstore.run.upkeep import pin, unpin

    pins = (pin if wanted else unpin)(url, name, storage_options=chosen())
    where = StoreSpec(url, chosen()).url
    if as_json:
        print(json.dumps({"url": where, "pins": list(pins)}))
    else:
        print(f"{where}: pinned as {', '.join(pins)}" if pins else f"{where}: not pinned")


def _print_sweep(report: SweepReport, grace: str) -> None:
    print(report.url)
    busy = [one for one in report.checkpoints if one.outcome != "clean" or one.uploads_aborted]
    lines = [(_name(report, one), _summary(one)) for one in busy]
    width = max((len(name) for name, _ in lines), default=0)
    columns = max(shutil.get_terminal_size().columns, width + _LEAST_TEXT_WIDTH)
    for name, summary in lines:
        first, *rest = textwrap.wrap(summary, columns - width - 4, break_on_hyphens=False)
        print(f"  {name.ljust(width)}  {first}")
        for line in rest:
            print(f"{' ' * (width + 4)}{line}")
    removed = "would be removed" if report.dry_run else "were removed"
    clean = len(report.checkpoints) - len(busy)
    if not report.checkpoints:
        print("there is no checkpoint here, and nothing that one has left")
        return
    print(f"{counted(len(report.checkpoints), 'checkpoint')} looked at, nothing to do at {clean}")
    older = f", older than {grace}" if report.deleted else ""
    print(
        f"{counted(report.deleted, 'object')} ({size_text(report.deleted_bytes)}) {removed}{older}"
    )
    if report.url.startswith("memory:"):
        pass  # a memory store has no unfinished uploads
    elif report.uploads_unseen is None:
        uploads = counted(report.uploads_aborted, "unfinished upload")
        young = sum(one.uploads_young for one in report.checkpoints)
        in_progress = f"; {young} in progress, or younger than {grace}" if young else ""
        print(f"{uploads} ({size_text(report.uploads_bytes)}) {removed}{in_progress}")
    else:
        print(f"unfinished uploads were not looked at: {report.uploads_unseen}")
    unknown = [f"{_name(report, one)}/{key}" for one in report.checkpoints for key in one.unknown]
    if unknown:
        count = counted(len(unknown), "object")
        print(f"{count} with unknown names left alone, for example {unknown[0].removeprefix('./')}")
    _print_lifecycle(report)
    has_work = any(one.outcome in ("swept", "mended") or one.uploads_aborted for one in busy)
    if report.dry_run and has_work:
        _print_how(["gc", report.url, *(["--grace", grace] if grace != "24h" else [])])


def _summary(one: CheckpointSweep) -> str:
    would = "would be " if one.dry_run else ""
    parts = []
    if one.deleted:
        parts.append(
            f"{counted(one.deleted, 'object')}, {size_text(one.deleted_bytes)}, {would}removed"
        )
    if one.uploads_aborted:
        parts.append(
            f"{counted(one.uploads_aborted, 'unfinished upload')}, {size_text(one.uploads_bytes)},"
            f" {would}removed"
        )
    if one.finished_delete:
        parts.append(f"a deletion begun before {would}finished; its objects later")
    if one.superseded:
        parts.append(f"a step that a superseded job saved {would}deleted; its objects later")
    if one.dot_metadata is not None:
        parts.append(f".metadata {would}{one.dot_metadata}")
        if one.fenced:
            parts[-1] += "; objects later"
    if one.outcome in ("waiting", "foreign", "lost", "damaged"):
        label = {"waiting": "not yet", "damaged": "cannot be read"}.get(one.outcome, "left alone")
        parts.append(f"{label}: {one.reason}")
    return "; ".join(parts)


def _print_lifecycle(report: SweepReport) -> None:
    if report.lifecycle_days is not None:
        print(
            "the bucket's lifecycle rule removes unfinished uploads after"
            f" {counted(report.lifecycle_days, 'day')}"
        )
    elif report.lifecycle_json is not None:
        scheme, _, rest = report.url.partition("://")
        bucket = rest.partition("/")[0]
        if scheme == "gs":
            command = f"gcloud storage buckets update gs://{bucket} --lifecycle-file=rules.json"
        else:
            command = (
                f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket}"
                " --lifecycle-configuration file://rules.json"
            )
        if report.lifecycle_unread is not None:
            print(
                f"the bucket's lifecycle rules are not known ({report.lifecycle_unread}); one of"
                " them should remove unfinished uploads. This replaces all its rules:"
            )
        else:
            print(
                "the bucket has no lifecycle rule that removes unfinished uploads; it should have"
                " one (this keeps its other rules):"
            )
        print(f"  echo {shlex.quote(report.lifecycle_json)} > rules.json")
        print(f"  {command}")


def _name(report: SweepReport, one: CheckpointSweep) -> str:
    return one.url.removeprefix(report.url).lstrip("/") or "."


def _print_how(command: list[str]) -> None:
    print("nothing was changed; to do it:")
    print(f"  dcp-objstore {shlex.join([*chosen_arguments(), *command])} --yes")


def print_json(report: Any, **more: object) -> None:
    """Print a report, a dataclass, as one JSON object, and more fields after its own."""
    print(json.dumps({**dataclasses.asdict(report), **more}))


def _seconds(text: str) -> float:
    found = _DURATION.match(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not a duration; write 90m, 24h or 7d")
    return float(found[1]) * _UNITS_SECONDS[found[2]]
