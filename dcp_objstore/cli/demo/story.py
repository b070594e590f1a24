"""The demo from start to end: train, kill, resume, prove. Runs in a process without torch."""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.cli.demo import proofs
from dcp_objstore.cli.demo.place import Place, in_bucket, on_loopback
from dcp_objstore.cli.demo.proofs import FinishedLoad, ProofFailedError, State, prove
from dcp_objstore.cli.demo.ranks import Job, Outcome, Ranks, warm_up
from dcp_objstore.cli.demo.report import MIB, Printer
from dcp_objstore.cli.exits import fail
from dcp_objstore.cli.seaweedfs import SeaweedServer, find_weed
from dcp_objstore.errors import DcpObjstoreError, UnsupportedError
from dcp_objstore.observe.report import SaveReport, counted
from dcp_objstore.run.listing import ListedCheckpoint, steps
from dcp_objstore.run.steps import step_number
from dcp_objstore.stores import ObjectStore

_STEPS = (4, 8, 12)
_SEQUENCES_PER_STEP = 16
_COMMITTED, _DOOMED = _STEPS[1], _STEPS[2]
# What ranks do. This process only names the functions there, because it does not import torch.
_TRAINING = "dcp_objstore.cli.demo.training"
# Imported once, before ranks are forked. Otherwise every rank would import the last three at first
# use; optimizers need torch._dynamo. The only thread that these imports start belongs to NumPy's
# OpenBLAS, which handles forks.
_PRELOAD = (_TRAINING, "torch._dynamo", "dcp_objstore.write.async_save", "obstore.store")
# Generous, for slow machines: no job takes more than half a minute on two cores.
_JOB_SECONDS = 300.0
# Collectives of a group with a dead rank end after this, if its closed connections do not end them.
_GROUP_SECONDS = 60.0
_SURVIVORS_SECONDS = _GROUP_SECONDS + 15
_OTHERS_SECONDS = 120.0
_LISTING_PAUSE_SECONDS = 0.1
_LOG_TAIL_CHARACTERS = 2000


