"""The stores that the other tests stand on really do what those tests take for granted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from dcp_objstore.cli import seaweedfs
from dcp_objstore.errors import PreconditionFailedError, StoreUnavailableError
from dcp_objstore.stores import IfVersion, open_store
from tests.support.scripted import Answer, ScriptedServer


def test_an_upload_that_nobody_completed_is_seen(bucket):
    client = bucket.client()
    upload = client.create_multipart_upload(Bucket=bucket.name, Key=bucket.prefix + "k")
    assert bucket.uploads() == [bucket.prefix + "k"]
    client.abort_multipart_upload(
        Bucket=bucket.name, Key=bucket.prefix + "k", UploadId=upload["UploadId"]
    )
    assert bucket.uploads() == []


@pytest.mark.backends("gcs")
def test_a_write_of_equal_bytes_has_another_generation(bucket):
    store = open_store(bucket.url, bucket.storage_options)
    first = store.put("k", b"same")
    store.put("k", b"same")
    with pytest.raises(PreconditionFailedError):
        store.put("k", b"other", precondition=IfVersion(first))


KILLED_OWNER = """
import os, signal, threading
from dcp_objstore.cli.seaweedfs import SeaweedServer
servers = []
starter = threading.Thread(target=lambda: servers.append(SeaweedServer()))
starter.start()
starter.join()
print(servers[0].endpoint_url, servers[0]._directory, flush=True)
signal.pause()
"""


def test_seaweedfs_ends_with_its_owner_even_by_sigkill(seaweed):
    owner = subprocess.Popen(
        [sys.executable, "-c", KILLED_OWNER], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    _, directory = owner.stdout.readline().split()
    below = psutil.Process(owner.pid).children(recursive=True)
    (weed,) = [process for process in below if process.name() == "weed"]
    ports = re.findall(r"\.port\.grpc=(\d+)", " ".join(weed.cmdline()))
    assert sockets_of(ports)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive
    assert not Path(directory).exists()
    assert sockets_of(ports) == []


def sockets_of(ports: list[str]) -> list[Path]:
    """What SeaweedFS puts into /tmp, whatever its settings say."""
    return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock")]


@pytest.mark.parametrize(
    ("then", "seconds", "says", "starts"),
    [("exec sleep 60", 1, "403", 1), ("exit 3", 60, "status 3", 3)],
)
def test_seaweedfs_that_refuses_or_ends_is_given_up_with_its_answer_and_log(
    then, seconds, says, starts, monkeypatch, tmp_path
):
    """If it ends, another process may have taken a port in the meantime."""
    weed = tmp_path / "weed"
    weed.write_text(f"#!/bin/sh\nseq 9\n{then}\n")
    weed.chmod(0o700)
    begun: list[object] = []
    start = seaweedfs.SeaweedServer._start

    def count(server: seaweedfs.SeaweedServer) -> None:
        begun.append(server)
        start(server)

    def refuse(method: str, *_: object) -> Answer:
        return Answer(201 if method == "POST" else 403, {}, b"")  # a bucket is made without a key

    monkeypatch.setattr(seaweedfs, "find_weed", lambda: str(weed))
    monkeypatch.setattr(seaweedfs, "_START_SECONDS", seconds)
    monkeypatch.setattr(seaweedfs.SeaweedServer, "_start", count)
    with ScriptedServer(refuse) as server:
        ports = defaultdict(lambda: server.server_port)
        monkeypatch.setattr(seaweedfs, "_pick_ports", lambda: ports)
        with pytest.raises(StoreUnavailableError, match=says) as caught:
            seaweedfs.SeaweedServer()
    assert len(begun) == starts
    (log,) = caught.value.__notes__
    assert len(log.splitlines()) > 5
