"""Every cut of a scene, and what may be said of the bucket after it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY
from dcp_objstore.cli.ls import print_checkpoints
from dcp_objstore.stores import StoreSpec
from tests.crash.process import Cut, Process, here, uploads
from tests.crash.scenes import (
    OURS,
    ROOT,
    RUN,
    STOCK_URL,
    THIRD,
    URL,
    Scene,
    Shape,
    alone,
    delete,
    doomed,
    edition_of,
    save,
    settle,
    stock_save,
)
from tests.support.memory_store import Bucket
from tests.support.upkeep import named, state

# More sweeps than any state needs: one finishes a deletion, one mends, one removes.
_SWEEPS = 5


@dataclass(frozen=True)
class Where:
    """One cut.

    Attributes:
        rank: which rank dies.
        cut: at which of its requests.
        verb, key: of that request.
        alone: the other ranks live.
        first: the rank that uploads before the others; None: there is one rank.
        requests: of that rank's upload.
    """

    rank: int
    cut: Cut
    verb: str
    key: str
    alone: bool
    first: int | None
    requests: int

    def __str__(self) -> str:
        others = "" if self.first is None else f", rank {self.first} first"
        others += ", the others live" if self.alone else ""
        return (
            f"rank {self.rank}, {self.cut.when} {self.cut.number}. {self.verb} {self.key}{others}"
        )


@dataclass
class Verdict:
    """What was found wrong after one cut.

    Attributes:
        torn: a load returned a mixture.
        unreadable: neither the old nor the new edition can be loaded.
        stock_torn: the same, by stock torch.
        false_success: an answer of success that was not true.
        stuck: saving again, or reading that back, failed.
        orphans: objects, uploads and parts that are left after the sweeps.
    """

    torn: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    stock_torn: list[str] = field(default_factory=list)
    false_success: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)


# Requests that leave the bucket as it is.
_READS = {"get", "head", "list", "list uploads"}


def cuts(scene: Scene, bucket: Bucket, *, every: bool = True) -> list[Where]:
    """Every place at which the operation can be cut, from a rehearsal. The bucket is changed.

    Args:
        scene: the operation.
        bucket: on which it is rehearsed.
        every: also where a process leaves what it would have left at its last change: after a read,
            and before any request but the first.
    """
    rehearsal = [Process() for _ in range(scene.ranks)]
    ended = scene.run(bucket, rehearsal)
    assert ended == [None] * scene.ranks, ended
    # Who uploads first matters only to those that die together.
    orders: list[tuple[int | None, bool]] = [(None, False)]
    if scene.ranks > 1:
        orders = [*((rank, False) for rank in range(scene.ranks)), (0, True)]
    return [
        Where(
            rank,
            Cut(number, when),
            *process.requests[number - 1],
            alone,
            first,
            sum(uploads(key) for _, key in rehearsal[first or 0].requests),
        )
        for first, alone in orders
        for rank, process in enumerate(rehearsal)
        for number in range(1, len(process.requests) + 1)
        for when in ("before", "after")
        if every
        or (number == 1 if when == "before" else process.requests[number - 1][0] not in _READS)
    ]


def verdicts(scene: Scene, *, every: bool = True) -> Iterator[tuple[Where, Verdict]]:
    """Every cut of a scene, or all that differ (see `cuts`), and what was found wrong after it."""
    first = scene.begin()
    for where in cuts(scene, first.copy(), every=every):
        yield where, judge(scene, where, first.copy())


def judge(scene: Scene, where: Where, bucket: Bucket) -> Verdict:
    """Cut the operation there, beginning with this bucket, and look at what is left.

    The bucket is changed.
    """
    published = _stock_load(bucket, scene.shape)
    processes = doomed(
        scene.ranks,
        where.rank,
        where.cut,
        alone=where.alone,
        first=where.first,
        requests=where.requests,
    )
    ended = scene.run(bucket, processes)
    assert processes[where.rank].killed, f"{where}: never reached"
    verdict = Verdict()
    allowed = {scene.before, scene.after}
    for process, error in zip(processes, ended, strict=True):
        if error is None and not process.killed:
            allowed = {scene.after}
    if scene.writer == OURS:
        _judge_ours(bucket, scene.shape, allowed, published, verdict)
    else:
        _judge_stock(bucket, scene.shape, allowed, verdict)
    if len(allowed) == 1 and scene.before != scene.after and (verdict.torn or verdict.unreadable):
        verdict.false_success.append("a rank that lived said that it was saved")
    return verdict


def _judge_ours(
    bucket: Bucket,
    shape: Shape,
    allowed: set[int | None],
    published: int | str | None,
    verdict: Verdict,
) -> None:
    """As `judge`; `published` is what stock torch loaded before."""
    found = _look(bucket, shape, allowed, verdict, published)
    # Branch: a sweep comes first.
    swept = bucket.copy()
    _sweep_until_clean(swept, verdict)
    _look(swept, shape, {found}, verdict, found)
    # Branch: a job resumes, saves again, and is swept much later.
    try:
        _save_again(bucket, shape)
    except Exception as error:  # noqa: BLE001 - reported
        verdict.stuck.append(f"saving again: {error!r}")
        return
    after = Verdict()
    _look(bucket, shape, {THIRD}, after, THIRD)
    _sweep_until_clean(bucket, verdict)
    _look(bucket, shape, {THIRD}, after, THIRD)
    if after != Verdict():
        verdict.stuck.append(f"what was saved again: {after}")


def _look(
    bucket: Bucket,
    shape: Shape,
    allowed: set[int | None],
    verdict: Verdict,
    published: int | str | None,
) -> int | None:
    """List, load, and load with stock torch; the edition that is there.

    Stock torch may see what we see or, while that is not mended yet, what was `published` before.
    """
    found = _load(bucket, shape)
    if found == "torn":
        verdict.torn.append("load")
    elif found not in allowed:
        verdict.unreadable.append(f"load: {found}, not one of {allowed}")
    listed = _listed(bucket)
    if ("committed" in listed) != isinstance(found, int):
        verdict.unreadable.append(f"listed as {listed}, loaded as {found}")
    seen = _stock_load(bucket, shape)
    if seen == "torn":
        verdict.stock_torn.append("stock load")
    elif seen not in {published, found}:
        verdict.unreadable.append(f"stock load: {seen}, ours: {found}, before: {published}")
    return found if isinstance(found, int) else None


def _load(bucket: Bucket, shape: Shape) -> int | str | None:
    wanted = _blank(shape)
    here.bucket, here.process = bucket, Process()
    try:
        dos.load(wanted, URL, progress=False)
    except dos.errors.CheckpointNotFoundError:
        return None
    except dos.errors.DcpObjstoreError as error:
        return repr(error)
    return edition_of(wanted)


def _listed(bucket: Bucket) -> list[str]:
    """The states that `ls` prints."""
    here.bucket, here.process = bucket, Process()
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            print_checkpoints(RUN, as_json=True)
    except dos.errors.CheckpointNotFoundError:
        return []
    return [json.loads(line)["state"] for line in text.getvalue().splitlines()]


def _stock_load(bucket: Bucket, shape: Shape) -> int | str | None:
    """By stock torch's reader."""
    if ROOT + DOT_METADATA_KEY not in bucket.objects:
        return None
    wanted = _blank(shape)
    here.bucket, here.process = bucket, Process()
    try:
        dcp.load(wanted, storage_reader=FsspecReader(STOCK_URL), no_dist=True)
    except BaseException as error:  # noqa: BLE001 - stock torch may fail in any way
        return f"{type(error).__name__}: {error}"[:200]
    return edition_of(wanted)


