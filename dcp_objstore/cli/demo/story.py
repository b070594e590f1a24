"""The demo from start to end: train, kill, resume, prove. Runs in a process without torch."""

from __future__ import annotations

import importlib.util
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import MARKER_KEY, parse_data_key
from dcp_objstore.checkpoint.probe import require_fencing
from dcp_objstore.cli.demo.ranks import (
    GROUP_SECONDS,
    FinishedLoad,
    Outcome,
    Ranks,
    State,
    warm_up,
)
from dcp_objstore.cli.exits import fail
from dcp_objstore.cli.seaweedfs import SeaweedServer, find_weed
from dcp_objstore.cli.serve import print_exports, wait_for_ctrl_c
from dcp_objstore.cli.terminal import aligned, coloured, columns, say, wrapped
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    DcpObjstoreError,
    InputError,
    UnsupportedError,
)
from dcp_objstore.observe.report import counted, first_few, size_text
from dcp_objstore.stores import ObjectStore, StoreSpec

_STEPS = (4, 8, 12)
_SEQUENCES_PER_STEP = 16
_COMMITTED, _DOOMED = _STEPS[1], _STEPS[2]
# Ranks add the same float32 numbers in another order; a wrong weight would change far more.
_LOSS_TOLERANCE = 1e-4
# The tolerance for the losses of several steps, over which such differences grow.
_PATH_TOLERANCE = 1e-2
_SURVIVORS_SECONDS = GROUP_SECONDS + 15
_OTHERS_SECONDS = 120.0
# Two states take some 70 MiB. With a bound, it does not matter how full the file system is.
_LOCAL_BYTES = 1 << 30
_LISTING_PAUSE_SECONDS = 0.1
_WIDEST = 100
_HEAD = ("phase", "ranks", "step", "MiB", "s")  # too small for rates to say anything
# Before any rank starts, a store that does not answer is an error to report at once.
_IMPATIENT = TransferConfig(
    connect_timeout_seconds=5.0,
    request_timeout_seconds=15.0,
    max_retries=2,
    retry_timeout_seconds=10.0,
)


class DemoFailedError(Exception):
    """A process of the demo did not do its job, or what was to be proved does not hold.

    `log` is the end of that process's output.
    """

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


def run_demo(*, ranks: int, resume_ranks: int, url: str | None, keep: bool) -> None:
    """Run the demo and print it; exit with status 1 if a proof does not hold."""
    began = time.monotonic()
    if importlib.util.find_spec("pydoc_data") is None:
        raise UnsupportedError("this Python has no pydoc_data, the text that the demo trains on")
    tell("dcp-objstore demo: train, kill a rank in mid-save, resume, prove", "")
    server = None
    with ExitStack() as stack:
        if url is None:
            find_weed()  # if it is missing, says how to install it, before anything starts
            warm_up()
            server = stack.enter_context(SeaweedServer())
            run = StoreSpec(f"{server.create_bucket('demo')}/run", server.storage_options)
            tell(f"saving to a SeaweedFS server at {server.endpoint_url}")
        else:
            run = stack.enter_context(in_bucket(url, keep=keep))
            tell(f"saving to {run.url}")
        node = stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-"))
        story = Story(run, ranks, resume_ranks, node)
        with failure_told():
            story.run()
        story.print_table()
        _title(f"All {story.proofs} proofs hold, in {time.monotonic() - began:.0f} s.")
        if keep and server is not None:
            _wait_for_ctrl_c(run, server)
        elif keep:
            tell(f"kept: {run.url}")


def tell(text: str, lead: str = "  ", colour: str | None = None) -> None:
    """Print text after a lead, wrapped under the text, at once."""
    width = max(20, min(columns(), _WIDEST)) if sys.stdout.isatty() else _WIDEST
    first, *rest = wrapped(lead + text, width, " " * len(lead))
    say(first.removeprefix(lead), *rest, lead=coloured(lead, colour) if lead.strip() else lead)
    sys.stdout.flush()


def _title(text: str) -> None:
    say("")
    tell(text, "")


def _sign(character: str, word: str) -> str:
    """Return the character, or the word if standard output cannot show the character."""
    try:
        character.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        return word
    return character


