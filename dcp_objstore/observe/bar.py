"""The line in the log and the progress bar of a save or load."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
import threading
from typing import Any

from dcp_objstore.errors import printable
from dcp_objstore.observe.events import (
    AnyEvent,
    Loaded,
    PartCopied,
    PartUploaded,
    Planned,
    RangeRead,
    Saved,
)
from dcp_objstore.observe.report import logger, size_text


def log_summary(event: AnyEvent) -> None:
    """Log the one INFO line of a save or load when it has ended."""
    if isinstance(event, Saved | Loaded):
        line, _, _ = str(event.report).partition("\n")
        logger.info("%s", line)


@functools.cache
def _quiet_tqdm() -> Any:
    """Return a tqdm without the thread that redraws bars. tqdm is imported only to draw a bar."""
    from tqdm import tqdm

    class Quiet(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0

    # tqdm's own lock has a semaphore of multiprocessing. A killed rank would leave it behind, and
    # the resource tracker of multiprocessing would complain. One process draws a bar, so a lock for
    # its threads is enough.
    Quiet.set_lock(threading.RLock())
    return Quiet


class Bar:
    """A listener that draws a byte-counting bar on standard error, and then leaves one line.

    Args:
        label: the text before the figures.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None
        self._outcome = ""

    @staticmethod
    def is_seen() -> bool:
        """Return whether standard error is a terminal; otherwise no bar is drawn."""
        return sys.stderr is not None and sys.stderr.isatty()

    def take(self, event: AnyEvent) -> None:
        """Start the bar when the size is known, advance it, and keep the line for its end."""
        match event:
            case Planned():
                self.begin(event.size_bytes)
            case PartUploaded() | PartCopied() | RangeRead():
                self.advance(event.size_bytes)
            case Saved():
                self._outcome = f"saved {_amount(event)}, committed"
            case Loaded():
                self._outcome = f"loaded {_amount(event)}"

    def begin(self, total_bytes: int) -> None:
        """Draw the bar."""
        self._bar = _quiet_tqdm()(
            desc=self._label,
            total=total_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
        )

    def advance(self, size_bytes: int) -> None:
        """Advance the bar, if it was begun."""
        if self._bar is not None:
            self._bar.update(size_bytes)

    def flush(self) -> None:
        """Replace the bar by a line about what was done, unless the log shows one (at INFO)."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._outcome and not logger.isEnabledFor(logging.INFO):
            print(printable(self._outcome), file=sys.stderr)
        self._outcome = ""


def _amount(event: Saved | Loaded) -> str:
    """Return what the last line of a bar says: URL, bytes and seconds."""
    return f"{event.url}: {size_text(event.report.total_bytes)} in {event.seconds:.1f} s"


class StatusLine:
    """A line on standard error that says what is being done, if that is a terminal.

    Args:
        shown: whether to show it there.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and Bar.is_seen()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._shown:
            columns = shutil.get_terminal_size().columns
            # To the first column; clear the line; a text of its whole width would begin the next.
            print(f"\r\033[K{printable(text)[: columns - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        self.show("")
