"""The real code on a stage: several actors in threads, one request at a time, in a drawn order.

Every request waits for its turn. What the network does with it is drawn too, from the same fates
as in `world.send`, and each turn is recorded as an `Event`, in the words of the model.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import md5
from typing import Any

from dcp_objstore.checkpoint.marker import Marker as RealMarker
from dcp_objstore.checkpoint.marker import decode_marker
from dcp_objstore.checkpoint.names import is_beacon_key, parse_data_key, parse_index_key
from dcp_objstore.errors import (
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dcp_objstore.stores.protocol import IfAbsent, ObjectMeta, Precondition, Version
from tests.model import world
from tests.model.world import (
    BEACON,
    DATA,
    DENIED,
    DOT,
    EVERYTHING,
    INDEX,
    MARKER,
    NO_ANSWER,
    NOBODY,
    Event,
)
from tests.support.memory_store import MemoryStore, Put, TickingClock
from tests.support.upkeep import DESCRIBED

_DAY = timedelta(days=1)
_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


class CrashedError(BaseException):
    """The process of an actor has died."""


class ContentStore(MemoryStore):
    """Equal content has an equal ETag, as on S3; and every change is days younger than the last."""

    def apply(self, put: Put) -> Version:
        super().apply(put)
        body, meta = self.objects[put.key]
        self.days = getattr(self, "days", 0) + 2
        version = Version(md5(body, usedforsecurity=False).hexdigest())
        meta = replace(meta, version=version, last_modified=_BEGINNING + self.days * _DAY)
        self.objects[put.key] = (body, meta)
        return version


class StageClock(TickingClock):
    """Tells sweeps that everything is old, or that everything is young."""

    def __init__(self, *, old: bool) -> None:
        super().__init__()
        self.old = old

    def utc_now(self) -> datetime:
        return _BEGINNING + (10_000 * _DAY if self.old else timedelta())


@dataclass
class Names:
    """Which save a commit_id, a body of `.metadata`, a data or an index key belongs to."""

    commits: dict[str, int] = field(default_factory=dict)
    dots: dict[bytes, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)

    def learn(self, key: str, body: bytes, save: int) -> None:
        """An object that a save put."""
        if key == MARKER:
            # Not what it rewrites of another: a tombstone, where it finishes a deletion.
            self.commits.setdefault(decode_marker(body).commit_id, save)
        elif kind_of(key) == INDEX:
            self.dots[DESCRIBED.derive(body)] = save
        self.keys[key] = save

    def marker(self, body: bytes) -> str:
        marker = decode_marker(body)
        return f"{marker.state} {world.save_name(self.commit(marker))}"

    def commit(self, marker: RealMarker) -> int:
        return self.commits.get(marker.commit_id, NOBODY)


@dataclass
class _Player:
    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    faults: int = 0
    flying: list[Put | str] = field(default_factory=list)
    ended: bool = False
    crashed: bool = False
    answer: str | None = None
    error: BaseException | None = None


class Stage:
    """Runs actors around one store.

    Args:
        seed: decides everything that is drawn.

    Attributes:
        events: what happened, in order.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = ContentStore()
        self.names = Names()
        self.events: list[Event] = []
        self.players: dict[str, _Player] = {}
        self._back = threading.Semaphore(0)

    def add(
        self, name: str, program: Callable[[StagedStore], str], *, faults: int, save: int | None
    ) -> None:
        player = self.players[name] = _Player(name, faults=faults)
        store = StagedStore(self, player, save)

        def run() -> None:
            try:
                store.await_turn()
                player.answer = program(store)
            except CrashedError:
                player.crashed = True
            except BaseException as error:  # noqa: BLE001 - raised again on the test's thread
                player.error = error
            player.ended = True
            self._back.release()

        threading.Thread(target=run, daemon=True).start()

    def run(self) -> None:
        """Until all have ended. Late requests arrive at any time, or never."""
        self._wait_for(len(self.players))
        while True:
            playing = [player for player in self.players.values() if not player.ended]
            late = [player for player in self.players.values() if player.flying]
            if late and self.rng.random() < 0.2:
                self._arrive(self.rng.choice(late))
            elif playing:
                player = self.rng.choice(playing)
                player.crashed = self.rng.random() < 0.01
                player.turn.release()
                self._wait_for(1)
                if player.error is not None:
                    raise player.error
            else:
                return

    def _wait_for(self, times: int) -> None:
        for _ in range(times):
            assert self._back.acquire(timeout=60), "an actor hangs"

    def _arrive(self, player: _Player) -> None:
        late = player.flying.pop(self.rng.randrange(len(player.flying)))
        if isinstance(late, str):
            self.store.objects.pop(late, None)
            self.events.append(Event(player.name, "late", DOT))
            return
        try:
            self.store.apply(late)
            outcome = "ok"
        except PreconditionFailedError:
            outcome = "refused"
        condition = _condition(late.precondition)
        self.events.append(Event(player.name, "late", late.key, condition, outcome))

    def pause(self, player: _Player) -> None:
        """An actor is about to send a request; the stage goes on until it is its turn."""
        self._back.release()
        player.turn.acquire()
        if player.crashed:
            raise CrashedError


