"""`list_checkpoints`: what lies at and below a URL. `steps`: the steps of a run that count.

The base of a run is the number of the oldest claim whose steps count; 0 if all count.

No torch, and only what is needed is imported: `ls` starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from dcp_objstore import errors
from dcp_objstore.checkpoint.catalogue import (
    Entry,
    Objects,
    Standing,
    counts,
    list_by_prefix,
    read_entry,
    read_standing,
)
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    DOT_METADATA_KEY,
    MARKER_KEY,
    is_beacon_key,
    natural_order,
    parse_data_key,
)
from dcp_objstore.checkpoint.read import explain_absence, explain_object, read_marker
from dcp_objstore.config import TransferConfig, check_number
from dcp_objstore.run.steps import catalogue, step_number
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore
from dcp_objstore.transfer.workers import in_waves

CheckpointState: TypeAlias = Literal[
    "committed",
    "superseded",
    "deleting",
    "deleted",
    "not committed",
    "foreign",
    "damaged",
    "unsupported",
]
# The listing starts again if a job claims one of the runs in between, at most this often in all.
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint, or the place of one.

    Attributes:
        url: URL of the checkpoint.
        name: its name below the URL that was listed, such as `step-1000`; empty for that itself.
        state: `committed`. `superseded`: committed, but by a job that no longer owns the run, so it
            does not count. `deleting`: a deletion has begun. `deleted`: there is a tombstone.
            `not committed`: a save has written objects, but there is no marker. `foreign`: another
            library wrote it, or its marker was removed. `damaged`, `unsupported`: the marker cannot
            be read; see `error`.
        total_bytes: size of the data objects; of a deleted one, of those that are still there.
        error: why the marker cannot be read, or None.
        objects: number of data objects; None if it is not committed or the marker cannot be read.
        tensors, world_size: numbers of tensors, and of ranks that saved; None without a marker.
        created_at: time of the commit by the committing host's clock, or None without a marker.
        commit_id: id of the commit, or None without a marker.
        claim: number of the claim of the job that saved or adopted it; 0 for none.
        pins: names of the pins that protect it.
        user_metadata: the values that were passed to `save`, among them those of `metrics`.
        is_fence: it was never committed: a sweep has put the tombstone, to defeat a dead save.
    """

    url: str
    name: str
    state: CheckpointState
    total_bytes: int
    error: str | None = None
    objects: int | None = None
    tensors: int | None = None
    world_size: int | None = None
    created_at: datetime | None = None
    commit_id: str | None = None
    claim: int = 0
    pins: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    is_fence: bool = False

    @property
    def step(self) -> int | None:
        """The number in the name `step-N`; None for any other name."""
        return step_number(self.name)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The checkpoints at and below a URL.

    Attributes:
        url: the URL.
        checkpoints: that at the URL itself, then those below, in the natural order of their names.
        unread: the error of each marker or `_CLAIM` that cannot be read.
        unlisted: why the checkpoints below are not listed, if these credentials may not list.
    """

    url: str
    checkpoints: tuple[ListedCheckpoint, ...]
    unread: tuple[errors.DcpObjstoreError, ...] = ()
    unlisted: errors.DcpObjstoreError | None = None


def list_checkpoints(
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> Listing:
    """List the checkpoints at and below a URL, and saves that were never committed.

        for checkpoint in dos.list_checkpoints("s3://bucket/run").checkpoints:
            print(checkpoint.name, checkpoint.state, checkpoint.total_bytes)

    One listing of all objects below the URL (a request for each 1,000), and one request for each
    marker. It changes nothing.

    Args:
        url: URL of a checkpoint or a run, or a prefix above some.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        CheckpointNotFoundError: there is no checkpoint and no save at or below the URL.
        CheckpointCorruptError, UnsupportedError: the marker at the URL itself cannot be read.
        RetryableError: other jobs kept claiming the runs here.
        DcpObjstoreError: the store refused or failed.
    """
    spec = StoreSpec(url, storage_options, config)
    store = spec.open()
    base_above, stored = _base_above(spec), read_marker(store)
    # The checkpoint at the URL itself, whose objects are not listed yet.
    itself = None if stored is None else Entry("", store, {}, stored)
    try:
        checkpoints, unread = _Lister(spec, itself, base_above).list_below(store)
    except errors.PermissionDeniedError as error:  # these credentials may not list
        if itself is None:
            raise
        return Listing(url=spec.url, checkpoints=(as_listed(itself, base_above),), unlisted=error)
    if not checkpoints:
        raise errors.CheckpointNotFoundError(
            explain_object(spec) or explain_absence(store), url=spec.url
        )
    return Listing(url=spec.url, checkpoints=checkpoints, unread=unread)


def steps(
    url: str,
    *,
    newest: int | None = None,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> tuple[ListedCheckpoint, ...]:
    """List the committed steps of a run that count, the newest last. One process calls it.

        newest = dos.steps("s3://bucket/run", newest=1)[0]
        dos.load(state, newest.url)

    Steps are sorted by name, and numbers in names are compared as numbers: `step-9` comes before
    `step-10`. In a run without a claim all committed steps count. A step with a damaged marker is
    left out, and a warning is logged.

    Sends two requests for the run's `_CLAIM`, one listing of the run (a page for each 1,000
    objects), and one request for each step. It starts again if a job claims the run in between.

    Args:
        url: URL of the run; its steps are the checkpoints directly below.
        newest: how many steps to list, the newest ones. Markers are read from the last step on
            until there are enough. Default: all.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        ConfigError: `newest` is not a number of steps.
        CheckpointCorruptError: the run's `_CLAIM` is damaged.
        UnsupportedError: a newer version wrote the run.
        RetryableError: other jobs kept claiming the run.
        DcpObjstoreError: the store refused or failed.
    """
    if newest is not None:
        check_number("newest", newest, 1)
    return list_steps(StoreSpec(url, storage_options, config), newest)


def list_steps(run: StoreSpec, newest: int | None = None) -> tuple[ListedCheckpoint, ...]:
    """List the steps of a run as `steps` does."""
    listed = catalogue(run, newest)
    return tuple(as_listed(step, listed.base) for step in listed.steps)


def _base_above(spec: StoreSpec) -> int:
    """Return the base of the run that contains a checkpoint; 0 if there is none, or unreadable."""
    run, _ = spec.parent()
    try:
        return 0 if run is None else read_standing(run.open(), run.open_child).base
    except (errors.PermissionDeniedError, errors.CheckpointCorruptError, errors.UnsupportedError):
        return 0


class _Run(NamedTuple):
    """The claims that count in a run; if they cannot be read, all count, and `error` says why."""

    standing: Standing
    error: errors.DcpObjstoreError | None = None


@dataclass(frozen=True)
class _Lister:
    """Lists the checkpoints at and below a URL.

    A prefix is the name of a checkpoint or a run below the URL; it is empty for the URL itself.

    Attributes:
        spec: the URL and its options.
        itself: the checkpoint at the URL itself, whose marker was read first, or None.
        base_above: the base of the run that contains it.
    """

    spec: StoreSpec
    itself: Entry | None
    base_above: int

    def list_below(
        self, store: ObjectStore
    ) -> tuple[tuple[ListedCheckpoint, ...], tuple[errors.DcpObjstoreError, ...]]:
        """Describe the checkpoints and saves, in natural order; the errors of what is unreadable.

        It starts again if a job claims one of the runs in between (rule C3 of `claim`).
        """
        for _ in range(_TRIES):
            objects_at = list_by_prefix(store, all_data=True)
            prefixes_of_runs = [run for run in objects_at if CLAIM_KEY in objects_at[run]]
            runs = self._read_runs(prefixes_of_runs)
            prefixes = [prefix for prefix in objects_at if _is_listed(objects_at[prefix])]
            read = partial(self._read_entry, objects_at)
            entries = list(in_waves(read, sorted(prefixes, key=natural_order)))
            runs_again = self._read_runs(prefixes_of_runs)
            if all(runs_again[prefix].standing == runs[prefix].standing for prefix in runs):
                listed = tuple(as_listed(entry, self._base(entry.name, runs)) for entry in entries)
                run_errors = [run.error for run in runs.values()]
                entry_errors = [entry.error for entry in entries]
                return listed, tuple(filter(None, [*run_errors, *entry_errors]))
        raise errors.RetryableError(
            "jobs kept claiming the runs here", advice="try again", url=store.url
        )

    def _read_runs(self, prefixes: Sequence[str]) -> dict[str, _Run]:
        """Return which claims count in each run, by its prefix."""
        return dict(zip(prefixes, in_waves(self._read_run, prefixes), strict=True))

    def _read_run(self, prefix: str) -> _Run:
        """Read which claims count in a run whose `_CLAIM` was listed."""
        spec = self.spec.child(prefix)
        try:
            return _Run(read_standing(spec.open(), spec.open_child, expected=True))
        except (errors.CheckpointCorruptError, errors.UnsupportedError) as error:
            return _Run(Standing(None, 0), error)  # all steps count

    def _read_entry(self, objects_at: Mapping[str, Objects], prefix: str) -> Entry:
        """Read the marker of the checkpoint at a prefix, if it has one."""
        objects = objects_at.get(prefix, {})
        if self.itself is not None and not prefix:  # its marker was read before the listing
            return replace(self.itself, objects=objects)
        if MARKER_KEY in objects:
            return read_entry(prefix, self.spec.open_child(prefix), objects)
        return Entry(prefix, self.spec.open_child(prefix), objects)

    def _base(self, prefix: str, runs: Mapping[str, _Run]) -> int:
        """Return the base of the run that has the checkpoint at a prefix."""
        if not prefix:  # the checkpoint at the URL itself
            return self.base_above
        # The last segment is the step's name; the segments before it name the run.
        run = runs.get(prefix.rpartition("/")[0])
        return 0 if run is None else run.standing.base


def _is_listed(objects: Objects) -> bool:
    """Return whether a save has begun where these objects are."""
    return any(
        name == MARKER_KEY or is_beacon_key(name) or parse_data_key(name) is not None
        for name in objects
    )


def as_listed(entry: Entry, base: int) -> ListedCheckpoint:
    """Describe a checkpoint, or the place of one, in a run with this base."""
    url, name = entry.store.url, entry.name
    if entry.stored is not None:
        marker = entry.marker
        superseded = marker.is_committed and not counts(marker, base)
        deleted = marker.state == "deleted"
        return ListedCheckpoint(
            url=url,
            name=name,
            state="superseded" if superseded else marker.state,
            total_bytes=_size(_data(entry)) if deleted else marker.counts.total_bytes,
            objects=marker.counts.objects,
            tensors=marker.counts.tensors,
            world_size=marker.world_size,
            created_at=marker.created_at,
            commit_id=marker.commit_id,
            claim=marker.claim,
            pins=marker.pins,
            user_metadata=marker.user_metadata,
            is_fence=marker.index is None,
        )
    # There is no marker: another library wrote the checkpoint, or the marker was removed.
    if entry.error is None and DOT_METADATA_KEY in entry.objects:
        # The data files that stock torch writes.
        data = [meta for key, meta in entry.objects.items() if key.endswith(".distcp")]
        return ListedCheckpoint(
            url=url, name=name, state="foreign", total_bytes=_size(data), objects=len(data)
        )
    state: CheckpointState = "not committed"
    if entry.error is not None:
        damaged = isinstance(entry.error, errors.CheckpointCorruptError)
        state = "damaged" if damaged else "unsupported"
    return ListedCheckpoint(
        url=url,
        name=name,
        state=state,
        total_bytes=_size(_data(entry)),
        error=None if entry.error is None else entry.error.message,
    )


def _data(entry: Entry) -> list[ObjectMeta]:
    """Return the data objects that are there, of any save."""
    return [meta for key, meta in entry.objects.items() if parse_data_key(key) is not None]


def _size(metas: Sequence[ObjectMeta]) -> int:
    return sum(meta.size_bytes for meta in metas)