@contextmanager
def failure_told() -> Iterator[None]:
    """Print why the demo failed in the block, and exit with status 1."""
    try:
        yield
    except (DemoFailedError, TimeoutError) as error:
        tell(str(error), f"  {_sign('✗', 'FAILED')} ", "red")
        if isinstance(error, DemoFailedError) and error.log:
            print(f"the end of that process's output:\n{error.log}", file=sys.stderr)
        fail(f"the demo failed: {error}")


@contextmanager
def in_bucket(url: str, *, keep: bool) -> Iterator[StoreSpec]:
    """Choose a new run below the user's URL, with credentials from the environment.

    The bucket must allow to list, put conditionally and delete; this checks it. At the end the
    run is removed, unless `keep`.

    Raises:
        InputError: the store refused: no such bucket, no credentials, no permission, ….
        StoreUnavailableError: the store does not answer.
    """
    spec = StoreSpec(url)
    if spec.parsed.scheme == "memory":
        raise InputError("memory:// exists in one process only; the demo has many", url=url)
    run = spec.child(f"dcp-objstore-demo-{secrets.token_hex(4)}")
    store = replace(run, config=_IMPATIENT).open()
    for _ in store.list():  # first, because the probe waits longer for a store that is away
        break
    require_fencing(store, replaces=True, allow_unfenced=False)
    try:
        yield run
    finally:
        if not keep:
            try:
                store = run.open()  # patient: after a minute's work, a busy store is worth a wait
                for meta in list(store.list()):
                    store.delete(meta.key)
            except BaseException:
                print(f"dcp-objstore: left behind: {run.url}", file=sys.stderr)
                raise


