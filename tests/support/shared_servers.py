"""One server of each kind for all processes of pytest: the first that wants it starts it.

with shared(tmp_path_factory, MotoServer, "endpoint_url", "gcs_endpoint_url") as server:
    ...    # the same server in every process; the one that started it waits for the others
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

S = TypeVar("S", bound=contextlib.AbstractContextManager[object])


@contextlib.contextmanager
def shared(places: pytest.TempPathFactory, start: Callable[[], S], *attributes: str) -> Iterator[S]:
    """The server that `start` starts, here or in another process.

    Args:
        places: of this session.
        start: starts it; its name stands for the server.
        attributes: what a process needs to know of the server that another one has started.
    """
    base = places.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / start.__name__
    folder.mkdir(exist_ok=True)
    user, known = folder / f"user-{os.getpid()}", folder / "server"
    with contextlib.ExitStack() as ours:
        with _locked(folder):
            user.touch()
            if known.exists():
                kind, found = pickle.loads(known.read_bytes())
                server = kind.__new__(kind)
                vars(server).update(found)
            else:
                server = start()
                ours.enter_context(server)
                ours.callback(_wait_for_others, folder, known)
                said = {name: getattr(server, name) for name in attributes}
                known.write_bytes(pickle.dumps((type(server), said)))
        try:
            yield server
        finally:
            user.unlink()


def _wait_for_others(folder: Path, known: Path) -> None:
    while True:
        with _locked(folder):
            if not any(map(_lives, folder.glob("user-*"))):
                known.unlink()  # who comes now starts one of its own
                return
        time.sleep(0.1)


def _lives(user: Path) -> bool:
    try:
        os.kill(int(user.name.partition("-")[2]), 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
