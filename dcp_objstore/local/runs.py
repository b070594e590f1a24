"""The runs of which this node has copies: what `dcp-objstore local` shows and removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import InputError
from dcp_objstore.local.folder import (
    FOLDER,
    READ,
    REMOVED,
    LocalError,
    files_in,
    home_name,
    is_being_written,
    key_of,
    lock_file,
    open_home,
    opened,
    remove_run,
    used_at,
)
from dcp_objstore.local.settings import Local

_EPOCH = datetime.fromtimestamp(0, UTC)


class Files(NamedTuple):
    """How many files, and what they take on the file system."""

    number: int = 0
    total_bytes: int = 0

    def with_one(self, size_bytes: int) -> Files:
        """Return these and one more file."""
        return Files(self.number + 1, self.total_bytes + size_bytes)


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The copies of one run.

    Attributes:
        folder: the name of its folder.
        url: the run's URL; None if its folder does not say.
        endpoint_url: the store's endpoint, if the run has one.
        in_use: whether a process uses it now.
        used_at: when a process last began to use it, or wrote to it; None if it is half removed.
        steps: the copies of each checkpoint, by its name; "." if the URL is a checkpoint's.
        being_written: files that a save is writing.
        left_over: files of processes that were killed. The next save writes over them.
    """

    folder: str
    url: str | None
    endpoint_url: str | None
    in_use: bool
    used_at: datetime | None
    steps: dict[str, Files]
    being_written: Files
    left_over: Files

    @property
    def total(self) -> Files:
        """All of its files together."""
        parts = [*self.steps.values(), self.being_written, self.left_over]
        return Files(*map(sum, zip(*parts, strict=True)))


class Removal(NamedTuple):
    """A run, and why its copies are still there; None if they are gone."""

    run: LocalRun
    refusal: str | None


def local_runs(local: Local) -> list[LocalRun]:
    """Return the runs of which there are copies, the one that was used last at the end.

    Raises:
        InputError: nothing was ever kept there, or the folder is not used.
    """
    with _home(local) as home:
        return _runs(home)


def remove_local_runs(local: Local, url: str | None = None) -> list[Removal]:
    """Remove the copies of all runs that no process uses, or of one run.

    Args:
        local: where they are kept.
        url: the run's URL. Default: all runs.

    Raises:
        InputError: there are no copies of that run, or as `local_runs`.
    """
    with _home(local) as home:
        runs = _runs(home)
        chosen = [run for run in runs if url in (None, run.url)]
        if url is not None and not chosen:
            here = ", ".join(sorted({run.url for run in runs if run.url is not None}))
            raise InputError(
                f"{local.folder} has no copies of this run; it has {here or 'none at all'}", url=url
            )
        refusals = ("it cannot be removed", "a process uses it")
        return [
            Removal(run, None if remove_run(home, run.folder) else refusals[run.in_use])
            for run in chosen
        ]


@contextmanager
def _home(local: Local) -> Iterator[int]:
    """Open the user's folder, and close it again."""
    folder = local.folder
    try:
        home = open_home(folder)
    except FileNotFoundError:
        raise InputError(
            f"there is no folder {folder}"
            if not os.path.isdir(folder)  # noqa: PTH112 - a path of `Local` is text
            else f"no job of this user has kept copies in {folder}: it has no {home_name()}"
        ) from None
    except (LocalError, OSError) as error:
        raise InputError(f"{folder} is not used: {error}") from error
    try:
        yield home
    finally:
        os.close(home)


def _runs(home: int) -> list[LocalRun]:
    with os.scandir(home) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    runs = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            runs.append(_run(home, name))
    return sorted(runs, key=lambda run: (run.in_use, run.used_at or _EPOCH))


def _run(home: int, name: str) -> LocalRun:
    with opened(name, FOLDER, home) as folder:
        url, _, endpoint_url = _text(folder).partition(" ")
        steps, being_written, left_over = _files(folder, is_removed=name.startswith(REMOVED))
        used = used_at(home, name)
        return LocalRun(
            folder=name,
            url=url or None,
            endpoint_url=endpoint_url or None,
            in_use=_is_in_use(folder),
            used_at=datetime.fromtimestamp(used, UTC) if used else None,
            steps=steps,
            being_written=being_written,
            left_over=left_over,
        )


def _text(folder: int) -> str:
    with contextlib.suppress(OSError), opened("url", READ, folder) as file:
        return os.read(file, 1 << 16).decode(errors="replace")
    return ""


def _is_in_use(folder: int) -> bool:
    with contextlib.suppress(FileNotFoundError), opened("lock", READ, folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a job that begins now tries again
        except BlockingIOError:
            return True
    return False


def _files(folder: int, *, is_removed: bool) -> tuple[dict[str, Files], Files, Files]:
    """Return the copies by checkpoint, the files that are being written, and what is left over."""
    steps: dict[str, Files] = {}
    being_written = left_over = Files()
    with contextlib.suppress(FileNotFoundError), opened("objects", FOLDER, folder) as objects:
        lock_file(objects, fcntl.LOCK_SH)  # no file begins to be written meanwhile
        for name, status in files_in(objects):
            size_bytes = status.st_blocks * 512
            key = key_of(name)
            if key is not None and not is_removed:
                step, slash, _ = key.partition("/")
                step = step if slash else "."
                steps[step] = steps.get(step, Files()).with_one(size_bytes)
            elif not is_removed and is_being_written(objects, name):
                being_written = being_written.with_one(size_bytes)
            else:
                left_over = left_over.with_one(size_bytes)
    return steps, being_written, left_over
