"""`dcp-objstore follow`: print each step of a run when it is committed, or run a command for it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer

import dcp_objstore as dos
from dcp_objstore.cli.exits import fail
from dcp_objstore.cli.ls import described
from dcp_objstore.cli.options import JsonLines, chosen, seconds
from dcp_objstore.cli.terminal import json_text, say
from dcp_objstore.errors import ConfigError

_PLACEHOLDER = re.compile(r"\{(url|name)\}")


def follow(
    url: Annotated[str, typer.Argument(help="URL of a run.", metavar="URL")],
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            help="Run this command for each step, one at a time, without a shell. {url} and {name}"
            " in its words stand for the step's; without them, its URL is the last word.",
            metavar="CMD",
        ),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="With --exec: go on after a command that failed."),
    ] = False,
    after: Annotated[
        str | None, typer.Option(help="Only steps after this one: its number or name.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="End when this step, or a later one, is there.")
    ] = None,
    skip_to_newest: Annotated[
        bool, typer.Option("--skip-to-newest", help="Of several new steps take only the newest.")
    ] = False,
    pin: Annotated[
        str | None,
        typer.Option(
            help="Pin each step while its command runs, so that it is not deleted. Each follower of"
            " a run needs a name of its own.",
            metavar="NAME",
        ),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(help="End after so long without a new step: 90m, 24h.")
    ] = None,
    poll: Annotated[str, typer.Option(help="Time between two listings of the run.")] = "30s",
    as_json: JsonLines = False,
) -> None:
    """Print each new step of a run, or run a command.

    It waits for further steps until the run is finished, until a step, for a time, or until Ctrl-C.
    A step that was printed and no longer counts is named on standard error; with --json it is
    printed again, as superseded.
    """
    if pin is not None and command is None:
        raise ConfigError("--pin is for --exec: nothing says when a printed step is no longer used")
    following = dos.follow(
        url,
        after=_step(after),
        until=_step(until),
        skip_to_newest=skip_to_newest,
        timeout_seconds=None if timeout is None else seconds(timeout),
        poll_seconds=seconds(poll),
        pin=pin,
        on_dropped=_print_json if as_json else None,
        storage_options=chosen(),
    )
    words = None if command is None else _words(command)
    first_failure = 0  # the exit status of a command
    with closing(following) as steps:  # closing it removes the pin, however the loop ends
        for step in steps:
            if as_json:
                _print_json(step)
            elif words is None:
                say(step.url)
                sys.stdout.flush()
            status = 0 if words is None else _run(words, step)
            first_failure = first_failure or status
            if status and not keep_going:
                break
    if first_failure:
        sys.exit(first_failure)


def _step(text: str | None) -> int | str | None:
    """Return the number or the name of a step: 40 for "40", "step-40" for "step-40"."""
    return int(text) if text is not None and text.isdecimal() else text


def _print_json(step: dos.reports.ListedCheckpoint) -> None:
    print(json_text(described(step)), flush=True)


def _words(command: str) -> list[str]:
    """Split a command as a shell does; without a placeholder, {url} becomes its last word."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--exec {command}: {error}") from None
    if not words:
        raise ConfigError("--exec is empty")
    return words if any(map(_PLACEHOLDER.search, words)) else [*words, "{url}"]


def _run(words: Sequence[str], step: dos.reports.ListedCheckpoint) -> int:
    """Run a command for a step, and return its exit status as a shell has it."""
    command = [_PLACEHOLDER.sub(lambda name: str(getattr(step, name[1])), word) for word in words]
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        fail(f"--exec {command[0]}: {error.strerror}", 2)
    with process:
        try:
            status = process.wait()
        except BaseException:
            # The command ends before the pin goes, because it may be reading the step until then.
            process.terminate()
            process.wait()
            raise
    if status:
        say(f"dcp-objstore: {step.url}: {command[0]} ended with {status}", to_errors=True)
    return status if status >= 0 else 128 - status  # of -9, SIGKILL, a shell has 137
