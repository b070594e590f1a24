"""Fault schedules: actors on one bucket, one request at a time, with faults that a plan says.

Time is virtual, the order of the actors and all that is random follow from a seed, so the same
seed gives the same log. Whatever the bucket is told, it checks after each change that what is
committed is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from unittest import mock

from obstore.exceptions import GenericError

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.marker import Marker, decode_marker
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY, is_ours, parse_data_key
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.errors import (
    CorruptDataError,
    DcpObjstoreError,
    PreconditionFailedError,
)
from dcp_objstore.stores.obstore.errors import translate_obstore
from dcp_objstore.stores.protocol import ObjectMeta, Precondition, Version
from tests.crash.bucket import Bucket, Connection, Cut, Process
from tests.support.upkeep import DESCRIBED

URL = "s3://schedules/run/step-1"
ROOT = "run/step-1/"
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOUR_SECONDS = 3600.0

# As obstore tells them; `stores.obstore.errors` makes errors of ours of these.
_REQUEST = "Error performing PUT http://127.0.0.1:1/b/k in 1.2s, after 3 retries"
_STATUS = f"Generic S3 error: {_REQUEST} - Server returned error response: status code: "
_DUMP = "\n\nDebug source:\nGeneric { source: "
_NO_ETAG = "Generic S3 error: Unable to extract metadata from headers: ETag Header missing"
SURFACE = {
    "500": f"{_STATUS}500: <Error><Code>InternalError</Code><Message>m</Message></Error>",
    "503 SlowDown": f"{_STATUS}503: <Error><Code>SlowDown</Code><Message>m</Message></Error>",
    "timeout": f"Generic S3 error: {_REQUEST} - HTTP error{_DUMP}HttpError {{ kind: Timeout }} }}",
    "connection reset": f"Generic S3 error: {_REQUEST} - HTTP error{_DUMP}"
    "legacy::Error( SendRequest, ConnectionReset ) }",
}
TRUNCATED, ERROR_IN_200, STALE, TWICE = (
    "truncated body",
    "200 with an error body",
    "stale ETag",
    "duplicate delivery",
)
KINDS = (*SURFACE, TRUNCATED, ERROR_IN_200, STALE, TWICE)
_ERROR_BODY = b"<Error><Code>InternalError</Code><Message>We failed.</Message></Error>"


@dataclass(frozen=True)
class Fault:
    """What becomes of one request: the kind, and whether it takes effect."""

    kind: str
    effect: bool

    def fits(self, verb: str) -> bool:
        """Whether there is such a thing for this verb."""
        reads = verb in ("get", "head", "list", "list uploads")
        if self.kind == STALE:
            return self.effect and verb in ("get", "head", "put")
        return self.effect or not reads


class VirtualClock(Clock):
    """One time for the bucket and all actors; it passes by sleeping and with each request."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.seconds += max(seconds, 0.01)

    def utc_now(self) -> datetime:
        return BEGINNING + timedelta(seconds=self.seconds)


class BrokenPromiseError(AssertionError):
    """What is committed is not whole."""


@lru_cache(maxsize=4096)
def _marker(body: bytes) -> Marker:
    return decode_marker(body)


