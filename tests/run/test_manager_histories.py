"""Random histories of jobs in a run do what a model says that users are told.

`python -m pytest tests/run/test_manager_histories.py -k 17` repeats seed 17 of the default ones;
`history(seed)` repeats any. A failing seed prints what was done.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.catalogue import decode_claim
from dcp_objstore.checkpoint.marker import decode_marker
from dcp_objstore.checkpoint.names import CLAIM_KEY, DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.errors import PermissionDeniedError
from dcp_objstore.run import follow, sweep as sweeping
from dcp_objstore.run.housekeeping import Retainer
from dcp_objstore.stores.spec import StoreSpec
from dcp_objstore.write.async_save import AsyncSaveHandle, _saves
from tests.crash.jobs import in_memory
from tests.crash.judging import quiet
from tests.crash.process import Connection, KilledError, Process, uploads
from tests.support.campaign import cases
from tests.support.managers import end_of, noticed_at_each_step
from tests.support.memory_store import Bucket
from tests.support.run_model import ANY_ERROR, Act, Settings, Step, World, loss

T = TypeVar("T")

RUN, ROOT = "s3://histories/run", "run/"
NUMBERS = (5, 10, 15, 20, 25, 30)
ACTS = 30
_in_upkeep: ContextVar[bool] = ContextVar("_in_upkeep", default=False)


class EndedError(BaseException):
    """Raised by the program's own handler of SIGTERM."""


def _end(*_: object) -> None:
    raise EndedError


class There:
    """The bucket, and the process that opens stores now, in whichever thread."""

    bucket: Bucket
    process: Process


def _connect(spec: StoreSpec) -> Connection:
    return Connection(There.bucket, There.process, spec.url)


class Interfered(Process):
    """A process to which something happens at one of its requests.

    Args:
        at: the number of that request, of those that count.
        interfere: does it.
        counts: whether a request for this key counts.
        after: it happens after the effect of the request.
    """

    def __init__(
        self,
        at: int,
        interfere: Callable[[Process], object],
        counts: Callable[[str], bool],
        *,
        after: bool = False,
    ) -> None:
        super().__init__()
        self.at, self.interfere, self.counts, self.after = at, interfere, counts, after

    @property
    def met(self) -> bool:
        return self.at <= 0

    def request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        if self.killed:
            raise KilledError
        if self.counts(key):
            with self._lock:
                self.at -= 1
                now = self.at == 0
            if now:
                if self.after:
                    with suppress(dos.errors.DcpObjstoreError):
                        effect()
                self.interfere(self)
        return effect()


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((2,), value)}


def _policies(keep: tuple[tuple[str, int], ...]) -> list[dos.RetentionPolicy] | None:
    made: dict[str, Callable[[int], dos.RetentionPolicy]] = {
        "latest": dos.KeepLatest,
        "every": dos.KeepEvery,
        "best": lambda n: dos.KeepBest("loss", n),
    }
    return [made[name](n) for name, n in keep] or None


