"""The catalogue of a run: one listing, sorted by prefix, and the markers that are read from it.

`list_run` is rule C3 of `claim`: which steps count. It is below `claim`, which claims a run by the
same listing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock, pause_or_raise
from dcp_objstore.checkpoint.marker import MAX_CLAIM, Marker, damaged, decode_record, with_checksum
from dcp_objstore.checkpoint.names import CLAIM_KEY, MARKER_KEY, natural_order, parse_data_key
from dcp_objstore.checkpoint.read import Stored, read_marker, read_record
from dcp_objstore.errors import CheckpointCorruptError, InvalidUrlError, UnsupportedError
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore
from dcp_objstore.stores.urls import check_key
from dcp_objstore.transfer.workers import WAVE, in_waves

FORMAT: Final = 1
MAX_SIZE_BYTES: Final = 4096
_WHAT = "the run's _CLAIM"
_warned_of: set[str] = set()  # by `can_be_in_url`

OpenBelow: TypeAlias = Callable[[str], "ObjectStore"]
# The objects at a prefix, by their names there.
Objects: TypeAlias = Mapping[str, "ObjectMeta"]
ReadEntry: TypeAlias = Callable[[str, "ObjectStore", Objects], "Entry"]


# --- `_CLAIM`


class GoingBack(msgspec.Struct, frozen=True, kw_only=True):
    """The commit by which a job that has gone back to an earlier step leaves the later ones.

    Attributes:
        step: the name of the step that it saves.
        claim: the number of its claim, which is the base as soon as a marker of the step has it.
    """

    step: str
    claim: Annotated[int, Meta(ge=1, le=MAX_CLAIM)]


class ClaimRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `_CLAIM`.

    Attributes:
        format: number of the format; it rises when an older version would misread the record.
        number: number of the latest claim.
        base: the oldest claim whose steps count.
        going_back: the commit that raises the base, once it is made; None if no job is going back.
        finished: the job with this claim has said that it trained to the end. No rule looks at it:
            a version that does not know it claims the run as any other, and a new claim lacks it.
        write_id: an id that is new for every content.
    """

    format: Annotated[int, Meta(ge=1)] = FORMAT
    number: Annotated[int, Meta(ge=1, le=MAX_CLAIM)]
    base: Annotated[int, Meta(ge=0, le=MAX_CLAIM)]
    going_back: GoingBack | None = None
    finished: bool = False
    write_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


_decoder = msgspec.json.Decoder(ClaimRecord)


def encode_claim(record: ClaimRecord) -> bytes:
    """Encode `_CLAIM` as it is stored."""
    return with_checksum(msgspec.json.encode(record))


def decode_claim(body: bytes) -> ClaimRecord:
    """Decode and check a stored `_CLAIM`, with the errors of `decode_record`."""
    record = decode_record(
        body, _decoder, what=_WHAT, newest_format=FORMAT, max_size_bytes=MAX_SIZE_BYTES
    )
    if record.base > record.number:
        raise damaged(_WHAT, f"base {record.base} is beyond number {record.number}")
    return record


def read_claim(run: ObjectStore, *, expected: bool = False) -> Stored[ClaimRecord] | None:
    """Read `_CLAIM` and its object's metadata; return None if no job ever claimed the run.

    Sends one GET; `expected` is that of `read_record`.

    Raises:
        CheckpointCorruptError: `_CLAIM` is damaged.
        UnsupportedError: a newer version wrote it in a format that this one does not know.
    """
    return read_record(
        run,
        CLAIM_KEY,
        decode_claim,
        what=_WHAT,
        max_size_bytes=MAX_SIZE_BYTES,
        expected=expected,
    )


class Standing(NamedTuple):
    """Which claims count in a run.

    Attributes:
        claim: the content of `_CLAIM`; None if no job ever claimed the run.
        base: the oldest claim whose steps count. 0 without a claim: all count.
    """

    claim: ClaimRecord | None
    base: int


def read_standing(run: ObjectStore, open_step: OpenBelow, *, expected: bool = False) -> Standing:
    """Read which claims count in a run (rule C3). One GET of `_CLAIM`, and perhaps one of a marker.

    If `_CLAIM` names a step in `going_back`, the marker of that step decides, by `base_by`.

    Args:
        expected: `_CLAIM` is known to be there.

    Raises:
        CheckpointCorruptError, UnsupportedError: `_CLAIM` or that marker cannot be read.
    """
    stored = read_claim(run, expected=expected)
    if stored is None:
        return Standing(None, 0)
    claim = stored.record
    if claim.going_back is None:
        return Standing(claim, claim.base)
    stored_step = read_marker(open_step(claim.going_back.step))
    return Standing(claim, base_by(claim, None if stored_step is None else stored_step.record))


