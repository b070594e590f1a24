"""A local folder in which the files of all ranks appear together, at the end, or not at all.

In a bucket nothing can be moved, but an object appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.failures import on_first, raise_on_all
from dcp_objstore.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist

    from dcp_objstore.stores import StoreSpec

# The names of temporary folders, and of what is in them besides files, begin with this.
_OWN_PREFIX = ".dcp-objstore."
# A file of this name in a temporary folder is locked while its export runs.
_ALIVE = f"{_OWN_PREFIX}alive"
# A file of this name in the folder itself is locked while files are moved there.
_MOVING = f"{_OWN_PREFIX}moving"


@contextmanager
def appearing_together(
    spec: StoreSpec,
    group: dist.ProcessGroup | None = None,
    before: Callable[[], object] = lambda: None,
    last: Sequence[str] = (),
) -> Iterator[StoreSpec]:
    """Return where to write: the folder itself, or if it is local a temporary one inside it.

    The files of a local folder are moved there at the end of the block, if it does not raise; if it
    does, folders that were made for them are removed. A collective, at its begin and its end.

    Args:
        spec: the folder.
        group: the ranks that write; None if this process is alone.
        before: is called before files are moved, on the first rank. No other export moves files
            into the folder between the call and the last of these. If it raises, none is moved.
        last: names of the files that are moved after the others.

    Raises:
        InputError: the folder cannot be written, or ranks see different folders under this name.
    """
    if spec.parsed.scheme != "file":
        yield spec
        return
    folder = Path(spec.url.removeprefix("file://"))
    with ExitStack() as stack:
        made = partial(stack.enter_context, _temporary_in(folder))
        temporary: Path = on_first(made, spec.url, group)
        unseen = InputError(
            "this rank does not see the folder that the first rank has made there: the ranks of"
            " several nodes need a folder that all of them share, or a URL of an object store"
        )
        raise_on_all(None if temporary.is_dir() else unseen, spec.url, group)
        yield spec.at(f"file://{temporary}")
        on_first(partial(_move_files, temporary, folder, before, last), spec.url, group)


def _move_files(
    temporary: Path, folder: Path, before: Callable[[], object], last: Sequence[str]
) -> None:
    with _writing(folder), _moving_alone(folder / _MOVING):
        before()
        for path in sorted(temporary.iterdir(), key=lambda path: path.name in last):
            if not path.name.startswith(_OWN_PREFIX):  # locks
                path.replace(folder / path.name)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror}", url=f"file://{folder}"
        ) from error


@contextmanager
def _temporary_in(folder: Path) -> Iterator[Path]:
    """Make a folder, if there is none, and a temporary one in it; remove what has no file."""
    new = [directory for directory in (folder, *folder.parents) if not directory.exists()]
    try:
        with ExitStack() as stack:
            with _writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                _remove_left(folder)
                temporary = stack.enter_context(_temporary(folder))
            yield temporary
    finally:
        with suppress(OSError):  # it has files in it
            for directory in new:
                directory.rmdir()


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Make a folder in a folder, which is removed at the end, and is locked until then."""
    with ExitStack() as stack:
        while True:
            path = Path(tempfile.mkdtemp(prefix=_OWN_PREFIX, dir=folder))
            with suppress(FileNotFoundError):  # an export that began just then has removed it
                if stack.enter_context(_locked(path / _ALIVE, fcntl.LOCK_EX)):
                    break
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def _remove_left(folder: Path) -> None:
    """Remove what killed exports have left in a folder: the system has given their locks back."""
    for path in folder.glob(f"{_OWN_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError), _locked(path / _ALIVE, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _moving_alone(lock: Path) -> Iterator[None]:
    """Wait for exports that move files under the same lock; the last one removes it."""
    with ExitStack() as stack:
        while not stack.enter_context(_locked(lock, fcntl.LOCK_EX)):
            pass
        stack.callback(lock.unlink)
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[bool]:
    """Lock a file; yield False if the one that held the lock before has removed the file."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, how)
        yield os.fstat(lock).st_nlink > 0
    finally:
        os.close(lock)
