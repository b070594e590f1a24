"""Publishing: `.metadata` follows the marker, whatever others do meanwhile and whoever answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY, is_ours
from dcp_objstore.checkpoint.publish import (
    Aligned,
    align_dot_metadata,
    if_metadata_unchanged,
    publish_dot_metadata,
)
from dcp_objstore.checkpoint.read import Stored, open_committed, read_marker
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CorruptDataError,
    PermissionDeniedError,
    RetryableError,
)
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, ObjectMeta
from tests.support.memory_store import LOST, UNANSWERED, Fate, MemoryStore, TickingClock, in_turn
from tests.support.upkeep import DESCRIBED, finish, save, tear_deletion, upload

LOOK = ["head .metadata", "get _COMMIT"]
PUT = ["put .metadata", "get _COMMIT"]
JUDGE = ["get index", "get .metadata"]


def requests(store: MemoryStore, after: int = 0) -> list[str]:
    names = (f"{verb} {'index' if is_ours(key) else key}" for verb, key in store.requests[after:])
    return list(names)


def publish(store: MemoryStore, commit_id: str, **changes) -> tuple[bool, list[str]]:
    """Whether it was written, and the requests."""
    before = len(store.requests)
    usual = {"body": b"ours", "tries": TickingClock().tries()}
    return publish_dot_metadata(store, commit_id, **{**usual, **changes}), requests(store, before)


def stored_marker(store: MemoryStore) -> Stored[Marker]:
    stored = read_marker(store)
    assert stored is not None
    return stored


def align(store: MemoryStore, **changes) -> tuple[Aligned, list[str]]:
    """What it returns, and the requests."""
    stored, before = stored_marker(store), len(store.requests)
    usual = {"tries": TickingClock().tries()}
    aligned = align_dot_metadata(store, stored, DESCRIBED, **{**usual, **changes})
    return aligned, requests(store, before)


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("before", [None, b"another's"])
def test_it_is_put_on_what_was_there_between_two_looks_at_the_marker(store, before, fenced):
    done = save(store, publish=False)
    if before is not None:
        store.put(DOT_METADATA_KEY, before)
    seen = if_metadata_unchanged(store)
    assert seen == (IfVersion(store.head(DOT_METADATA_KEY).version) if before else IfAbsent())
    assert publish(store, done.commit_id, fenced=fenced) == (True, LOOK + PUT)
    put = store.puts[-1]
    assert (put.key, put.data, put.retry) == (DOT_METADATA_KEY, b"ours", False)
    assert put.precondition == (seen if fenced else None)


def test_it_costs_two_requests_if_it_is_what_the_save_saw(store):
    save(store)
    token = commits.take_begin_token(store, overwrite=True)
    done = finish(store, token, upload(store))
    assert publish(store, done.commit_id, condition=token.dot_metadata) == (True, PUT)
    assert store.body(DOT_METADATA_KEY) == b"ours"


def test_a_refusal_is_raised_at_once_and_the_commit_stands(store):
    done = save(store, publish=False)
    store.on_put = lambda put: PermissionDeniedError("no")
    with pytest.raises(PermissionDeniedError):
        publish(store, done.commit_id)
    assert [put.key for put in store.puts].count(DOT_METADATA_KEY) == 1
    assert open_committed(store)[0] == done.marker


def remove_marker(store: MemoryStore) -> None:
    store.delete(MARKER_KEY)


def overwrite(store: MemoryStore) -> None:
    save(store, overwrite=True, publish=False)


@pytest.mark.parametrize(
    ("change", "removed"),
    [(remove_marker, False), (overwrite, False), (delete, True), (tear_deletion, True)],
)
@pytest.mark.parametrize("answered", [True, False])
def test_what_was_put_is_taken_back_only_if_a_deletion_came_in_between(
    store, answered, change, removed
):
    """The deletion may have removed `.metadata` before it was put."""
    done = save(store, publish=False)

    def cross(put) -> Fate | None:
        change(store)
        return None if answered else UNANSWERED

    store.on_put = in_turn(DOT_METADATA_KEY, cross)
    written, sent = publish(store, done.commit_id)
    assert written == (answered and not removed)
    assert (DOT_METADATA_KEY in store.objects) == (not removed)
    end = [*(["get _COMMIT"] if answered else LOOK), *["delete .metadata"] * removed]
    assert sent[-len(end) :] == end


def test_no_put_begins_after_the_deadline_and_the_error_says_that_the_commit_stands(store):
    done = save(store, publish=False)
    store.on_put = lambda put: LOST
    clock = TickingClock(deadline_seconds=10)
    with pytest.raises(RetryableError, match=r"last answer: no answer.* committed") as caught:
        publish(store, done.commit_id, tries=clock.tries())
    assert caught.value.url == store.url
    assert 0 < clock.now < 11
    assert sum(put.key == DOT_METADATA_KEY for put in store.puts) > 2


# --- bringing it into line


def in_line(store: MemoryStore) -> bool:
    return store.body(DOT_METADATA_KEY) == DESCRIBED.derive(open_committed(store)[1])


def test_where_it_is_in_line_its_age_is_told(store):
    save(store)
    aligned, sent = align(store)
    written_at = store.head(DOT_METADATA_KEY).last_modified
    assert aligned == Aligned(stored_marker(store), None, written_at)
    assert sent == JUDGE


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("before", [None, b"metadata of another"])
def test_it_is_written_where_a_commit_stands(store, before, dry_run):
    save(store, publish=False)
    if before is not None:
        store.put(DOT_METADATA_KEY, before)
    aligned, sent = align(store, dry_run=dry_run)
    assert aligned == Aligned(stored_marker(store), "written")
    assert sent == JUDGE + ([] if dry_run else [*LOOK, *PUT, "get _COMMIT"])
    wanted = DESCRIBED.derive(open_committed(store)[1])
    assert store.objects.get(DOT_METADATA_KEY, (None,))[0] == (before if dry_run else wanted)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("body", [None, b"metadata of another", b"another library's"])
def test_it_is_removed_where_a_tombstone_stands_if_it_is_ours(store, body, dry_run):
    """Also where the tombstone is a fence, which names no index."""
    assert commits.put_tombstone(store, TickingClock().tries())
    if body is not None:
        store.put(DOT_METADATA_KEY, body)
    aligned, sent = align(store, dry_run=dry_run)
    ours = body is not None and DESCRIBED.is_ours(body)
    removed = ours and not dry_run
    assert aligned == Aligned(stored_marker(store), "removed" if ours else None)
    assert sent == ["get .metadata", *(["delete .metadata", "get _COMMIT"] if removed else [])]
    assert (DOT_METADATA_KEY in store.objects) == (body is not None and not removed)


class Large(MemoryStore):
    """`.metadata` has this size there, which no test could hold."""

    size_bytes = 0

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        if key == DOT_METADATA_KEY and self.size_bytes > max_size_bytes:
            raise CorruptDataError("too large", object_key=key)
        return super().get(key, max_size_bytes=max_size_bytes)


@pytest.mark.parametrize("more", [0, 1])
def test_one_of_more_than_4_gib_is_not_ours(more):
    store = Large()
    save(store)
    store.size_bytes = 4 * 2**30 + more
    assert align(store, dry_run=True)[0].change == ("written" if more else None)
    delete(store)
    store.put(DOT_METADATA_KEY, b"metadata of another")
    assert align(store, dry_run=True)[0].change == (None if more else "removed")


def at_look(store: MemoryStore, number: int, change: Callable[[MemoryStore], object]) -> None:
    """Change something right before the `number`-th look at the marker."""
    looks = 0

    def on_get(key: str) -> None:
        nonlocal looks
        looks += key == MARKER_KEY
        if looks == number:
            store.on_get = None
            change(store)

    store.on_get = on_get


def rewrite(store: MemoryStore) -> None:
    assert commits.rewrite_marker(store, stored_marker(store), "", TickingClock().tries())


def publish_late(store: MemoryStore) -> None:
    save(store, publish=False)


@pytest.mark.parametrize(
    ("deleted", "look", "change", "told", "puts"),
    [
        # Stores delete without conditions: what was removed may have been the new one.
        (True, 2, publish_late, "written", 1),
        (False, 4, lambda store: save(store, overwrite=True), "written", 2),
        (False, 2, lambda store: save(store, overwrite=True), None, 1),  # this call wrote none
        (False, 4, rewrite, "written", 1),
    ],
)
def test_what_was_changed_is_told_with_the_marker_that_stands(
    store, deleted, look, change, told, puts
):
    save(store, publish=False)
    if deleted:
        delete(store)
        store.put(DOT_METADATA_KEY, b"metadata of another")
    at_look(store, look, change)
    clock, before = TickingClock(), len(store.puts)
    aligned, _ = align(store, tries=clock.tries())
    assert (aligned.stored, aligned.change) == (stored_marker(store), told)
    assert in_line(store)
    assert sum(put.key == DOT_METADATA_KEY for put in store.puts[before:]) == puts
    assert (clock.now > 0) == (change is not rewrite)


@pytest.mark.parametrize(
    ("look", "change", "kind", "why"),
    [
        (4, remove_marker, CheckpointCorruptError, "the marker was removed"),
        (1, tear_deletion, RetryableError, "being deleted"),
        (4, tear_deletion, RetryableError, "being deleted"),
    ],
)
def test_what_is_deleted_or_disappears_meanwhile_is_an_error(store, look, change, kind, why):
    save(store, publish=False)
    at_look(store, look, change)
    with pytest.raises(kind, match=why) as caught:
        align(store)
    assert caught.value.url == store.url


def test_it_ends_at_the_deadline_if_others_never_stop_saving(store):
    save(store, publish=False)

    def overwrite_first(key: str) -> None:
        if key == MARKER_KEY:
            store.on_get = None
            overwrite(store)
            store.on_get = overwrite_first

    store.on_get = overwrite_first
    clock = TickingClock(deadline_seconds=3)
    with pytest.raises(RetryableError, match="others kept changing") as caught:
        align(store, tries=clock.tries())
    assert caught.value.url == store.url
    assert 0 < clock.now < 4
