"""Exit statuses of `dcp-objstore`, and the lines for errors on standard error."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import NoReturn

from dcp_objstore.cli.options import chosen
from dcp_objstore.cli.terminal import say
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    RetryableError,
    add_advice,
    one_line,
)

EXPLAINED = """\b
Exit status:
  0    success
  1    an unexpected failure; doctor: a check failed; diff: they differ
  2    the command, URL, settings or credentials need a change, or there is
       no such checkpoint
  3    try again: the store did not answer
  4    damaged data
  5    another writer was first
  130  ended by Ctrl-C

Example: dcp-objstore ls file:///tmp/run
"""

# If nothing is at a URL, similar names are looked for among this many keys, at most.
_MOST_KEYS = 10_000
_UNEXPECTED = 1
DAMAGED_STATUS = 4
_STATUSES: tuple[tuple[type[DcpObjstoreError], int], ...] = (
    (InputError, 2),
    (RetryableError, 3),
    (CorruptDataError, DAMAGED_STATUS),
    (LostRaceError, 5),
)


def status_of(error: DcpObjstoreError) -> int:
    """Return the exit status for an error: it depends on what the user has to do next."""
    return next((code for kind, code in _STATUSES if isinstance(error, kind)), _UNEXPECTED)


def fail(text: str, status: int = _UNEXPECTED, notes: Sequence[str] = ()) -> NoReturn:
    """Print one line on standard error, and notes (such as a server's log) as they are; exit.

    On a terminal the lines of the text stay.
    """
    lines = text.splitlines() if sys.stderr.isatty() else [one_line(text)]
    say(*lines, *_split(notes), lead="dcp-objstore: ", to_errors=True)
    sys.exit(status)


def _split(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in note.splitlines()]


@contextmanager
def exits() -> Iterator[None]:
    """Run a command: turn a `DcpObjstoreError` into one line and a status, Ctrl-C into 130.

    SIGTERM and SIGHUP end the command as Ctrl-C does, so that it cleans up. Where they are ignored,
    as nohup has it, they stay so.
    """
    before = {
        number: signal.signal(number, _end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    if sys.stdout is None:
        fail("standard output is closed; redirect it, to /dev/null if you do not need it")
    try:
        yield
        sys.stdout.flush()
    except DcpObjstoreError as error:
        if isinstance(error, CheckpointNotFoundError) and error.url is not None:
            with suppress(DcpObjstoreError):  # such as no right to list
                _propose(error, error.url)
        notes = getattr(error, "__notes__", ())
        fail(f"{type(error).__name__}: {error}", status_of(error), notes)
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", ())
        number, name = error.args if isinstance(error, _Ended) else (signal.SIGINT, "Ctrl-C")
        with suppress(OSError):  # after SIGHUP, the terminal is gone
            say(f"dcp-objstore: ended by {name}", *_split(notes), to_errors=True)
        sys.exit(128 + number)
    except OSError as error:
        # The reader of the output has gone, or its disk is full. At exit Python writes what is left
        # in its buffer, so that has to go elsewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            fail(f"the output cannot be written, or a file used: {error}")
        sys.exit(128 + signal.SIGPIPE)
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: Python did not install it, so it cannot do it again
                signal.signal(number, handler)


def _propose(error: DcpObjstoreError, url: str) -> None:
    """Add to an error, of a URL at which nothing is, the URLs most like it that exist.

    Lists each prefix above in turn, in bounds, and ends at the first one that has folders.
    """
    from difflib import get_close_matches  # imported here, so that --help stays quick

    from dcp_objstore.stores import StoreSpec

    folders: set[str] = set()
    spec = StoreSpec(url, chosen())
    above, name = spec.parent()
    while above is not None and not folders:
        keys = (meta.key for meta in islice(above.open().list(), _MOST_KEYS))
        folders.update(key.partition("/")[0] for key in keys if "/" in key)
        # If there is a folder of this name, the name is right, and nothing is proposed for it.
        similar = [] if name in folders else get_close_matches(name, sorted(folders))
        if similar:
            # What follows the wrong name: "/step-10" in file:///tmp/rnu/step-10, with rnu for run.
            below = spec.url[len(above.url) + 1 + len(name) :]
            urls = [f"'{above.child(folder).url}{below}'" for folder in similar]
            add_advice(error, f"did you mean {' or '.join(urls)}?")
        above, name = above.parent()


class _Ended(KeyboardInterrupt):
    """A signal that ends the command: its number and name."""


def _end(number: int, _frame: object) -> None:
    raise _Ended(number, signal.Signals(number).name)
