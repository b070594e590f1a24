"""A listener that keeps what it hears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.events import AnyEvent, Event

E = TypeVar("E", bound=Event)


class Heard(list[AnyEvent]):
    """The events, in their order; as a listener, and as `on_event`."""

    def __call__(self, event: AnyEvent) -> None:
        self.append(event)


def of(kind: type[E], heard: Sequence[AnyEvent]) -> list[E]:
    """Those of one type."""
    return [event for event in heard if isinstance(event, kind)]


def heard_channel() -> tuple[Channel, Heard]:
    """A channel with a listener that hears every detail."""
    channel, heard = Channel("save", "memory://heard"), Heard()
    channel.add(heard, "test", detailed=True)
    return channel, heard
