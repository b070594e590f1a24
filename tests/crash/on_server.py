"""The bucket of the matrix on a real server, whose conditions, listings and uploads then decide.

Time passes in here alone: the server's times are shown earlier by as much as the bucket was aged
since the object was written. All writes go through here, so this needs no time of the server,
which Ceph's gateway gives in milliseconds in listings, and in whole seconds elsewhere.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

from dcp_objstore.errors import ObjectNotFoundError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta, Precondition, Version
from tests.support.memory_store import Bucket, _Pending
from tests.support.servers import BUCKET, make_s3_client

_MOST_BYTES = 1 << 30
_open = StoreSpec.open  # before the matrix puts its own in this place
_numbers = itertools.count()
_run = secrets.token_hex(4)


@cache
def _client(endpoint_url: str, key: str, secret: str) -> Any:
    return make_s3_client(
        endpoint_url=endpoint_url,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
    )


class ServerBucket(Bucket):
    """Objects and uploads below a fresh prefix of a server.

    Attributes:
        storage_options: those of the server; set before the first bucket is made.
    """

    storage_options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._prefix = f"crash-{_run}/{next(_numbers)}/"
        self._store = _open(StoreSpec(f"s3://{BUCKET}/{self._prefix}", self.storage_options))
        self._client = _client(**self.storage_options)
        # By how much an object, by its key, or an upload, by its name, is older than it says.
        self._older: dict[str, timedelta] = {}
        self._named: dict[str, dict[str, str]] = {}  # the arguments that name an upload
        self._parts: dict[str, dict[int, bytes]] = {}
        self._sizes: dict[str, list[int]] = {}  # of the parts of each object that has some
        self._changing = threading.Lock()
        self.objects = _Objects(self)  # type: ignore[assignment]

    @property
    def uploads(self) -> dict[str, _Pending]:  # type: ignore[override]
        """Those that the server lists; none are begun elsewhere."""
        if not self._named:
            return {}
        listed = self._client.list_multipart_uploads(Bucket=BUCKET, Prefix=self._prefix)
        return {
            one["UploadId"]: _Pending(
                one["Key"].removeprefix(self._prefix),
                one["Initiated"] - self._older.get(one["UploadId"], timedelta()),
                self._parts[one["UploadId"]],
            )
            for one in listed.get("Uploads", ())
        }

    @uploads.setter
    def uploads(self, _: object) -> None:
        """They are the server's."""

    def copy(self) -> ServerBucket:
        """As it is now: with the ETags, the ages and the unfinished uploads."""
        twin = ServerBucket()
        for meta in self.list(""):
            body, _ = self.get(meta.key)
            if meta.key in self._sizes:
                name, at = twin.begin(meta.key), 0
                for number, size in enumerate(self._sizes[meta.key], 1):
                    twin.part(name, number, body[at : at + size])
                    at += size
                twin.complete(name)
            else:
                twin.put(meta.key, body)
            assert twin.get(meta.key)[1].version == meta.version
        shown = {meta.key: meta.last_modified for meta in self.list("")}
        for meta in twin.list(""):
            twin._older[meta.key] = meta.last_modified - shown[meta.key]
        for name, pending in self.uploads.items():
            other = twin.begin(pending.key)
            for number, body in pending.parts.items():
                twin.part(other, number, body)
            twin._older[other] = self._older.get(name, timedelta())
        return twin

    def age(self, **units: float) -> None:
        for name in [*self.objects, *self.uploads]:
            self._older[name] = self._older.get(name, timedelta()) + timedelta(**units)

    def put(self, key: str, body: bytes, precondition: Precondition | None = None) -> Version:
        retry = precondition is None
        with self._changing:
            version = self._store.put(key, body, precondition=precondition, retry=retry)
            self._older.pop(key, None)
            self._sizes.pop(key, None)
        return version

    def get(self, key: str) -> tuple[bytes, ObjectMeta]:
        if key.startswith("/"):  # the prefix above the run, which is no run
            raise ObjectNotFoundError("404", object_key=key)
        with self._changing:
            body, meta = self._store.get(key, max_size_bytes=_MOST_BYTES)
            return body, self._aged(meta)

    def list(self, prefix: str) -> list[ObjectMeta]:
        # Callers list from the middle of a name, too.
        with self._changing:
            listed = list(self._store.list())
            return [self._aged(meta) for meta in listed if meta.key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def begin(self, key: str) -> str:
        answer = self._client.create_multipart_upload(Bucket=BUCKET, Key=self._prefix + key)
        name = str(answer["UploadId"])
        self._named[name] = {"Bucket": BUCKET, "Key": self._prefix + key, "UploadId": name}
        self._parts[name] = {}
        return name

    def part(self, name: str, number: int, body: bytes) -> None:
        self._client.upload_part(**self._named[name], PartNumber=number, Body=body)
        self._parts[name][number] = body

    def complete(self, name: str) -> Version:
        named = self._named[name]
        listed = self._client.list_parts(**named)["Parts"]
        parts = [{"PartNumber": one["PartNumber"], "ETag": one["ETag"]} for one in listed]
        key = named["Key"].removeprefix(self._prefix)
        with self._changing:
            self._client.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
            self._older.pop(key, None)
            self._sizes[key] = [len(body) for _, body in sorted(self._parts[name].items())]
        return self._store.head(key).version

    def abort(self, name: str) -> None:
        if name in self.uploads:
            self._client.abort_multipart_upload(**self._named[name])

    def _aged(self, meta: ObjectMeta) -> ObjectMeta:
        older = self._older.get(meta.key, timedelta())
        return replace(meta, last_modified=meta.last_modified - older)


class _Objects:
    """The keys of a bucket."""

    def __init__(self, bucket: ServerBucket) -> None:
        self._bucket = bucket

    def __iter__(self) -> Iterator[str]:
        return iter([meta.key for meta in self._bucket.list("")])

    def __contains__(self, key: object) -> bool:
        return key in list(self)