class Story:
    """One run of the demo.

    Args:
        spec: the run.
        ranks: number of ranks that train first.
        resume_ranks: number of ranks that resume.
        node: the folder for copies on this node.

    Attributes:
        proofs: the number of proofs that hold so far.
    """

    def __init__(self, spec: StoreSpec, ranks: int, resume_ranks: int, node: str) -> None:
        self._local = dos.Local(node, max_bytes=_LOCAL_BYTES)
        self.spec, self.ranks, self.resume_ranks = spec, ranks, resume_ranks
        self._rows: list[tuple[str, ...]] = []
        self.proofs = 0
        self._saved: dict[int, State] = {}

    def run(self) -> None:
        """Run the whole demo; raise if a statement does not hold or a process fails."""
        losses = self._train_and_kill()
        self._resume(losses)
        _title("4. Load in one plain process, without a process group")
        load: FinishedLoad = _value(self._alone("load", *self._access(_DOOMED)))
        self._check_loads("load", _DOOMED, self.resume_ranks, [load])
        self._load_with_stock()

    def prove(self, holds: bool, statement: str, otherwise: str) -> None:
        """Print a statement if it holds; otherwise raise what is the case."""
        if not holds:
            raise DemoFailedError(otherwise)
        self.proofs += 1
        tell(statement, f"  {_sign('✓', 'ok')} ", "green")

    # --- the phases

    def _train_and_kill(self) -> dict[int, float]:
        """Train until the last save, and kill a rank there; return the losses by step."""
        _title(f"1. Train on {counted(self.ranks, 'rank')} (FSDP2, gloo), save on the way")
        losses: dict[int, float] = {}
        held: list[Any] = []
        with self._training(self.ranks, None, _STEPS, doomed_step=_DOOMED) as job:
            for message in self._shown(job, self.ranks, losses):
                if message[0] == "uploading":
                    _, *held = message
                # Each rank has its own pipe, so the report of this upload may arrive first.
                if held and _COMMITTED in self._saved:
                    self._kill_in_mid_save(job, *held)
                    break
            else:
                _require_success(job)
                raise DemoFailedError("the ranks ended before the last save began")
        self.prove_invisible(self._alone("load", *self._access(_DOOMED)))
        return losses

    def _kill_in_mid_save(self, job: Ranks, held_key: str, held_bytes: int) -> None:
        """Kill the held rank when all others have written."""
        victim = self.ranks - 1
        _title(f"2. SIGKILL rank {victim} in the middle of the save of step-{_DOOMED}")
        store = self._step(_DOOMED).open()
        self._wait_for_the_others(store, held_key)
        tell(
            f"{counted(victim, 'rank')} wrote; rank {victim} is held in its upload of"
            f" {held_bytes / MIB:.1f} MiB: kill"
        )
        began = time.monotonic()
        job.kill(victim)
        self.prove_ended_cleanly(job.end(_SURVIVORS_SECONDS), time.monotonic() - began)
        self.prove_torn([meta.key for meta in store.list()], held_key)
        self.add_row("save, killed", self.ranks, _DOOMED)

    def _wait_for_the_others(self, store: ObjectStore, held_key: str) -> None:
        """Wait until the others have written, or until it is too late, which the proof detects."""
        deadline = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < deadline:
            keys = [meta.key for meta in store.list()]
            others = len(_ranks_that_wrote(keys))
            if others == self.ranks - 1 or held_key in keys or MARKER_KEY in keys:
                return
            time.sleep(_LISTING_PAUSE_SECONDS)
        raise DemoFailedError("the objects of the other ranks did not appear on the store")

    def _resume(self, losses_before: dict[int, float]) -> None:
        """Load the newest committed step on another number of ranks, and train on."""
        ranks, step = self.resume_ranks, max(self._committed())
        _title(f"3. Resume on {counted(ranks, 'rank')} from the newest committed step")
        if step != _COMMITTED:
            raise DemoFailedError(f"step {step} is the newest committed one, not {_COMMITTED}")
        losses: dict[int, float] = {}
        loads: list[FinishedLoad] = []
        with self._training(ranks, step, (_DOOMED,)) as job:
            for message in self._shown(job, ranks, losses):
                if message[0] == "loaded":
                    loads += message[1:]
                    if len(loads) == ranks:
                        self._check_loads("resume", step, self.ranks, loads)
                        self.prove_from_the_node(loads)
            _require_success(job)
        self.prove_falling(self._saved[step], self._saved[_DOOMED])
        if all(_SEQUENCES_PER_STEP % number == 0 for number in (ranks, self.ranks)):
            # Otherwise ranks have unequal shares, and the mean over ranks is not that of the batch.
            self.prove_same_path(losses_before, losses)

    def _load_with_stock(self) -> None:
        """Download everything, as `aws s3 sync` would, and read that without this library."""
        _title("5. Read it with stock torch.distributed.checkpoint")
        with tempfile.TemporaryDirectory(prefix="dcp-objstore-demo-") as directory:
            store = self._step(_DOOMED).open()
            objects = list(store.list())
            for meta in objects:
                body, _ = store.get(meta.key, max_size_bytes=meta.size_bytes)
                Path(directory, meta.key).write_bytes(body)
            size = sum(meta.size_bytes for meta in objects) / MIB
            tell(
                f"downloaded as they are: {len(objects)} objects, {size:.1f} MiB, torn save"
                " included"
            )
            loads: dict[str, FinishedLoad] = _value(self._alone("load_with_stock", directory))
        for reader, load in loads.items():
            self.prove_identical(reader, self._saved[_DOOMED], [load.state])
            self.add_row(reader, 1, _DOOMED, seconds=load.seconds)

    # --- processes

    def _training(
        self, ranks: int, resume: int | None, steps: tuple[int, ...], doomed_step: int | None = None
    ) -> Ranks:
        """Begin the training of a resumed run or of a new one."""
        url = None if resume is None else self._step(resume).url
        arguments = (self._local, url, _SEQUENCES_PER_STEP, steps, doomed_step)
        return Ranks(ranks, "train", *self._access(), *arguments)

    def _alone(self, function: str, *args: object) -> Outcome:
        """Run a function of `training` in one process without a process group."""
        with Ranks(1, function, *args, grouped=False) as job:
            (outcome,) = job.end()
            return outcome

    def _shown(self, job: Ranks, ranks: int, losses: dict[int, float]) -> Iterator[tuple[Any, ...]]:
        """Yield what training ranks say; print progress and saves, and keep the losses."""
        for message in job.messages():
            match message:
                case ("ready", parameters, text_bytes):
                    tell(
                        f"a transformer of {parameters / 1e6:.1f} M parameters reads"
                        f" {text_bytes:,} bytes: Python's own reference"
                    )
                case ("step", step, loss):
                    losses[step] = loss
                    if step == 1 or step % 2 == 0:
                        tell(f"step {step:3}  loss {loss:.3f}")
                case ("saved", state, report, steps_meanwhile):
                    self._check_save(state, report, steps_meanwhile, ranks)
            yield message

    def _committed(self) -> dict[int, tuple[int | None, Any]]:
        """Return the world size and the noted step of each committed step, by its number."""
        url, options = self._access()
        return {
            int(step.name.removeprefix("step-")): (step.world_size, step.user_metadata.get("step"))
            for step in dos.steps(url, storage_options=options)
        }

    def _step(self, number: int) -> StoreSpec:
        return self.spec.child(f"step-{number}")

    def _access(self, step: int | None = None) -> tuple[str, Any]:
        """Return URL and `storage_options` of the run or of a step. (Specs pickle no secrets.)"""
        spec = self.spec if step is None else self._step(step)
        return spec.url, spec.storage_options

    # --- the proofs

    def _check_save(
        self, state: State, report: dos.reports.SaveReport, steps_meanwhile: int, ranks: int
    ) -> None:
        self._saved[state.step] = state
        meanwhile = f", while {steps_meanwhile} more steps were trained" if steps_meanwhile else ""
        self.prove(
            self._committed().get(state.step) == (ranks, state.step),
            f"step-{state.step} committed: {report.total_bytes / MIB:.1f} MiB in"
            f" {counted(report.objects, 'object')}, {report.seconds:.1f} s{meanwhile}",
            f"the marker of step {state.step} has a wrong world size or step",
        )
        self.add_row("save", ranks, state.step, report.total_bytes, report.seconds)

    def _check_loads(self, phase: str, step: int, saved_by: int, loads: list[FinishedLoad]) -> None:
        """Prove that each rank has loaded what was saved."""
        saved, states = self._saved[step], [load.state for load in loads]
        self.prove_identical(f"step-{step}, saved by {counted(saved_by, 'rank')}", saved, states)
        self.prove_same_loss(saved, states)
        total_bytes = sum(load.total_bytes for load in loads)
        self.add_row(phase, len(loads), step, total_bytes, max(load.seconds for load in loads))

    def prove_identical(self, what: str, saved: State, loaded: Sequence[State]) -> None:
        """Prove that every tensor and value of states is the same, bit for bit."""
        expected = saved.digests.items()
        differ = sorted({key for state in loaded for key, _ in state.digests.items() ^ expected})
        self.prove(
            bool(expected) and not differ,
            f"{what}: state bit-identical: all {len(expected)} SHA-256 digests agree",
            f"{what}: of {len(expected)} values {len(differ)} differ from what was saved:"
            f" {first_few(differ, 3)}",
        )

    def prove_same_loss(self, saved: State, loaded: Sequence[State]) -> None:
        """Prove that the loss on the fixed batch, computed again, is the one that was recorded."""
        before, now = saved.recorded_loss, [state.fixed_loss for state in loaded]
        self.prove(
            all(loss is not None and abs(before - loss) <= _LOSS_TOLERANCE for loss in now),
            f"loss on the same batch: {before:.4f} when it was saved, {now[0]:.4f} after the load",
            f"the loss on the same batch was {before:.6f} when saved and is {now} after the load",
        )

    def prove_from_the_node(self, loads: Sequence[FinishedLoad]) -> None:
        """Prove that ranks that have started again on their node read nothing from the bucket."""
        local_bytes = sum(load.local_bytes for load in loads)
        fetched_bytes = sum(load.total_bytes for load in loads) - local_bytes
        text = f"{size_text(local_bytes)} from its copies, {size_text(fetched_bytes)} from the"
        self.prove(
            local_bytes > 0 and not fetched_bytes,
            f"the job that starts again reads its bytes from this node: {text} bucket",
            f"the job that started again read {text} bucket",
        )

    def prove_falling(self, before: State, after: State) -> None:
        """Prove that training went on from where it was."""
        losses = (
            f"{before.recorded_loss:.4f} at step {before.step},"
            f" {after.recorded_loss:.4f} at step {after.step}"
        )
        self.prove(
            after.recorded_loss < before.recorded_loss,
            f"loss goes on falling: {losses}",
            f"the loss did not go on falling: {losses}",
        )

    def prove_same_path(self, killed: Mapping[int, float], resumed: Mapping[int, float]) -> None:
        """Prove that the resumed run had the losses of the killed run, step by step.

        Args:
            killed: the killed run's loss by step, over the whole batch, which is the same for any
                number of ranks.
            resumed: the resumed run's loss by step.
        """
        steps = sorted(killed.keys() & resumed.keys())
        if not steps:
            raise DemoFailedError("the resumed run trained none of the steps of the killed one")
        gap, step = max((abs(killed[step] - resumed[step]), step) for step in steps)
        self.prove(
            gap <= _PATH_TOLERANCE,
            f"steps {steps[0]} to {steps[-1]} have the losses that they had before the kill, within"
            f" {gap:.0e}",
            f"the loss of step {step} was {killed[step]:.5f} before the kill and is"
            f" {resumed[step]:.5f} after the resume",
        )

    def prove_torn(self, keys: Collection[str], held_key: str) -> None:
        """Prove that the objects of all ranks but one are there, and no marker."""
        survivors, done = self.ranks - 1, len(_ranks_that_wrote(keys))
        count = sum(parse_data_key(key) is not None for key in keys)
        self.prove(
            MARKER_KEY not in keys and held_key not in keys and done >= survivors,
            f"the torn save left {counted(count, 'data object')} and no {MARKER_KEY} marker",
            f"the save is not torn in the middle: {done} of {survivors} surviving ranks' objects"
            f" are there, among {first_few(sorted(keys), 20)}",
        )

    def prove_ended_cleanly(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Prove that the last rank was killed, and every other raised a `DcpObjstoreError`."""
        *survivors, killed = outcomes
        others = [one for one in survivors if not isinstance(one.error, DcpObjstoreError)]
        kinds = ", ".join(sorted({type(outcome.error).__name__ for outcome in survivors}))
        self.prove(
            killed.status == -signal.SIGKILL and not others,
            f"typed error ({kinds}) on {len(survivors)} of {len(survivors)} surviving ranks in"
            f" {seconds:.1f} s",
            f"the killed rank has the status {killed.status}; without a typed error ended"
            f" {[one.failure or f'rank {one.rank}' for one in others]}",
        )

    def prove_invisible(self, load: Outcome) -> None:
        """Prove that the load of the torn checkpoint has found none."""
        self.prove(
            isinstance(load.error, CheckpointNotFoundError),
            f"so it does not exist: dos.load raises {type(load.error).__name__}",
            f"the load of the torn checkpoint did not find it missing: {load.failure or 'loaded'}",
        )

    # --- the table

    def add_row(
        self, phase: str, ranks: int, step: int, total_bytes: int = 0, seconds: float = 0.0
    ) -> None:
        """Add a line to the table; `total_bytes` are those of all ranks together."""
        size = f"{total_bytes / MIB:.1f}" if total_bytes else "-"
        duration = f"{seconds:.2f}" if seconds else "-"
        self._rows.append((phase, str(ranks), str(step), size, duration))

    def print_table(self) -> None:
        """Print what was saved and loaded."""
        say("")
        for line in aligned([_HEAD, *self._rows], _HEAD[1:]):
            tell(line, "")


def _ranks_that_wrote(keys: Collection[str]) -> set[int]:
    return {name.rank for key in keys if (name := parse_data_key(key)) is not None}


def _require_success(job: Ranks) -> None:
    """Raise what a rank of a job failed with."""
    for outcome in [*job.outcomes.values()]:
        _value(outcome)
    for outcome in job.end():
        _value(outcome)


def _value(outcome: Outcome) -> Any:
    """Return what a rank returned; raise if it failed."""
    if isinstance(outcome.error, DcpObjstoreError):
        raise outcome.error.at(rank=outcome.rank)
    if outcome.failure:
        raise DemoFailedError(outcome.failure, outcome.log)
    return outcome.value


def _wait_for_ctrl_c(run: StoreSpec, server: SeaweedServer) -> None:
    """Say how to look at the server, which runs until Ctrl-C."""
    tell("the server runs until Ctrl-C; to look around, in another terminal:")
    print_exports(server)
    say(f"dcp-objstore ls {run.url}")
    sys.stdout.flush()
    wait_for_ctrl_c()