def base_by(claim: ClaimRecord, marker: Marker | None) -> int:
    """Return the base of a run, by its claim and the marker of the step in `going_back`.

    For example, `_CLAIM` has base 3 and a `going_back` with claim 5. As soon as the marker of that
    step has base 5, too, its commit is made, and the base is 5; until then it is 3.
    """
    back = claim.going_back
    if back is None or marker is None or marker.base != back.claim:
        return claim.base
    return back.claim


def counts(marker: Marker, base: int) -> bool:
    """Return whether the step with this marker counts (rule C3)."""
    return marker.is_committed and marker.claim >= base


# --- the listing, and markers


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or the place of one, as a listing and its marker show it.

    Attributes:
        name: its name below the URL that was listed.
        store: the store, rooted at the checkpoint.
        objects: the objects that the listing showed there.
        stored: its marker, in any state, and the object's metadata; None without a readable marker.
        error: why the marker cannot be read, or None.
    """

    name: str
    store: ObjectStore
    objects: Objects
    stored: Stored[Marker] | None = None
    error: CheckpointCorruptError | UnsupportedError | None = None

    @property
    def marker(self) -> Marker:
        """The marker without its version."""
        assert self.stored is not None
        return self.stored.record

    @property
    def committed_at(self) -> CommitTime:
        """The time of its commit, by `commit_time`."""
        return commit_time(self.marker, self.objects)


class CommitTime(NamedTuple):
    """The time of a commit, by which commits are compared.

    Attributes:
        by_store: the store's time of the index: hosts have different clocks, and sweeps, pins
            and claims rewrite the marker.
        by_host: the host's time in the marker, for stores that count whole seconds.
    """

    by_store: datetime
    by_host: datetime


def commit_time(marker: Marker, objects: Objects) -> CommitTime:
    """Return the time of a commit; without its index, the host's twice."""
    assert marker.index is not None  # every commit has one
    index = objects.get(marker.index.key)
    by_store = marker.created_at if index is None else index.last_modified
    return CommitTime(by_store, marker.created_at)


def list_by_prefix(
    store: ObjectStore, *, all_data: bool = False
) -> dict[str, dict[str, ObjectMeta]]:
    """List what lies at and below a URL: the objects at each prefix, by their names there.

    A prefix that no URL can name is left out, with one warning: another program wrote it.

    Args:
        all_data: keep all data objects, of which 10,000 ranks write 70,000 in each step. Default:
            only the first one at each prefix, which shows that there are some.
    """
    objects_at: dict[str, dict[str, ObjectMeta]] = defaultdict(dict)
    with_data: set[str] = set()
    for meta in store.list():
        prefix, _, name = meta.key.rpartition("/")
        if not all_data and parse_data_key(name) is not None:
            if prefix in with_data:
                continue
            with_data.add(prefix)
        objects_at[prefix][name] = meta
    return {
        prefix: objects
        for prefix, objects in objects_at.items()
        if can_be_in_url(prefix, store.url)
    }


def can_be_in_url(prefix: str, below: str) -> bool:
    """Return whether a prefix can be in a URL. Otherwise warn, once for each such prefix.

    Args:
        prefix: the prefix, relative to `below`; empty for that URL itself.
        below: the URL that was listed.
    """
    try:
        if prefix:
            check_key(prefix).encode()  # it may hold characters that are not Unicode
    except (InvalidUrlError, UnicodeEncodeError) as error:
        name = f"{below}/{prefix!a}"
        if name not in _warned_of:
            _warned_of.add(name)
            logger.warning("%s is left out, because no URL can name it: %s", name, error)
        return False
    return True


def read_entry(name: str, store: ObjectStore, objects: Objects) -> Entry:
    """Read the marker of a checkpoint. One GET; another one if the answer contradicts the listing.

    The answer contradicts the listing if the marker names an index that was not listed: the step
    was saved again after the listing, or the store answered with another object. The second answer
    is believed.
    """
    try:
        stored = read_marker(store, expected=True)
        index = None if stored is None else stored.record.index
        if index is not None and index.key not in objects:
            stored = read_marker(store)
        return Entry(name, store, objects, stored)
    except (CheckpointCorruptError, UnsupportedError) as error:
        return Entry(name, store, objects, error=error)


class Markers(dict[str, Entry]):
    """The markers of a run that were read, by the names of their steps, for the next listing."""

    def read(self, name: str, store: ObjectStore, objects: Objects) -> Entry:
        """Read a marker, unless the listing shows that it was not written since it was read.

        One that could not be read is read again.
        """
        entry = self.get(name)
        if entry is None or entry.error or entry.objects[MARKER_KEY] != objects[MARKER_KEY]:
            entry = self[name] = read_entry(name, store, objects)
        return entry

    def forget_others(self, objects_at: Mapping[str, Objects]) -> None:
        """Forget the markers of steps that a listing lacks."""
        for name in self.keys() - objects_at.keys():
            del self[name]