class Player:
    """Does the acts, on a bucket in memory.

    Args:
        skip_to_newest: of the follower.
    """

    def __init__(self, *, skip_to_newest: bool) -> None:
        self.bucket = There.bucket = Bucket()
        self.managers: dict[str, dos.CheckpointManager] = {}
        self.named: dict[int, set[str]] = {}  # the keys of each commit, by what it holds
        self.dropped: list[dos.reports.ListedCheckpoint] = []
        self.callbacks = 0  # that are still to be called
        self.follower = follow._Follower(
            run=StoreSpec(RUN),
            after=None,
            until=None,
            skip_to_newest=skip_to_newest,
            timeout_seconds=0.0,
            poll_seconds=1.0,
            pin=None,
            on_dropped=self.dropped.append,
        )

    def do(self, act: Act) -> str:
        """Do an act; return what the job is told."""
        There.process = Process()
        try:
            answer = str(getattr(self, act.kind)(act))
        except (KeyboardInterrupt, KilledError, EndedError, dos.errors.DcpObjstoreError) as error:
            answer = type(error).__name__
        if answer == "KilledError":
            self.kill(act)
        There.process = Process()
        self._settle()
        assert not self.callbacks, "a callback was not called"
        return answer

    def _settle(self) -> None:
        """Wait for what goes on in the background; the managers do not know of its end yet."""
        end_of("async-save")
        end_of("upkeep")

    def start(self, act: Act, settings: Settings) -> None:
        """Begin a job, which catches signals."""
        There.process = Process()
        run = self.managers[act.job] = dos.CheckpointManager(
            RUN,
            keep=_policies(settings.keep),
            save_every=settings.save_every,
            save_last=settings.save_last,
            preemption=dos.Preemption(save=settings.saves_preempted),
            grace_seconds=3600.0 if settings.grace else 0.0,
            sweep=False,
        )
        run.__enter__()

    def close(self, act: Act) -> object:
        run = self.managers.pop(act.job)
        return run.finish() if act.how == "finish" else run.close()

    def kill(self, act: Act) -> None:
        """Nothing reaches the store any more, whatever its clean-up code tries."""
        gone = self.managers.pop(act.job)
        gone._unclosed.detach()
        gone._preemption.restore()

    def interrupted_close(self, act: Act) -> str:
        """Ctrl-C comes while `close` waits for a save in the background."""
        main, waits, came = threading.get_ident(), threading.Event(), threading.Event()
        wait = AsyncSaveHandle.exception

        def ctrl_c(*_: object) -> None:
            came.set()
            raise KeyboardInterrupt

        def interfere(_: Process) -> None:
            assert waits.wait(60)
            signal.pthread_kill(main, signal.SIGINT)
            assert came.wait(60)

        def exception(*args: Any) -> Any:
            waits.set()
            return wait(*args)

        process = There.process = Interfered(1, interfere, uploads)
        before = signal.signal(signal.SIGINT, ctrl_c)
        try:
            self.save_in_background(act)
            run = self.managers.pop(act.job)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(AsyncSaveHandle, "exception", exception)
                try:
                    ended = str(run.close())
                except (KeyboardInterrupt, EndedError) as error:
                    if not process.met:
                        raise
                    ended = type(error).__name__
            return f"{ended}, {run.close()}" if process.met else ended
        finally:
            signal.signal(signal.SIGINT, before)

    def sigterm(self, act: Act) -> None:
        signal.raise_signal(signal.SIGTERM)

    def claim(self, act: Act) -> None:
        dos.claim_run(RUN)

    def load(self, act: Act) -> str:
        found, run = state(-1), self.managers[act.job]
        step = run.load(found, None if act.step < 0 else act.step)
        [value] = set(found["w"].tolist())
        assert run.last_resume is not None
        assert run.last_resume.step == step
        if step is None:
            assert value == -1, "the state is changed, though nothing was loaded"
            return "None"
        return f"step {step} with {value}"

    def _described(self, act: Act) -> dict[str, Any]:
        metric = "high" if act.how == "bad metric" else loss(act.value)
        metrics: Any = [metric] if act.how == "bad metric" else {"loss": metric}
        return {"metrics": metrics, "user_metadata": {"value": act.value}}

    def _state(self, act: Act) -> dict[str, Any]:
        bad = {"lock": threading.Lock()} if act.how == "bad value" else {}
        return {**state(act.value), **bad}

    def save(self, act: Act) -> str:
        self.managers[act.job].save(act.step, self._state(act), **self._described(act))
        return "ok"

    def save_in_background(self, act: Act) -> str:
        run = self.managers[act.job]
        handle = run.async_save(act.step, self._state(act), **self._described(act))
        assert handle is not None
        if act.how == "callback":
            self.callbacks += 1
            handle.upload_completion.add_done_callback(lambda _: self._look(handle))
        return "ok"

    def _look(self, handle: AsyncSaveHandle) -> None:
        with suppress(dos.errors.DcpObjstoreError):
            handle.result()
        self.callbacks -= 1
        raise ZeroDivisionError("of the user's callback")

    def step(self, act: Act) -> bool:
        return self.managers[act.job].step(act.step, state(act.value), **self._described(act))

    def cut(self, act: Act) -> str:
        def interfere(process: Process) -> None:
            if act.how == "ctrl_c":
                raise KeyboardInterrupt
            if act.how == "kill":
                process.kill()
                raise KilledError
            if act.how == "forbidden":
                raise PermissionDeniedError("403")
            There.process = Process()
            dos.claim_run(RUN)
            There.process = process

        after = act.how in ("ctrl_c", "kill") and act.value % 2 == 0
        process = There.process = Interfered(
            act.at, interfere, lambda _: not _in_upkeep.get(), after=after
        )
        answer = self.save(act._replace(how=""))
        assert act.how not in ("ctrl_c", "kill") or not process.met, f"{act.how} was swallowed"
        return answer

    def pin(self, act: Act) -> None:
        run = self.managers[act.job]
        (run.unpin if act.how == "unpin" else run.pin)(act.step)

    def remove(self, act: Act) -> None:
        prefix = f"{ROOT}step-{act.step}/"
        if act.how == "delete":
            dos.delete(f"{RUN}/step-{act.step}", allow_newest=True)
            return
        step = self.seen().get(act.step)
        gone = {key for key in self.bucket.objects if key.startswith(prefix)}
        if act.how != "prefix":
            if step is None or step.objects != "whole":
                return
            index = {key for key in self.named[step.value] if "/index." in key}
            gone = index if act.how == "index lost" else self.named[step.value] - index
        for key in gone:
            del self.bucket.objects[key]

    def sweep(self, act: Act) -> None:
        for _ in range(4):  # one finishes a deletion, one mends, one removes
            self.bucket.age(days=3)
            dos.sweep(RUN)
        loose = {key for key in self.bucket.objects if not key.endswith((CLAIM_KEY, MARKER_KEY))}
        for number, step in self.seen().items():
            prefix = f"{ROOT}step-{number}/"
            if step.objects == "index lost":
                loose = {key for key in loose if not key.startswith(prefix)}
            elif not step.deleted:
                loose -= self.named[step.value] | {prefix + DOT_METADATA_KEY}
        assert not loose, f"after the sweep there are {loose}"

    # --- what is there

    def followed(self) -> tuple[list[tuple[int | None, object]], set[object]]:
        """Return number and content of each step that comes to a follower, and what it dropped."""
        There.process = Process()
        self.follower.poll_at = 0.0
        came: list[tuple[int | None, object]] = []
        self.dropped.clear()
        while (step := self.follower._next()) is not None:
            came.append((step.step, step.user_metadata["value"]))
        return came, {step.user_metadata["value"] for step in self.dropped}

    def _named(self, prefix: str, index: str) -> set[str]:
        """Return the keys of a commit, which is whole."""
        body, _ = self.bucket.objects[prefix + index]
        return {prefix + index, *(prefix + one.key for one in ix.decode(body).objects)}

    def seen(self) -> dict[int, Step]:
        """Return the steps that are on the store, as the model describes them."""
        counting = {step.name for step in dos.steps(RUN)}
        steps = {}
        for key, (body, _) in list(self.bucket.objects.items()):
            prefix = key.removesuffix(MARKER_KEY)
            marker = decode_marker(body) if key != prefix else None
            if marker is None or marker.index is None:
                continue  # a marker without an index is a fence
            name, value = prefix.split("/")[-2], marker.user_metadata["value"]
            assert isinstance(value, int)
            if value not in self.named:
                self.named[value] = self._named(prefix, marker.index.key)
            named, left = self.named[value], self.named[value] & self.bucket.objects.keys()
            objects = "whole" if left == named else "data lost" if left else "none"
            if left and prefix + marker.index.key not in left:
                objects = "index lost"
            steps[int(name.removeprefix("step-"))] = Step(
                value=value,
                counts=name in counting,
                deleted=marker.state == "deleted",
                objects=objects,
                pinned=bool(marker.pins),
            )
        return steps