class StagedStore:
    """What one actor has of the store. An `ObjectStore`, except for streams and ranges."""

    def __init__(self, stage: Stage, player: _Player, save: int | None) -> None:
        self.stage, self.player, self.save = stage, player, save
        self.inner = stage.store
        self.url = self.inner.url
        self.capabilities = self.inner.capabilities
        self.endpoint_url = self.inner.endpoint_url
        self.reports_throttling = self.inner.reports_throttling
        self._waited = False

    def await_turn(self) -> None:
        """Before the first request: nothing happens yet, so it is no event."""
        self.stage.pause(self.player)
        self._waited = True

    def _turn(self) -> None:
        if not self._waited:
            self.stage.pause(self.player)
        self._waited = False

    def _tell(self, verb: str, key: str, outcome: str, condition: str = "") -> None:
        event = Event(self.player.name, verb, kind_of(key), condition, outcome)
        self.stage.events.append(event)

    def _fate(self, *fates: str) -> str | None:
        """One of these faults, or None."""
        if not self.player.faults or self.stage.rng.random() < 0.6:
            return None
        self.player.faults -= 1
        return self.stage.rng.choice(fates)

    def put(
        self,
        key: str,
        data: Any,
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        self._turn()
        put = Put(key, bytes(data), precondition, retry, 0)
        self._learn(put)
        condition = _condition(precondition)
        before = dict(self.inner.objects)
        try:
            version = self.inner.apply(put)
            outcome = "ok"
        except PreconditionFailedError as error:
            refusal = error
            outcome = "refused"
        fate = None
        if kind_of(key) in (MARKER, DOT):
            fates = ["delayed"] if not self._flies(put) else []
            if kind_of(key) == MARKER:
                fates += [DENIED, *([f"ok, {DENIED}"] if outcome == "ok" else [])]
            if outcome == "ok":
                fates += ["ok, no answer", "refused for nothing"]
                if not self._flies(put):
                    fates.append("ok, a copy delayed")
                if condition and getattr(precondition, "version", None) != version:
                    fates.append("ok, then its copy refused")
            fate = self._fate(*fates) if fates else None
        self._tell("put", key, fate or outcome, condition)
        if fate in ("delayed", "refused for nothing", DENIED):
            self.inner.objects = before
        if fate in ("delayed", "ok, a copy delayed"):
            self.player.flying.append(put)
        if fate in ("delayed", "ok, no answer"):
            raise StoreUnavailableError("no answer")
        if fate in (DENIED, f"ok, {DENIED}"):
            raise PermissionDeniedError("403")
        if fate in ("refused for nothing", "ok, then its copy refused"):
            raise PreconditionFailedError("409")
        if outcome == "refused":
            raise refusal
        return version

    def _flies(self, put: Put) -> bool:
        return put in self.player.flying

    def _learn(self, put: Put) -> None:
        if self.save is not None:
            self.stage.names.learn(put.key, put.data, self.save)

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        kind = kind_of(key)
        self._turn()
        if kind in (MARKER, DOT) and self._fate(NO_ANSWER):
            self._tell("get", key, NO_ANSWER)
            raise StoreUnavailableError("no answer")
        found = self.inner.objects.get(key)
        names = self.stage.names
        if kind == MARKER:
            self._tell("get", key, names.marker(found[0]) if found else "absent")
        elif kind == DOT:
            self._tell("get", key, world.save_name(names.dots[found[0]]) if found else "absent")
        else:
            self._tell("get", key, "ok" if found else "missing")
        return self.inner.get(key, max_size_bytes=max_size_bytes)

    def head(self, key: str) -> ObjectMeta:
        self._turn()
        if self._fate(NO_ANSWER):
            self._tell("head", key, NO_ANSWER)
            raise StoreUnavailableError("no answer")
        self._tell("head", key, "present" if key in self.inner.objects else "absent")
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Any:
        self._turn()
        self._tell("list", EVERYTHING, "ok")
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self._turn()
        fate = None
        if key == DOT:
            flies = key in self.player.flying
            fates = ["ok, no answer", *([] if flies else ["delayed", "ok, a copy delayed"])]
            fate = self._fate(*fates)
        self._tell("delete", key, fate or "ok")
        if fate != "delayed":
            self.inner.objects.pop(key, None)
        if fate in ("delayed", "ok, a copy delayed"):
            self.player.flying.append(key)
        if fate in ("delayed", "ok, no answer"):
            raise StoreUnavailableError("no answer")


def kind_of(key: str) -> str:
    """The model's word for an object."""
    if parse_data_key(key):
        return DATA
    if is_beacon_key(key):
        return BEACON
    return INDEX if parse_index_key(key) else key


def _condition(precondition: Precondition | None) -> str:
    if precondition is None:
        return ""
    return "if-absent" if isinstance(precondition, IfAbsent) else "if-version"
