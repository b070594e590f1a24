"""The events that `on_event` is called with: one type for each thing that a save or load does.

    def on_event(event):
        match event:
            case events.PartUploaded() | events.RangeRead():
                moved.labels(rank=event.rank).inc(event.size_bytes)
            case events.Failed():
                alert(event.url, event.error, event.message)

Every event has the rank, the URL of the checkpoint, the time at which it began and how long it
took. No event holds a credential. Events are plain frozen data: they can be kept, compared and
pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dcp_objstore.observe.report import LoadReport, SaveReport, VerifyReport

Operation: TypeAlias = Literal["save", "load", "open", "read", "verify", "export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The base class of all events.

    Attributes:
        rank: global rank of the process; 0 without a process group.
        url: URL of the checkpoint.
        start_ns: the time at which it began: Unix time in nanoseconds, as in OpenTelemetry and
            `torch.profiler`, by a clock that does not jump within one save or load.
        seconds: how long it took.
    """

    rank: int
    url: str
    start_ns: int
    seconds: float

    @property
    def end_ns(self) -> int:
        """When it ended: Unix time in nanoseconds."""
        return self.start_ns + int(self.seconds * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Event):
    """The state was copied for a save in the background. Emitted when that save begins.

    Attributes:
        size_bytes: size of the tensors that were copied.
    """

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Event):
    """Marker and index of a checkpoint were read.

    Attributes:
        commit_id: id of the checkpoint's commit; None if another library wrote the checkpoint.
    """

    commit_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Event):
    """This rank knows what it will move. Lasts as long as everything before it.

    Attributes:
        operation: "save" or "load"; for a checkpoint from `dcp_objstore.open`, "read" or "verify";
            "export".
        items: number of tensor chunks and values.
        size_bytes: bytes to move. For a save, without framing and pickled values, whose size is not
            known yet.
        objects: number of data objects to write, or to read from.
        requests: number of parts or ranged GETs; for a save, the least number.
    """

    operation: Operation
    items: int
    size_bytes: int
    objects: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed(Event):
    """A slice of up to 16 MiB was hashed for a save, while uploads went on.

    Attributes:
        size_bytes: size of the slice.
        worker: number of the thread.
    """

    size_bytes: int
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUploaded(Event):
    """A part of an object was uploaded; an object that is put in one request is one part.

    It lasts from when the transport got the first byte of the part until it dropped the last. This
    includes the time to collect the part and to wait for a free connection. It is emitted when the
    store is known to have the part: over most transports when later parts are sent, for the last
    ones when the object is uploaded. Until then, and for a part that failed, there is none.

    Attributes:
        object_key: key of the object, relative to the checkpoint.
        part: its number within the object, from 0.
        size_bytes: size of the part.
        worker: the lowest number that no other part under way had. (The transport has no workers
            that could be numbered.)
    """

    object_key: str
    part: int
    size_bytes: int
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectUploaded(Event):
    """A data object was uploaded completely.

    Attributes:
        object_key: key of the object, relative to the checkpoint.
        size_bytes: size of the object.
        parts: number of requests that carried its bytes.
    """

    object_key: str
    size_bytes: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCopied(Event):
    """The store has copied a part of an object, from the base of a save or for `copy`.

    It has no duration: emitted when the store has answered.

    Attributes:
        object_key: key of the object, relative to the checkpoint.
        size_bytes: size of the part.
    """

    object_key: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCopied(Event):
    """A save with a base uploads what the store should have copied.

    Attributes:
        base: URL of the base, or "latest" if that was not resolved.
        reason: why, in words.
        not_copied_bytes: bytes of this rank that have not changed and are uploaded; 0 if they were
            not compared.
    """

    base: str
    reason: str
    not_copied_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUnused(Event):
    """Copies on this node (`local=`) are not written, or not read, and the store is used alone.

    Attributes:
        folder: the folder of `local`.
        reason: why, in words.
    """

    folder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead(Event):
    """A range of an object was fetched, verified, and copied to its destination.

    Attributes:
        object_key: key of the object, relative to the checkpoint.
        offset: position of its first byte in the object.
        size_bytes: size of the range.
        worker: number of the request among those that are under way at the same time.
    """

    object_key: str
    offset: int
    size_bytes: int
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Event):
    """A request is sent again.

    Retries of parts and listings inside obstore, and all retries inside fsspec, are not reported.

    Attributes:
        what: "commit" (the PUT of the marker had no clear answer), "range" (the bytes were damaged
            on the way), "slow range" (it took far longer than the others), or "request" (any
            other).
        attempt: the number of the try that follows, from 2.
        error: type and text of the error.
        object_key: key of the object, relative to the checkpoint.
    """

    what: Literal["commit", "range", "slow range", "request"]
    attempt: int
    error: str
    object_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer(Event):
    """The store has not answered for 5 s, neither to the parts of an object nor when it was asked.

    A save emits at most one on a rank, and warns. It lasts from the last answer. More parts follow
    once the store answers.

    Attributes:
        object_key: key of the object, relative to the checkpoint.
        parts: number of parts under way.
        wait_seconds: the longest time that the upload waits from now on.
    """

    object_key: str
    parts: int
    wait_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The checkpoint was committed. Emitted on the coordinator (rank 0) alone.

    Attributes:
        commit_id: id of the commit.
        attempts: number of PUTs of the marker that were sent.
    """

    commit_id: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """A save has succeeded. Emitted on the coordinator (rank 0) alone, for all ranks.

    It lasts from the set-up of the save.

    Attributes:
        report: what was saved, and how fast.
    """

    report: SaveReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Event):
    """A load or read has ended: everything that this rank asked for is in place.

    Attributes:
        report: what was loaded, and how fast; without the keys that only `dos.load` compares.
    """

    report: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(Event):
    """A checkpoint was compared with its digests.

    Attributes:
        report: what was compared, and the damage that was found.
    """

    report: VerifyReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """A save or load failed. Lasts from the beginning of that save or load.

    Each save or load emits at most one on a rank. `dcp_objstore.save`, `async_save` and `load` emit
    it on every rank. Under DCP's own calls, a writer or reader emits it only on a rank on which it
    failed itself.

    Attributes:
        operation: "save", "load", "open", "read" or "verify".
        error: name of the error's type, such as "StoreUnavailableError".
        message: text of the error, without the rank, keys and URL.
        failed_rank: the rank that failed, if the error names it.
        key: the state-dict key, if the error names it.
        object_key: key of the object, relative to the checkpoint, if the error names it.
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
    | NotCopied
    | LocalUnused
    | PartCopied
    | PartUploaded
    | ObjectUploaded
    | RangeRead
    | Retried
    | NoAnswer
    | Committed
    | Saved
    | Loaded
    | Verified
    | Failed
)

OnEvent: TypeAlias = Callable[[AnyEvent], object]