class History:
    """Acts at random, and the worlds that agree with what came of them.

    Args:
        seed: decides all of it.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.due: list[Act] = []  # the acts that come next
        self.polls = random.Random(seed)
        self.skips = seed % 2 == 1
        self.player = Player(skip_to_newest=self.skips)
        self.passed: set[int] = set()  # the contents of the steps that came to a follower, or never
        self.came: dict[int, int] = {}  # the numbers of those that came and count, by content
        self.worlds = [World()]
        self.done: list[str] = []

    def play(self) -> None:
        for number in range(ACTS):
            self._act(self._next(number + 1))
        for name in list(self.player.managers):
            self._act(Act("close", name))
        self._act(Act("sweep"))

    def _next(self, value: int) -> Act:
        """Choose the next act."""
        if self.due and self.due[0].job in {"", *self.player.managers}:
            return self.due.pop(0)._replace(value=value)
        act = self._choose(value)
        self.due = self._sequel(act) if self.draw.random() < 0.3 else []
        return act

    def _sequel(self, act: Act) -> list[Act]:
        """Choose acts that follow one, for which it matters what a job knows of its own saves."""
        again = act._replace(kind="save", how="", at=0)
        if act.kind == "load":
            again = again._replace(step=max(act.step, 0) + 5)
            bad = again._replace(kind=self.draw.choice(["save", "save_in_background"]))
            return [bad._replace(how="bad value"), again]
        if act.kind == "sigterm":
            return [again._replace(kind="step"), again._replace(kind="step")]
        if act.kind not in ("save", "save_in_background"):
            return []
        back = again._replace(kind="load", step=self.draw.choice([-1, act.step - 5]))
        gone = Act("remove", step=act.step, how="delete")
        return self.draw.choice([[back, again], [gone, back, again]])

    def _choose(self, value: int) -> Act:
        draw, jobs = self.draw, list(self.player.managers)
        if len(jobs) < draw.choice([1] * 9 + [2]):
            return Act("start", next(name for name in ("A", "B") if name not in jobs))
        kind = draw.choice(_KINDS)
        how, at = draw.choice(_HOW.get(kind, ("",))), 0
        job, step = draw.choice(jobs), draw.choice(NUMBERS)
        newest = max((n for world in self.worlds for n in world.counting()), default=0)
        if kind in _FORWARD and draw.random() < 0.6:
            step = newest + 5
        if kind == "load" and draw.random() < 0.4:
            step = -1
        if all(world.is_superseded(job) for world in self.worlds) and draw.random() < 0.3:
            kind, how = draw.choice([("close", ""), ("kill", "")])
        if kind == "cut":
            at = draw.randint(1, 24)
        if kind == "remove" and how == "prefix":
            stored = self.player.bucket.objects.get(ROOT + CLAIM_KEY)
            if stored is not None and decode_claim(stored[0]).going_back is not None:
                how = "delete"  # a marker that decides is never removed
        return Act(kind, job, step, value, how, at)

    def _act(self, act: Act) -> None:
        if act.kind == "start":
            settings = self._settings()
            self.player.start(act, settings)
            for world in self.worlds:
                world.start(act, settings)
            self.done.append(f"{act.job} starts with {settings}")
            return
        answer = self.player.do(act)
        seen = self.player.seen()
        self.done.append(f"{act} -> {answer}")
        expected = [each for world in self.worlds for each in world.after(act)]
        self.worlds = []
        for may_be, world in expected:
            failed = answer.endswith(("Error", "Interrupt"))
            told = may_be == answer or (may_be == ANY_ERROR and failed)
            if told and world.steps == seen and world not in self.worlds:
                self.worlds.append(world)
        assert self.worlds, self._difference(answer, seen, expected)
        if self.polls.random() < 0.6:
            self._follow(seen)

    def _follow(self, seen: dict[int, Step]) -> None:
        """Compare what a follower is told with what users are told of `follow`."""
        dropped = set()
        for value, number in list(self.came.items()):
            now = seen.get(number)
            if now is None or not now.counts or now.value != value:
                del self.came[value]
                dropped |= {value} if now is not None and not now.deleted else set()
        counting = [(number, seen[number].value) for number in sorted(seen) if seen[number].counts]
        new = [(number, value) for number, value in counting if value not in self.passed]
        self.passed |= {value for _, value in new}
        came = new[-1:] if self.skips else new
        self.came |= {value: number for number, value in came}
        found = self.player.followed()
        assert found == (came, dropped), self._difference(f"followed: {found}", seen, [])

    def _settings(self) -> Settings:
        draw = self.draw
        policies = [("latest", 1), ("latest", 2), ("every", 10), ("best", 1)]
        keep = tuple(draw.sample(policies, draw.choice([0, 1, 1, 2])))
        return Settings(
            keep=keep,
            save_every=draw.choice([None, 10]),
            save_last=draw.random() < 0.8,
            saves_preempted=draw.random() < 0.8,
            grace=draw.random() < 0.2,
        )

    def _difference(self, answer: str, seen: object, expected: list[tuple[str, World]]) -> str:
        lines = [f"seed {self.seed}:", *self.done, f"answer: {answer}", f"on the store: {seen}"]
        for may_be, world in expected[:12]:
            lines += [f"or expected: {may_be}", f"with {world.steps}", f"of {world.jobs}"]
        return "\n  ".join(lines)


_KINDS = (
    *("save",) * 6,
    *("save_in_background",) * 5,
    *("step",) * 6,
    *("load",) * 5,
    *("cut",) * 4,
    *("close", "close", "kill", "interrupted_close", "sigterm", "claim", "sweep"),
    *("pin", "remove", "remove"),
)
_FORWARD = {"save", "save_in_background", "step", "cut", "interrupted_close"}
_HOW = {
    "save": (*("",) * 12, "bad value", "bad metric"),
    "save_in_background": (*("",) * 8, *("callback",) * 4, "bad value"),
    "cut": ("ctrl_c", "kill", "forbidden", "claimed"),
    "close": ("", "", "finish"),
    "pin": ("", "", "unpin"),
    "remove": ("delete", "prefix", "data lost", "index lost"),
}


@pytest.fixture(autouse=True, scope="module")
def stores() -> Iterator[None]:
    """All stores are in memory, and signals are noticed at the next step."""
    committed = Retainer.committed

    def in_upkeep(retainer: Retainer, step: int) -> None:
        _in_upkeep.set(True)  # of this thread
        committed(retainer, step)

    with in_memory(), quiet(), noticed_at_each_step(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreSpec, "open", _connect)
        patch.setattr(sweeping, "open_uploads", lambda spec: _connect(spec).uploads())
        patch.setattr(Retainer, "committed", in_upkeep)
        There.bucket, There.process = Bucket(), Process()
        with dos.CheckpointManager(RUN) as run:  # what is asked once is asked now
            run.save(1, state(1))
        yield


def history(seed: int) -> None:
    """Play one."""
    before = signal.signal(signal.SIGTERM, _end)
    played = History(seed)
    try:
        played.play()
    finally:
        for name in list(played.player.managers):
            played.player.kill(Act("kill", name))
        signal.signal(signal.SIGTERM, before)
        for handle in _saves.here.unsettled:
            handle.exception()  # nobody needs to be told at the end of the program


@pytest.mark.parametrize("seed", cases(range(500), default=range(12)))
def test_a_history_of_a_run_does_what_users_are_told(seed):
    history(seed)