def _blank(shape: Shape) -> dict[str, object]:
    return {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for key, value in shape.whole(0).items()
    }


def _sweep_until_clean(bucket: Bucket, verdict: Verdict) -> None:
    """As a nightly job: the time between two sweeps is longer than the grace period."""
    for _ in range(_SWEEPS):
        bucket.age(days=2)
        here.bucket, here.process = bucket, Process()
        try:
            report = dos.sweep(RUN)
        except Exception as error:  # noqa: BLE001 - reported
            verdict.stuck.append(f"sweep: {error!r}")
            return
        if all(one.outcome == "clean" for one in report.checkpoints) and not report.uploads_bytes:
            break
    else:
        verdict.stuck.append(f"never clean: {report}")
    verdict.orphans += _orphans(bucket)


def _orphans(bucket: Bucket) -> list[str]:
    """Keys and uploads that nothing names."""
    here.bucket, here.process = bucket, Process()
    store = StoreSpec(URL).open()
    known = {MARKER_KEY}
    if state(store) == "committed":
        known |= {DOT_METADATA_KEY, *named(store)}
    loose = [key for key in bucket.keys(ROOT) if key not in known]
    return loose + [f"upload of {one.key}" for one in bucket.uploads.values()]


def _save_again(bucket: Bucket, shape: Shape) -> None:
    """As a job that resumes: it replaces what is there, and finishes a deletion under way."""
    act = save(THIRD, overwrite=True)
    try:
        alone(bucket, act, shape)
    except CheckpointException as error:
        [(failure, _)] = error.failures.values()
        if not isinstance(failure, dos.errors.RetryableError):
            raise
        alone(bucket, delete(grace_seconds=math.inf), shape)
        alone(bucket, act, shape)


def _judge_stock(bucket: Bucket, shape: Shape, allowed: set[int | None], verdict: Verdict) -> None:
    found = _stock_load(bucket, shape)
    if found == "torn":
        verdict.torn.append("load")
    elif found not in allowed:
        verdict.unreadable.append(f"load: {found}, not one of {allowed}")
    try:
        settle(bucket, stock_save(THIRD), shape)
    except Exception as error:  # noqa: BLE001 - reported
        verdict.stuck.append(f"saving again: {error!r}")
        return
    if _stock_load(bucket, shape) != THIRD:
        verdict.stuck.append("what was saved again cannot be loaded")
        return
    body, _ = bucket.get(ROOT + DOT_METADATA_KEY)
    named = {place.relative_path for place in pickle.loads(body).storage_data.values()}
    loose = [key for key in bucket.keys(ROOT) if key not in {DOT_METADATA_KEY, *named}]
    verdict.orphans += loose + [f"upload of {one.key}" for one in bucket.uploads.values()]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that dying processes give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is done is small; a team of threads only waits
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
