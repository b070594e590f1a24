"""One server of each kind for all processes of pytest: the first that wants it starts it.

with shared(tmp_path_factory, MotoServer, "endpoint_url", "gcs_endpoint_url") as server:
    ...    # the same server in every process; the one that started it waits for the others
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support import launcher

# What all processes of this run of pytest have in common, if there are several.
common_folder: Path | None = None

S = TypeVar("S", bound=contextlib.AbstractContextManager[object])


@contextlib.contextmanager
def shared(places: pytest.TempPathFactory, start: Callable[[], S], *attributes: str) -> Iterator[S]:
    """The server that `start` starts, here or in another process.

    Args:
        places: of this session.
        start: starts it; its name stands for the server.
        attributes: what a process needs to know of the server that another one has started.
    """
    folder = folder_of_all(places) / start.__name__
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


def folder_of_all(places: pytest.TempPathFactory) -> Path:
    """The folder that all processes of this run have in common."""
    base = places.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def warm_up(preload: Sequence[str]) -> None:
    """Start the server from which ranks are forked, or find that of another process of pytest.

    Its imports take five CPU-seconds. It ends with the last process that uses it.
    """
    # From Python 3.14 on, it wants a key.
    if common_folder is None or sys.platform != "linux" or sys.version_info >= (3, 14):
        launcher.warm_up(preload)
        return
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    known = common_folder / "fork-server"
    with _locked(common_folder):
        if launcher._server_output is not None:  # it is known here
            return
        with contextlib.suppress(FileNotFoundError):  # nobody has started one, or that has ended
            address, alive, output = json.loads(known.read_text())
            launcher._server_output = Path(output).open("rb")  # noqa: SIM115
            server._forkserver_alive_fd = os.open(alive, os.O_WRONLY)
            server._forkserver_address = address
            server.ensure_running = resource_tracker.ensure_running
            return
        launcher.warm_up(preload)
        assert launcher._server_output is not None
        files = server._forkserver_alive_fd, launcher._server_output.fileno()
        places = (f"/proc/{os.getpid()}/fd/{number}" for number in files)
        known.write_text(json.dumps([server._forkserver_address, *places]))


def _wait_for_others(folder: Path, known: Path) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's: others may have tests of minutes
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
