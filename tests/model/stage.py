"""The real code on a stage: several actors around one bucket, one request at a time.

Every request waits for its turn, meets what a plan says, and is recorded as an `Event`, in the
words of the model. Time is virtual. The order of the actors and all else that is random follow
from a seed, so the same seed gives the same log. The bucket checks after each change that what is
committed is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, TypeAlias
from unittest import mock

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.marker import Marker as RealMarker, decode_marker
from dcp_objstore.checkpoint.names import is_beacon_key, is_index_key, is_ours, parse_data_key
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.errors import DcpObjstoreError, ObjectNotFoundError, PreconditionFailedError
from dcp_objstore.stores.protocol import (
    CopySource,
    IfAbsent,
    IfVersion,
    ObjectMeta,
    Precondition,
    Version,
)
from tests.crash.process import Connection, KilledError, Process
from tests.model import world
from tests.model.copies import SOURCE
from tests.model.faults import (
    BOTH_LATE,
    CRASH,
    DAMAGED,
    ERROR_BODY,
    ERROR_IN_200,
    LATE,
    STALE,
    TWICE,
    UNIX_EPOCH,
    Fault,
)
from tests.model.world import BEACON, DATA, DOT, EVERYTHING, INDEX, MARKER, NOBODY, Event
from tests.support.memory_store import Bucket, TickingClock, joined
from tests.support.serial import one_after_the_other
from tests.support.upkeep import DESCRIBED

URL = "s3://stage/run/step-1"
ROOT = "run/step-1/"
SOURCE_URL = f"{URL}/source"  # of a copy; no other actor sees what is below
HOUR_SECONDS = 3600.0
DAYS_SECONDS = 48 * HOUR_SECONDS  # longer than the grace period
_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


class BrokenPromiseError(AssertionError):
    """What is committed is not whole."""


_marker = lru_cache(maxsize=4096)(decode_marker)


@lru_cache(maxsize=4096)
def _named(index: bytes) -> tuple[str, ...]:
    return tuple(entry.key for entry in ix.decode(index).objects)


class WatchedBucket(Bucket):
    """Checks after every change that the committed checkpoint is whole.

    Attributes:
        written: the first body of each data object and index; they never change.
        strange: the keys of those that another program has overwritten.
        landed: who put the commits that took effect, by commit_id.
        forgotten: who replaced a marker that knew a commit by one that does not, by commit_id.
        before: the last metadata but one of each key, for stale answers.
        actor: on whose behalf the next change is.
        seconds: the time.
        slowness: seconds that each change takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self._time  # type: ignore[method-assign]
        self.written: dict[str, bytes] = {}
        self.strange: set[str] = set()
        self.landed: dict[str, str] = {}
        self.forgotten: dict[str, str] = {}
        self.before: dict[str, ObjectMeta] = {}
        self.actor = ""
        self.seconds = self.slowness = 0.0

    def _time(self) -> datetime:
        return _BEGINNING + timedelta(seconds=self.seconds)

    def put(self, key: str, body: bytes, precondition: Precondition | None = None) -> Version:
        self.seconds += self.slowness
        old = self.objects.get(key)
        version = super().put(key, body, precondition)
        if old is not None:
            self.before[key] = old[1]
        name = key.removeprefix(ROOT)
        changed = is_ours(name) and self.written.setdefault(name, body) != body
        if changed and name not in self.strange:
            raise BrokenPromiseError(f"{name} was written twice, differently")
        if name == MARKER:
            marker = _marker(body)
            was = _marker(old[0]) if old is not None else marker
            for commit_id in (was.commit_id, *was.log):
                if not marker.knows(commit_id):
                    self.forgotten[commit_id] = self.actor
            if marker.is_committed:
                self.landed.setdefault(marker.commit_id, self.actor)
        self.check()
        return version

    def delete(self, key: str) -> None:
        super().delete(key)
        self.check()

    def marker(self) -> RealMarker | None:
        found = self.objects.get(ROOT + MARKER)
        return None if found is None else _marker(found[0])

    def check(self) -> None:
        """What the marker says is committed is there, every byte of it."""
        marker = self.marker()
        if marker is None or not marker.is_committed:
            return
        assert marker.index is not None
        found = self.objects.get(ROOT + marker.index.key)
        if found is None or hashlib.sha256(found[0]).hexdigest() != marker.index.sha256:
            raise BrokenPromiseError(f"the index of commit {marker.commit_id} is not there")
        for name in _named(found[0]):
            held = self.objects.get(ROOT + name)
            if held is None or (held[0] != self.written[name] and name not in self.strange):
                raise BrokenPromiseError(f"{name} of commit {marker.commit_id} is not there")

    def loose(self) -> list[str]:
        """Keys that nothing names; and a `.metadata` that is not that of the commit."""
        marker, known = self.marker(), {MARKER}
        if marker is not None and marker.is_committed and marker.index is not None:
            known |= {marker.index.key, *_named(self.written[marker.index.key])}
            published = self.objects.get(ROOT + DOT)
            right = DESCRIBED.derive(self.written[marker.index.key])
            if published is None or published[0] != right:
                return [".metadata is not in line"]
            known.add(DOT)
        return [name for name in self.keys(ROOT) if name not in known and "/" not in name]


