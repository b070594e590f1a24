"""Runs a SeaweedFS server for `seaweedfs`, and ends it when its owner ends.

`seaweedfs` runs this file with `python -I -S FILE DIRECTORY COMMAND…`: without site packages it
starts at once. Standard input is a pipe that only the owner writes to. When the owner closes it or
ends, however it ends, the guardian kills the server and removes the directory and the server's
sockets. If the owner writes a byte first, both stay, for a restart. If the server ends by itself,
the guardian ends with its status.

Linux could end a child with its parent (PR_SET_PDEATHSIG), but "parent" means the thread that
started the child there, and other systems cannot.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path


def remove(directory: str, command: Iterable[str]) -> None:
    """Remove a server's directory, and the sockets that it puts into /tmp for its gRPC ports.

    Args:
        directory: the folder of the server's data and log.
        command: the server's command; its options name the ports, as `-s3.port.grpc=10001`.
    """
    shutil.rmtree(directory, ignore_errors=True)
    for option in command:
        name, grpc, port = option.partition(".port.grpc=")
        if grpc:
            with contextlib.suppress(OSError):
                Path(f"/tmp/seaweedfs{name}-grpc-{port}.sock").unlink()


def main(directory: str, command: list[str]) -> None:
    """Run the server until it ends or the owner does; does not return."""
    with Path(directory, "log").open("ab") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    ended_by_owner = threading.Event()

    def end_with_server() -> None:
        status = server.wait()
        if not ended_by_owner.is_set():
            os._exit(status & 0xFF)

    threading.Thread(target=end_with_server, daemon=True).start()
    byte = os.read(0, 1)  # the owner sends one to end the server; none if the owner was killed
    ended_by_owner.set()
    server.kill()
    server.wait()
    if not byte:
        remove(directory, command)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
