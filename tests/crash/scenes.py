"""What is cut off: operations of this library and of stock torch, each from a state of the bucket.

An edition of a checkpoint has its number in every element, so that a mixture of two is seen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import dcp_objstore as dos
from dcp_objstore.checkpoint import probe
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY
from dcp_objstore.stores import StoreSpec
from tests.crash import stock_store  # noqa: F401 - registers cut://
from tests.crash.jobs import break_group, run_here, run_job
from tests.crash.process import Cut, Process, Turns, here, uploads
from tests.support.memory_store import Bucket
from tests.support.serial import Order, as_given, one_after_the_other, reverse

RUN = "s3://crash/run"
URL = f"{RUN}/step-7"
STOCK_URL = "cut://crash/run/step-7"
ROOT = "run/step-7/"
OLD, NEW, THIRD = 1, 2, 3
# An upload in parts needs more than one part of the least size.
CONFIG = dos.TransferConfig(part_size_bytes=5 * 1024 * 1024)
_MANY = 5 * 1024 * 1024 // 8 + 1000
_FEW = 100


@cache
def state(edition: int, rank: int, shape: Shape) -> dict[str, Any]:
    """What one rank holds. Nobody may change it."""
    count = _MANY if rank == shape.large_rank else _FEW
    tensors: dict[str, Any] = {
        f"rank {rank}, first": torch.full((count,), edition),
        f"rank {rank}, second": torch.full((_FEW, 3), edition, dtype=torch.float32),
    }
    if rank == 0:
        tensors |= {
            "step": edition,
            "history": str(edition) * (100 * edition if shape.grows else 1),
        }
    return tensors


@dataclass(frozen=True)
class Shape:
    """What is saved.

    Attributes:
        ranks: how many save.
        large_rank: which of them has more than one part; None: none of them.
        grows: a pickled value is longer in each edition, as a loss history is, so that what comes
            after it lies elsewhere.
    """

    ranks: int
    large_rank: int | None = None
    grows: bool = False

    def whole(self, edition: int) -> dict[str, Any]:
        """What all ranks hold."""
        return {
            key: value
            for rank in range(self.ranks)
            for key, value in state(edition, rank, self).items()
        }


def edition_of(found: dict[str, Any]) -> int | str:
    """The one edition that a loaded state is of; or `torn`."""
    numbers: set[float] = set()
    for value in found.values():
        # Of a text, every character says it.
        pair = value.aminmax() if isinstance(value, torch.Tensor) else str(value) or "0"
        numbers |= {float(number) for number in pair}
    return int(numbers.pop()) if len(numbers) == 1 else "torn"


@dataclass(frozen=True)
class Scene:
    """An operation and where it begins.

    Attributes:
        writer: `dcp_objstore` or `FsspecWriter`.
        name: of the operation, in words.
        shape: of the checkpoint; the operation has as many ranks if it is a save.
        act: what each rank does.
        first: makes the state that it begins from.
        before: the edition that can be loaded before; None: none.
        after: and afterwards.
        saves: the operation is a save, by all ranks.
        probes: the process has not met this bucket yet.
        order: of requests that are sent at the same time.
    """

    writer: str
    name: str
    shape: Shape
    act: Callable[[int, Shape], None]
    first: Callable[[Bucket, Shape], None]
    before: int | None
    after: int | None
    saves: bool = False
    probes: bool = False
    order: Order = as_given

    @property
    def ranks(self) -> int:
        return self.shape.ranks if self.saves else 1

    def begin(self) -> Bucket:
        """The bucket before the operation."""
        bucket = Bucket()
        self.first(bucket, self.shape)
        return bucket

    def run(self, bucket: Bucket, processes: list[Process]) -> list[BaseException | None]:
        """The operation."""
        if self.probes:
            probe.forget()
        else:
            here.bucket, here.process = Bucket(), Process()
            probe.require_rewrites(StoreSpec(RUN).open(), "")  # known to the process from now on
        shape = self.shape
        with one_after_the_other(self.order):
            return run_job(bucket, lambda rank: self.act(rank, shape), processes)


def save(edition: int, *, overwrite: bool) -> Callable[[int, Shape], None]:
    """A save with this library, by every rank."""

    def act(rank: int, shape: Shape) -> None:
        writer = dos.ObjectStoreWriter(URL, overwrite=overwrite, config=CONFIG, progress=False)
        no_dist = not dist.is_initialized()
        mine = state(edition, rank, shape) if not no_dist else shape.whole(edition)
        dcp.save(mine, storage_writer=writer, no_dist=no_dist)

    return act


def stock_save(edition: int) -> Callable[[int, Shape], None]:
    """A save of stock torch, by every rank."""

    def act(rank: int, shape: Shape) -> None:
        writer = FsspecWriter(STOCK_URL, overwrite=True)
        no_dist = not dist.is_initialized()
        mine = state(edition, rank, shape) if not no_dist else shape.whole(edition)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it overwrites
            dcp.save(mine, storage_writer=writer, no_dist=no_dist)

    return act


def delete(*, grace_seconds: float) -> Callable[[int, Shape], None]:
    """A deletion with this library."""

    def act(_rank: int, _shape: Shape) -> None:
        dos.delete(URL, grace_seconds=grace_seconds, allow_newest=True)

    return act


def sweep(_rank: int, _shape: Shape) -> None:
    """A sweep of the whole run."""
    dos.sweep(RUN)


def repair(_rank: int, _shape: Shape) -> None:
    """A repair of the checkpoint."""
    dos.repair(URL)


def settle(bucket: Bucket, act: Callable[[int, Shape], None], shape: Shape) -> None:
    """Do it, to the end."""
    processes = [Process() for _ in range(shape.ranks)]
    for error in run_job(bucket, lambda rank: act(rank, shape), processes):
        if error is not None:
            raise error


def alone(bucket: Bucket, act: Callable[[int, Shape], None], shape: Shape) -> None:
    """Do it in one process, to the end."""
    error = run_here(bucket, lambda rank: act(rank, shape))
    if error is not None:
        raise error


def nothing(_bucket: Bucket, _shape: Shape) -> None:
    """An empty bucket, of which the process knows that it has conditional writes."""


def committed(bucket: Bucket, shape: Shape) -> None:
    """The old edition, for some days."""
    settle(bucket, save(OLD, overwrite=False), shape)
    bucket.age(days=3)


def stock_committed(bucket: Bucket, shape: Shape) -> None:
    """The old edition, saved by stock torch."""
    settle(bucket, stock_save(OLD), shape)


def deleted(bucket: Bucket, shape: Shape) -> None:
    """A tombstone, and the objects of what was deleted."""
    committed(bucket, shape)
    alone(bucket, delete(grace_seconds=math.inf), shape)
    bucket.age(days=3)


def torn(bucket: Bucket, shape: Shape) -> None:
    """A first save that died with an upload under way."""
    _die(bucket, save(OLD, overwrite=False), shape, "complete")


def overwritten(bucket: Bucket, shape: Shape) -> None:
    """The new edition over the old one, and a third save that died with an upload under way."""
    committed(bucket, shape)
    settle(bucket, save(NEW, overwrite=True), shape)
    _die(bucket, save(THIRD, overwrite=True), shape, "complete")


def unpublished(bucket: Bucket, shape: Shape) -> None:
    """The new edition over the old one, with the `.metadata` of the old one."""
    committed(bucket, shape)
    _die(bucket, save(NEW, overwrite=True), shape, "put", DOT_METADATA_KEY)


def deleting(bucket: Bucket, shape: Shape) -> None:
    """A deletion that died on its way."""
    committed(bucket, shape)
    # Its second request that changes something: the first made the marker say `deleting`.
    _die(
        bucket, delete(grace_seconds=math.inf), replace(shape, ranks=1), "delete", DOT_METADATA_KEY
    )


def _die(
    bucket: Bucket, act: Callable[[int, Shape], None], shape: Shape, verb: str, name: str = ""
) -> None:
    """Let rank 0 die before its last request of this kind, and all others with it."""
    rehearsal = [Process() for _ in range(shape.ranks)]
    run_job(bucket.copy(), lambda rank: act(rank, shape), rehearsal)
    rank, number = next(
        (rank, at)
        for rank, process in enumerate(rehearsal)
        for at in range(len(process.requests), 0, -1)
        if process.requests[at - 1][0] == verb and process.requests[at - 1][1].endswith(name)
    )
    # The others have done all they do before.
    first = next((other for other in range(shape.ranks) if other != rank), None)
    uploads_of = [sum(uploads(key) for _, key in one.requests) for one in rehearsal]
    processes = doomed(
        shape.ranks,
        rank,
        Cut(number, "before"),
        alone=False,
        first=first,
        requests=uploads_of[first] if first is not None else 0,
    )
    run_job(bucket, lambda rank: act(rank, shape), processes)
    assert processes[rank].killed
    bucket.age(days=3)


def doomed(
    ranks: int, rank: int, cut: Cut, *, alone: bool, first: int | None = None, requests: int = 0
) -> list[Process]:
    """Processes of which one dies at the cut.

    Args:
        ranks: how many.
        rank: the one that dies.
        cut: where.
        alone: the others live; else they die in the same moment.
        first: who uploads first, with so many requests; None: all at once.
    """
    turns = Turns(requests) if first is not None else None

    def die() -> None:
        if not alone:
            for process in processes:
                process.kill()
        if turns is not None:
            turns.give_up()
        if ranks > 1:
            break_group()

    processes = [
        Process(cut if one == rank else None, die, turns, first=one == first)
        for one in range(ranks)
    ]
    return processes


OURS = "dcp_objstore"
STOCK = "FsspecWriter"
ONE = Shape(1)
ONE_LARGE = Shape(1, large_rank=0)
TWO = Shape(2)
TWO_LARGE = Shape(2, large_rank=1)
TWO_GROWING = Shape(2, grows=True)


def scenes() -> list[Scene]:
    """All that is cut off by default."""
    fresh, over = save(NEW, overwrite=False), save(NEW, overwrite=True)
    stock = stock_save(NEW)
    return [
        Scene(OURS, "save, first of a process", ONE, fresh, nothing, None, NEW, True, True),
        Scene(OURS, "save", ONE_LARGE, fresh, nothing, None, NEW, True),
        Scene(OURS, "save", TWO, fresh, nothing, None, NEW, True),
        Scene(OURS, "save over another", ONE_LARGE, over, committed, OLD, NEW, True),
        Scene(OURS, "save over another", TWO, over, committed, OLD, NEW, True),
        Scene(OURS, "save over a deleted one", ONE, fresh, deleted, None, NEW, True),
        Scene(OURS, "save, reversed", ONE, fresh, nothing, None, NEW, True, order=reverse),
        Scene(OURS, "delete", ONE, delete(grace_seconds=math.inf), committed, OLD, None),
        Scene(OURS, "delete now", ONE, delete(grace_seconds=0), committed, OLD, None),
        Scene(OURS, "sweep a dead save", TWO_LARGE, sweep, torn, None, None),
        Scene(OURS, "sweep what was replaced", ONE_LARGE, sweep, overwritten, NEW, NEW),
        Scene(OURS, "sweep what was deleted", ONE, sweep, deleted, None, None),
        Scene(OURS, "sweep: .metadata is old", ONE, sweep, unpublished, NEW, NEW),
        Scene(OURS, "repair .metadata", ONE, repair, unpublished, NEW, NEW),
        Scene(OURS, "repair a deletion", ONE, repair, deleting, None, None),
        Scene(STOCK, "save", ONE_LARGE, stock, nothing, None, NEW, True),
        Scene(STOCK, "save", TWO, stock, nothing, None, NEW, True),
        Scene(STOCK, "save over another", ONE_LARGE, stock, stock_committed, OLD, NEW, True),
        Scene(STOCK, "save over another", TWO, stock, stock_committed, OLD, NEW, True),
        Scene(
            STOCK, "save over a shorter one", TWO_GROWING, stock, stock_committed, OLD, NEW, True
        ),
    ]


def large_scenes() -> list[Scene]:
    """More of them, with an upload in parts on one of two ranks."""
    fresh, over = save(NEW, overwrite=False), save(NEW, overwrite=True)
    first = Shape(2, large_rank=0)
    return [
        Scene(OURS, "save over a shorter one", TWO_GROWING, over, committed, OLD, NEW, True),
        Scene(OURS, "save", TWO_LARGE, fresh, nothing, None, NEW, True, True),
        Scene(OURS, "save, reversed", TWO_LARGE, fresh, nothing, None, NEW, True, order=reverse),
        Scene(OURS, "save over, reversed", TWO, over, committed, OLD, NEW, True, order=reverse),
        Scene(OURS, "save over another", TWO_LARGE, over, committed, OLD, NEW, True),
        Scene(OURS, "save over another", first, over, committed, OLD, NEW, True, True),
        Scene(OURS, "save over a deleted one", TWO_LARGE, fresh, deleted, None, NEW, True),
        Scene(OURS, "delete now", TWO_LARGE, delete(grace_seconds=0), committed, OLD, None),
        Scene(OURS, "sweep what was replaced", TWO_LARGE, sweep, overwritten, NEW, NEW),
        Scene(
            STOCK, "save over another", TWO_LARGE, stock_save(NEW), stock_committed, OLD, NEW, True
        ),
    ]
