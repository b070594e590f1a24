"""Check the object requests, one right at a time: put, list, read, parts, delete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import probe
from dcp_objstore.config import MIB
from dcp_objstore.doctor.findings import Finding, advice_for, failed, summary
from dcp_objstore.errors import (
    CredentialsError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
)
from dcp_objstore.observe.report import size_text
from dcp_objstore.stores.protocol import LEFTOVER_ADVICE
from dcp_objstore.stores.ranges import read_range

if TYPE_CHECKING:
    from dcp_objstore.doctor.scratch import Scratch, Stop
    from dcp_objstore.stores.spec import StoreSpec

_PART_SIZE_BYTES = 5 * MIB  # the smallest part that S3 accepts
_UNEQUAL = "the bytes read back differ from those written: this store cannot be trusted"
_REPORT_IT = "do not use it; tell its operator, or the operator of a proxy or cache on the way"


class ObjectChecks:
    """The checks of object requests, in an order in which each can rely on those before it."""

    def __init__(self, spec: StoreSpec, scratch: Scratch, stop: Stop) -> None:
        self._spec = spec
        self._url = spec.parsed
        self._scratch = scratch
        self._store = scratch.store
        self._stop = stop
        self._body = os.urandom(2048)
        self._written = False

    def all(self) -> Iterator[Finding]:
        """Make all checks."""
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
                f"writing works only with a signed body: {summary(error)}",
                "pass storage_options={'sign_payload': True}",
            )
            return
        self._written = True
        unsigned = self._url.scheme == "s3" and not self._spec.storage_options.get("sign_payload")
        how = " (with an unsigned body, which is faster)" if unsigned else ""
        yield Finding("put", "ok", f"an object was written{how}")

    def _signed_put_works(self) -> bool:
        """Whether a PUT works if its body is signed: some servers refuse unsigned bodies."""
        options = dict(self._spec.storage_options)
        if self._url.scheme != "s3" or options.get("sign_payload"):
            return False
        signing = replace(self._scratch.spec, storage_options={**options, "sign_payload": True})
        try:
            with self._scratch.writing("put") as key:
                signing.open().put(key, self._body)
        except DcpObjstoreError:
            return False  # report the first error
        return True

    def _list(self) -> Iterator[Finding]:
        found = {meta.key for meta in self._store.list()}
        if self._written and "put" not in found:
            yield Finding(
                "list",
                "failed",
                "an object that was just written is not listed",
                "a commit lists the objects to check that all exist; use a store that lists an"
                " object as soon as it is written",
            )
        else:
            at_once = ", and shows a written object at once" if self._written else ""
            yield Finding("list", "ok", f"listing works{at_once}")

    def _read(self) -> Iterator[Finding]:
        if not self._written:
            yield from self._read_existing()
            return
        body = read_range(self._store, "put", 100, 1500)
        if body != self._body[100:1500]:
            yield Finding("read", "failed", _UNEQUAL, _REPORT_IT)
            return
        try:
            read_range(self._store, "absent", 0, 1)
        except PermissionDeniedError as error:
            # S3 and GCS answer so without the right to list. A condition on the prefix that is
            # listed allows every listing of a job, but does not hold for this request.
            advice = f"{advice_for('absent', error, self._url)}, without a condition on a prefix"
            text = "an object that does not exist is answered with 'forbidden', so a job cannot see"
            yield Finding("read", "failed", f"{text} that there is no checkpoint yet", advice)
            return
        except ObjectNotFoundError:
            pass
        yield Finding("read", "ok", "a range of an object was read")

    def _read_existing(self) -> Iterator[Finding]:
        """Read one byte of an existing object, because nothing can be written."""
        store = self._spec.open()
        found = next((meta for meta in store.list() if meta.size_bytes), None)
        if found is None:
            yield Finding("read", "not made", "there is no object to read, and none can be written")
            return
        read_range(store, found.key, 0, 1)
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
            why = "an object could not be written in parts"
            yield Finding("checksums", "not made", why)
            return
        if parts:
            yield Finding("multipart", "ok", "an object was written in two parts")
        else:
            yield Finding(
                "multipart", "not applicable", "this store takes an object in one request"
            )
        self._stop.check()
        try:
            size = len(first) + len(last)
            same = read_range(self._store, "multipart", 0, size) == first + last
        except DcpObjstoreError as error:
            yield Finding(
                "checksums", "not made", f"the object could not be read back: {summary(error)}"
            )
            return
        if same:
            yield Finding("checksums", "ok", f"{size_text(size)} were read back unchanged")
        else:
            yield Finding("checksums", "failed", _UNEQUAL, _REPORT_IT)

    def _abort(self) -> Iterator[Finding]:
        if not self._store.capabilities.multipart:
            yield Finding("abort", "not applicable", "this store has no uploads in parts")
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
            denied = PermissionDeniedError("the parts of an aborted upload were not removed")
            yield failed("abort", denied, self._url)
        elif left is None:
            yield Finding(
                "abort", "ok", "an upload was aborted; whether its parts are gone cannot be seen"
            )
        else:
            yield Finding("abort", "ok", "an upload was aborted, and its parts are gone")

    def _unfinished(self) -> int | None:
        uploads = self._scratch.uploads()
        try:
            return len(uploads.list()) if uploads is not None else None
        except DcpObjstoreError:
            return None  # the check of unfinished uploads reports why

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
            text = "of two or more writers that create or replace an object, exactly one wins"
            yield Finding("conditional put", "ok", text, details=details)
        elif found.conditional_create:
            yield Finding(
                "conditional put",
                "warning",
                "an object can be created conditionally, but not replaced",
                "save each checkpoint under a new URL: a checkpoint cannot be overwritten, or saved"
                " again after it was deleted",
                details,
            )
        else:
            yield Finding(
                "conditional put",
                "failed",
                "the store ignores or refuses the condition of a PUT (If-None-Match: *), so two"
                " jobs that save the same checkpoint would damage it",
                "use a store with conditional writes; or, if only one job ever saves here, pass"
                " allow_unfenced=True to ObjectStoreWriter or save",
                details,
            )

    def _delete(self) -> Iterator[Finding]:
        if not self._written:
            yield Finding("delete", "not made", "no object was written, so there is none to delete")
            return
        self._store.delete("put")
        try:
            self._store.head("put")
        except ObjectNotFoundError:
            yield Finding("delete", "ok", "an object was deleted, and was gone at once")
            return
        except PermissionDeniedError:
            yield Finding(
                "delete",
                "ok",
                "an object was deleted; these credentials may not look whether it is gone",
            )
            return
        yield Finding("delete", "failed", "a deleted object is still there")


class _EndedOnPurposeError(DcpObjstoreError):
    """Raised during an upload, so that the upload is aborted."""
