"""`dcp-objstore verify`: verify a checkpoint or all steps of a run, and print what is damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap

from dcp_objstore.cli.access import chosen
from dcp_objstore.cli.colour import coloured
from dcp_objstore.cli.exits import fail, status_of
from dcp_objstore.errors import CheckpointCorruptError, ConfigError
from dcp_objstore.inspect.verify import VerifyReport, verify_at
from dcp_objstore.inspect.verify_run import verify_run
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores import StoreSpec

_SHOWN = 20  # damages to print of one checkpoint


def verify(
    url: str,
    *,
    quick: bool,
    deep: bool,
    run: bool,
    before: str | None,
    from_byte: int,
    as_json: bool,
) -> None:
    """Verify and print each report as soon as it is there; exit with status 4 on damage.

    Raises:
        DcpObjstoreError: `dcp_objstore.verify_run` or `Checkpoint.verify` refused or failed.
        SystemExit: something is damaged.
    """
    if before is not None and not run:
        raise ConfigError("--before is for the steps of a run: it needs --run")
    if from_byte and run:
        raise ConfigError("--from-byte is for a single checkpoint, not for --run")
    damaged: list[VerifyReport] = []
    whole: str | None = None
    spec, events = StoreSpec(url, chosen()), EventSettings(None, None)
    reports = (
        verify_run(url, quick=quick, deep=deep, before=before, storage_options=chosen())
        if run
        else [verify_at(spec, events, quick=quick, deep=deep, progress=True, from_byte=from_byte)]
    )
    for report in reports:
        if not report.ok:
            damaged.append(report)
        elif whole is None:
            whole = report.url
        if as_json:
            print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}), flush=True)
        else:
            _print(report)
    if run and not as_json:
        print(f"the newest {_whole(quick)} step: {whole or 'none'}")
    if damaged:
        text = (
            f"{counted(len(damaged), 'step')} damaged: {damaged[0].url}"
            if run
            else f"{damaged[0].url} is damaged"
        )
        fail(text, status_of(CheckpointCorruptError(text)))


def _whole(quick: bool) -> str:
    return "complete" if quick else "whole"  # damage inside an object is not looked for


def _print(report: VerifyReport) -> None:
    objects, blocks = counted(report.objects, "object"), counted(report.blocks, "block")
    word, colour = (_whole(report.quick), "green") if report.ok else ("DAMAGED", "red")
    print(f"{coloured(word, colour)}: {report.url}")
    if report.quick:
        print(f"  {objects} looked at, nothing read")
    else:
        since = f", from byte {report.from_byte} on" if report.from_byte else ""
        print(f"  {objects}, {blocks}, {size_text(report.total_bytes)} read{since}")
    width = max(shutil.get_terminal_size().columns, 60)
    for damage in report.damaged[:_SHOWN]:
        # Keys are copied from here, so no word is broken.
        lines = textwrap.wrap(
            damage.text, width - 2, break_long_words=False, break_on_hyphens=False
        )
        print(textwrap.indent("\n".join([lines[0], *(f"  {line}" for line in lines[1:])]), "  "))
    if len(report.damaged) > _SHOWN:
        print(f"  and {len(report.damaged) - _SHOWN} more; --json prints all")
    print(end="", flush=True)
