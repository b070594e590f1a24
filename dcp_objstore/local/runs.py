"""The runs of which this node has copies: what `dcp-objstore local` shows and removes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import InputError, StoreUnavailableError
from dcp_objstore.local import folder as at
from dcp_objstore.local.settings import Local


class Files(NamedTuple):
    """How many files, and what they take on the file system."""

    number: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The copies of one run.

    Attributes:
        folder: the name of its folder.
        url: the run's URL; None if its folder does not say.
        endpoint_url: the store's endpoint, if the run has one.
        in_use: whether a process that has used it is alive.
        used_at: when a process last saved or loaded; None if it is half removed.
        steps: the copies of each checkpoint, by its name; "." if the URL is a checkpoint's.
        unfinished: files that a save writes now, or that a killed one has left: the next save
            writes over those.
    """

    folder: str
    url: str | None
    endpoint_url: str | None
    in_use: bool
    used_at: datetime | None
    steps: dict[str, Files]
    unfinished: Files

    @property
    def total(self) -> Files:
        """All of its files together."""
        parts = [*self.steps.values(), self.unfinished]
        return Files(*map(sum, zip(*parts, strict=True)))


def local_runs(local: Local) -> list[LocalRun]:
    """Return the runs of which there are copies, the one that was used last at the end.

    Raises:
        InputError: nothing was ever kept there, or the folder is not used.
    """
    with _home(local) as home:
        return [_run(run) for run in sorted(at.folders_in(home), key=at.used_at)]


def remove_local_runs(local: Local, url: str | None = None) -> list[tuple[LocalRun, bool]]:
    """Remove the copies of all runs that no process uses, or of one run.

    Returns:
        Each run, and whether its copies are gone. If not, a process uses them.

    Args:
        local: where they are kept.
        url: the run's URL. Default: all runs.

    Raises:
        InputError: there are no copies of that run, or as `local_runs`.
    """
    with _home(local) as home:
        runs = local_runs(local)
        chosen = [run for run in runs if url in (None, run.url)]
        if url is not None and not chosen:
            here = ", ".join(sorted(run.url or "" for run in runs)) or "none at all"
            raise InputError(f"{local.folder} has no copies of this run; it has {here}", url=url)
        return [(run, not run.in_use and at.remove_run(home, home / run.folder)) for run in chosen]


@contextmanager
def _home(local: Local) -> Iterator[Path]:
    """Yield the user's folder, and say what goes wrong there."""
    try:
        home = at.home_of(local.folder)
        if not home.exists():
            raise InputError(
                f"no job of this user has kept copies in {local.folder}: it has no {home.name}"
            )
        yield home
    except (at.LocalError, OSError, StoreUnavailableError) as error:
        raise InputError(f"{local.folder} is not used: {error}") from error


def _run(run: Path) -> LocalRun:
    files = {_name(folder): at.files_in(folder) for folder in at.folders_in(run)}
    steps = {name: [file for file in files[name] if not file.is_temporary] for name in files}
    unfinished = [file for of_step in files.values() for file in of_step if file.is_temporary]
    texts = [path.read_text(encoding="utf-8") for path in run.glob(at.URL)]
    url, _, endpoint_url = "".join(texts).partition(" ")
    used = at.used_at(run)
    return LocalRun(
        folder=run.name,
        url=url or None,
        endpoint_url=endpoint_url or None,
        in_use=at.is_used(run, unknown=False),
        used_at=datetime.fromtimestamp(used, UTC) if used else None,
        steps={name: _count(copies) for name, copies in steps.items() if copies},
        unfinished=_count(unfinished),
    )


def _name(folder: Path) -> str:
    return "." if folder.name == at.STORE_ROOT else unquote(folder.name)


def _count(files: Sequence[at.File]) -> Files:
    return Files(len(files), sum(file.status.st_blocks * 512 for file in files))
