"""Check the object requests, one right at a time: put, list, read, parts, delete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import probe
from dcp_objstore.config import MIB
from dcp_objstore.doctor.checks import (
    TO_LIST,
    Verdict,
    allow,
    failed,
    not_applicable,
    ok,
    warning,
)
from dcp_objstore.doctor.scratch import Scratch
from dcp_objstore.errors import DcpObjstoreError, ObjectNotFoundError, PermissionDeniedError
from dcp_objstore.observe.report import logger, size_text
from dcp_objstore.stores.protocol import LEFTOVER_ADVICE
from dcp_objstore.stores.ranges import read_range

if TYPE_CHECKING:
    from dcp_objstore.stores.protocol import ObjectStore
    from dcp_objstore.stores.spec import StoreSpec


_PART_SIZE_BYTES = 5 * MIB  # the smallest part that S3 accepts
_CHANGED_BYTES = "the bytes read back differ from those written: this store cannot be trusted"
_REPORT_IT = "do not use it; tell its operator, or the operator of a proxy or cache on the way"


class ObjectChecks:
    """The checks of object requests, in an order in which each can rely on those before it.

    Attributes:
        has_written: whether `put` has written its object.
    """

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._url = spec.parsed
        self._body = os.urandom(2048)
        self.has_written = False

    @cached_property
    def scratch(self) -> Scratch:
        """The prefix where the checks write. It does not exist before the first check."""
        return Scratch(self._spec)

    @property
    def _store(self) -> ObjectStore:
        return self.scratch.store

    def abandon(self) -> None:
        """Remove what was written before the checks were stopped, and log what could not be."""
        # `scratch` is a cached property: as long as it is not there, no check has written anything.
        if "scratch" in self.__dict__:
            unremoved = self.scratch.remove()
            if unremoved.keys:
                logger.warning(
                    "%s could not be removed: %s", ", ".join(unremoved.keys), unremoved.why
                )

    def put(self) -> Verdict:
        """Write an object. To S3 its body is unsigned, unless an option asks for signed ones."""
        with self.scratch.writing("put") as key:
            self._store.put(key, self._body)
        self.has_written = True
        is_signed = self._url.scheme != "s3" or self._spec.storage_options.get("sign_payload")
        remark = "" if is_signed else " (with an unsigned body, which is faster)"
        return ok(f"an object was written{remark}")

    def listing(self) -> Verdict:
        """List objects, and see one that was just written."""
        keys = {meta.key for meta in self._store.list()}
        if not self.has_written:  # `put` failed, but these credentials may list
            return ok("listing works")
        if "put" in keys:
            return ok("listing works, and shows a written object at once")
        return failed(
            "an object that was just written is not listed",
            "a commit lists the objects to check that all exist; use a store that lists an object"
            " as soon as it is written",
        )

    def read(self) -> Verdict:
        """Read a range, and check that the store says when an object does not exist."""
        body = read_range(self._store, "put", 100, 1500)
        if body != self._body[100:1500]:
            return failed(_CHANGED_BYTES, _REPORT_IT)
        try:
            read_range(self._store, "absent", 0, 1)
        except PermissionDeniedError:
            # S3 and GCS answer so if the credentials may not list. If the right to list has a
            # condition on the prefix, listings work, but a GET does not meet the condition.
            advice = f"{allow(TO_LIST, self._url)}, without a condition on a prefix"
            text = "an object that does not exist is answered with 'forbidden', so a job cannot see"
            return failed(f"{text} that there is no checkpoint yet", advice)
        except ObjectNotFoundError:
            pass
        return ok("a range of an object was read")

    def _put_in_parts(self, name: str, parts: Iterator[bytes]) -> None:
        with self.scratch.writing(name) as key:
            self._store.put_stream(key, parts, part_size_bytes=_PART_SIZE_BYTES, max_concurrency=2)

    def multipart(self) -> Verdict:
        """Write an object in two parts, and read it back."""
        parts = os.urandom(_PART_SIZE_BYTES), os.urandom(1000)
        self._put_in_parts("multipart", iter(parts))
        size_bytes = sum(map(len, parts))
        try:
            if read_range(self._store, "multipart", 0, size_bytes) != b"".join(parts):
                return failed(_CHANGED_BYTES, _REPORT_IT)
        except PermissionDeniedError:
            return ok("an object was written in two parts")  # the check of reads reports it
        return ok(f"{size_text(size_bytes)} were written in two parts, and read back unchanged")

    def abort(self) -> Verdict:
        """Abort an upload, whose parts are then gone."""
        if not self._store.capabilities.multipart:
            return not_applicable("this store has no uploads in parts")

        def two_parts_and_an_error() -> Iterator[bytes]:
            yield os.urandom(_PART_SIZE_BYTES)
            yield os.urandom(_PART_SIZE_BYTES)
            raise _EndedOnPurposeError("ended on purpose")

        abort_failed = False
        try:
            self._put_in_parts("abort", two_parts_and_an_error())
        except _EndedOnPurposeError as error:
            # `put_stream` adds this advice to an error if it could not abort the upload.
            abort_failed = error.advice == LEFTOVER_ADVICE
        unfinished_uploads = self._count_unfinished()
        if abort_failed or unfinished_uploads:
            # Raised, so that the advice names the right to abort.
            raise PermissionDeniedError("the parts of an aborted upload were not removed")
        if unfinished_uploads is None:
            return ok("an upload was aborted; whether its parts are gone cannot be seen")
        return ok("an upload was aborted, and its parts are gone")

    def _count_unfinished(self) -> int | None:
        """Return the number of unfinished uploads of these checks; None if nothing tells it."""
        try:
            return len(self.scratch.uploads().list())
        except DcpObjstoreError:
            return None  # the check of unfinished uploads reports why

    def conditional_put(self) -> Verdict:
        """Let writers race for one object: whether a PUT can create or replace it conditionally."""
        conditions = probe.probe(self._store)
        create, update = conditions.conditional_create, conditions.conditional_update
        details = {"conditional_create": create, "conditional_update": update}
        if create and update:
            text = "of two or more writers that create or replace an object, exactly one wins"
            return ok(text, **details)
        if create:
            return warning(
                "an object can be created conditionally, but not replaced",
                "save each checkpoint under a new URL: a checkpoint cannot be overwritten, or saved"
                " again after it was deleted",
                **details,
            )
        return failed(
            "the store ignores or refuses the condition of a PUT (If-None-Match: *), so two jobs"
            " that save the same checkpoint would damage it",
            "use a store with conditional writes; or, if only one job ever saves here, pass"
            " allow_unfenced=True to ObjectStoreWriter or save",
            **details,
        )

    def delete(self) -> Verdict:
        """Delete an object, which is then gone."""
        self._store.delete("put")
        try:
            self._store.head("put")
        except ObjectNotFoundError:
            return ok("an object was deleted, and was gone at once")
        except PermissionDeniedError:
            return ok("an object was deleted; these credentials may not look whether it is gone")
        return failed("a deleted object is still there", _REPORT_IT)

    def clean_up(self) -> Verdict:
        """Remove everything that the checks wrote."""
        unremoved = self.scratch.remove()
        if not unremoved.keys:
            return ok("all objects of these checks were removed")
        url = self.scratch.spec.url
        return failed(
            f"{len(unremoved.keys)} objects of these checks could not be removed: {unremoved.why}",
            f"remove everything below {url}",
            url=url,
            keys=unremoved.keys,
        )


class _EndedOnPurposeError(DcpObjstoreError):
    """Raised during an upload, so that the upload is aborted."""
