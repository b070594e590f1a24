"""What a save or load did, as data; and the log line and the progress bar, made of its events."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from dcp_objstore.observe.events import Loaded, PartUploaded, Planned, RangeRead, Saved

if TYPE_CHECKING:
    from dcp_objstore.observe.events import AnyEvent

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
        commit_id: of the commit; None on ranks that do not commit.
    """

    url: str
    total_bytes: int
    seconds: float
    objects: int
    parts: int
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
        retries: how often a request for the checkpoint was sent again, because it failed or its
            bytes came damaged; None where the adapter does not count them (`file://`, boto3,
            fsspec).
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

    def __getitem__(self, key: object) -> NoReturn:
        """Not the state: that is what was passed to `dos.load`."""
        raise TypeError(
            "a LoadReport is not the state that was loaded: dcp_objstore.load fills the state that"
            f" it is given, so write state[{key!r}] after dcp_objstore.load(state, url)"
        )


def log_failure(url: str | None, error: BaseException) -> None:
    """Log the error of a save in the background, for whose result nobody may ask."""
    # A filter of the program may raise, which must not take the place of the error.
    with contextlib.suppress(Exception):
        logger.error("saving %s in the background failed: %s", url, error)


def size_text(count_bytes: float) -> str:
    """Bytes in the largest unit (B, KiB, MiB, GiB) of which there is at least one."""
    for unit, size in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if count_bytes >= size:
            return f"{count_bytes / size:.2f} {unit}"
    return f"{count_bytes:.0f} B"


class SummaryLine:
    """A listener that logs the one INFO line of a save or load."""

    name = "the log line"

    def take(self, event: AnyEvent) -> None:
        """See `Listener`."""
        match event:
            case Saved():
                self._log("saved", event, f"{event.parts} parts")
            case Loaded():
                self._log("loaded", event, f"{event.requests} requests")

    def _log(self, verb: str, event: Saved | Loaded, requests: str) -> None:
        logger.info(
            "%s %s: %s in %.2f s (%s/s), %d objects, %s",
            verb,
            event.url,
            size_text(event.size_bytes),
            event.seconds,
            size_text(event.size_bytes / max(event.seconds, 1e-9)),
            event.objects,
            requests,
        )

    def settle(self) -> None:
        """See `Listener`."""


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm without the thread that it starts to redraw bars."""

    monitor_interval = 0


# tqdm's own lock is one of multiprocessing, which a killed rank would leave behind and a helper
# process would complain about. Our bars are drawn by one process.
_Bar.set_lock(threading.RLock())


class Bar:
    """A listener that draws a byte-counting bar on standard error.

    Args:
        label: what it says before the figures.
    """

    name = "the progress bar"

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: tqdm[None] | None = None

    @staticmethod
    def is_seen() -> bool:
        """Whether standard error is a terminal; there are no bars elsewhere."""
        return sys.stderr is not None and sys.stderr.isatty()

    def take(self, event: AnyEvent) -> None:
        """See `Listener`."""
        match event:
            case Planned():
                self._bar = _Bar(
                    desc=self._label,
                    total=event.size_bytes,
                    unit="B",
                    unit_scale=True,
                    unit_divisor=1024,
                    leave=False,
                )
            case PartUploaded() | RangeRead() if self._bar is not None:
                self._bar.update(event.size_bytes)

    def settle(self) -> None:
        """See `Listener`."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
