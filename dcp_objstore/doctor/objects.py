"""What is asked of objects, tried out one right after the other: put, list, read, parts, delete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import probe
from dcp_objstore.config import MIB
from dcp_objstore.doctor.findings import Finding, failed, size_text, summary
from dcp_objstore.errors import (
    CredentialsError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
)
from dcp_objstore.stores.protocol import LEFTOVER_ADVICE

if TYPE_CHECKING:
    from dcp_objstore.doctor.scratch import Scratch, Stop
    from dcp_objstore.stores.spec import StoreSpec

_PART_SIZE_BYTES = 5 * MIB  # the least that S3 takes
_UNEQUAL = "other bytes came back than were written: what this store keeps cannot be trusted"
_REPORT_IT = "do not use it; tell its operator, or whoever runs a proxy or cache on the way"


class ObjectChecks:
    """The checks of objects, in the order in which they build on one another."""

    def __init__(self, spec: StoreSpec, scratch: Scratch, stop: Stop) -> None:
        self._spec = spec
        self._url = spec.parsed
        self._scratch = scratch
        self._store = scratch.store
        self._stop = stop
        self._body = os.urandom(2048)
        self._written = False

    def all(self) -> Iterator[Finding]:
        """Make them."""
        checks = (
            ("put", self._put),
            ("list", self._list),
            ("read", self._read),
            ("multipart", self._multipart),
            ("abort", self._abort),
            ("conditional put", self._conditional_put),
            ("delete", self._delete),
        )
        for name, check in checks:
            self._stop.check()
            try:
                yield from check()
            except DcpObjstoreError as error:
                yield failed(name, error, self._url)

    @property
    def written(self) -> bool:
        """Whether objects can be written."""
        return self._written

    def _put(self) -> Iterator[Finding]:
        try:
            with self._scratch.writing("put") as key:
                self._store.put(key, self._body)
        except (CredentialsError, PermissionDeniedError, InputError) as error:
            if not self._signed_put_works():
                raise
            yield Finding(
                "put",
                "failed",
                f"only with a signed body: {summary(error)}",
                "pass storage_options={'sign_payload': True}",
            )
            return
        self._written = True
        unsigned = self._url.scheme == "s3" and not (self._spec.storage_options or {}).get(
            "sign_payload"
        )
        how = " (its body unsigned, which is quicker)" if unsigned else ""
        yield Finding("put", "ok", f"an object was written{how}")

    def _signed_put_works(self) -> bool:
        """Some servers refuse a body that the signature does not cover."""
        options = dict(self._spec.storage_options or {})
        if self._url.scheme != "s3" or options.get("sign_payload"):
            return False
        signing = replace(self._scratch.spec, storage_options={**options, "sign_payload": True})
        try:
            with self._scratch.writing("put") as key:
                signing.open().put(key, self._body)
        except DcpObjstoreError:
            return False  # the first error is the one to tell
        return True

    def _list(self) -> Iterator[Finding]:
        found = {meta.key for meta in self._store.list()}
        if self._written and "put" not in found:
            yield Finding(
                "list",
                "failed",
                "an object that was just written is not listed",
                "a commit checks by listing that all objects are there; use a store that lists"
                " what was written at once",
            )
        else:
            told = ", and shows at once what was written" if self._written else ""
            yield Finding("list", "ok", f"listing works{told}")

    def _read(self) -> Iterator[Finding]:
        if not self._written:
            yield from self._read_existing()
            return
        body = bytes(self._store.get_range("put", 100, 1500))
        if body != self._body[100:1500]:
            yield Finding("read", "failed", _UNEQUAL, _REPORT_IT)
            return
        yield Finding("read", "ok", "a range of an object was read")

    def _read_existing(self) -> Iterator[Finding]:
        """Where nothing can be written, one byte of something that is there."""
        store = self._spec.open()
        found = next((meta for meta in store.list() if meta.size_bytes), None)
        if found is None:
            yield Finding("read", "not made", "there is nothing to read, and nothing was written")
            return
        store.get_range(found.key, 0, 1)
        yield Finding("read", "ok", f"a byte of {found.key} was read")

    def _multipart(self) -> Iterator[Finding]:
        first, last = os.urandom(_PART_SIZE_BYTES), os.urandom(1000)
        parts = self._store.capabilities.multipart
        try:
            with self._scratch.writing("multipart") as key:
                self._store.put_stream(
                    key,
                    iter((first, last)),
                    part_size_bytes=_PART_SIZE_BYTES,
                    max_concurrency=2,
                )
        except DcpObjstoreError as error:
            yield failed("multipart", error, self._url)
            why = "no object in parts could be written"
            yield Finding("checksums", "not made", why)
            return
        if parts:
            yield Finding("multipart", "ok", "an object was written in two parts")
        else:
            yield Finding("multipart", "not applicable", "objects are written in one go here")
        self._stop.check()
        try:
            size = len(first) + len(last)
            same = bytes(self._store.get_range("multipart", 0, size)) == first + last
        except DcpObjstoreError as error:
            yield Finding("checksums", "not made", f"it could not be read back: {summary(error)}")
            return
        if same:
            yield Finding("checksums", "ok", f"{size_text(size)} came back as written")
        else:
            yield Finding("checksums", "failed", _UNEQUAL, _REPORT_IT)

    def _abort(self) -> Iterator[Finding]:
        if not self._store.capabilities.multipart:
            yield Finding("abort", "not applicable", "there are no uploads in parts here")
            return
        if not self._written:
            yield Finding("abort", "not made", "no object can be written")
            return
        gone = _EndedOnPurposeError("ended on purpose")

        def broken() -> Iterator[bytes]:
            yield os.urandom(_PART_SIZE_BYTES)
            yield os.urandom(_PART_SIZE_BYTES)
            raise gone

        try:
            with self._scratch.writing("abort") as key:
                self._store.put_stream(
                    key, broken(), part_size_bytes=_PART_SIZE_BYTES, max_concurrency=2
                )
        except _EndedOnPurposeError as error:
            refused = LEFTOVER_ADVICE in error.message
        left = self._unfinished()
        if refused or left:
            denied = PermissionDeniedError("the parts of an upload that was given up stay behind")
            yield failed("abort", denied, self._url)
        elif left is None:
            yield Finding("abort", "ok", "an upload was given up; whether its parts went is unseen")
        else:
            yield Finding("abort", "ok", "an upload was given up, and its parts are gone")

    def _unfinished(self) -> int | None:
        uploads = self._scratch.uploads()
        try:
            return len(uploads.list()) if uploads is not None else None
        except DcpObjstoreError:
            return None  # the check of unfinished uploads says why

    def _conditional_put(self) -> Iterator[Finding]:
        if not self._written:
            yield Finding("conditional put", "not made", "no object can be written")
            return
        found = probe.probe(self._store)
        details = {
            "conditional_create": found.conditional_create,
            "conditional_update": found.conditional_update,
        }
        if found.conditional_create and found.conditional_update:
            text = "creating and replacing: of two or more writers exactly one wins"
            yield Finding("conditional put", "ok", text, details=details)
        elif found.conditional_create:
            yield Finding(
                "conditional put",
                "warning",
                "an object can be created conditionally, but not replaced",
                "save each checkpoint under a URL of its own: none can be overwritten, or saved"
                " again after it was deleted",
                details,
            )
        else:
            yield Finding(
                "conditional put",
                "failed",
                "the condition of a PUT (If-None-Match: *) is ignored or refused, so two jobs"
                " that save one checkpoint would damage it",
                "use a store with conditional writes; or, if only one job ever saves here, pass"
                " allow_unfenced=True to ObjectStoreWriter or save",
                details,
            )

    def _delete(self) -> Iterator[Finding]:
        if not self._written:
            yield Finding("delete", "not made", "there is nothing of ours to delete")
            return
        self._store.delete("put")
        try:
            self._store.head("put")
        except ObjectNotFoundError:
            yield Finding("delete", "ok", "an object was deleted, and is gone at once")
            return
        except PermissionDeniedError:
            yield Finding("delete", "ok", "an object was deleted; it may not be looked for")
            return
        yield Finding("delete", "failed", "an object that was deleted is still there")


class _EndedOnPurposeError(DcpObjstoreError):
    """Raised in the midst of an upload, so that it is aborted."""
