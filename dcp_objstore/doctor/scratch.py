"""`Scratch`: a random prefix below a URL where checks may write, and its removal.

No existing object is touched, because none lies under the random name. Objects that are written
there are removed, and a listing afterwards checks that they are gone.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from dcp_objstore.checkpoint.names import new_nonce
from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import DcpObjstoreError, InputError
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.stores.s3.unfinished import S3Uploads
from dcp_objstore.stores.spec import StoreSpec, open_bucket_uploads

T = TypeVar("T")


class Stop(threading.Event):
    """A flag that asks running checks to end soon."""

    def check(self) -> None:
        """Raise `StoppedError` once `set` was called."""
        if self.is_set():
            raise StoppedError


class StoppedError(BaseException):
    """The checks were asked to stop. Not an Exception, so that no check reports it as a finding."""


@dataclass(frozen=True, slots=True)
class Unremoved:
    """The objects that could not be removed.

    Attributes:
        keys: keys of the objects, relative to the scratch prefix.
        why: text of the first error, or empty.
        listed: whether a listing showed them. Otherwise only known keys are among them.
    """

    keys: Sequence[str]
    why: str
    listed: bool


class Scratch:
    """A prefix below a URL where checks may write.

    Args:
        spec: the URL, with its options and settings.
        name: the name of the prefix without its random part.

    Attributes:
        spec: store and prefix of the scratch objects.
        store: the store, rooted at the prefix.
        keys: keys that may have been written, relative to the prefix.
    """

    def __init__(self, spec: StoreSpec, name: str = ".doctor") -> None:
        self.spec = spec.child(f"{name}-{new_nonce()}")
        self._folder = Path(self.spec.parsed.prefix) if spec.parsed.scheme == "file" else None
        above = () if self._folder is None else self._folder.parents
        # The folders that a write will make, which `remove` removes, too: the innermost first.
        self._new_folders = [folder for folder in above if not os.path.lexists(folder)]
        self.store: ObjectStore = self.spec.open()
        self.keys: set[str] = set()
        self._outer_spec = spec  # unfinished uploads are listed for all of it

    @contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Note the object that the block writes, so that `remove` removes it.

        Unless the store refused it for good (`InputError`), the object may be there after an error.
        """
        self.keys.add(name)
        try:
            yield name
        except InputError:
            self.keys.discard(name)
            raise

    @cached_property
    def around(self) -> S3Uploads:
        """The unfinished uploads below the URL; raises what `open_bucket_uploads` does."""
        return open_bucket_uploads(self._outer_spec)

    def uploads(self) -> S3Uploads:
        """Return the unfinished uploads below the prefix; raise as `around` does."""
        return self.around.below(self.spec.url.rpartition("/")[2])

    def remove(self) -> Unremoved:
        """Remove everything below the prefix; return what could not be removed.

        Whatever fails, the rest is tried.
        """
        errors: list[DcpObjstoreError] = []  # an attempt that makes it longer has failed
        listed_before = _attempt(errors, lambda: {meta.key for meta in self.store.list()})
        undeleted = set()
        for key in sorted(self.keys | (listed_before or set())):
            error_count = len(errors)
            _attempt(errors, partial(self.store.delete, key))
            if len(errors) > error_count:
                undeleted.add(key)
        listed_after = _attempt(errors, lambda: {meta.key for meta in self.store.list()})
        # What is still listed was not removed; without a listing, what could not be deleted.
        keys = undeleted if listed_after is None else listed_after
        # An error of this listing does not count, because few stores can list uploads.
        for upload in _attempt([], lambda: self.uploads().list()) or ():
            error_count = len(errors)
            _attempt(errors, partial(self.uploads().abort, upload))
            if len(errors) > error_count:
                keys.add(f"{upload.key} (unfinished upload)")
        if self._folder is not None:
            self._remove_folders(self._folder)
        why = errors[0].message if errors else ""
        return Unremoved(sorted(keys), why, listed=listed_after is not None)

    def _remove_folders(self, folder_of_objects: Path) -> None:
        """Remove the folder of the objects, and those above that a write has made."""
        shutil.rmtree(folder_of_objects, ignore_errors=True)
        for folder in self._new_folders:
            try:
                folder.rmdir()
            except OSError:
                return  # not empty because of another program, or no write has made any of them


def _attempt(errors: list[DcpObjstoreError], action: Callable[[], T]) -> T | None:
    """Return what an action returns; append its error to a list, and return None."""
    try:
        return action()
    except DcpObjstoreError as error:
        errors.append(error)
        return None
