"""Checkpoints that are real to the checkpoint floor, of any age, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TypeAlias

import pytest
import xxhash

from dcp_objstore.checkpoint import commit as commits, index as ix
from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK
from dcp_objstore.checkpoint.commit import BeginToken, CommitResult
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.marker import Counts
from dcp_objstore.checkpoint.names import data_key, is_ours, new_nonce
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.checkpoint.read import open_committed, read_marker
from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore
from dcp_objstore.stores.wrappers import WrappedStore
from tests.support import indexes
from tests.support.wrapped_stores import Fault, FaultStore

DAY_SECONDS = 24 * 3600.0

Ages: TypeAlias = dict[tuple[str, str | None], timedelta]


class Described:
    """A `.metadata` that is made of the index, for tests without torch."""

    def derive(self, index: bytes) -> bytes:
        return b"metadata of " + index

    def describes(self, body: bytes, index: bytes) -> bool:
        return bytes(body) == self.derive(index)  # raises if there is no body

    def is_ours(self, body: bytes) -> bool:
        return body.startswith(b"metadata of ")


DESCRIBED = Described()


class AgedStore(WrappedStore):
    """A store whose clock has gone on: `age` makes what is there now so much older.

    What is written later, a marker that is rewritten for one, has its true age.
    """

    def __init__(self, inner: ObjectStore, ages: Ages | None = None) -> None:
        super().__init__(inner)
        self._ages = {} if ages is None else ages  # shared by the stores of one bucket

    def age(self, seconds: float = 2 * DAY_SECONDS, *keys: str) -> None:
        """Make these keys older, or all of them."""
        for meta in list(self.inner.list()):
            if not keys or meta.key in keys:
                version = f"{self.url}/{meta.key}", self.inner.head(meta.key).version.e_tag
                already = self._ages.get(version, timedelta())
                self._ages[version] = already + timedelta(seconds=seconds)

    def _seen(self, meta: ObjectMeta) -> ObjectMeta:
        older = self._ages.get((f"{self.url}/{meta.key}", meta.version.e_tag), timedelta())
        return replace(meta, last_modified=meta.last_modified - older)

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        body, meta = super().get(key, max_size_bytes=max_size_bytes)
        return body, self._seen(meta)

    def head(self, key: str) -> ObjectMeta:
        return self._seen(super().head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return map(self._seen, super().list(prefix))


def upload(store: ObjectStore, ranks: int = 2) -> ix.Index:
    """What the ranks of one save put, and the index of it."""
    entries = []
    for rank in range(ranks):
        key = data_key(rank, 0, new_nonce())
        body = b"data of " + key.encode()
        e_tag = store.put(key, body).e_tag
        entries.append(ix.ObjectEntry(key, len(body), e_tag, xxhash.xxh3_128_digest(body)))
    return ix.decode(indexes.encode(indexes.Index(tuple(entries))))


def commit(
    store: ObjectStore, token: BeginToken, index: ix.Index, **settings: object
) -> CommitResult:
    """Commit what was uploaded."""
    total_bytes = sum(entry.size_bytes for entry in index.objects)
    usual = {"user_metadata": None, "nonce": new_nonce(), "world_size": len(index.objects)}
    return commits.commit_checkpoint(
        store,
        token,
        index=ix.encode(index),
        objects=[(entry.key, entry.size_bytes) for entry in index.objects],
        counts=Counts(objects=len(index.objects), total_bytes=total_bytes),
        **{**usual, **settings},  # type: ignore[arg-type]
    )


def finish(
    store: ObjectStore, token: BeginToken, index: ix.Index, **settings: object
) -> CommitResult:
    """Commit what was uploaded, without `.metadata`, and remove the beacon."""
    done = commit(store, token, index, **settings)
    commits.remove_beacon(store, token.beacon)
    return done


def save(store: ObjectStore, *, overwrite: bool = False, publish: bool = True) -> CommitResult:
    """A whole save."""
    token = commits.take_begin_token(store, overwrite=overwrite)
    index = upload(store)
    done = finish(store, token, index)
    if publish:
        body = DESCRIBED.derive(ix.encode(index))
        assert publish_dot_metadata(store, done.commit_id, body, tries=SYSTEM_CLOCK.tries())
    return done


def tear(store: ObjectStore) -> set[str]:
    """A save that died before its commit: the keys of its data. Its beacon is left, too."""
    commits.take_begin_token(store, overwrite=True)
    return {entry.key for entry in upload(store).objects}


def tear_deletion(store: ObjectStore) -> None:
    """A deletion that died at its first DELETE."""

    def die(verb: str, *_: object) -> Fault | None:
        return Fault("before", StoreUnavailableError("")) if verb == "delete" else None

    with pytest.raises(StoreUnavailableError):
        delete(FaultStore(store, die))


def keys(store: ObjectStore) -> set[str]:
    return {meta.key for meta in store.list()}


def named(store: ObjectStore) -> set[str]:
    """The keys of the committed checkpoint; checks that each is there."""
    marker, body = open_committed(store)
    assert marker.index is not None
    wanted = {marker.index.key, *(entry.key for entry in ix.decode(body).objects)}
    assert wanted <= keys(store)
    return wanted


def loose(store: ObjectStore) -> set[str]:
    """Keys of our own form that no commit names."""
    stored = read_marker(store)
    committed = stored is not None and stored.record.is_committed
    return {key for key in keys(store) if is_ours(key)} - (named(store) if committed else set())


def state(store: ObjectStore) -> str:
    stored = read_marker(store)
    return "absent" if stored is None else stored.record.state
