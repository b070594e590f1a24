"""`dcp-objstore serve`: a server to try things with, whose data go with it."""

from __future__ import annotations

import importlib.metadata
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_objstore.cli.seaweedfs import SeaweedServer, find_weed
from dcp_objstore.errors import InputError, UnsupportedError
from dcp_objstore.stores import open_store

pytestmark = pytest.mark.usefixtures("usual_signals")


def started(*options: str) -> tuple[subprocess.Popen[str], str, dict[str, object]]:
    """Start `serve`; return it, what it says first, and the `storage_options` it prints."""
    server = subprocess.Popen(
        [sys.executable, "-m", "dcp_objstore", "serve", *options], stdout=subprocess.PIPE, text=True
    )
    says = server.stdout.readline()
    exports = [server.stdout.readline().rstrip("\n").removeprefix("export ") for _ in range(3)]
    values = dict(line.split("=", 1) for line in exports)
    return (
        server,
        says,
        {
            "endpoint_url": values["AWS_ENDPOINT_URL"],
            "key": values["AWS_ACCESS_KEY_ID"],
            "secret": values["AWS_SECRET_ACCESS_KEY"],
        },
    )


def test_a_server_runs_until_ctrl_c_and_its_data_go_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server, says, options = started("--bucket", "mine")
    try:
        assert "s3://mine" in says
        open_store("s3://mine/run", options).put("object", b"there")
        assert list(tmp_path.iterdir()), "its data are here"
    finally:
        server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_said_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=str(taken.getsockname()[1])):
            SeaweedServer(port=taken.getsockname()[1])


class Packaged:
    """A file of a package."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = path.name, path

    def locate(self) -> Path:
        return self._path


def test_of_the_files_of_the_package_the_one_that_is_weed_and_runs_is_used(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("other", "broken/weed", "weed")]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        path.chmod(0o644 if path.parent.name == "broken" else 0o755)
    packaged = [Packaged(path) for path in files]
    monkeypatch.setattr(importlib.metadata, "files", lambda _: packaged)
    assert find_weed() == str((tmp_path / "weed").resolve())
    packaged.clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_weed() == str(tmp_path / "weed")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedError, match="pip install"):
        find_weed()
