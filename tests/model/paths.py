"""Is what happened a path in the model? Follows every state in which the model may be."""

from __future__ import annotations

from collections.abc import Sequence

from tests.model.actors import Actor
from tests.model.world import Event, Me, Store

State = tuple[Store, tuple[Me, ...]]


class NoPathError(AssertionError):
    """The model does not allow what happened."""


class Path:
    """A run of the actors, as far as it has come."""

    def __init__(self, actors: Sequence[Actor], store: Store) -> None:
        self.actors = actors
        self.states: set[State] = {(store, tuple(actor.start() for actor in actors))}
        self.events: list[Event] = []

    def follow(self, event: Event) -> None:
        """Go on by one event.

        Raises:
            NoPathError: no state that the model may be in allows it; says what it does allow.
        """
        i = next(n for n, actor in enumerate(self.actors) if actor.name == event.actor)
        following = set()
        allowed = set()
        for store, mes in self.states:
            for possible, me, after in self.actors[i].moves(mes[i], store):
                allowed.add(possible)
                if possible == event:
                    following.add((after, (*mes[:i], me, *mes[i + 1 :])))
        if not following and event == self._before(event.actor) and event.verb == "get":
            return  # what is missing is asked for once more, and once is enough for the model
        if not following:
            lines = [*map(str, self.events), f"then, which the model does not allow: {event}"]
            lines += [f"allowed: {one}" for one in sorted(allowed)]
            raise NoPathError("\n".join(lines))
        self.states = following
        self.events.append(event)

    def _before(self, actor: str) -> Event | None:
        """The last event of this actor."""
        return next((one for one in reversed(self.events) if one.actor == actor), None)

    def answers(self, name: str) -> set[str | None]:
        """What the model says that an actor was told; None: it is not at its end."""
        i = next(n for n, actor in enumerate(self.actors) if actor.name == name)
        return {mes[i].answer if mes[i].at is None else None for _, mes in self.states}

    def stores(self) -> set[Store]:
        return {store for store, _ in self.states}