class StageClock(TickingClock):
    """An actor's: its deadlines pass by sleeping, and its date may be wrong.

    Args:
        bucket: whose time it tells.
        deadline_seconds: how long it tries.
        ahead: by how much it is wrong.
    """

    def __init__(
        self, bucket: WatchedBucket, deadline_seconds: float = 60.0, ahead: timedelta = timedelta()
    ) -> None:
        super().__init__(deadline_seconds)
        self.bucket, self.ahead = bucket, ahead

    def utc_now(self) -> datetime:
        return self.bucket.now() + self.ahead


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
            self.commits.setdefault(_marker(body).commit_id, save)
        elif kind_of(key) == INDEX:
            self.dots[DESCRIBED.derive(body)] = save
        self.keys[key] = save

    def data_of(self, save: int) -> str:
        """The key of its one data object."""
        return next(key for key, of in self.keys.items() if of == save and kind_of(key) == DATA)

    def commit(self, marker: RealMarker) -> int:
        return self.commits.get(marker.commit_id, NOBODY)

    def describe(self, verb: str, key: str, body: bytes | None) -> str:
        """What an answer to a GET or HEAD says, in the words of the model."""
        key = key.rpartition("/")[2]
        if body is None:
            return "missing" if kind_of(key) in (DATA, INDEX) else "absent"
        if verb == "head":
            return "present"
        if key == MARKER:
            return f"{_marker(body).state} {world.save_name(self.commit(_marker(body)))}"
        return world.save_name(self.dots.get(body, NOBODY)) if key == DOT else "ok"


@dataclass(frozen=True)
class Request:
    """One that an actor is about to send, or that is on its way.

    Attributes:
        holds: its precondition is met.
        conditional: a second delivery of it would be refused.
    """

    actor: str
    verb: str
    key: str
    body: bytes | None = None
    precondition: Precondition | None = None
    holds: bool = field(default=True, compare=False)
    conditional: bool = field(default=False, compare=False)

    @property
    def condition(self) -> str:
        if self.precondition is None:
            return ""
        return "if-absent" if isinstance(self.precondition, IfAbsent) else "if-version"

    def event(self, verb: str, outcome: str) -> Event:
        return Event(self.actor, verb, kind_of(self.key), self.condition, outcome)


# Of the n-th request of an actor, from 1: what it meets.
Plan: TypeAlias = Callable[[int, Request], Fault | None]


def no_faults(_number: int, _request: Request) -> None:
    """Nothing happens."""


def at_request(at: int, fault: Fault | None) -> Plan:
    """One request meets it."""
    return lambda number, _: fault if number == at else None


