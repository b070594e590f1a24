"""The demo from start to end: train, kill, resume, prove. Runs in a process without torch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dcp_objstore.checkpoint.commit import open_committed
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.cli.demo import proofs
from dcp_objstore.cli.demo.launcher import Crew, SilenceError
from dcp_objstore.cli.demo.messages import (
    Ended,
    LoadAlone,
    LoadWithStock,
    RankEvent,
    RankFailed,
    Ready,
    State,
    StepLoaded,
    Stepped,
    StepSaved,
    Train,
    Uploading,
)
from dcp_objstore.cli.demo.place import Place
from dcp_objstore.cli.demo.proofs import ProofFailedError
from dcp_objstore.cli.demo.report import MIB, Printer, Row, counted
from dcp_objstore.errors import CheckpointNotFoundError
from dcp_objstore.stores import ObjectStore

_STEPS = (8, 16, 24)
_SEQUENCES_PER_STEP = 16
_COMMITTED, _DOOMED = _STEPS[1], _STEPS[2]
# Generous, for slow machines: nothing in the demo is silent for longer than a few seconds.
_SILENCE_SECONDS = 120.0
# Longer than the time-out of the survivors' process group.
_SURVIVORS_SECONDS = 75.0
_LISTING_PAUSE_SECONDS = 0.1


class DemoFailedError(Exception):
    """A process of the demo did not do its job. `log` is the end of its output."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's choices.

    Attributes:
        ranks: number of ranks that train first.
        resume_ranks: number of ranks that resume.
    """

    ranks: int
    resume_ranks: int


class Story:
    """One run of the demo at a place."""

    def __init__(self, place: Place, settings: Settings, printer: Printer) -> None:
        self.place, self.settings, self.out = place, settings, printer
        self.saved: dict[int, State] = {}
        self.losses: dict[int, float] = {}

    def run(self) -> None:
        """Run the whole demo.

        Raises:
            ProofFailedError: a statement does not hold.
            DemoFailedError: a process ended before its job was done.
            DcpObjstoreError: a rank raised it.
        """
        self._train_and_kill()
        self._show_that_the_torn_step_is_invisible()
        self._resume()
        self._load_alone()
        self._load_with_stock()

    def _train_and_kill(self) -> None:
        ranks = self.settings.ranks
        self.out.title(f"1. Train on {counted(ranks, 'rank')} (FSDP2, gloo), save on the way")
        job = Train(
            run_url=self.place.run_url,
            storage_options=self.place.storage_options,
            resume_url=None,
            sequences_per_step=_SEQUENCES_PER_STEP,
            save_steps=_STEPS,
            doomed_step=_DOOMED,
        )
        held: Uploading | None = None
        with _crew(job, ranks) as crew:
            for _, event in _reports(crew):
                if isinstance(event, Uploading):
                    held = event
                elif isinstance(event, Stepped):
                    self.losses[event.step] = event.loss
                self._show_training(event, ranks)
                # Each rank has its own pipe, so the report of this upload may arrive first.
                if held is not None and _COMMITTED in self.saved:
                    self._kill_in_mid_save(crew, held)
                    return
        raise DemoFailedError("the ranks ended before the last save began")

    def _show_training(self, event: RankEvent, ranks: int) -> None:
        if isinstance(event, Ready):
            self.out.say(
                f"a transformer of {event.parameters / 1e6:.1f} M parameters reads"
                f" {event.text_bytes:,} bytes: Python's own reference"
            )
        elif isinstance(event, Stepped) and (event.step == 1 or event.step % 4 == 0):
            self.out.say(f"step {event.step:3}  loss {event.loss:.3f}")
        elif isinstance(event, StepSaved):
            self._note_save(event, ranks)

    def _note_save(self, event: StepSaved, ranks: int) -> None:
        step = event.state.step
        self.saved[step] = event.state
        beside = (
            f", while {event.steps_meanwhile} more steps were trained"
            if event.steps_meanwhile
            else ""
        )
        marker, _ = open_committed(self.place.open(step))
        if (marker.world_size, marker.user_metadata.get("step")) != (ranks, step):
            raise ProofFailedError(f"the marker of step {step} has a wrong world size or step")
        self.out.proof(
            f"step-{step} committed: {event.total_bytes / MIB:.1f} MiB in"
            f" {counted(event.objects, 'object')}, {event.seconds:.1f} s{beside}"
        )
        self.out.rows.append(
            Row(
                phase="save",
                ranks=ranks,
                step=step,
                total_bytes=event.total_bytes,
                seconds=event.seconds,
                proof="committed by one conditional PUT",
            )
        )

    def _kill_in_mid_save(self, crew: Crew, held: Uploading) -> None:
        """Wait until all ranks but the held one have written, then kill that one."""
        victim = self.settings.ranks - 1
        self.out.title(f"2. SIGKILL rank {victim} in the middle of the save of step-{_DOOMED}")
        store = self.place.open(_DOOMED)
        self._wait_for_the_others(store, held)
        self.out.say(
            f"{counted(victim, 'rank')} wrote; rank {victim} is held in its upload of"
            f" {held.size_bytes / MIB:.1f} MiB: kill"
        )
        began = time.monotonic()
        crew.kill(victim)
        heard, late = crew.end_quietly(_SURVIVORS_SECONDS)
        seconds = time.monotonic() - began
        if Ended(exit_code=-9) not in heard.get(victim, []):
            raise ProofFailedError(f"rank {victim} was not ended by SIGKILL")
        failures = [
            event
            for rank, events in heard.items()
            if rank != victim
            for event in events
            if isinstance(event, RankFailed)
        ]
        typed = [type(one.error).__name__ for one in failures if one.error is not None]
        others = [one.text for one in failures if one.error is None]
        others += ["nothing"] * (victim - len(failures) - len(late))
        self.out.proof(f"{proofs.ended_cleanly(typed, others, len(late))} in {seconds:.1f} s")
        keys = [meta.key for meta in store.list()]
        proof = proofs.torn(keys, self.settings.ranks, held.key)
        self.out.proof(proof)
        self.out.rows.append(
            Row(
                phase="save, killed",
                ranks=self.settings.ranks,
                step=_DOOMED,
                total_bytes=None,
                seconds=None,
                proof="typed error on every survivor",
            )
        )

    def _wait_for_the_others(self, store: ObjectStore, held: Uploading) -> None:
        """Wait until the others have written, or until it is too late, which the proof detects."""
        deadline = time.monotonic() + _SILENCE_SECONDS
        while time.monotonic() < deadline:
            keys = [meta.key for meta in store.list()]
            others = proofs.ranks_that_wrote(keys)
            if len(others) == self.settings.ranks - 1 or held.key in keys or MARKER_KEY in keys:
                return
            time.sleep(_LISTING_PAUSE_SECONDS)
        raise ProofFailedError("the objects of the other ranks did not appear on the store")

    def _show_that_the_torn_step_is_invisible(self) -> None:
        job = LoadAlone(
            url=self.place.step_url(_DOOMED), storage_options=self.place.storage_options
        )
        with _crew(job, 0) as crew:
            for _, event in _all_reports(crew):
                if isinstance(event, StepLoaded):
                    raise ProofFailedError("the torn checkpoint was loaded")
                if isinstance(event, RankFailed):
                    if not isinstance(event.error, CheckpointNotFoundError):
                        raise ProofFailedError(f"loading the torn checkpoint raised {event.text}")
                    self.out.proof(
                        f"so it does not exist: dos.load raises {type(event.error).__name__}"
                    )
                    return
        raise DemoFailedError("the process that had to load the torn checkpoint reported nothing")

    def _newest_committed(self) -> int:
        for step in reversed(_STEPS):
            try:
                open_committed(self.place.open(step))
            except CheckpointNotFoundError:
                continue
            return step
        raise ProofFailedError("no checkpoint of this run is committed")

    def _resume(self) -> None:
        ranks = self.settings.resume_ranks
        step = self._newest_committed()
        self.out.title(f"3. Resume on {counted(ranks, 'rank')} from the newest committed step")
        if step != _COMMITTED:
            raise ProofFailedError(f"step {step} is the newest committed one, not {_COMMITTED}")
        job = Train(
            run_url=self.place.run_url,
            storage_options=self.place.storage_options,
            resume_url=self.place.step_url(step),
            sequences_per_step=_SEQUENCES_PER_STEP,
            save_steps=(_DOOMED,),
        )
        loads: dict[int, StepLoaded] = {}
        losses: dict[int, float] = {}
        with _crew(job, ranks) as crew:
            for rank, event in _reports(crew):
                if isinstance(event, StepLoaded):
                    loads[rank] = event
                    if len(loads) == ranks:
                        self._check_resume(step, list(loads.values()))
                elif isinstance(event, Stepped):
                    losses[event.step] = event.loss
                if not isinstance(event, Ready):
                    self._show_training(event, ranks)
        if len(loads) != ranks or _DOOMED not in self.saved:
            raise DemoFailedError("the resumed ranks ended before their job was done")
        self.out.proof(proofs.falling(self.saved[step], self.saved[_DOOMED]))
        if all(_SEQUENCES_PER_STEP % number == 0 for number in (ranks, self.settings.ranks)):
            # Otherwise ranks have unequal shares, and the mean over ranks is not that of the batch.
            self.out.proof(proofs.same_path(self.losses, losses))

    def _check_resume(self, step: int, loads: list[StepLoaded]) -> None:
        saved = self.saved[step]
        first, *others = loads
        for other in others:
            proofs.identical(saved, other.state)
            proofs.same_loss(saved, other.state)
        proof = proofs.identical(saved, first.state)
        self.out.proof(f"step-{step}, saved by {counted(self.settings.ranks, 'rank')}: {proof}")
        self.out.proof(proofs.same_loss(saved, first.state))
        self.out.rows.append(
            Row(
                phase="resume",
                ranks=len(loads),
                step=step,
                total_bytes=sum(load.total_bytes for load in loads),
                seconds=max(load.seconds for load in loads),
                proof="bit-identical, loss goes on",
            )
        )

    def _load_alone(self) -> None:
        self.out.title("4. Load in one plain process, without a process group")
        job = LoadAlone(
            url=self.place.step_url(_DOOMED), storage_options=self.place.storage_options
        )
        for event in self._loads(job):
            proof = proofs.identical(self.saved[_DOOMED], event.state)
            self.out.proof(
                f"step-{_DOOMED}, saved by {counted(self.settings.resume_ranks, 'rank')}: {proof}"
            )
            self.out.proof(proofs.same_loss(self.saved[_DOOMED], event.state))
            self.out.rows.append(
                Row(
                    phase="load",
                    ranks=1,
                    step=_DOOMED,
                    total_bytes=event.total_bytes,
                    seconds=event.seconds,
                    proof="bit-identical, no process group",
                )
            )

    def _load_with_stock(self) -> None:
        self.out.title("5. Read it with stock torch.distributed.checkpoint")
        with tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-") as directory:
            count, size = _download(self.place.open(_DOOMED), Path(directory))
            self.out.say(
                f"downloaded as they are: {count} objects, {size / MIB:.1f} MiB, torn save included"
            )
            for event in self._loads(LoadWithStock(directory=directory)):
                proof = proofs.identical(self.saved[_DOOMED], event.state)
                self.out.proof(f"{event.reader}: {proof}")
                self.out.rows.append(
                    Row(
                        phase="stock read",
                        ranks=1,
                        step=_DOOMED,
                        total_bytes=None,
                        seconds=event.seconds,
                        proof=f"{event.reader}: bit-identical",
                    )
                )

    def _loads(self, job: LoadAlone | LoadWithStock) -> list[StepLoaded]:
        with _crew(job, 0) as crew:
            loads = [event for _, event in _reports(crew) if isinstance(event, StepLoaded)]
        if not loads:
            raise DemoFailedError("the process that had to load the checkpoint loaded nothing")
        return loads


@contextmanager
def _crew(job: Train | LoadAlone | LoadWithStock, ranks: int) -> Iterator[Crew]:
    with Crew(job, ranks) as crew:
        try:
            yield crew
        except SilenceError as error:
            raise DemoFailedError(str(error)) from error


def _all_reports(crew: Crew) -> Iterator[tuple[int, RankEvent]]:
    return crew.events(_SILENCE_SECONDS)


def _reports(crew: Crew) -> Iterator[tuple[int, RankEvent]]:
    """Yield the reports of the ranks; raise when a rank fails."""
    for rank, event in _all_reports(crew):
        if isinstance(event, RankFailed):
            if event.error is not None:
                raise event.error.at(rank=rank)
            raise DemoFailedError(f"rank {rank} failed: {event.text}", crew.log_tail(rank))
        if isinstance(event, Ended):
            if event.exit_code != 0:
                raise DemoFailedError(
                    f"rank {rank} ended with status {event.exit_code}", crew.log_tail(rank)
                )
            continue
        yield rank, event


def _download(store: ObjectStore, directory: Path) -> tuple[int, int]:
    """Download every object under its own name, as `aws s3 sync` would.

    Returns:
        The number of objects and of bytes.
    """
    count = size = 0
    for meta in store.list():
        body, _ = store.get(meta.key, max_size_bytes=meta.size_bytes)
        (directory / meta.key).write_bytes(body)
        count, size = count + 1, size + len(body)
    return count, size
