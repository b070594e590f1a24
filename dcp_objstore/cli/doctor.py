"""`dcp-objstore doctor`: print the findings of a check-up, as a table or as JSON."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from dcp_objstore.cli.access import chosen
from dcp_objstore.cli.colour import coloured
from dcp_objstore.doctor import Finding, check_up
from dcp_objstore.stores import StoreSpec

if TYPE_CHECKING:
    from dcp_objstore.doctor import Status

_SHOWN: dict[Status, tuple[str, str | None]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "failed": ("FAILED", "red"),
    "not applicable": ("n/a", None),
    "not made": ("not made", "yellow"),
}
_NAME_WIDTH = max(len("unfinished uploads"), len("conditional put")) + 2
_STATUS_WIDTH = len("not made") + 2
_LEAST_TEXT_WIDTH = 30
_FAILED_STATUS = 1
_ABOUT_RIGHTS = (
    "Rights come from the policy of the user or role, and the bucket's own must not deny them;"
    " servers other than AWS may call them differently."
)


def diagnose(url: str, *, as_json: bool) -> None:
    """Check a store and print what was found; exit with status 1 if a check failed.

    Raises:
        DcpObjstoreError: the URL or the settings cannot be used.
    """
    shown = StoreSpec(url, chosen()).url
    if not as_json:
        print(f"{shown}\n", flush=True)
    findings: list[Finding] = []
    with closing(check_up(url, chosen())) as stream:
        for finding in stream:
            findings.append(finding)
            if not as_json:
                _print(finding, findings)
    failures = [finding for finding in findings if finding.status == "failed"]
    if as_json:
        _print_json(shown, findings)
    else:
        print(f"\n{_summary(findings)}")
    if failures:
        sys.exit(_FAILED_STATUS)


def _print(finding: Finding, so_far: list[Finding]) -> None:
    before = so_far[-2] if len(so_far) > 1 else None
    if before is not None and _text(finding) == _text(before) and finding.status == "not made":
        return  # the summary names all checks that could not be made for the same reason
    word, colour = _SHOWN[finding.status]
    indent = " " * (_NAME_WIDTH + _STATUS_WIDTH)
    columns = shutil.get_terminal_size().columns
    width = max(columns, len(indent) + _LEAST_TEXT_WIDTH)
    lines = textwrap.wrap(finding.text, width - len(indent), break_on_hyphens=False) or [""]
    padding = " " * (_STATUS_WIDTH - len(word))
    print(f"{finding.check.ljust(_NAME_WIDTH)}{coloured(word, colour)}{padding}{lines[0]}")
    for line in lines[1:]:
        print(f"{indent}{line}")
    if finding.advice:
        advice = _wrapped(finding.advice, width - len(indent) - 3)
        for number, line in enumerate(advice):
            print(f"{indent}{'-> ' if number == 0 else '   '}{line}")
    sys.stdout.flush()


def _wrapped(advice: str, width: int) -> list[str]:
    """Wrap text into lines, but do not break a command in the middle of an argument."""
    kept = re.sub("`([^`]*)`", _with_whole_arguments, advice)
    lines = textwrap.wrap(kept, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]


def _with_whole_arguments(command: re.Match[str]) -> str:
    """Replace the spaces in a command's arguments by \0, which no argument contains."""
    arguments = (shlex.quote(one).replace(" ", "\0") for one in shlex.split(command[1]))
    return f"`{' '.join(arguments)}`"


def _text(finding: Finding) -> tuple[str, str]:
    return finding.text, finding.advice


def _summary(findings: list[Finding]) -> str:
    failures = [finding.check for finding in findings if finding.status == "failed"]
    warnings = [finding.check for finding in findings if finding.status == "warning"]
    missing = [finding.check for finding in findings if finding.status == "not made"]
    parts = [
        f"{label}: {', '.join(names)}"
        for label, names in (("FAILED", failures), ("warnings", warnings), ("not made", missing))
        if names
    ]
    if not failures:
        parts.insert(0, "fit to hold checkpoints")
    if any(finding.details.get("error") == "PermissionDeniedError" for finding in findings):
        parts.append(_ABOUT_RIGHTS)
    width = shutil.get_terminal_size().columns
    return "\n".join(line for part in parts for line in textwrap.wrap(part, width))


def _print_json(url: str, findings: list[Finding]) -> None:
    ok = not any(finding.status == "failed" for finding in findings)
    checks = [asdict(finding) for finding in findings]
    print(json.dumps({"url": url, "ok": ok, "checks": checks}))
