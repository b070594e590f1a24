"""Reports of a save, a load and a verification, and how sizes and counts are written in texts."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from dcp_objstore.errors import one_line, printable

logger = logging.getLogger("dcp_objstore")


def _make_printable(record: logging.LogRecord) -> bool:
    """Put a record on one line, without characters that act on a terminal; return True: keep it."""
    text = record.getMessage()
    safe = printable(one_line(text), keep="\t")
    if safe != text:
        record.msg, record.args = safe, None
    return True


logger.addFilter(_make_printable)


def warn(text: str) -> None:
    """Warn with the line of the program that led here: not one of this package or of torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


GIB = 1024**3
_SHOWN_DAMAGES = 20
# Packages between a line of the user's program and a warning that is meant for it.
_LIBRARIES = ("dcp_objstore", "torch", "contextlib")


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """A finished save.

    On the coordinator (rank 0) it covers all ranks; on other ranks, what that rank wrote.

    Attributes:
        url: URL of the checkpoint.
        total_bytes: bytes in data objects, framing included.
        copied_bytes: how many of them the store has copied from the base of the save.
        seconds: time from set-up to commit; on other ranks than the coordinator, of the upload.
        objects: number of data objects.
        parts: number of requests that carried their bytes (single PUTs and multipart parts), or had
            the store copy them.
        commit_id: id of the commit; None on ranks that do not commit.
    """

    url: str
    total_bytes: int
    seconds: float
    objects: int
    parts: int
    commit_id: str | None = None
    copied_bytes: int = 0

    def __str__(self) -> str:
        """Return what was saved, how much of it and how fast, on one line."""
        copied = size_text(self.copied_bytes)
        more = f", {copied} of them copied by the store" if self.copied_bytes else ""
        moved = _moved(self.url, self.total_bytes, self.seconds, self.objects)
        return f"saved {moved}, {counted(self.parts, 'part')}{more}"

    @property
    def uploaded_bytes(self) -> int:
        """Bytes in data objects that were uploaded."""
        return self.total_bytes - self.copied_bytes

    @property
    def gib_per_second(self) -> float:
        """Throughput over `seconds`."""
        return self.total_bytes / GIB / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """A finished load, as seen by this rank.

    Attributes:
        url: URL of the checkpoint.
        total_bytes: bytes that this rank read of data objects.
        local_bytes: how many of them came from copies on this node (`local=`), the others from the
            store.
        needed_bytes: bytes that this rank's state needed.
        received_bytes: bytes that other ranks fetched and sent to this one.
        missing: keys of this rank's state that the checkpoint does not have and that `dos.load` did
            not refuse (`strict=False`, or optimizer state of parameters that had none). Only
            `dos.load` fills this in.
        unexpected: keys of the checkpoint that this rank's state did not ask for. Only `dos.load`
            fills this in.
        seconds: time from reading the marker until the last byte was in place.
        objects: number of data objects that were read from.
        requests: number of ranges that were read, from the store or from copies.
        retries: number of requests that were sent again because they failed or their bytes were
            damaged; None if the adapter does not count them (`file://`, boto3, fsspec).
        slow_ranges: number of ranges that took far longer than the others and were asked for again.
            They are not in `requests` and `retries`.
        commit_id: id of the checkpoint's commit; None if another library wrote the checkpoint.
        unverified: whether bytes were not compared with digests: another library wrote the
            checkpoint, without any, or `verify` was off.
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
    slow_ranges: int = 0
    commit_id: str | None = None
    local_bytes: int = 0
    unverified: bool = False

    def __str__(self) -> str:
        """Return what was loaded, from where, how fast, and what was left out, on a few lines."""
        again = counted(self.slow_ranges, "slow range")
        moved = _moved(self.url, self.total_bytes, self.seconds, self.objects)
        line = f"loaded {moved}, {counted(self.requests, 'request')}"
        line += f", {again} asked for again" if self.slow_ranges else ""
        line += ", unverified" if self.unverified else ""
        # The origins of the bytes are told only if there are others than the store.
        origins = (
            ("the store", self.fetched_bytes),
            ("copies on this node", self.local_bytes),
            ("other ranks", self.received_bytes),
        )
        if self.local_bytes or self.received_bytes:
            shares = [f"{size_text(count)} from {origin}" for origin, count in origins if count]
            line += f"\n  {', '.join(shares)}"
        for keys, what in (
            (self.missing, "the checkpoint does not have"),
            (self.unexpected, "the state does not ask for"),
        ):
            if keys:
                line += f"\n  {what} {counted(len(keys), 'key')}: {first_few(keys, 3)}"
        return line

    @property
    def fetched_bytes(self) -> int:
        """Bytes that this rank fetched from the store."""
        return self.total_bytes - self.local_bytes

    @property
    def gib_per_second(self) -> float:
        """Throughput over `seconds`."""
        return self.total_bytes / GIB / max(self.seconds, 1e-9)

    def __getitem__(self, key: object) -> NoReturn:
        """Raise a TypeError: the loaded state is the one that was passed to `dos.load`."""
        raise TypeError(
            "a LoadReport is not the loaded state: dcp_objstore.load fills the state that was"
            f" passed to it, so use state[{key!r}] after dcp_objstore.load(state, url)"
        )


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """A single difference between a checkpoint and what was saved.

    Attributes:
        object_key: key of the data object, the index, the marker or `.metadata`.
        what: kind of damage. `missing`: the object does not exist; `size`: it has another size, or
            ends too early; `block`: a block of payload differs; `framing`: bytes around the
            payloads differ; `counts`: the marker's counts are not those of the index; `metadata`:
            there is a `.metadata`, and it does not describe the checkpoint; `unreadable`: the
            marker or the index is damaged, so nothing else can be looked at.
        key: key of the tensor or value with the damaged block; otherwise empty.
        block: number of the damaged 4 MiB block in its item; otherwise -1.
        elements: what cannot be read any more: parts of tensors in the notation of slices, such as
            `model.embed.weight[0:2097, 0:500]`, and keys of values. A part of a block is the
            smallest box that holds all its elements.
        text: description for people.
    """

    object_key: str
    what: Literal["missing", "size", "block", "framing", "counts", "metadata", "unreadable"]
    key: str = ""
    block: int = -1
    elements: tuple[str, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        """Let no key in the text act on a terminal."""
        object.__setattr__(self, "text", printable(self.text))


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        url: URL of the checkpoint.
        commit_id: commit that was verified.
        objects: number of data objects that were checked.
        blocks: number of blocks of payload that were read and compared.
        total_bytes: number of bytes read.
        quick: whether only the existence and the sizes of the objects were checked.
        deep: whether framing, padding, counts and `.metadata` were compared as well.
        damaged: all damage that was found, ordered by object.
    """

    url: str
    commit_id: str | None
    objects: int
    blocks: int
    total_bytes: int
    quick: bool
    deep: bool
    damaged: tuple[Damage, ...]

    def __str__(self) -> str:
        """Return whether the checkpoint is whole, what was read for that, and the first damages."""
        # A quick verification does not look inside the objects, so it does not say "whole".
        undamaged = "complete" if self.quick else "whole"
        lines = [f"{'DAMAGED' if self.damaged else undamaged}: {printable(self.url)}"]
        objects, blocks = counted(self.objects, "object"), counted(self.blocks, "block")
        if self.quick:
            lines.append(f"  {objects} looked at, nothing read")
        else:
            lines.append(f"  {objects}, {blocks}, {size_text(self.total_bytes)} read")
        lines += [f"  {damage.text}" for damage in self.damaged[:_SHOWN_DAMAGES]]
        if more := len(self.damaged[_SHOWN_DAMAGES:]):
            lines.append(f"  and {more} more; `damaged` and --json have all")
        return "\n".join(lines)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


def _moved(url: str, size_bytes: int, seconds: float, objects: int) -> str:
    """Return what saves and loads say alike: URL, bytes, seconds, speed and objects."""
    rate = size_text(size_bytes / max(seconds, 1e-9))
    return (
        f"{printable(url)}: {size_text(size_bytes)} in {seconds:.2f} s ({rate}/s),"
        f" {counted(objects, 'object')}"
    )


def log_failure(url: str | None, error: BaseException) -> None:
    """Log the error of a save in the background, in case the program never asks for its result."""
    # A logging filter of the program may raise, which must not replace the error.
    with contextlib.suppress(Exception):
        logger.error("saving %s in the background failed: %s", url, error)


def size_text(count_bytes: float) -> str:
    """Format a number of bytes in the largest unit (B, KiB, … TiB) that gives at least 1."""
    for unit, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if count_bytes >= size:
            return f"{count_bytes / size:.2f} {unit}"
    return f"{count_bytes:.0f} B"


def first_few(names: Sequence[str], most: int) -> str:
    """Join names with commas; of more than `most`, only the first ones and the number of others."""
    shown = ", ".join(map(printable, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: `1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