class DemoFailedError(Exception):
    """A process of the demo did not do its job. `log` is the end of its output."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log[-_LOG_TAIL_CHARACTERS:]


def run_demo(*, ranks: int, resume_ranks: int, url: str | None, keep: bool) -> None:
    """Run the demo and print it; exit with status 1 if a proof does not hold."""
    began = time.monotonic()
    if importlib.util.find_spec("pydoc_data") is None:
        raise UnsupportedError("this Python has no pydoc_data, the text that the demo trains on")
    out = Printer()
    out.headline("dcp-objstore demo: train, kill a rank in mid-save, resume, prove")
    if url is None:
        find_weed()  # if it is missing, says how to install it, before anything starts
        warm_up(_PRELOAD)
    with on_loopback() if url is None else in_bucket(url, keep=keep) as place:
        server = place.server
        where = f"a SeaweedFS server at {server.endpoint_url}" if server else place.run.url
        out.say(f"saving to {where}")
        try:
            Story(place, ranks, resume_ranks, out).run()
        except (ProofFailedError, DemoFailedError) as error:
            out.failure(str(error))
            if isinstance(error, DemoFailedError) and error.log:
                print(f"the end of that process's output:\n{error.log}", file=sys.stderr)
            fail(f"the demo failed: {error}")
        out.table()
        out.title(f"All {out.proofs} proofs hold, in {time.monotonic() - began:.0f} s.")
        if keep and server is not None:
            _wait_for_ctrl_c(place, server, out)
        elif keep:
            out.say(f"kept: {place.run.url}")


class Story:
    """One run of the demo at a place."""

    def __init__(self, place: Place, ranks: int, resume_ranks: int, out: Printer) -> None:
        self.place, self.ranks, self.resume_ranks, self.out = place, ranks, resume_ranks, out
        self.saved: dict[int, State] = {}

    def run(self) -> None:
        """Run the whole demo; raise if a statement does not hold or a process fails."""
        losses = self._train_and_kill()
        self._resume(losses)
        self._load_alone()
        self._load_with_stock()

    def _train_and_kill(self) -> dict[int, float]:
        """Train until the last save, and kill a rank there; return the losses by step."""
        self.out.title(f"1. Train on {counted(self.ranks, 'rank')} (FSDP2, gloo), save on the way")
        losses: dict[int, float] = {}
        held: list[Any] = []
        with self._training(self.ranks, doomed_step=_DOOMED) as job:
            for message in self._shown(job, self.ranks, losses):
                if message[0] == "uploading":
                    _, *held = message
                # Each rank has its own pipe, so the report of this upload may arrive first.
                if held and _COMMITTED in self.saved:
                    self._kill_in_mid_save(job, *held)
                    break
            else:
                _require_success(job)
                raise DemoFailedError("the ranks ended before the last save began")
        load = self._alone("load", *self._access(_DOOMED))
        self.out.proof(proofs.invisible(load))
        return losses

    def _kill_in_mid_save(self, job: Job, held_key: str, held_bytes: int) -> None:
        """Kill the held rank when all others have written."""
        victim = self.ranks - 1
        self.out.title(f"2. SIGKILL rank {victim} in the middle of the save of step-{_DOOMED}")
        store = self.place.step(_DOOMED).open()
        self._wait_for_the_others(store, held_key)
        self.out.say(
            f"{counted(victim, 'rank')} wrote; rank {victim} is held in its upload of"
            f" {held_bytes / MIB:.1f} MiB: kill"
        )
        began = time.monotonic()
        job.kill(victim)
        *survivors, killed = job.end(within_seconds=_SURVIVORS_SECONDS)
        seconds = time.monotonic() - began
        prove(killed.exit_signal == signal.SIGKILL, f"rank {victim} was not ended by SIGKILL")
        self.out.proof(f"{proofs.ended_cleanly(survivors)} in {seconds:.1f} s")
        keys = [meta.key for meta in store.list()]
        self.out.proof(proofs.torn(keys, self.ranks, held_key))
        self.out.add_row("save, killed", self.ranks, _DOOMED, "typed error on every survivor")

    def _wait_for_the_others(self, store: ObjectStore, held_key: str) -> None:
        """Wait until the others have written, or until it is too late, which the proof detects."""
        deadline = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < deadline:
            keys = [meta.key for meta in store.list()]
            others = proofs.ranks_that_wrote(keys)
            if len(others) == self.ranks - 1 or held_key in keys or MARKER_KEY in keys:
                return
            time.sleep(_LISTING_PAUSE_SECONDS)
        raise ProofFailedError("the objects of the other ranks did not appear on the store")

    def _resume(self, losses_before: dict[int, float]) -> None:
        """Load the newest committed step on another number of ranks, and train on."""
        ranks, step = self.resume_ranks, max(self._committed())
        self.out.title(f"3. Resume on {counted(ranks, 'rank')} from the newest committed step")
        prove(step == _COMMITTED, f"step {step} is the newest committed one, not {_COMMITTED}")
        losses: dict[int, float] = {}
        loads: list[FinishedLoad] = []
        with self._training(ranks, resume_step=step) as job:
            for message in self._shown(job, ranks, losses):
                if message[0] == "loaded":
                    loads.append(message[1])
                    if len(loads) == ranks:
                        proof = "bit-identical, loss goes on"
                        self._check_loads("resume", step, self.ranks, loads, proof)
            _require_success(job)
        if len(loads) != ranks or _DOOMED not in self.saved:
            raise DemoFailedError("the resumed ranks ended before their job was done")
        self.out.proof(proofs.falling(self.saved[step], self.saved[_DOOMED]))
        if all(_SEQUENCES_PER_STEP % number == 0 for number in (ranks, self.ranks)):
            # Otherwise ranks have unequal shares, and the mean over ranks is not that of the batch.
            self.out.proof(proofs.same_path(losses_before, losses))

    def _load_alone(self) -> None:
        self.out.title("4. Load in one plain process, without a process group")
        load: FinishedLoad = _value(self._alone("load", *self._access(_DOOMED)))
        proof = "bit-identical, no process group"
        self._check_loads("load", _DOOMED, self.resume_ranks, [load], proof)

    def _check_loads(
        self, phase: str, step: int, saved_by: int, loads: list[FinishedLoad], proof: str
    ) -> None:
        """Prove that each rank has loaded what was saved."""
        saved, states = self.saved[step], [load.state for load in loads]
        identical, *_ = [proofs.identical(saved, state) for state in states]
        same_loss, *_ = [proofs.same_loss(saved, state) for state in states]
        self.out.proof(f"step-{step}, saved by {counted(saved_by, 'rank')}: {identical}")
        self.out.proof(same_loss)
        self.out.add_row(
            phase,
            len(loads),
            step,
            proof,
            total_bytes=sum(load.total_bytes for load in loads),
            seconds=max(load.seconds for load in loads),
        )

    def _load_with_stock(self) -> None:
        self.out.title("5. Read it with stock torch.distributed.checkpoint")
        with tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-") as directory:
            count, size = _download(self.place.step(_DOOMED).open(), Path(directory))
            self.out.say(
                f"downloaded as they are: {count} objects, {size / MIB:.1f} MiB, torn save included"
            )
            loads: dict[str, FinishedLoad] = _value(self._alone("load_with_stock", directory))
        for reader, load in loads.items():
            self.out.proof(f"{reader}: {proofs.identical(self.saved[_DOOMED], load.state)}")
            proof = f"{reader}: bit-identical"
            self.out.add_row("stock read", 1, _DOOMED, proof, seconds=load.seconds)

    @contextmanager
    def _training(
        self, ranks: int, *, resume_step: int | None = None, doomed_step: int | None = None
    ) -> Iterator[Job]:
        """Begin the training of a resumed run or of a new one; end its processes in the end."""
        with Ranks(preload=_PRELOAD) as processes:
            yield processes.start(
                ranks,
                f"{_TRAINING}:train",
                *self._access(),
                None if resume_step is None else self.place.step(resume_step).url,
                _SEQUENCES_PER_STEP,
                _STEPS if resume_step is None else (_DOOMED,),
                doomed_step,
                timeout_seconds=_JOB_SECONDS,
                group_timeout_seconds=_GROUP_SECONDS,
            )

    def _alone(self, name: str, *args: object) -> Outcome:
        """Run a function of `training` in one process without a process group."""
        with Ranks(preload=_PRELOAD) as processes:
            job = processes.start(
                1, f"{_TRAINING}:{name}", *args, timeout_seconds=_JOB_SECONDS, grouped=False
            )
            return job.end()[0]

    def _shown(self, job: Job, ranks: int, losses: dict[int, float]) -> Iterator[tuple[Any, ...]]:
        """Yield what training ranks say; print progress and saves, and keep the losses."""
        for said in job.messages():
            match said.message:
                case ("ready", parameters, text_bytes):
                    self.out.say(
                        f"a transformer of {parameters / 1e6:.1f} M parameters reads"
                        f" {text_bytes:,} bytes: Python's own reference"
                    )
                case ("step", step, loss):
                    losses[step] = loss
                    if step == 1 or step % 2 == 0:
                        self.out.say(f"step {step:3}  loss {loss:.3f}")
                case ("saved", state, report, steps_meanwhile):
                    self._note_save(state, report, steps_meanwhile, ranks)
            yield said.message

    def _note_save(
        self, state: State, report: SaveReport, steps_meanwhile: int, ranks: int
    ) -> None:
        self.saved[state.step] = state
        step = self._committed().get(state.step)
        prove(
            step is not None
            and (step.world_size, step.user_metadata.get("step")) == (ranks, state.step),
            f"the marker of step {state.step} has a wrong world size or step",
        )
        meanwhile = f", while {steps_meanwhile} more steps were trained" if steps_meanwhile else ""
        self.out.proof(
            f"step-{state.step} committed: {report.total_bytes / MIB:.1f} MiB in"
            f" {counted(report.objects, 'object')}, {report.seconds:.1f} s{meanwhile}"
        )
        self.out.add_row(
            "save",
            ranks,
            state.step,
            "committed by one conditional PUT",
            total_bytes=report.total_bytes,
            seconds=report.seconds,
        )

    def _access(self, step: int | None = None) -> tuple[str, Mapping[str, object]]:
        """Return URL and `storage_options` of the run or of a step. (Specs pickle no secrets.)"""
        spec = self.place.run if step is None else self.place.step(step)
        return spec.url, spec.storage_options

    def _committed(self) -> dict[int, ListedCheckpoint]:
        """Return the committed steps by their numbers."""
        url, options = self._access()
        listed = steps(url, storage_options=options)
        found = {step_number(one.name): one for one in listed}
        return {number: one for number, one in found.items() if number is not None}


def _require_success(job: Job) -> None:
    """Raise what a rank of a job failed with; its messages have ended, or its time is up."""
    for outcome in [*job.outcomes.values()]:
        _value(outcome)
    for outcome in job.end():
        _value(outcome)


def _value(outcome: Outcome) -> Any:
    """Return what a rank returned; raise if it failed."""
    if isinstance(outcome.error, DcpObjstoreError):
        raise outcome.error.at(rank=outcome.rank)
    if outcome.failed:
        raise DemoFailedError(outcome.reason, outcome.text)
    return outcome.value


def _download(store: ObjectStore, directory: Path) -> tuple[int, int]:
    """Download all objects, as `aws s3 sync` would; return the numbers of objects and bytes."""
    count = size = 0
    for meta in store.list():
        body, _ = store.get(meta.key, max_size_bytes=meta.size_bytes)
        (directory / meta.key).write_bytes(body)
        count, size = count + 1, size + len(body)
    return count, size


def _wait_for_ctrl_c(place: Place, server: SeaweedServer, out: Printer) -> None:
    """Say how to look at the server, which runs until Ctrl-C."""
    out.say("the server runs until Ctrl-C; to look around, in another terminal:")
    try:
        for name, value in (
            ("AWS_ENDPOINT_URL", server.endpoint_url),
            ("AWS_ACCESS_KEY_ID", server.access_key),
            ("AWS_SECRET_ACCESS_KEY", server.secret_key),
        ):
            out.verbatim(f"export {name}={value}")
        out.verbatim(f"dcp-objstore ls {place.run.url}")
        while True:
            signal.pause()
    except KeyboardInterrupt:
        out.say("ended")