class WatchedBucket(Bucket):
    """Checks after every change that the committed checkpoint is whole.

    Attributes:
        written: the first body of each data object and index; they never change.
        landed: who put the commits that took effect, by commit_id.
        before: the last metadata but one of each key, for stale answers.
        actor: on whose behalf the next change is.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.now = clock.utc_now  # type: ignore[method-assign]
        self.written: dict[str, bytes] = {}
        self.landed: dict[str, str] = {}
        self.before: dict[str, ObjectMeta] = {}
        self.actor = ""

    def put(self, key: str, body: bytes, precondition: Precondition | None = None) -> Version:
        old = self.objects.get(key)
        version = super().put(key, body, precondition)
        if old is not None:
            self.before[key] = old[1]
        name = key.removeprefix(ROOT)
        if is_ours(name) and self.written.setdefault(name, body) != body:
            raise BrokenPromiseError(f"{name} was written twice, differently")
        if name == MARKER_KEY and _marker(body).is_committed:
            self.landed.setdefault(_marker(body).commit_id, self.actor)
        self.check()
        return version

    def delete(self, key: str) -> None:
        super().delete(key)
        self.check()

    def marker(self) -> Marker | None:
        found = self.objects.get(ROOT + MARKER_KEY)
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
            if held is None or held[0] != self.written[name]:
                raise BrokenPromiseError(f"{name} of commit {marker.commit_id} is not there")


@lru_cache(maxsize=4096)
def _named(index: bytes) -> tuple[str, ...]:
    return tuple(entry.key for entry in ix.decode(index).objects)


@dataclass
class World:
    """A bucket, its time, what is still on the way to it, and what has happened."""

    seed: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    log: list[str] = field(default_factory=list)
    late: list[tuple[str, str, Callable[[], Any]]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.bucket = WatchedBucket(self.clock)
        # What the store can do is known to the processes; `tests.crash` cuts the probe as well.
        require_rewrites(Connection(Bucket(), Process(), URL), "")

    def tell(self, who: str, verb: str, key: str, what: str) -> None:
        """A line of the log; objects by the order in which they came up."""
        name = key.removeprefix(ROOT) or "everything"
        if is_ours(name):
            kind = "data" if parse_data_key(name) else "index"
            name = self.kinds.setdefault(name, f"{kind} {len(self.kinds)}")
        self.log.append(f"{self.clock.seconds:9.1f} {who:9} {verb:6} {name:10} {what}")

    def arrive(self) -> None:
        """One request that was on its way arrives."""
        who, name, effect = self.late.pop(self.rng.randrange(len(self.late)))
        self.bucket.actor = who
        try:
            effect()
        except PreconditionFailedError:
            self.tell(who, "late", name, "refused")
        else:
            self.tell(who, "late", name, "ok")


class Actor(Process):
    """One process; its requests wait for their turn and meet the faults that `plan` says.

    Attributes:
        cut: where it dies, as in `Process`.
        plan: of its n-th request (from 1), verb and key: a fault or None.
        faults: those it met: verb, key and fault.
    """

    def __init__(
        self,
        world: World,
        name: str,
        plan: Callable[[int, str, str], Fault | None] = lambda *_: None,
        turn: Callable[[], None] = lambda: None,
        cut: Cut | None = None,
    ) -> None:
        super().__init__(cut)
        self.world, self.name, self.plan, self.turn = world, name, plan, turn
        self.faults: list[tuple[str, str, Fault]] = []

    def connect(self) -> Connection:
        return Connection(self.world.bucket, self, URL)

    def request(self, verb: str, key: str, effect: Callable[[], Any]) -> Any:
        self.turn()
        self.world.clock.seconds += 1
        self.world.bucket.actor = self.name
        if self.cut is not None:
            answer = self._send(verb, key, effect)
            self.world.tell(self.name, verb, key, "ok")
            return answer
        self.requests.append((verb, key))
        fault = self.plan(len(self.requests), verb, key.removeprefix(ROOT))
        if fault is not None and not fault.fits(verb):
            fault = None
        said = "" if fault is None else f", {fault.kind}, {'' if fault.effect else 'no '}effect"
        try:
            if fault is None:
                answer = effect()
            else:
                self.faults.append((verb, key.removeprefix(ROOT), fault))
                answer = self._met(fault, verb, key, effect)
        except DcpObjstoreError as error:
            self.world.tell(self.name, verb, key, type(error).__name__ + said)
            raise
        self.world.tell(self.name, verb, key, "ok" + said)
        return answer

    def _met(self, fault: Fault, verb: str, key: str, effect: Callable[[], Any]) -> Any:
        if fault.kind in SURFACE:
            self._perhaps(fault, effect)
            raise translate_obstore(GenericError(SURFACE[fault.kind]))
        if fault.kind == TRUNCATED:
            if verb == "get":
                effect()
                raise CorruptDataError("the store announced 100 bytes and sent 7")
            self._perhaps(fault, effect)
            raise translate_obstore(GenericError(SURFACE["connection reset"]))
        if fault.kind == ERROR_IN_200:
            return self._error_in_200(fault, verb, effect)
        if fault.kind == STALE:
            return self._stale(verb, key, effect)
        # Duplicate delivery: at once, with the answer to the second; or the second comes later.
        if fault.effect:
            with contextlib.suppress(DcpObjstoreError):
                effect()
            return effect()
        if self.world.rng.random() < 0.5:
            self.world.late.append((self.name, key, effect))
            return effect()
        self.world.late += [(self.name, key, effect)] * 2
        raise translate_obstore(GenericError(SURFACE["timeout"]))

    def _perhaps(self, fault: Fault, effect: Callable[[], Any]) -> None:
        if fault.effect:
            with contextlib.suppress(DcpObjstoreError):
                effect()

    def _error_in_200(self, fault: Fault, verb: str, effect: Callable[[], Any]) -> Any:
        # As our adapter takes it (see the tests): what is no listing is an empty one, and only PUTs
        # need an ETag.
        if verb in ("list", "list uploads"):
            return []
        if verb in ("get", "head"):
            _, meta = effect()
            nothing = Version(None, None)
            meta = replace(meta, size_bytes=len(_ERROR_BODY), version=nothing, last_modified=EPOCH)
            return _ERROR_BODY, meta
        self._perhaps(fault, effect)
        if verb != "put":
            return None
        raise translate_obstore(GenericError(_NO_ETAG))

    def _stale(self, verb: str, key: str, effect: Callable[[], Any]) -> Any:
        answer = effect()
        old = self.world.bucket.before.get(key)
        version = old.version if old is not None else Version('"of-no-object"')
        if verb == "put":
            return version
        body, meta = answer
        return body, replace(meta, version=version)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All that is random in between follows from the seed: nonces, ids, pauses."""
    rng, state = random.Random(seed), random.getstate()
    random.seed(seed)
    try:
        with mock.patch.object(secrets, "token_hex", lambda size: rng.randbytes(size).hex()):
            yield
    finally:
        random.setstate(state)


