"""`dcp-objstore serve`: a server to try things with, whose data go with it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.errors import InputError
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
