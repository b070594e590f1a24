"""What `on_event` is called with: one type for each thing that happens in a save or load.

    def on_event(event):
        match event:
            case events.PartUploaded() | events.RangeRead():
                moved.labels(rank=event.rank).inc(event.size_bytes)
            case events.Failed():
                alert(event.url, event.error, event.message)

Every event says which rank of which checkpoint it is about, when it began and how long it took;
none holds a credential. They are plain frozen data: they can be kept, compared and pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["save", "load", "open", "read", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events have.

    Attributes:
        rank: global rank of the process; 0 without a process group.
        url: the checkpoint.
        start_ns: when it began: Unix time in nanoseconds, as OpenTelemetry and `torch.profiler`
            count it. By a clock that does not jump within one save or load.
        seconds: how long it took.
    """

    rank: int
    url: str
    start_ns: int
    seconds: float

    @property
    def end_ns(self) -> int:
        """When it had ended, as `start_ns`."""
        return self.start_ns + int(self.seconds * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Event):
    """The state was copied for a save in the background; told as that save begins.

    Attributes:
        size_bytes: of the tensors' memory that was copied.
    """

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Event):
    """Marker and index of a checkpoint were read.

    Attributes:
        commit_id: of the checkpoint; None for one that another library wrote.
    """

    commit_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Event):
    """It is known what this rank will move; takes as long as whatever came before it.

    Attributes:
        operation: "save", "load"; of what `dcp_objstore.open` gives "read" and "verify".
        items: tensor chunks and values.
        size_bytes: to be moved. Of a save without framing and pickled values, of which the size is
            not known yet.
        objects: data objects that are written, or read from.
        requests: parts or ranged GETs; of a save at least so many.
    """

    operation: Operation
    items: int
    size_bytes: int
    objects: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed(Event):
    """A slice of up to 16 MiB was hashed for a save, beside the uploads.

    Attributes:
        size_bytes: of the slice.
        worker: number of the thread.
    """

    size_bytes: int
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUploaded(Event):
    """A part of an object was uploaded; an object that is put in one request is one part.

    It lasts from when the transport was handed the first byte of the part until it let go of the
    last: gathering the part and waiting for a free connection count.

    Attributes:
        object_key: the object, relative to the checkpoint.
        part: its number within the object, from 0.
        size_bytes: of the part.
        worker: the lowest number that no part under way had. (The transport has no workers of its
            own that could be told apart.)
    """

    object_key: str
    part: int
    size_bytes: int
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectUploaded(Event):
    """A data object is whole on the store.

    Attributes:
        object_key: the object, relative to the checkpoint.
        size_bytes: of the object.
        parts: requests that carried it.
    """

    object_key: str
    size_bytes: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead(Event):
    """A range of an object was fetched, verified, and put where it belongs.

    Attributes:
        object_key: the object, relative to the checkpoint.
        offset: of its first byte.
        size_bytes: of the range.
        worker: number of the request among those that are under way at the same time.
    """

    object_key: str
    offset: int
    size_bytes: int
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Event):
    """A request is made again. Retries of parts and listings within obstore, and all within
    fsspec, are not seen.

    Attributes:
        what: "commit" (the marker's PUT had no clear answer), "range" (damaged on its way), or
            "request" (any other).
        attempt: the number of the try that follows, from 2.
        error: type and text of what went wrong.
        object_key: the object, relative to the checkpoint.
    """

    what: Literal["commit", "range", "request"]
    attempt: int
    error: str
    object_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The checkpoint exists. On the coordinator (rank 0) alone.

    Attributes:
        commit_id: of the commit.
        attempts: PUTs of the marker that were sent.
    """

    commit_id: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """A save has ended well. On the coordinator (rank 0) alone, for all ranks, from its set-up on.

    Attributes:
        size_bytes: put into data objects, framing included.
        objects: data objects.
        parts: requests that carried their bytes.
        commit_id: of the commit.
    """

    size_bytes: int
    objects: int
    parts: int
    commit_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Event):
    """All that this rank asked for is in place: the end of a load, or of a read.

    Attributes:
        size_bytes: that this rank fetched.
        needed_bytes: that this rank's state needed.
        received_bytes: that other ranks fetched and handed to this one.
        objects: data objects read from.
        requests: ranged GETs.
        commit_id: of the checkpoint; None for one that another library wrote.
    """

    size_bytes: int
    needed_bytes: int
    received_bytes: int
    objects: int
    requests: int
    commit_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(Event):
    """A checkpoint was compared with its digests.

    Attributes:
        size_bytes: that were compared.
        damaged: how many damages were found.
    """

    size_bytes: int
    damaged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """A save or load failed; lasts from its begin.

    At most one for each on a rank. `dcp_objstore.save`, `async_save` and `load` tell it on every
    rank; a writer or reader under DCP's own calls only where it failed itself.

    Attributes:
        operation: see `Planned`; or "open".
        error: name of the type, as "StoreUnavailableError".
        message: its text, without what follows.
        failed_rank: where it failed, as far as the error knows.
        key: of the state.
        object_key: the object, relative to the checkpoint.
    """

    operation: Operation
    error: str
    message: str
    failed_rank: int | None
    key: str | None
    object_key: str | None


AnyEvent: TypeAlias = (
    Staged
    | Opened
    | Planned
    | Hashed
    | PartUploaded
    | ObjectUploaded
    | RangeRead
    | Retried
    | Committed
    | Saved
    | Loaded
    | Verified
    | Failed
)

OnEvent: TypeAlias = Callable[[AnyEvent], object]

__all__ = [
    "AnyEvent",
    "Committed",
    "Event",
    "Failed",
    "Hashed",
    "Loaded",
    "ObjectUploaded",
    "OnEvent",
    "Opened",
    "Operation",
    "PartUploaded",
    "Planned",
    "RangeRead",
    "Retried",
    "Saved",
    "Staged",
    "Verified",
]
