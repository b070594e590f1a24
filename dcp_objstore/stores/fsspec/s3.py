"""`ObjectStore` over s3fs, which lets any call of S3 through: conditions, parts, one-request reads.

`call_s3` and its coroutine `_call_s3` take the arguments of botocore's client, so writes carry
`IfNoneMatch` and `IfMatch` themselves, and the parts of an upload run beside each other on s3fs's
event loop. s3fs's own file object sends them one after the other, and its `pipe_file` knows no
update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from dcp_objstore.errors import (
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsupportedError,
)
from dcp_objstore.stores.buffers import WatchedBuffers, cut_parts
from dcp_objstore.stores.fsspec.errors import translate_fsspec
from dcp_objstore.stores.fsspec.store import FsspecStore
from dcp_objstore.stores.protocol import (
    LEFTOVER_ADVICE,
    Capabilities,
    IfAbsent,
    IfVersion,
    ObjectMeta,
    Precondition,
    Version,
)

_log = logging.getLogger("dcp_objstore")


class S3fsStore(FsspecStore):
    """A store rooted at one URL, over s3fs."""

    @property
    def capabilities(self) -> Capabilities:
        """Everything; `checkpoint.probe` finds out if the server keeps it."""
        return Capabilities()

    def _put(
        self, path: str, body: bytes, precondition: Precondition | None, *, retry: bool
    ) -> Version:
        fs = self._filesystems.fs if retry else self._filesystems.once
        condition: dict[str, str] = {}
        if isinstance(precondition, IfAbsent):
            condition["IfNoneMatch"] = "*"
        elif isinstance(precondition, IfVersion):
            if precondition.version.e_tag is None:
                raise InputError(f"a conditional write needs the e_tag of {precondition.version}")
            condition["IfMatch"] = precondition.version.e_tag
        elif precondition is not None:
            raise UnsupportedError(f"not a precondition: {precondition!r}")
        try:
            answer = fs.call_s3(
                "put_object", **self._place(path), Body=body, **condition, **self._checksum(body)
            )
        except Exception as error:
            found = translate_fsspec(error)
            if "IfMatch" in condition and isinstance(found, ObjectNotFoundError):
                # If-Match on an absent key: 404 on AWS and moto, 412 elsewhere.
                raise PreconditionFailedError("there is no such object any more") from error
            raise
        return Version(answer["ETag"])

    def _put_stream(
        self, path: str, source: WatchedBuffers, part_size_bytes: int, max_concurrency: int
    ) -> Version:
        parts = cut_parts(source, part_size_bytes)
        first = list(next(parts, ()))
        size = sum(map(len, first))
        if size < part_size_bytes:
            return self._put(path, b"".join(first), None, retry=True)
        place = self._place(path)
        beginning = self._filesystems.checksums.beginning
        upload_id = self._fs.call_s3("create_multipart_upload", **place, **beginning)["UploadId"]
        upload = {**place, "UploadId": upload_id}
        # With each part the buffers that it was made of: their end is the caller's sign that it
        # has arrived.
        pending: dict[Future[Any], tuple[dict[str, Any], list[memoryview]]] = {}
        sent: list[dict[str, Any]] = []
        number = 0
        try:
            while first:
                number += 1
                body = b"".join(first)
                part = {"PartNumber": number, **self._checksum(body)}
                pending[self._start_part(upload, part, body)] = (part, first)
                while len(pending) >= max_concurrency:
                    self._collect(pending, sent)
                first = list(next(parts, ()))
            while pending:
                self._collect(pending, sent)
            # With the checksums again, as over boto3 (`boto3.upload`).
            listed = sorted(sent, key=lambda part: part["PartNumber"])
            answer = self._fs.call_s3(
                "complete_multipart_upload", **upload, MultipartUpload={"Parts": listed}
            )
        except BaseException as error:
            for future in pending:
                future.cancel()
            self._abort(upload, error)
            raise
        return Version(answer["ETag"])

    def _start_part(
        self, upload: Mapping[str, Any], part: Mapping[str, Any], body: bytes
    ) -> Future[Any]:
        call = self._fs._call_s3("upload_part", **upload, **part, Body=body)
        return asyncio.run_coroutine_threadsafe(call, self._fs.loop)

    @staticmethod
    def _collect(
        pending: dict[Future[Any], tuple[dict[str, Any], list[memoryview]]],
        sent: list[dict[str, Any]],
    ) -> None:
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            part, _ = pending.pop(future)
            sent.append({**part, "ETag": future.result()["ETag"]})

    def _abort(self, upload: Mapping[str, Any], cause: BaseException) -> None:
        try:
            self._fs.call_s3("abort_multipart_upload", **upload)
        except Exception as error:  # noqa: BLE001  the first error is the one to show
            if isinstance(translate_fsspec(error), ObjectNotFoundError):
                return  # the store has forgotten it: nothing is left
            if isinstance(cause, DcpObjstoreError):
                cause.message += f"; {LEFTOVER_ADVICE}"
            else:
                _log.warning("an upload was not aborted: %s; %s", upload["Key"], LEFTOVER_ADVICE)

    def _get(self, key: str, path: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        from fsspec.asyn import sync

        async def read() -> tuple[Any, bytes | None]:
            answer = await self._fs._call_s3("get_object", **self._place(path))
            stream = answer["Body"]
            try:
                large = answer["ContentLength"] > max_size_bytes
                return answer, None if large else await stream.read()
            finally:
                stream.close()

        answer, body = sync(self._fs.loop, read)
        size = answer["ContentLength"]
        if body is None:
            raise CorruptDataError(
                f"the object has {size} bytes, at most {max_size_bytes} expected"
            )
        if len(body) != size:
            raise CorruptDataError(f"the store announced {size} bytes and sent {len(body)}")
        return body, ObjectMeta(key, size, Version(answer["ETag"]), answer["LastModified"])

    def _checksum(self, body: bytes) -> dict[str, str]:
        return self._filesystems.checksums.of([memoryview(body)])

    def _place(self, path: str) -> dict[str, str]:
        bucket, key, _ = self._fs.split_path(path)
        return {"Bucket": bucket, "Key": key}
