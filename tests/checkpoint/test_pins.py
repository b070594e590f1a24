"""Pins protect a commit from deletion and overwriting; the first request wins."""

from __future__ import annotations

import pytest

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.delete import delete
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.checkpoint.pins import pin, unpin
from dcp_objstore.checkpoint.read import open_committed, read_marker
from dcp_objstore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    ConfigError,
    RetryableError,
)
from tests.support.memory_store import MemoryStore, Put, TickingClock, in_turn
from tests.support.upkeep import save, state


def pins_of(store: MemoryStore) -> tuple[str, ...]:
    stored = read_marker(store)
    assert stored is not None
    return stored.record.pins


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_a_pin_stays_until_it_is_removed_and_the_commit_with_it(real):
    store = real
    done = save(store)
    assert pin(store, "paper") == pin(store, "paper") == ("paper",)
    assert pin(store, "ö 1") == ("paper", "ö 1")
    marker = open_committed(store)[0]
    assert (marker.pins, marker.commit_id) == (("paper", "ö 1"), done.commit_id)
    assert marker.write_id != done.marker.write_id
    with pytest.raises(CheckpointPinnedError, match="paper, ö 1"):
        delete(store)
    assert state(store) == "committed"
    with pytest.raises(CheckpointExistsError, match="pinned"):
        commits.take_begin_token(store, overwrite=True)
    assert unpin(store, "paper") == unpin(store, "paper") == ("ö 1",)
    assert unpin(store, "ö 1") == ()
    delete(store)
    assert state(store) == "deleted"


def test_pin_that_is_there_already_sends_no_put(store):
    save(store)
    pin(store, "paper")
    before = len(store.puts)
    pin(store, "paper")
    unpin(store, "other")
    assert len(store.puts) == before


def test_two_pins_at_once_are_both_set(store):
    save(store)
    store.on_put = in_turn(MARKER_KEY, lambda _: pin(store, "other", clock=TickingClock()))
    pin(store, "mine", clock=TickingClock())
    assert set(pins_of(store)) == {"mine", "other"}


def test_there_must_be_a_checkpoint_to_pin(store):
    with pytest.raises(CheckpointNotFoundError):
        pin(store, "paper")
    save(store)
    delete(store)
    for change in (pin, unpin):
        with pytest.raises(CheckpointNotFoundError, match="was deleted"):
            change(store, "paper")


@pytest.mark.parametrize("name", ["", "x" * 201, "two\nlines", "\ud800", None, 3])
def test_a_name_has_1_to_200_characters_that_a_marker_can_hold(store, name):
    save(store)
    assert pin(store, "x" * 200) == pins_of(store) == ("x" * 200,)
    before = dict(store.objects)
    for change in (pin, unpin):
        if name != "\ud800" or change is pin:
            with pytest.raises(ConfigError):
                change(store, name)
    assert store.objects == before


def test_a_pin_gives_up_at_the_deadline_where_others_keep_changing_the_marker(store):
    save(store)
    pin(store, "other")
    others = iter(range(1000))
    clock = TickingClock(1)

    def change_first(put: Put) -> None:
        if b"mine" in put.data:
            store.on_put = None
            (pin if next(others) % 2 else unpin)(store, "other")
            store.on_put = change_first

    store.on_put = change_first
    with pytest.raises(RetryableError, match="others kept changing") as caught:
        pin(store, "mine", clock=clock)
    assert caught.value.url == store.url
    assert clock.now < 2
    assert "mine" not in pins_of(store)


def test_too_many_pins_are_refused(store):
    save(store)
    pins = [f"{number:0200}" for number in range(64)]  # each as long as a pin may be
    for name in pins:
        pin(store, name)
    with pytest.raises(ConfigError, match="at most 64"):
        pin(store, "one more")
    assert sorted(pins_of(store)) == pins
