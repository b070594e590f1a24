"""What is listed of a run, with which requests, and when a step was committed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.catalogue import (
    ClaimRecord,
    CommitTime,
    Entry,
    commit_time,
    encode_claim,
    list_by_prefix,
    list_run,
    next_step,
    read_entry,
)
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.marker import new_id
from dcp_objstore.checkpoint.names import CLAIM_KEY, MARKER_KEY, data_key, index_key, new_nonce
from dcp_objstore.errors import RetryableError
from tests.support.memory_store import Below, MemoryStore, TickingClock
from tests.support.upkeep import finish, upload


@pytest.fixture
def run() -> MemoryStore:
    return MemoryStore("memory://test/run")


def save(run: MemoryStore, *names: str, claim: int = 0) -> None:
    for name in names:
        step = Below(run, name)
        finish(step, commits.take_begin_token(step, overwrite=False, claim=claim), upload(step))


def claim_run(run: MemoryStore, number: int) -> None:
    run.put(CLAIM_KEY, encode_claim(ClaimRecord(number=number, base=number, write_id=new_id())))


def spoil(run: MemoryStore, name: str, marker: bytes = b"{}") -> None:
    """A step with a marker that cannot be read, and an index."""
    run.put(f"{name}/{index_key(new_nonce())}", b"")
    run.put(f"{name}/{MARKER_KEY}", marker)


def listed(run: MemoryStore, **settings: Any) -> list[str]:
    settings = {"clock": TickingClock(), **settings}
    return [step.name for step in list_run(run, lambda name: Below(run, name), **settings).steps]


def following(run: MemoryStore, name: str) -> str | None:
    return next_step(run, lambda name: Below(run, name), name)


def test_a_listing_asks_only_for_the_markers_of_steps(run):
    """Not for that of the run itself, of what lies deeper, or of a tombstone alone."""
    save(run, "step-1", "deeper/step-2", "step-3")
    finish(run, commits.take_begin_token(run, overwrite=False), upload(run))
    delete(Below(run, "step-3"))
    for key in run.bucket.keys("step-3/"):
        if key != MARKER_KEY:
            run.delete(f"step-3/{key}")
    run.put(f"step-4/{index_key(new_nonce())}", b"")
    upload(Below(run, "step-4"))
    del run.requests[:]
    assert listed(run) == ["step-1"]
    marker = ("get", f"step-1/{MARKER_KEY}")
    assert run.requests == [("get", CLAIM_KEY), ("list", ""), marker, ("get", CLAIM_KEY)]


def test_a_listing_leaves_out_a_damaged_step_and_says_so(run, caplog):
    save(run, "step-1")
    spoil(run, "step-2")
    assert listed(run) == ["step-1"]
    assert "memory://test/run/step-2" in caplog.text
    assert listed(run, with_damaged=True) == ["step-1", "step-2"]


def test_markers_are_read_as_the_caller_says(run):
    save(run, "step-1", "step-2")
    remembered = {name: read_entry(name, Below(run, name), {}) for name in ("step-1", "step-2")}
    del run.requests[:]

    def read(name: str, store: object, objects: object) -> Entry:
        return remembered[name]

    assert listed(run, read=read) == ["step-1", "step-2"]
    assert run.requests == [("get", CLAIM_KEY), ("list", ""), ("get", CLAIM_KEY)]


def test_a_run_that_is_claimed_again_and_again_is_not_listed_beyond_the_deadline(run):
    claims = iter(range(1, 1000))

    def claimed_again(key: str) -> None:
        if key == CLAIM_KEY:
            claim_run(run, next(claims))

    run.on_get = claimed_again
    clock = TickingClock(1)
    with pytest.raises(RetryableError, match="kept claiming") as caught:
        listed(run, clock=clock)
    assert caught.value.url == run.url
    assert clock.now < 2


def test_of_the_data_of_a_step_one_object_is_kept_in_memory_unless_all_are_asked_for():
    store, nonce = MemoryStore(), new_nonce()
    names = [MARKER_KEY, *(data_key(rank, 0, nonce) for rank in range(3))]
    for step, name in product(("step-1", "step-2"), names):
        store.put(f"{step}/{name}", b"")
    kept = {step: sorted(objects) for step, objects in list_by_prefix(store).items()}
    assert kept == {step: sorted(names[:2]) for step in ("step-1", "step-2")}
    everything = list_by_prefix(store, all_data=True)
    assert [len(objects) for objects in everything.values()] == [4, 4]


# --- the step after one


def test_a_prefix_that_no_url_can_name_is_left_out_with_one_warning(run, caplog):
    save(run, "step-1")
    for odd in ("step-2\t", "..", "step-\udcff", "deep//er"):
        run.objects.update({f"{odd}/{MARKER_KEY}": run.objects[f"step-1/{MARKER_KEY}"]})
        meta = replace(run.objects[f"{odd}/{MARKER_KEY}"][1], key=f"{odd}/{MARKER_KEY}")
        run.objects[f"{odd}/{MARKER_KEY}"] = b"", meta
        for _ in range(2):
            assert set(list_by_prefix(run)) == {"step-1"}
        assert sum(ascii(odd) in record.getMessage() for record in caplog.records) == 1


def test_a_marker_that_contradicts_the_listing_is_asked_for_again(run):
    """It may be that of another step: a proxy had mixed up two answers."""
    save(run, "step-1", "step-2")
    objects_at, step = list_by_prefix(run), f"step-2/{MARKER_KEY}"
    right = run.objects[step]
    run.objects[step] = run.objects[f"step-1/{MARKER_KEY}"]
    reads: list[str] = []

    def answer(key: str) -> None:
        reads.append(key)
        if len(reads) == 2:
            run.objects[step] = right

    run.on_get = answer
    entry = read_entry("step-2", Below(run, "step-2"), objects_at["step-2"])
    assert entry.marker.index is not None
    assert entry.marker.index.key in objects_at["step-2"]
    assert reads == [step, step]


def test_the_next_step_is_the_first_later_one_that_counts(run):
    save(run, "step-1", claim=2)
    save(run, "step-8", claim=1)
    save(run, "step-9", "step-10", "step-11", "step-12", claim=2)
    claim_run(run, 2)
    assert following(run, "step-7") == "step-9"
    assert following(run, "step-9") == "step-10"
    assert following(run, "step-12") is None


def test_a_prefix_that_no_job_ever_claimed_is_not_listed_for_a_hint(run):
    save(run, "step-1", "step-2")
    del run.requests[:]
    assert following(run, "step-1") is None
    assert run.requests == [("get", CLAIM_KEY)]


# --- when a step was committed


def test_commits_are_compared_by_the_stores_time_of_their_indexes(run):
    """A host's clock may be wrong, and what the listing does not show has only that."""
    save(run, "step-1")
    run.bucket.age(hours=1)
    objects_at = list_by_prefix(run)
    [step] = list_run(run, lambda name: Below(run, name), clock=TickingClock()).steps
    index = step.marker.index
    assert index is not None
    by_store = objects_at["step-1"][index.key].last_modified
    by_host = step.marker.created_at
    assert by_store < by_host
    assert step.committed_at == CommitTime(by_store, by_host)
    assert commit_time(step.marker, {}) == CommitTime(by_host, by_host)
