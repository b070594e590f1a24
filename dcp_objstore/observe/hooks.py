"""`Hooks`: which listeners a user has asked for."""

from __future__ import annotations

import time
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import ConfigError
from dcp_objstore.observe.dispatch import Callback, Channel
from dcp_objstore.observe.events import Staged
from dcp_objstore.observe.report import Bar, SummaryLine
from dcp_objstore.observe.trace import TraceFile, check_trace, trace_path

if TYPE_CHECKING:
    import os

    from dcp_objstore.observe.events import OnEvent, Operation


class Hooks:
    """The settings `on_event` and `trace`; picklable if `on_event` is.

    Args:
        on_event: a function that is called with each event, or None.
        trace: the local file to write a trace to, or None; may hold `{rank}` and `{name}`.

    Raises:
        ConfigError: `on_event` is not callable, or `trace` is not the name of a local file.
    """

    def __init__(self, on_event: OnEvent | None, trace: str | os.PathLike[str] | None) -> None:
        if on_event is not None and not callable(on_event):
            raise ConfigError(f"on_event must be a function of one event, got {on_event!r}")
        self.on_event = on_event
        self.trace = check_trace(trace)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            ForkingPickler.dumps(self.on_event)
        except Exception as error:
            raise ConfigError(
                f"on_event={self.on_event!r} cannot be sent to another process, where this save"
                " runs: use a function of a module, or an object that can be pickled, instead of a"
                f" lambda, a local function or one that holds a lock ({error})"
            ) from error
        return Hooks, (self.on_event, self.trace)

    def channel(
        self, operation: Operation, url: str, rank: int = 0, world_size: int = 1
    ) -> Channel:
        """Return the channel to which one save or load on this rank emits its events."""
        channel = Channel(operation, url, rank)
        if self.trace is not None:
            path = trace_path(self.trace, url, rank, world_size)
            channel.add(TraceFile(path), detailed=True)
        if self.on_event is not None:
            channel.add(Callback(self.on_event), detailed=True)
        return channel


def show(channel: Channel, *, bar: bool, summary: bool) -> None:
    """Add the progress bar and the log line of this process to a channel.

    Args:
        channel: the channel to add them to.
        bar: whether to add the bar, if standard error is a terminal.
        summary: whether to add the log line.
    """
    if bar and Bar.is_seen():
        channel.add(Bar(channel.operation), detailed=True)
    if summary:
        channel.add(SummaryLine(), detailed=False)


def staged(url: str, rank: int, size_bytes: int, began_at: float) -> Staged:
    """Make the event of a copy that began at `began_at` (`time.monotonic()`) and has just ended."""
    seconds = time.monotonic() - began_at
    start_ns = time.time_ns() - int(seconds * 1e9)
    return Staged(rank=rank, url=url, start_ns=start_ns, seconds=seconds, size_bytes=size_bytes)
