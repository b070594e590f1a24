"""The sink: an S3-shaped server on loopback, in a process of its own.

    with Sink() as sink:
        dos.save(state, "s3://bucket/run/step-1", storage_options=sink.storage_options)

`python -m benchmarks.sink --port 9000` runs one by hand and prints its endpoint, with `--tls` also
the certificate to trust; `GET /__stats` tells what it was asked, `DELETE /__stats` begins at zero.
See `wire` for how bytes are kept out of Python.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from benchmarks.conditions import Conditions
from benchmarks.sink_objects import Objects
from benchmarks.sink_server import Connection, RequestRate, SlowAnswers
from benchmarks.wire import Throttle, TlsWire, Wire, make_certificate, tls_context

_HOST = "127.0.0.1"


class Sink:
    """A sink server that ends with the `with` block, or with this process.

    Args:
        keep: keep large bodies too (in memory), so that they can be read back. Default False:
            bodies of 1 MiB and more are discarded, only their sizes are remembered.
        conditions: TLS, latency and limits. Default: none of them.

    Attributes:
        endpoint_url: `http://127.0.0.1:PORT`, or https.
        certificate: the file with the certificate that clients must trust; None without TLS.
        storage_options: what `storage_options=` takes to reach it.
    """

    def __init__(self, *, keep: bool = False, conditions: Conditions | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.sink", "--until-stdin-closes"]
        if keep:
            command.append("--keep")
        if conditions is not None:
            command.extend(conditions.arguments)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        assert self._process.stdout is not None
        found = self._process.stdout.readline().split()
        if not found:
            raise RuntimeError(f"the sink ended with status {self._process.wait()}")
        self.endpoint_url = found[0]
        self.certificate = found[1] if len(found) > 1 else None

    @property
    def storage_options(self) -> dict[str, object]:
        """Credentials (any would do), endpoint and the certificate to trust."""
        options: dict[str, object] = {"key": "sink", "secret": "sink"}
        options["endpoint_url"] = self.endpoint_url
        if self.certificate is not None:
            options["verify"] = self.certificate
        return options

    def stats(self) -> dict[str, Any]:
        """Return what was counted since the start or the last reset; see `Objects.stats`."""
        return fetch_stats(self.endpoint_url, self.certificate)

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


def connect(endpoint_url: str, certificate: str | None) -> http.client.HTTPConnection:
    """Make a connection to a sink; `certificate` is the file to trust, if it has TLS."""
    place = urlsplit(endpoint_url).netloc
    if certificate is None:
        return http.client.HTTPConnection(place, timeout=60)
    context = ssl.create_default_context(cafile=certificate)
    return http.client.HTTPSConnection(place, timeout=60, context=context)


def fetch_stats(
    endpoint_url: str, certificate: str | None = None, *, reset: bool = False
) -> dict[str, Any]:
    """Return what a sink counted; see `Objects.stats`.

    Args:
        endpoint_url: of the sink.
        certificate: the file to trust, if the sink has TLS.
        reset: count from zero from now on.
    """
    with contextlib.closing(connect(endpoint_url, certificate)) as connection:
        connection.request("DELETE" if reset else "GET", "/__stats")
        stats: dict[str, Any] = json.loads(connection.getresponse().read())
    return stats


class _Server:
    """Accepts connections for ever.

    Args:
        keep: keep large bodies too.
        conditions: TLS, latency and limits.
        folder: for the certificate; empty.
    """

    def __init__(self, *, keep: bool, conditions: Conditions, folder: Path) -> None:
        self._objects = Objects()
        self._keep = keep
        self._latency_seconds = (conditions.latency_ms or 0.0) / 1e3
        mib, gib = conditions.rate_mib_per_connection, conditions.gib_per_second
        self._bytes_per_second = None if mib is None else mib * 1024**2
        self._shared = None if gib is None else Throttle(gib * 1024**3)
        per_second = conditions.requests_per_second
        self._rate = None if per_second is None else RequestRate(per_second)
        percent, factor = conditions.slow_percent, conditions.slow_factor
        self._slow = SlowAnswers(percent, factor, conditions.slow_seed) if percent else None
        self._context: ssl.SSLContext | None = None
        self._certificate: Path | None = None
        if conditions.tls:
            self._certificate, key = make_certificate(folder)
            self._context = tls_context(self._certificate, key, conditions.tls_record_bytes)

    def listen(self, port: int) -> None:
        """Listen on a loopback port (0: any free one), print the endpoint, and serve."""
        with socket.create_server((_HOST, port), backlog=1024) as server:
            scheme = "http" if self._context is None else "https"
            endpoint_url = f"{scheme}://{_HOST}:{server.getsockname()[1]}"
            print(endpoint_url, self._certificate or "", flush=True)
            while True:
                accepted, _ = server.accept()
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        # Not every client says goodbye, not even in the middle of a handshake.
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            Connection(
                self._wire(accepted),
                self._objects,
                keep=self._keep,
                latency_seconds=self._latency_seconds,
                rate=self._rate,
                slow=self._slow,
            ).serve()

    def _wire(self, accepted: socket.socket) -> Wire:
        rate, shared = self._bytes_per_second, self._shared
        if self._context is None:
            return Wire(accepted, bytes_per_second=rate, shared=shared)
        return TlsWire(accepted, self._context, bytes_per_second=rate, shared=shared)


def _end_with_stdin(folder: Path) -> None:
    sys.stdin.read()
    shutil.rmtree(folder)
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a sink in this process until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sink", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--keep", action="store_true", help="keep large bodies, in memory")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the parent")
    Conditions.add_options(parser)
    options = parser.parse_args(arguments)
    # Every connection is a file descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        if options.until_stdin_closes:
            threading.Thread(target=_end_with_stdin, args=(Path(folder),), daemon=True).start()
        conditions = Conditions.from_options(options)
        _Server(keep=options.keep, conditions=conditions, folder=Path(folder)).listen(options.port)


if __name__ == "__main__":
    main()
