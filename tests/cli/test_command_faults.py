"""Every command under every fault: one clear line, its status, and nothing half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.config import MIB
from tests.support.command_line import environment
from tests.support.proxy import Asked, NetworkProxy, Refuse
from tests.support.servers import BUCKET, Bucket

# Of which an upload has two parts, and a load several requests.
ELEMENTS = 5 * MIB  # 20 MiB


@dataclass(frozen=True)
class Place:
    """Where the commands work.

    Attributes:
        bucket: has a checkpoint `step-1`; results go below `out/`.
        folder: has the same as `step-1`, and as `model.pt`; results go below `out`.
    """

    bucket: Bucket
    folder: Path

    @property
    def commands(self) -> dict[str, list[str]]:
        """The commands by what they do, as words."""
        one = self.bucket.at("step-1")
        local, file, out = (
            f"file://{self.folder}",
            str(self.folder / "model.pt"),
            self.folder / "out",
        )
        return {
            "verify": ["verify", one],
            "export to a file": ["export", one, f"{out}/model.pt"],
            "export to a folder": ["export", one, f"{out}/model"],
            "export to a bucket": ["export", f"{local}/step-1", self.bucket.at("out/model.pt")],
            "import from a bucket": ["import", one, f"{local}/out/step-1"],
            "import to a bucket": ["import", file, self.bucket.at("out/step-1")],
            "cp from a bucket": ["cp", one, f"{local}/out/step-1"],
            "cp to a bucket": ["cp", f"{local}/step-1", self.bucket.at("out/step-1")],
            "bench": ["bench", self.bucket.at("out"), "--size", "40MiB"],
        }

    def results(self) -> list[str]:
        """Return what a command has written, uploads that are not finished included.

        Not the lock of a local folder, and not beacons: a save that fails leaves one, so that no
        sweep takes what another rank may still be writing.
        """
        places = (self.folder / "out").rglob("*")
        files = [str(one.relative_to(self.folder)) for one in places if not one.is_dir()]
        uploads = [one for one in self.bucket.uploads() if "/out/" in one]
        return [
            one
            for one in (*files, *self.bucket.keys("out"), *uploads)
            if ".dcp-objstore.lock" not in one and "/.save-" not in f"/{one}"
        ]


# Not `inspect`, which reads the index alone, and not `diff`, which compares digests.
READ = ("verify", "export to a file", "export to a folder")
READ = (*READ, "import from a bucket", "cp from a bucket")
WRITTEN = ("export to a bucket", "import to a bucket", "cp to a bucket", "bench")


def save(bucket: Bucket, folder: Path) -> Place:
    state = {"w": torch.full((ELEMENTS,), 1.0), "step": 1}
    dos.save(state, bucket.at("step-1"), storage_options=bucket.storage_options, progress=False)
    dos.save(state, f"file://{folder}/step-1", progress=False)
    torch.save(state, folder / "model.pt")
    return Place(bucket, folder)


@pytest.fixture
def place(bucket: Bucket, tmp_path: Path) -> Place:
    return save(bucket, tmp_path)


def start(
    words: list[str], options: Mapping[str, object], program: Sequence[str] = ("-m", "dcp_objstore")
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment(options)},
    )


def assert_failed(done: subprocess.Popen[str], status: int, says: str = "") -> str:
    """Assert that it ends with that status and one line that has that text; return all it said."""
    stdout, stderr = done.communicate(timeout=300)
    assert done.returncode == status, (done.args, stdout, stderr)
    lines = [line for line in stderr.splitlines() if "dcp-objstore: " in line]
    assert len(lines) == 1, (done.args, stderr)
    assert "Traceback" not in stderr
    assert says in lines[0], (done.args, stderr)
    return stdout + stderr


@pytest.mark.parametrize(
    "url", ["s4://bucket/x", "no-scheme", "s3:///no-bucket", "file://{tmp}/nothing"]
)
def test_wrong_urls_are_errors_of_the_caller(url, tmp_path):
    url = url.format(tmp=tmp_path)
    for words in (
        ["verify", url],
        ["inspect", url],
        ["diff", url, url],
        ["export", url, f"{tmp_path}/model.pt"],
        ["import", url, f"file://{tmp_path}/x"],
        ["cp", url, f"file://{tmp_path}/x"],
        ["bench", url, "--size", "1MiB"],
    ):
        if words[0] == "bench" and url.startswith("file"):
            continue  # a folder that does not exist is a place to save to
        arguments = [*words, *(["--seconds", "0.1"] if words[0] == "bench" else [])]
        assert_in_process(arguments, 2)
    assert list(tmp_path.iterdir()) == []


def assert_in_process(words: list[str], status: int) -> str:
    from typer.testing import CliRunner

    from dcp_objstore.cli.app import app

    done = CliRunner().invoke(app, words)
    assert done.exit_code == status, (words, done.output)
    assert len(done.stderr.splitlines()) == 1, (words, done.stderr)
    return done.stderr


def test_keys_that_are_not_there_are_named(tmp_path):
    url, other = f"file://{tmp_path}/step-1", f"file://{tmp_path}/out"
    dos.save({"model": {"weight": torch.ones(3)}}, url, progress=False)
    torch.save({"model": {"weight": torch.ones(3)}}, tmp_path / "model.pt")
    for words in (
        ["inspect", url, "modle.*"],
        ["diff", url, url, "--keys", "modle.*"],
        ["export", url, f"{tmp_path}/out.pt", "--keys", "modle.*"],
        ["import", f"{tmp_path}/model.pt", other, "--keys", "modle.*"],
    ):
        said = assert_in_process(words, 2)
        assert "'modle.*'" in said, (words, said)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model.pt", "step-1"]


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("name", READ)
def test_a_damaged_block_ends_every_command_that_reads_it(place, name):
    (key,) = (key for key in place.bucket.keys("step-1") if key.endswith(".distcp"))
    place.bucket.flip_byte(f"step-1/{key}", 9 * MIB)
    said = assert_failed(start(place.commands[name], place.bucket.storage_options), 4)
    assert "w[" in said or "key w" in said or "of w" in said, said
    assert place.results() == []


ON_A_LITTLE_DISK = f"""
import resource
from dcp_objstore.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({6 * MIB}, {6 * MIB}))
main()
"""


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
def test_a_full_disk_ends_every_command_that_writes_there(place):
    local = [
        *(place.commands[name] for name in READ if "--" not in name and "a " in name),
        ["bench", f"file://{place.folder}/out", "--size", "40MiB"],
    ]
    assert len(local) == 5
    for words in local:
        done = start(words, place.bucket.storage_options, ("-c", ON_A_LITTLE_DISK))
        assert_failed(done, 2, "File too large")
        assert place.results() == [], words


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
def test_a_full_bucket_ends_every_command_that_writes_there(place):
    with NetworkProxy(place.bucket.storage_options) as proxy:
        proxy.plan = lambda asked: (
            Refuse(403, "QuotaExceeded") if "partNumber=2" in asked.query else None
        )
        for name in WRITTEN:
            assert_failed(start(place.commands[name], proxy.storage_options), 2, "full")
            assert place.results() == [], name


def is_data(asked: Asked) -> bool:
    is_range = asked.method == "GET" and asked.name.endswith(".distcp")
    return is_range or (asked.method == "PUT" and "partNumber=2" in asked.query)


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("name", [*READ, *WRITTEN])
def test_ctrl_c_ends_every_command_and_leaves_nothing(place, name):
    with NetworkProxy(place.bucket.storage_options) as proxy:
        held = proxy.hold(is_data)
        done = start(place.commands[name], proxy.storage_options)
        held.wait()
        done.send_signal(signal.SIGINT)
        if name in WRITTEN:
            held.release()  # an upload is aborted when its parts that are under way have ended
        assert_failed(done, 130, "ended by Ctrl-C")
        proxy.hang_up()
    # Objects that no commit names may have arrived: a copy goes on from them.
    is_save = name.startswith(("cp", "import"))
    kept = [one for one in place.bucket.uploads() if "/out/" in one]
    kept += [one for one in place.results() if not (is_save and one.endswith(".distcp"))]
    assert kept == []


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[tuple[SeaweedServer, Place, NetworkProxy]]:
    with SeaweedServer() as server, NetworkProxy(server.storage_options) as proxy:
        server.create_bucket(BUCKET)
        options = server.storage_options
        yield (
            server,
            save(Bucket("seaweed", f"s3://{BUCKET}/run", options, options), tmp_path),
            proxy,
        )


@pytest.mark.campaign
@pytest.mark.timeout(900)  # each command retries for about a minute
def test_a_server_that_dies_ends_every_command_and_no_result_is_half_written(doomed):
    server, place, proxy = doomed
    for names in (READ, WRITTEN):
        held = {}
        running = {}
        for name in names:
            held[name] = proxy.hold(is_data, times=1)
            running[name] = start(place.commands[name], proxy.storage_options)
            held[name].wait()
        server.kill()
        proxy.hang_up()
        said = {name: assert_failed(done, 3) for name, done in running.items()}
        server.restart()
        results = place.results()
        assert not any(one.endswith("_COMMIT") and "/.bench-" not in one for one in results)
        assert not any(one.startswith("out/model") for one in results), results
        if place.bucket.uploads():
            assert any("incomplete multipart upload" in one for one in said.values())
        if any(".bench-" in one for one in results):
            assert "remove everything below" in said["bench"]