class Actor(Process):
    """One process; its requests wait for their turn and meet the faults that `plan` says.

    Args:
        stage: where it acts.
        name: for events.
        plan: the faults that its requests meet.
        turn: called before each request.
        save: the number of its save, for a writer.

    Attributes:
        faults: those it met: verb, key and fault.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        plan: Plan = no_faults,
        turn: Callable[[], None] = lambda: None,
        save: int | None = None,
    ) -> None:
        super().__init__()
        self.stage, self.name, self.plan, self.turn, self.save = stage, name, plan, turn, save
        self.faults: list[tuple[str, str, Fault]] = []
        self._sending: tuple[bytes | None, Precondition | None] = (None, None)

    def connect(self, url: str = URL) -> StagedStore:
        return StagedStore(self.stage.bucket, self, url)

    def put(self, key: str, body: bytes, precondition: Precondition | None) -> None:
        """The next request is this PUT."""
        self._sending = body, precondition
        if self.save is not None:
            self.stage.names.learn(key, body, self.save)

    def request(self, verb: str, key: str, effect: Callable[[], Any]) -> Any:
        if self.killed:
            raise KilledError
        self.turn()
        self.stage.bucket.seconds += 1
        self.stage.bucket.actor = self.name
        self.requests.append((verb, key))
        name = key.removeprefix(ROOT)
        body, precondition = self._sending if verb == "put" else (None, None)
        request = self.stage.judged(Request(self.name, verb, name, body, precondition))
        fault = self.plan(len(self.requests), request)
        if fault is None or not fault.fits(verb):
            return self._answered(request, effect, "")
        self.faults.append((verb, name, fault))
        if fault.kind == CRASH:
            if fault.effect:
                with contextlib.suppress(DcpObjstoreError):
                    self._answered(request, effect, f"   {fault}")
            self.killed = True
            raise KilledError
        word = fault.word(verb, kind_of(name), holds=request.holds, conditional=request.conditional)
        self.stage.tell(request.event(verb, word or "?"), f"   {fault}")
        return self._met(fault, request, effect)

    def _answered(self, request: Request, effect: Callable[[], Any], told: str) -> Any:
        stage = self.stage
        if request.verb in ("get", "head"):
            found = stage.bucket.objects.get(ROOT + request.key)
            outcome = stage.names.describe(request.verb, request.key, found and found[0])
        elif request.verb == "copy":
            outcome = _judge_copy(effect)
        else:
            outcome = "ok" if request.holds else "refused"
        if request.verb not in ("list uploads", "abort"):  # there are none: the model knows none
            stage.tell(request.event(request.verb, outcome), told)
        return effect()

    def _met(self, fault: Fault, request: Request, effect: Callable[[], Any]) -> Any:
        late = self.stage.late
        if fault.kind == STALE:
            return self._stale(request, effect())
        if fault.kind == DAMAGED:
            body, meta = effect()
            at = self.stage.rng.randrange(len(body))
            changed = bytes([body[at] ^ 1]) + body[at + 1 :] if fault.effect else b""
            return body[:at] + changed, meta
        if fault.kind == TWICE:
            if fault.effect:
                with contextlib.suppress(DcpObjstoreError):
                    effect()
            else:
                late.append((request, effect))
            return effect()
        if fault.kind == ERROR_IN_200 and request.verb == "list uploads":
            return []
        if fault.kind == ERROR_IN_200 and request.verb in ("get", "head"):
            _, meta = effect()
            size, nothing = len(ERROR_BODY), Version(None, None)
            meta = replace(meta, size_bytes=size, version=nothing, last_modified=UNIX_EPOCH)
            return ERROR_BODY, meta
        if fault.effect:
            with contextlib.suppress(DcpObjstoreError):
                effect()
        if fault.kind == ERROR_IN_200 and request.verb in ("delete", "abort"):
            return None
        late += [(request, effect)] * {LATE: 1, BOTH_LATE: 2}.get(fault.kind, 0)
        raise fault.error(request.verb)

    def _stale(self, request: Request, answer: Any) -> Any:
        old = self.stage.bucket.before.get(ROOT + request.key)
        version = old.version if old is not None else Version('"of-no-object"')
        if request.verb == "put":
            return version
        body, meta = answer
        return body, replace(meta, version=version)


class StagedStore(Connection):
    """What one actor has of the bucket."""

    process: Actor

    def put(
        self, key: str, data: Any, *, precondition: Precondition | None = None, retry: bool = True
    ) -> Version:
        body = joined(data)
        self.process.put(key, body, precondition)
        return super().put(key, body, precondition=precondition, retry=retry)

    def copy(
        self,
        key: str,
        sources: Sequence[CopySource],
        *,
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        """A request for each source, and one that completes the object."""

        def part(source: CopySource) -> bytes:
            body, meta = self.bucket.get(source.url.partition("://stage/")[2])
            if meta.version != source.version:
                raise PreconditionFailedError("412")
            return body[source.start : source.end]

        request = partial(self.process.request, "copy", self.root + key)
        parts = []
        for source in sources:
            parts.append(request(partial(part, source)))
            moved(source.end - source.start)
        return self.put(key, parts)


def _judge_copy(effect: Callable[[], Any]) -> str:
    try:
        effect()  # it changes nothing
    except ObjectNotFoundError:
        return "missing"
    except PreconditionFailedError:
        return "refused"
    return "ok"


@dataclass
class _Player:
    name: str
    actor: Actor = field(init=False)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits: bool = False
    ended: bool = False
    answer: Any = None


class Stage:
    """Runs actors around one bucket.

    Args:
        seed: decides everything that is drawn.

    Attributes:
        events: what happened, in order.
        log: the same, with the faults.
        late: requests that are on their way.
        later: markers that the source of a copy may have next.
        sources: the version, and whether it was copied unread, that digits in a name stand for.
        jumps: how likely a day and more passes between two requests.
        crashes: how likely a process dies instead of sending a request.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.bucket = WatchedBucket()
        self.names = Names()
        self.events: list[Event] = []
        self.log: list[str] = []
        self.late: list[tuple[Request, Callable[[], Any]]] = []
        self.later: list[bytes] = []
        self.sources: dict[str, tuple[int, bool]] = {}
        self.players: dict[str, _Player] = {}
        self.jumps = self.crashes = self._burst = 0.0
        self._over = threading.Semaphore(0)
        self._error: BaseException | None = None
        # What the store can do is known to the processes; `tests.crash` cuts the probe as well.
        require_rewrites(Connection(Bucket(), Process(), URL), "")

    def tell(self, event: Event, told: str = "") -> None:
        self.events.append(event)
        self.log.append(f"{self.bucket.seconds:11.1f} {event}{told}")

    def judged(self, request: Request) -> Request:
        """With what the bucket would say to it now."""
        found = self.bucket.objects.get(ROOT + request.key)
        wanted, body = request.precondition, request.body
        if isinstance(wanted, IfAbsent):
            return replace(request, holds=found is None, conditional=True)
        if isinstance(wanted, IfVersion):
            holds = found is not None and found[1].version == wanted.version
            return replace(request, holds=holds, conditional=not holds or found[0] != body)
        return request

    def add(
        self,
        name: str,
        program: Callable[[Actor], Any],
        plan: Plan = no_faults,
        save: int | None = None,
    ) -> None:
        """Put an actor on the stage. It begins in `run`."""

        def crashing(number: int, request: Request) -> Fault | None:
            if self.rng.random() < self.crashes:
                return Fault(CRASH, self.rng.random() < 0.5)
            return plan(number, request)

        player = _Player(name)
        player.actor = Actor(self, name, crashing, lambda: self._wait_turn(player), save)
        self.players[name] = player

        def run() -> None:
            player.turn.acquire()
            try:
                with contextlib.suppress(KilledError):
                    player.answer = program(player.actor)
                player.ended = True
                following = self._draw(player)
            except BaseException as error:  # noqa: BLE001 - raised again on the test's thread
                self._error, following = error, None
            (self._over if following is None else following.turn).release()

        threading.Thread(target=run, daemon=True).start()

    def run(self) -> dict[str, Any]:
        """Until all have ended; the answers of those that have not crashed.

        Late requests arrive at any time.
        """
        # How long one goes on while the others wait: many crossings need a pause at one place.
        self._burst = self.rng.choice([0.0, 0.7, 0.9])
        self.rng.choice(list(self.players.values())).turn.release()
        assert self._over.acquire(timeout=60), "an actor hangs"
        if self._error is not None:
            raise self._error
        return {player.name: player.answer for player in self.players.values() if player.answer}

    def _wait_turn(self, player: _Player) -> None:
        following = self._draw(player)
        if following is not player:
            assert following
            assert not player.waits, "two requests of one actor at the same time"
            player.waits = True
            following.turn.release()
            player.turn.acquire()
            player.waits = False

    def _draw(self, player: _Player) -> _Player | None:
        """Who goes on after this one, when time may have passed; None: all have ended."""
        playing = [player for player in self.players.values() if not player.ended]
        if not playing:
            return None
        if self.rng.random() < self.jumps:
            self.bucket.seconds += 30 * HOUR_SECONDS
        if self.late and self.rng.random() < 0.2:
            self.arrive()
        goes_on = not player.ended and self.rng.random() < self._burst
        return player if goes_on else self.rng.choice(playing)

    def arrive(self) -> None:
        """One request that was on its way arrives."""
        request, effect = self.late.pop(self.rng.randrange(len(self.late)))
        self.bucket.actor = request.actor
        outcome = "ok"
        try:
            effect()
        except PreconditionFailedError:
            outcome = "refused"
        self.tell(request.event("late", outcome))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All that is random in between follows from the seed: nonces, ids, pauses, orders."""
    rng, orders, state = random.Random(seed), random.Random(seed), random.getstate()
    random.seed(seed)
    try:
        with (
            mock.patch.object(secrets, "token_hex", lambda size: rng.randbytes(size).hex()),
            one_after_the_other(lambda numbers: orders.sample(numbers, len(numbers))),
        ):
            yield
    finally:
        random.setstate(state)


@lru_cache(maxsize=4096)
def kind_of(key: str) -> str:
    """The model's word for an object. One below is of the source of a copy."""
    if "/" in key:
        return SOURCE + kind_of(key.rpartition("/")[2])
    if parse_data_key(key):
        return DATA
    if is_beacon_key(key):
        return BEACON
    if is_index_key(key):
        return INDEX
    return key if key in (MARKER, DOT) else EVERYTHING
