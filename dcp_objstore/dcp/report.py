"""What a save or load did, as data, and the one log line and progress bar made of it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from tqdm import tqdm

logger = logging.getLogger("dcp_objstore")

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """A finished save.

    On the coordinator (rank 0) it covers all ranks; elsewhere what that rank wrote.

    Attributes:
        url: the checkpoint.
        total_bytes: bytes put into data objects, framing included.
        seconds: from set-up to commit (elsewhere than on the coordinator: of the upload).
        objects: data objects.
        parts: requests that carried their bytes (single PUTs and multipart parts).
        retries: None, where the transport does not report them (obstore does not, of parts).
        commit_id: of the commit; None on ranks that do not commit.
    """

    url: str
    total_bytes: int
    seconds: float
    objects: int
    parts: int
    retries: int | None = None
    commit_id: str | None = None

    @property
    def gib_per_second(self) -> float:
        """Throughput over `seconds`."""
        return self.total_bytes / GIB / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """A finished load, as seen by this rank.

    Attributes:
        url: the checkpoint.
        total_bytes: bytes fetched from data objects by this rank.
        needed_bytes: bytes that this rank's state needed.
        received_bytes: what other ranks fetched and handed on to this one.
        missing: keys of this rank's state that the checkpoint does not have, as far as `dos.load`
            let that pass (`strict=False`, or optimizer state of parameters that had none).
        unexpected: keys of the checkpoint that this rank's state did not ask for. Both are filled
            in by `dos.load` alone.
        seconds: from reading the marker to the last byte in place.
        objects: data objects read from.
        requests: ranged GETs.
        retries: of requests for the checkpoint, while its data was fetched; None, where the
            transport retries reads out of sight.
        commit_id: of the checkpoint; None for one that another library wrote.
    """

    url: str
    total_bytes: int
    needed_bytes: int
    seconds: float
    objects: int
    requests: int
    received_bytes: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    retries: int | None = None
    commit_id: str | None = None

    @property
    def gib_per_second(self) -> float:
        """Throughput over `seconds`."""
        return self.total_bytes / GIB / max(self.seconds, 1e-9)


def size_text(count_bytes: float) -> str:
    """Bytes in the largest unit (B, KiB, MiB, GiB) of which there is at least one."""
    for unit, size in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if count_bytes >= size:
            return f"{count_bytes / size:.2f} {unit}"
    return f"{count_bytes:.0f} B"


def log_save(report: SaveReport) -> None:
    """The one INFO line of a save."""
    logger.info(
        "saved %s: %s in %.2f s (%s/s), %d objects, %d parts%s",
        report.url,
        size_text(report.total_bytes),
        report.seconds,
        size_text(report.gib_per_second * GIB),
        report.objects,
        report.parts,
        "" if report.retries is None else f", {report.retries} retries",
    )


def log_load(report: LoadReport) -> None:
    """The one INFO line of a load."""
    logger.info(
        "loaded %s: %s in %.2f s (%s/s), %d objects, %d requests%s",
        report.url,
        size_text(report.total_bytes),
        report.seconds,
        size_text(report.gib_per_second * GIB),
        report.objects,
        report.requests,
        "" if report.retries is None else f", {report.retries} retries",
    )


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm without the thread that it starts, even for a bar that is not shown, to redraw bars."""

    monitor_interval = 0


# tqdm's own lock is one of multiprocessing, which a killed rank would leave behind and a helper
# process would complain about. Our bars are drawn by one process.
_Bar.set_lock(threading.RLock())


def progress_bar(label: str, total_bytes: int, *, shown: bool) -> tqdm[None]:
    """A byte-counting bar on standard error; shown only where that is a terminal."""
    return _Bar(
        desc=label,
        total=total_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None if shown else True,
        leave=False,
    )
