"""Ceph's RADOS gateway on this machine: one monitor, one OSD in memory, one gateway.

Its programs are in Debian's packages ceph-mon, ceph-mgr, ceph-osd, radosgw and ceph-common.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Self
from uuid import uuid4

import pytest

from tests.support.servers import BUCKET, make_s3_client

_PROGRAMS = ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "monmaptool")
_START_SECONDS = 120  # beside the other servers of a campaign, on two cores

# Nobody else is on this machine's loopback: no keys, no copies, and small pools.
_SETTINGS = """
[global]
fsid = {fsid}
mon host = {monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = true
ms client mode = crc
ms mon client mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
mon data avail warn = 1
mon data avail crit = 1
osd objectstore = memstore
memstore device bytes = 6442450944
osd max object name len = 256
osd max object namespace len = 64
keyring = {root}/keyring
log file = {root}/$name.log
admin socket = {root}/$name.asok
pid file = {root}/$name.pid
run dir = {root}
mon data = {root}/mon
mgr data = {root}/mgr
osd data = {root}/osd
osd journal = {root}/osd/journal
rgw data = {root}/rgw
"""


class CephServer:
    """The gateway, until the `with` block ends. A test that asks for it is skipped without Ceph."""

    def __init__(self) -> None:
        missing = [name for name in _PROGRAMS if shutil.which(name) is None]
        if missing:
            pytest.skip(f"Ceph is not installed here: there is no {missing[0]}")
        self._root = Path(tempfile.mkdtemp(prefix="ceph-"))
        self.endpoint_url = ""
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        shutil.rmtree(self._root, ignore_errors=True)

    @property
    def storage_options(self) -> dict[str, object]:
        return {"key": "ceph", "secret": "ceph-secret", "endpoint_url": self.endpoint_url}

    @property
    def version(self) -> str:
        return self._run("radosgw", "--version").split()[2]

    def _start(self) -> None:
        for name in ("mon", "mgr", "osd", "rgw"):
            (self._root / name).mkdir()
        fsid, keyring = str(uuid4()), str(self._root / "keyring")
        monitor = ",".join(f"v{number}:127.0.0.1:{_free_port()}" for number in (2, 1))
        settings = _SETTINGS.format(fsid=fsid, monitor=f"[{monitor}]", root=self._root)
        (self._root / "ceph.conf").write_text(settings)
        for name, rights in (("mon.", ["mon"]), ("client.admin", ["mon", "osd", "mgr"])):
            caps = [word for right in rights for word in ("--cap", right, "allow *")]
            create = ["--create-keyring"] if name == "mon." else []
            self._run("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps)
        map_file = str(self._root / "monmap")
        self._run("monmaptool", "--create", "--addv", "a", f"[{monitor}]", "--fsid", fsid, map_file)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_file, "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a")
        disk = str(uuid4())
        self._run("ceph", "--connect-timeout", str(_START_SECONDS - 10), "osd", "new", disk)
        self._daemon("ceph-mgr", "-i", "x")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self._daemon("ceph-osd", "-i", "0")
        self._wait(lambda: "1 up" in self._run("ceph", "osd", "stat"))
        user = ("--uid", "tests", "--display-name", "tests")
        keys = ("--access-key", "ceph", "--secret", "ceph-secret")
        self._run("radosgw-admin", "user", "create", *user, *keys)
        # Not before: in the meantime, another server could take a port that is free now.
        gateway_at = f"127.0.0.1:{_free_port()}"
        self.endpoint_url = f"http://{gateway_at}"
        frontend = f"beast tcp_nodelay=1 endpoint={gateway_at}"
        gateway = ("radosgw", "-n", "client.admin", "--no-mon-config", "--keyring", keyring)
        self._daemon(*gateway, "--rgw-frontends", frontend)
        self._wait(self._answers)
        make_s3_client(
            endpoint_url=self.endpoint_url,
            aws_access_key_id="ceph",
            aws_secret_access_key="ceph-secret",
            region_name="us-east-1",
        ).create_bucket(Bucket=BUCKET)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint_url, timeout=10):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def _wait(self, ready: Callable[[], bool]) -> None:
        latest = time.monotonic() + _START_SECONDS
        while not ready():
            if time.monotonic() > latest:
                raise RuntimeError(f"Ceph did not start within {_START_SECONDS} s")
            time.sleep(0.2)

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self._root / "ceph.conf")}

    def _run(self, *command: str) -> str:
        found = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=120, check=False
        )
        if found.returncode:
            raise RuntimeError(f"{command[0]} failed: {found.stderr or found.stdout}")
        return found.stdout + found.stderr

    def _daemon(self, *command: str) -> None:
        # Its log is a file: nobody reads what it prints.
        self._daemons.append(
            subprocess.Popen(
                [*command, "-f"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