def step_names(objects_at: Mapping[str, Objects], *, bare: bool = False) -> set[str]:
    """Return the names of the steps of a run that have a marker.

    Args:
        bare: return the steps that have nothing but a marker, too. A deleted step keeps just its
            marker, for ever, while a committed step also has its index, which was put before the
            marker. So by default deleted steps cost no requests.
    """
    directly_below = (name for name in objects_at if name and "/" not in name)
    least = 1 if bare else 2  # objects, the marker among them
    return {
        name
        for name in directly_below
        if MARKER_KEY in objects_at[name] and len(objects_at[name]) >= least
    }


def read_steps(
    objects_at: Mapping[str, Objects],
    open_step: OpenBelow,
    *,
    bare: bool = False,
    with_damaged: bool = False,
    wave: int = WAVE,
    read: ReadEntry = read_entry,
) -> Iterator[Entry]:
    """Read the markers of the steps of a run, several at a time; the last name first.

    Args:
        objects_at: the objects below the run, by prefix and name.
        open_step: returns the store of a step by its name; called from several threads.
        bare: as for `step_names`.
        with_damaged: yield the steps whose markers are damaged, too. Default: log a warning.
        wave: the number of markers that are asked for before the first is yielded.
        read: returns the marker of a step; called from several threads. Default: send a GET.

    Raises:
        UnsupportedError: a step is in a newer format.
    """
    names = sorted(step_names(objects_at, bare=bare), key=natural_order, reverse=True)
    for entry in in_waves(lambda name: read(name, open_step(name), objects_at[name]), names, wave):
        if isinstance(entry.error, UnsupportedError):
            raise entry.error
        if entry.error is not None and not with_damaged:
            logger.warning("a step is left out because its marker cannot be read: %s", entry.error)
        # With neither an error nor a marker, the marker was removed since it was listed.
        elif entry.error is not None or entry.stored is not None:
            yield entry


# --- C3


@dataclass(frozen=True)
class Catalogue:
    """The content of a run.

    Attributes:
        claim: the content of its `_CLAIM`, or None.
        base: the oldest claim whose steps count.
        objects_at: the objects below the run, by prefix and name; of data objects, one a prefix.
        steps: the steps that count, in natural order of their names, the newest last.
    """

    claim: ClaimRecord | None
    base: int
    objects_at: Mapping[str, Objects]
    steps: list[Entry]


def list_run(
    run: ObjectStore,
    open_step: OpenBelow,
    *,
    newest: int | None = None,
    with_damaged: bool = False,
    read: ReadEntry = read_entry,
    clock: Clock = SYSTEM_CLOCK,
) -> Catalogue:
    """List a run and the steps that count in it (rule C3).

    Sends two GETs of `_CLAIM`, one listing, and one GET for each marker; with `newest`, it reads
    markers from the last one on until it has enough. Deleted steps of which nothing but the marker
    is left cost no requests.

    Args:
        open_step: returns the store of a step by its name; called from several threads.
        newest: the number of steps to return, the newest ones. Default: all.
        with_damaged: return the steps whose markers are damaged, too. Default: log a warning.
        read: as for `read_steps`.

    Raises:
        RetryableError: other jobs kept claiming the run until the deadline.
        CheckpointCorruptError, UnsupportedError: `_CLAIM` cannot be read, or a step is in a newer
            format.
    """
    tries = clock.tries()
    wave = WAVE if newest is None else min(newest, WAVE)
    while True:
        standing = read_standing(run, open_step)
        objects_at = list_by_prefix(run)
        counting = (
            entry
            for entry in read_steps(
                objects_at, open_step, with_damaged=with_damaged, wave=wave, read=read
            )
            if entry.error is not None or counts(entry.marker, standing.base)
        )
        steps = list(islice(counting, newest))
        if read_standing(run, open_step) == standing:
            return Catalogue(*standing, objects_at, steps[::-1])
        # Another job has changed in between which claims count. Some of the markers may have been
        # read before that job rewrote them, and some after, so all is read again.
        pause_or_raise(
            run, tries, "other jobs kept claiming this run until the deadline; try again"
        )


def next_step(run: ObjectStore, open_step: OpenBelow, name: str) -> str | None:
    """Return the name of the first step after this one that counts, for a hint.

    Returns None if there is none, or if no job ever claimed the run: then it may be any prefix, and
    a listing of it very long. Sends one GET of `_CLAIM`, and for a run one listing and a GET for
    each later step. It does not list again if a job claims the run in between.
    """
    claim, base = read_standing(run, open_step)
    if claim is None:
        return None
    own_order = natural_order(name)
    objects_at = list_by_prefix(run)
    later = {step: objects_at[step] for step in objects_at if natural_order(step) > own_order}
    names = [entry.name for entry in read_steps(later, open_step) if counts(entry.marker, base)]
    return names[-1] if names else None  # `read_steps` begins with the last name
