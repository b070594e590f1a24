"""The bucket of the crash matrix on a real server, whose conditions then decide."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
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


class ServerBucket(Bucket):
    """Objects and uploads below a fresh prefix of a server.

    Attributes:
        storage_options: of the server; set before the first is made.
    """

    storage_options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._root = f"crash-{_run}/{next(_numbers)}/"
        self._store = _open(StoreSpec(f"s3://{BUCKET}/{self._root}", self.storage_options))
        self._client = make_s3_client(
            endpoint_url=self.storage_options["endpoint_url"],
            aws_access_key_id=self.storage_options["key"],
            aws_secret_access_key=self.storage_options["secret"],
            region_name="us-east-1",
        )
        self._older: dict[tuple[str, datetime], timedelta] = {}  # by key or upload, and its time
        self._begun: dict[str, _Pending] = {}
        self.objects = _Objects(self)  # type: ignore[assignment]

    @property
    def uploads(self) -> dict[str, _Pending]:  # type: ignore[override]
        """Those that the server lists."""
        listed = self._client.list_multipart_uploads(Bucket=BUCKET, Prefix=self._root)
        return {
            one["UploadId"]: _Pending(
                one["Key"].removeprefix(self._root), self._aged(one["UploadId"], one["Initiated"])
            )
            for one in listed.get("Uploads", ())
        }

    @uploads.setter
    def uploads(self, _: object) -> None:
        """They are the server's."""

    def copy(self) -> ServerBucket:
        twin = ServerBucket()
        for meta in self.list(""):
            twin.put(meta.key, self.get(meta.key)[0])
        seen = {meta.key: meta.last_modified for meta in self.list("")}
        for meta in twin._store.list():
            twin._older[meta.key, meta.last_modified] = meta.last_modified - seen[meta.key]
        return twin

    def age(self, **units: float) -> None:
        by = timedelta(**units)
        times = {meta.key: meta.last_modified for meta in self._store.list()}
        listed = self._client.list_multipart_uploads(Bucket=BUCKET, Prefix=self._root)
        times |= {one["UploadId"]: one["Initiated"] for one in listed.get("Uploads", ())}
        for place in times.items():
            self._older[place] = self._older.get(place, timedelta()) + by

    def put(self, key: str, body: bytes, precondition: Precondition | None = None) -> Version:
        return self._store.put(key, body, precondition=precondition, retry=precondition is None)

    def get(self, key: str) -> tuple[bytes, ObjectMeta]:
        if key.startswith("/"):  # the prefix above the run, which is no run
            raise ObjectNotFoundError("404", object_key=key)
        body, meta = self._store.get(key, max_size_bytes=_MOST_BYTES)
        return body, self._meta(meta)

    def list(self, prefix: str) -> list[ObjectMeta]:
        # Callers list from the middle of a name, too.
        return [self._meta(meta) for meta in self._store.list() if meta.key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def begin(self, key: str) -> str:
        answer = self._client.create_multipart_upload(Bucket=BUCKET, Key=self._root + key)
        self._begun[answer["UploadId"]] = _Pending(key, self.now())
        return str(answer["UploadId"])

    def part(self, name: str, number: int, body: bytes) -> None:
        pending = self._begun[name]
        self._client.upload_part(**self._named(name), PartNumber=number, Body=body)
        pending.parts[number] = body

    def complete(self, name: str) -> Version:
        listed = self._client.list_parts(**self._named(name))["Parts"]
        parts = [{"PartNumber": one["PartNumber"], "ETag": one["ETag"]} for one in listed]
        named = self._named(name)
        self._client.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
        return self._store.head(self._begun[name].key).version

    def abort(self, name: str) -> None:
        key = next((one.key for other, one in self.uploads.items() if other == name), None)
        if key is not None:
            self._client.abort_multipart_upload(Bucket=BUCKET, Key=self._root + key, UploadId=name)

    def _named(self, name: str) -> dict[str, str]:
        return {"Bucket": BUCKET, "Key": self._root + self._begun[name].key, "UploadId": name}

    def _meta(self, meta: ObjectMeta) -> ObjectMeta:
        return replace(meta, last_modified=self._aged(meta.key, meta.last_modified))

    def _aged(self, name: str, time: datetime) -> datetime:
        return time - self._older.get((name, time), timedelta())


class _Objects:
    """The keys of a bucket."""

    def __init__(self, bucket: ServerBucket) -> None:
        self._bucket = bucket

    def __iter__(self) -> Iterator[str]:
        return iter([meta.key for meta in self._bucket.list("")])

    def __contains__(self, key: str) -> bool:
        return key in list(self)