@dataclass
class _Player:
    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: bool = False
    answer: Any = None
    error: BaseException | None = None


class Stage:
    """Actors in threads, of which one at a time goes on for one request, as drawn.

    Args:
        world: where they act.
        jumps: how likely a day passes between two requests.
    """

    def __init__(self, world: World, jumps: float) -> None:
        self.world, self.jumps = world, jumps
        self._players: list[_Player] = []
        self._back = threading.Semaphore(0)

    def add(
        self,
        name: str,
        program: Callable[[Actor], Any],
        plan: Callable[[int, str, str], Fault | None],
    ) -> None:
        player = _Player(name)
        self._players.append(player)

        def turn() -> None:
            self._back.release()
            player.turn.acquire()

        def run() -> None:
            player.turn.acquire()
            try:
                player.answer = program(Actor(self.world, name, plan, turn))
            except BaseException as error:  # noqa: BLE001 - raised again on the test's thread
                player.error = error
            player.ended = True
            self._back.release()

        threading.Thread(target=run, daemon=True).start()

    def run(self) -> dict[str, Any]:
        """Until all have ended; their answers. Late requests arrive now and then."""
        rng = self.world.rng
        # How long one goes on while the others wait: many crossings need a pause at one place.
        burst = rng.choice([0.0, 0.7, 0.9])
        player = self._players[0]
        while playing := [player for player in self._players if not player.ended]:
            if rng.random() < self.jumps:
                self.world.clock.seconds += 30 * HOUR_SECONDS
            if self.world.late and rng.random() < 0.2:
                self.world.arrive()
            if player.ended or rng.random() >= burst:
                player = rng.choice(playing)
            player.turn.release()
            assert self._back.acquire(timeout=60), "an actor hangs"
            if player.error is not None:
                raise player.error
        return {player.name: player.answer for player in self._players}


def loose(bucket: WatchedBucket) -> list[str]:
    """Keys that nothing names; and a `.metadata` that is not that of the commit."""
    marker = bucket.marker()
    known = {MARKER_KEY}
    if marker is not None and marker.is_committed and marker.index is not None:
        known |= {marker.index.key, *_named(bucket.written[marker.index.key])}
        published = bucket.objects.get(ROOT + DOT_METADATA_KEY)
        right = DESCRIBED.derive(bucket.written[marker.index.key])
        if published is not None and published[0] == right:
            known.add(DOT_METADATA_KEY)
        else:
            return [".metadata is not in line"]
    return [name for name in bucket.keys(ROOT) if name not in known]
