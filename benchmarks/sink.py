"""The sink: an S3-shaped server on loopback, in a process of its own.

    with Sink() as sink:
        dos.save(state, "s3://bucket/run/step-1", storage_options=sink.storage_options)

`python -m benchmarks.sink --port 9000` runs one by hand; `GET /__stats` tells what it was asked,
`DELETE /__stats` begins at zero. See `sink_server` for how bytes are kept out of Python.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.sink_objects import Objects
from benchmarks.sink_server import Connection, Throttle

_HOST = "127.0.0.1"


class Sink:
    """A sink server that ends with the `with` block, or with this process.

    Args:
        keep: keep large bodies too (in memory), so that they can be read back. Default False:
            bodies of 1 MiB and more are discarded, only their sizes are remembered.
        throttle_gib_per_second: take discarded bodies at this rate, all connections together.
            Default None: as fast as they come.

    Attributes:
        endpoint_url: `http://127.0.0.1:PORT`.
        storage_options: what `storage_options=` takes to reach it.
    """

    def __init__(self, *, keep: bool = False, throttle_gib_per_second: float | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.sink", "--until-stdin-closes"]
        if keep:
            command.append("--keep")
        if throttle_gib_per_second is not None:
            command.append(f"--throttle-gib-per-second={throttle_gib_per_second}")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        assert self._process.stdout is not None
        self.endpoint_url = self._process.stdout.readline().strip()
        if not self.endpoint_url:
            raise RuntimeError(f"the sink ended with status {self._process.wait()}")

    @property
    def storage_options(self) -> dict[str, object]:
        """Credentials (any would do) and endpoint."""
        return {"key": "sink", "secret": "sink", "endpoint_url": self.endpoint_url}

    def stats(self) -> dict[str, Any]:
        """Requests by verb, and body bytes received and sent, since the start or last reset."""
        return fetch_stats(self.endpoint_url)

    def stop(self) -> None:
        """End the server; a second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def fetch_stats(endpoint_url: str, *, reset: bool = False) -> dict[str, Any]:
    """What a sink counted: `requests` by verb, `received_bytes`, `sent_bytes`, `open_uploads`."""
    connection = http.client.HTTPConnection(endpoint_url.removeprefix("http://"), timeout=10)
    with contextlib.closing(connection):
        connection.request("DELETE" if reset else "GET", "/__stats")
        stats: dict[str, Any] = json.loads(connection.getresponse().read())
    return stats


def serve(port: int, *, keep: bool, throttle_gib_per_second: float | None = None) -> None:
    """Listen on a loopback port (0: any free one), print the endpoint, and serve for ever."""
    # Every kept part is a file descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    objects = Objects()
    rate = throttle_gib_per_second
    throttle = None if rate is None else Throttle(rate * 1024**3)
    with socket.create_server((_HOST, port), backlog=256) as server:
        print(f"http://{_HOST}:{server.getsockname()[1]}", flush=True)
        while True:
            accepted, _ = server.accept()
            connection = Connection(accepted, objects, keep=keep, throttle=throttle)
            threading.Thread(target=connection.serve, daemon=True).start()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a sink in this process until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sink", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--keep", action="store_true", help="keep large bodies, in memory")
    parser.add_argument("--throttle-gib-per-second", type=float, help="of discarded bodies")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the parent")
    options = parser.parse_args(arguments)
    if options.until_stdin_closes:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        serve(
            options.port,
            keep=options.keep,
            throttle_gib_per_second=options.throttle_gib_per_second,
        )


if __name__ == "__main__":
    main()
