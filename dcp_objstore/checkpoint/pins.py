"""Pins: names that protect a commit from deletion and from being overwritten.

Pins are part of the marker, so a pin and a deletion are decided by the same conditional PUT: either
the pin is there first and the deletion is refused, or the pin finds nothing left to protect.
A pin belongs to one commit; a commit that replaces it does not inherit the pin.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock, pause_or_raise
from dcp_objstore.checkpoint.commit import rewrite_marker
from dcp_objstore.checkpoint.marker import MAX_PIN_LENGTH, MAX_PINS
from dcp_objstore.checkpoint.read import not_committed, read_marker
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.stores.retries import Tries

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def pin(
    store: ObjectStore,
    name: str,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[str, ...]:
    """Protect the commit at the store's root. If it already has this pin, nothing changes.

    Args:
        store: the store, rooted at the checkpoint. It needs conditional updates
            (`probe.require_rewrites`).
        name: the pin's name: 1 to 200 characters, none of them a control character.
        clock: the clock, which also sets the deadline: by default 60 s after the start.

    Returns:
        All pins of the commit.

    Raises:
        ConfigError: the name has another form, or the commit has 64 pins already.
        CheckpointNotFoundError: nothing is committed here.
        CommitUnknownError, RetryableError: no success before the deadline; it is safe to pin again.
    """
    check_name(name)

    def with_this(pins: tuple[str, ...]) -> tuple[str, ...]:
        if name in pins:
            return pins
        if len(pins) >= MAX_PINS:
            raise ConfigError(f"a checkpoint has at most {MAX_PINS} pins", url=store.url)
        return (*pins, name)

    return _change_pins(store, with_this, clock.tries())


def unpin(
    store: ObjectStore,
    name: str,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[str, ...]:
    """Remove a pin, if it is there. Arguments, result and errors are those of `pin`."""
    check_name(name)
    return _change_pins(
        store,
        lambda pins: tuple(other for other in pins if other != name),
        clock.tries(),
    )


def _change_pins(
    store: ObjectStore, new_pins: Callable[[tuple[str, ...]], tuple[str, ...]], tries: Tries
) -> tuple[str, ...]:
    """Rewrite the marker with other pins until no other writer comes in between; return them.

    Args:
        new_pins: returns the pins that the commit shall have, from those that it has.
    """
    while True:
        stored = read_marker(store)
        if stored is None or not stored.record.is_committed:
            raise not_committed(store, stored)
        pins = new_pins(stored.record.pins)
        if pins == stored.record.pins or rewrite_marker(store, stored, "the pin", tries, pins=pins):
            return pins
        pause_or_raise(store, tries)


def check_name(name: object) -> None:
    """Raise ConfigError unless this can be the name of a pin."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_PIN_LENGTH or _CONTROL.search(name):
        raise ConfigError(
            f"a pin's name has 1 to {MAX_PIN_LENGTH} characters and no control characters"
        )
