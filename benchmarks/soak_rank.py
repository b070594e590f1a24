"""A rank of `soak`: it saves, loads, deletes and sweeps until it is preempted or killed.

At the end of each cycle, when no save is under way, it says what it holds of the machine.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

import dcp_objstore as dos
from benchmarks.resume_state import blank, fill, local, make_state, tensors_of
from benchmarks.settings import MIB, Settings
from dcp_objstore.checkpoint import sweep
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.errors import CheckpointNotFoundError, DcpObjstoreError, StoreUnavailableError
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import open_uploads
from tests.support.launcher import say

# Shorter than a real job may have it, so that what dead saves leave is removed within the run.
GRACE_SECONDS = 60.0
# What is done besides saving has so many turns, one in each cycle.
TURNS = 6
_KEPT_STEPS = 3
_SAVES_PER_MANAGER = 8
# An outage of ten seconds fails a save; single faults do not.
_CONFIG = dos.TransferConfig(part_size_bytes=5 * MIB, max_retries=3, peer_timeout_seconds=90)


@dataclass(frozen=True, kw_only=True)
class SoakJob:
    """What each rank is told.

    Attributes:
        root: the URL below which all is saved.
        storage_options: to reach it through the faults.
        direct_options: to count what is there, past the faults.
        settings: the size of the state.
        cycle_seconds: a cycle takes at least this long.
        newest: the newest step that was acknowledged; 0 before the first.
    """

    root: str
    storage_options: dict[str, object]
    direct_options: dict[str, object]
    settings: Settings
    cycle_seconds: float
    newest: int


def train(rank: int, world_size: int, job: SoakJob) -> None:
    """Resume and save, manager after manager, until the job is preempted."""
    del world_size  # the state is spread over the group
    trainer = _Trainer(rank, job)
    signals: list[int] = []
    # A signal that comes while one manager closes is not seen by the next.
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    while not (trainer.preempted or _is_seen_by_any(signals)):
        try:
            trainer.run()
        except DcpObjstoreError as error:
            _tell_failure(error)


def _is_seen_by_any(signals: Sequence[int]) -> bool:
    """Return whether a rank has seen a signal; raise if a rank was killed, as training would."""
    seen = torch.tensor(float(bool(signals)))
    dist.all_reduce(seen)
    return bool(seen)


def _tell_failure(error: DcpObjstoreError) -> None:
    """Say that a save or load has failed, as it does in an outage."""
    say("failed", f"{type(error).__name__}: {error.message[:300]}")


class _Trainer:
    def __init__(self, rank: int, job: SoakJob) -> None:
        self.preempted = False
        self._rank, self._job = rank, job
        self._run_url, self._child_url = f"{job.root}/run", f"{job.root}/by-children"
        self._access: Any = {"storage_options": job.storage_options, "config": _CONFIG}
        # What is saved in step N is the base plus N.
        self._base, self._saved, self._loaded = (
            make_state(job.settings, "shard0") for _ in range(3)
        )
        fill(self._base)
        self._loaded["step"] = -1
        self._newest = self._step = job.newest
        self._cycle = 0
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        """One manager, from its resume to its end."""
        keep = dos.KeepLatest(_KEPT_STEPS)
        with dos.CheckpointManager(
            self._run_url, keep=keep, save_last=False, **self._access
        ) as run:
            blank(self._loaded)
            began = time.monotonic()
            resumed = run.load(self._loaded) or 0
            self._seconds["s/resume"] = time.monotonic() - began
            if resumed < self._newest:
                raise AssertionError(f"step {self._newest} is lost: resumed from {resumed}")
            self._check(resumed)
            say("resumed", resumed)
            self._step = self._newest = resumed
            for _ in range(_SAVES_PER_MANAGER):
                _is_seen_by_any([])
                self._run_cycle(run)
                if run.preempted():
                    self.preempted = True
                    return

    def _run_cycle(self, run: dos.CheckpointManager) -> None:
        began = time.monotonic()
        self._step += 1
        self._cycle += 1
        try:
            self._save(run)
            self._do_more()
        except DcpObjstoreError as error:
            _tell_failure(error)
        run.step(self._step, self._saved)
        self._measure()
        time.sleep(max(0.0, began + self._job.cycle_seconds - time.monotonic()))

    def _save(self, run: dos.CheckpointManager) -> None:
        self._saved["step"] = self._step
        for tensor, base in zip(tensors_of(self._saved), tensors_of(self._base), strict=True):
            torch.add(local(base), self._step, out=local(tensor))
        began = time.monotonic()
        handle = run.async_save(self._step, self._saved)
        self._seconds["s held up"] = time.monotonic() - began
        blank(self._saved)  # training goes on
        assert handle is not None
        handle.result()
        self._seconds["s/save"] = time.monotonic() - began
        self._newest = self._step
        say("saved", self._step)

    def _do_more(self) -> None:
        """Do one of the things that a job does now and then."""
        newest = f"{self._run_url}/step-{self._newest}"
        turn, began = self._cycle % TURNS, time.monotonic()
        if turn in (1, 4):
            blank(self._loaded)
            dos.load(self._loaded, newest, progress=False, **self._access)
            self._seconds["s/load"] = time.monotonic() - began
            self._check(self._newest)
        elif turn == 2:
            self._save_in_a_child()
        elif turn == 3 and self._rank == 0:
            # A sweep never touches a URL that is overwritten more often than the grace period.
            with contextlib.suppress(CheckpointNotFoundError):
                dos.delete(self._child_url, allow_newest=True, **self._access)
            with mock.patch.object(sweep, "LEAST_GRACE_SECONDS", GRACE_SECONDS):
                dos.sweep(self._job.root, grace_seconds=GRACE_SECONDS, **self._access)
            self._seconds["s/sweep"] = time.monotonic() - began
        elif turn == 5 and self._rank == 0:
            assert dos.open(newest, **self._access).verify().ok, f"{newest} is damaged"

    def _save_in_a_child(self) -> None:
        """Save as DCP's process mode does, always to one URL."""
        writer = dos.ObjectStoreWriter(
            self._child_url, overwrite=True, progress=False, **self._access
        )
        mode: Any = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        saved: Any = async_save(self._saved, storage_writer=writer, **mode)
        try:
            getattr(saved, "upload_completion", saved).result()
        except (CheckpointException, RuntimeError) as error:  # what DCP makes of the child's own
            raise StoreUnavailableError(f"in a child: {error}") from None

    def _check(self, step: int) -> None:
        """Raise unless every element of what was loaded is of this step; 0: nothing was there."""
        if step == 0:
            return
        assert self._loaded["step"] == step, f"step {step} is of step {self._loaded['step']}"
        for tensor, base in zip(tensors_of(self._loaded), tensors_of(self._base), strict=True):
            assert torch.equal(local(tensor), local(base) + step), f"torn: not all of step {step}"

    def _measure(self) -> None:
        gc.collect()  # what only waits for this does not grow
        process = psutil.Process()
        children = process.children(recursive=True)
        figures = {
            "memory": process.memory_info().rss / MIB,
            "children": sum(child.memory_info().rss for child in children) / MIB,
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "sockets": len(process.net_connections("all")),
        }
        if self._rank == 0:
            figures |= self._seconds | self._count_stored()
        self._seconds = {}
        say("measured", figures, [child.pid for child in children])

    def _count_stored(self) -> dict[str, float]:
        spec = StoreSpec(self._job.root, self._job.direct_options)
        sizes = {meta.key: meta.size_bytes for meta in spec.open().list()}
        below = Counter(key.rpartition("/")[0] for key in sizes)
        # The marker of a deleted step stays, by design.
        deleted = sum(below[name] == 1 and f"{name}/{MARKER_KEY}" in sizes for name in below)
        return {
            "objects": len(sizes) - deleted,
            "deleted steps": deleted,
            "MiB": sum(sizes.values()) / MIB,
            "uploads": len(list(open_uploads(spec).list())),
        }
