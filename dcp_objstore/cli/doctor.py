"""`dcp-objstore doctor`: print the findings of a check-up, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_objstore.cli.options import Json, chosen
from dcp_objstore.cli.terminal import coloured, columns, json_text, say, wrapped

if TYPE_CHECKING:
    from dcp_objstore.doctor import Finding, Status

# The word for each status, and its colour.
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


def diagnose(
    url: Annotated[
        str, typer.Argument(help="The URL below which you want to save checkpoints.", metavar="URL")
    ],
    as_json: Json = False,
) -> None:
    """Check a store: credentials, rights, conditional writes.

    Prints for each check what was found and what to do about it. Writes a few small objects under
    a random name below the URL and removes them again, even after Ctrl-C; it touches nothing else.
    Exits with status 1 if a check failed; a warning is not a failure.
    """
    from dcp_objstore.doctor import check_up
    from dcp_objstore.stores import StoreSpec

    shown = StoreSpec(url, chosen()).url
    findings: list[Finding] = []
    if not as_json:
        say(shown, "")
        sys.stdout.flush()
    with closing(check_up(url, chosen())) as stream:  # Ctrl-C closes it: it removes what it wrote
        for finding in stream:
            if not as_json:
                _print(finding, findings)
            findings.append(finding)
    ok = not _checks(findings, "failed")
    if as_json:
        checks = [dataclasses.asdict(finding) for finding in findings]
        print(json_text({"url": shown, "ok": ok, "checks": checks}))
    else:
        say("", *_summary(findings))
    if not ok:
        sys.exit(_FAILED_STATUS)


def _print(finding: Finding, earlier: list[Finding]) -> None:
    """Print a finding as rows of the table.

    Several checks in turn that could not be made for one reason are one row; the summary names all.
    """
    if finding.status == "not made" and earlier:
        last = earlier[-1]
        if (last.text, last.advice) == (finding.text, finding.advice):
            return
    word, colour = _SHOWN[finding.status]
    indent = " " * (_NAME_WIDTH + _STATUS_WIDTH)
    width = max(columns() - len(indent), _LEAST_TEXT_WIDTH)
    first, *rest = wrapped(finding.text, width)
    padding = " " * (_STATUS_WIDTH - len(word))
    # `say` makes what a store has answered harmless to terminals; the colour in `lead` stays.
    lead = f"{finding.check.ljust(_NAME_WIDTH)}{coloured(word, colour)}"
    say(f"{padding}{first}", lead=lead)
    for line in rest:
        say(f"{indent}{line}")
    if finding.advice:
        # A command stays on one line, to be copied.
        is_command = "`" in finding.advice
        advice = [finding.advice] if is_command else wrapped(finding.advice, width - 3)
        for number, line in enumerate(advice):
            say(f"{indent}{'-> ' if number == 0 else '   '}{line}")
    sys.stdout.flush()


def _checks(findings: list[Finding], status: Status) -> list[str]:
    """Return the names of the checks with this status."""
    return [finding.check for finding in findings if finding.status == status]


def _summary(findings: list[Finding]) -> list[str]:
    """Return the last lines of the report: which checks failed, and what that means."""
    # In the order in which they are printed.
    labels: dict[Status, str] = {"failed": "FAILED", "warning": "warnings", "not made": "not made"}
    parts = [
        f"{label}: {', '.join(names)}"
        for status, label in labels.items()
        if (names := _checks(findings, status))
    ]
    if not _checks(findings, "failed"):
        parts.insert(0, "fit to hold checkpoints")
    if any(finding.details.get("error") == "PermissionDeniedError" for finding in findings):
        parts.append(_ABOUT_RIGHTS)
    return [line for part in parts for line in textwrap.wrap(part, columns())]
