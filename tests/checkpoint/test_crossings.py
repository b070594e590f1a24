"""`.metadata` where a publication, a deletion and a sweep cross: found by `tests.model`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp_objstore.checkpoint.commit import rewrite_marker
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.checkpoint.read import open_committed, read_marker
from dcp_objstore.checkpoint.repair import repair
from dcp_objstore.checkpoint.sweep import sweep
from dcp_objstore.errors import RetryableError, StoreUnavailableError
from tests.support import upkeep
from tests.support.memory_store import MemoryStore, Put, TickingClock
from tests.support.upkeep import DESCRIBED, AgedStore


class Crossed(MemoryStore):
    """Once, right before a request for `.metadata`, the checkpoint is deleted."""

    def __init__(self, verb: str | None, *, answers: bool = True) -> None:
        super().__init__()
        self.verb = verb
        self.answers = answers
        self.on_put = self._before_put

    def _before_put(self, put: Put) -> None:
        if put.key == DOT_METADATA_KEY and self.verb == "put":
            self._cross()
            if not self.answers:
                self.apply(put)
                raise StoreUnavailableError("no answer")

    def head(self, key: str):
        if key == DOT_METADATA_KEY and self.verb == "head":
            self._cross()
        return super().head(key)

    def _cross(self) -> None:
        self.verb = None
        delete(self)


@pytest.mark.parametrize("answers", [True, False])
def test_a_deletion_that_crosses_a_save_leaves_no_dot_metadata(answers: bool) -> None:
    store = Crossed("put", answers=answers)
    with pytest.raises(AssertionError):  # `save` expects that it was published
        upkeep.save(store)
    assert upkeep.state(store) == "deleted"
    assert DOT_METADATA_KEY not in store.objects


def test_what_repair_makes_obsolete_is_kept_for_the_grace_period() -> None:
    """Stock readers may have begun with the old `.metadata` a moment ago."""
    store = AgedStore(MemoryStore())
    upkeep.save(store)
    old = upkeep.named(store)
    upkeep.save(store, overwrite=True, publish=False)
    store.age()
    assert repair(store, dot_metadata=DESCRIBED).dot_metadata == "written"
    assert sweep(store, dot_metadata=DESCRIBED).outcome == "waiting"
    assert old <= upkeep.keys(store)
    store.age()
    assert sweep(store, dot_metadata=DESCRIBED).outcome == "swept"
    assert not old & upkeep.keys(store)


def test_what_a_late_publication_makes_obsolete_is_kept_for_the_grace_period() -> None:
    store = AgedStore(MemoryStore())
    upkeep.save(store)
    old = upkeep.named(store)
    done = upkeep.save(store, overwrite=True, publish=False)
    store.age()
    body = DESCRIBED.derive(open_committed(store)[1])
    assert publish_dot_metadata(store, done.commit_id, body)
    assert sweep(store, dot_metadata=DESCRIBED).outcome == "waiting"
    assert old <= upkeep.keys(store)


def test_what_a_removed_dot_metadata_named_is_kept_for_the_grace_period() -> None:
    store = AgedStore(MemoryStore())
    upkeep.save(store)
    old = upkeep.named(store)
    stale, _ = store.get(DOT_METADATA_KEY, max_size_bytes=10**6)
    delete(store)
    store.put(DOT_METADATA_KEY, stale)
    store.age()
    assert repair(store, dot_metadata=DESCRIBED).dot_metadata == "removed"
    assert sweep(store, dot_metadata=DESCRIBED).outcome == "waiting"
    assert old <= upkeep.keys(store)


def test_a_sweep_removes_nothing_once_a_deletion_has_crossed_it() -> None:
    inner = Crossed(None)
    store = AgedStore(inner)
    upkeep.save(store)
    old = upkeep.named(store)
    upkeep.save(store, overwrite=True, publish=False)
    store.age()
    inner.verb = "head"
    assert sweep(store, dot_metadata=DESCRIBED).outcome == "lost"
    assert inner.verb is None
    assert old <= upkeep.keys(store)


class Repaired(MemoryStore):
    """The checkpoint changes right after its `.metadata` was written and looked after."""

    def __init__(self, change: Callable[[MemoryStore], object]) -> None:
        super().__init__()
        upkeep.save(self, publish=False)
        self._change = change
        self._looks = 0
        self.on_get = self._look

    def _look(self, key: str) -> None:
        if key == MARKER_KEY and DOT_METADATA_KEY in self.objects:
            self._looks += 1
            if self._looks == 2:
                self._change(self)


def test_a_deletion_that_begins_as_dot_metadata_is_repaired_is_left_to_finish() -> None:
    """The last look at the marker finds the same commit, which is being deleted."""

    def begin_to_delete(store: MemoryStore) -> None:
        found = read_marker(store)
        assert found is not None
        tries = TickingClock().tries()
        assert rewrite_marker(store, found, "the deletion", tries, state="deleting")

    with pytest.raises(RetryableError, match="being deleted"):
        repair(Repaired(begin_to_delete), dot_metadata=DESCRIBED)


def test_a_save_that_comes_as_dot_metadata_is_repaired_has_its_own() -> None:
    store = Repaired(lambda store: upkeep.save(store, overwrite=True, publish=False))
    assert repair(store, dot_metadata=DESCRIBED).dot_metadata == "written"
    _, index = open_committed(store)
    assert DESCRIBED.describes(store.body(DOT_METADATA_KEY), index)
