"""The stores that the other tests stand on really do what those tests take for granted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from botocore.exceptions import ClientError

from dcp_objstore.errors import StoreUnavailableError
from tests.support.servers import Bucket, MotoServer


def test_an_object_comes_back_and_is_listed(bucket: Bucket) -> None:
    bucket.put("a/b", b"payload")
    assert bucket.get("a/b") == b"payload"
    assert bucket.keys() == ["a/b"]
    assert bucket.keys("a") == ["b"]


def test_conditional_create_lets_exactly_one_of_many_win(bucket: Bucket) -> None:
    client = bucket.client()

    def create(number: int) -> bool:
        try:
            client.put_object(
                Bucket=bucket.name, Key=bucket.prefix + "k", Body=b"%d" % number, IfNoneMatch="*"
            )
        except ClientError as error:
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] in {409, 412}
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(16))) == 1


def test_an_upload_that_nobody_completed_is_seen(bucket: Bucket) -> None:
    client = bucket.client()
    upload = client.create_multipart_upload(Bucket=bucket.name, Key=bucket.prefix + "k")
    assert bucket.uploads() == [bucket.prefix + "k"]
    client.abort_multipart_upload(
        Bucket=bucket.name, Key=bucket.prefix + "k", UploadId=upload["UploadId"]
    )
    assert bucket.uploads() == []


def gcs_store(server: MotoServer):
    from obstore.store import GCSStore

    return GCSStore(
        "dcp-tests",
        config={"base_url": server.gcs_endpoint_url, "bearer_token": "dummy"},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def test_gcs_generations_guard_puts(gcs_server: MotoServer) -> None:
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    store = gcs_store(gcs_server)

    def create(number: int) -> bool:
        try:
            obstore.put(store, "gcs-create", b"%d" % number, mode="create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(16))) == 1
    first = obstore.head(store, "gcs-create")
    same = bytes(obstore.get(store, "gcs-create").bytes())
    obstore.put(store, "gcs-create", same, mode={"version": first["version"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "gcs-create", b"stale", mode={"version": first["version"]})
    assert bytes(obstore.get(store, "gcs-create").bytes()) == same


def test_gcs_multipart_arrives_whole_or_leaves_nothing(gcs_server: MotoServer) -> None:
    import obstore

    store = gcs_store(gcs_server)
    mib = 1024 * 1024
    data = os.urandom(11 * mib)
    obstore.put(store, "gcs-parts", data, use_multipart=True, chunk_size=5 * mib)
    assert bytes(obstore.get_range(store, "gcs-parts", start=5, end=11 * mib)) == data[5:]

    def torn():
        yield data[: 6 * mib]
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        obstore.put(store, "gcs-torn", torn(), use_multipart=True, chunk_size=5 * mib)
    listed = [entry["path"] for page in obstore.list(store, "gcs-torn") for entry in page]
    assert listed == []
    obstore.delete(store, "gcs-parts")
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "gcs-parts")
    assert Bucket("gcs", "gs://dcp-tests/gcs-torn", {}, gcs_server.storage_options).uploads() == []


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


def test_seaweedfs_ends_with_its_owner_even_by_sigkill(seaweed) -> None:
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


def test_seaweedfs_keeps_its_data_over_a_kill() -> None:
    from dcp_objstore.cli.seaweedfs import SeaweedServer

    with SeaweedServer() as server:
        url = server.create_bucket("kept-data")
        place = Bucket("seaweed", url + "/x", server.storage_options, server.storage_options)
        place.put("k", b"still here")
        server.kill()
        server.restart()
        assert place.get("k") == b"still here"


def test_seaweedfs_that_refuses_its_owner_is_given_up_at_once_with_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dcp_objstore.cli import seaweedfs

    begun: list[object] = []
    options, start = seaweedfs.SeaweedServer.storage_options, seaweedfs.SeaweedServer._start

    def with_wrong_secret(server: seaweedfs.SeaweedServer) -> dict[str, object]:
        return {**options.__get__(server), "secret": "wrong"}

    def count(server: seaweedfs.SeaweedServer) -> None:
        begun.append(server)
        start(server)

    monkeypatch.setattr(seaweedfs.SeaweedServer, "storage_options", property(with_wrong_secret))
    monkeypatch.setattr(seaweedfs.SeaweedServer, "_start", count)
    with pytest.raises(StoreUnavailableError, match="refuses the credentials") as caught:
        seaweedfs.SeaweedServer(start_timeout_seconds=20)
    assert len(begun) == 1
    (log,) = caught.value.__notes__
    assert len(log.splitlines()) > 5
