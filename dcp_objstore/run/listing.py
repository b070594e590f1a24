"""`list_checkpoints`: what lies at and below a URL: checkpoints, unfinished saves, leftovers.

No torch, and only what is needed is imported: `ls` starts quickly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dcp_objstore.checkpoint.claim import ClaimRecord, counts, read_claim
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    DOT_METADATA_KEY,
    MARKER_KEY,
    is_beacon_key,
    is_ours,
    is_upload_key,
    natural_order,
    parse_data_key,
)
from dcp_objstore.checkpoint.read import explain_absence, explain_object, read_index, read_marker
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    PermissionDeniedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.interruptible import InterruptibleStore
from dcp_objstore.transfer.workers import in_waves

if TYPE_CHECKING:
    from datetime import datetime

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore, UnfinishedUpload

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
# The listing starts again if a job claims one of the runs meanwhile, at most this often in all.
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What lies at a checkpoint and no commit names. `sweep` removes it when it is old enough.

    Attributes:
        objects: the number of data objects and indices.
        objects_bytes: their size.
        written_at: when the last of them was written, by the store's clock; None if there are none.
        saves: the number of beacons: saves that are under way, or died.
        began_at: when the last of these saves began; None if there are none.
        uploads: the number of unfinished multipart uploads, of saves under way and of dead ones.
        uploads_bytes: the size of their parts, which no listing shows.
        initiated_at: when the last of them began; None if there are none.
    """

    objects: int = 0
    objects_bytes: int = 0
    written_at: datetime | None = None
    saves: int = 0
    began_at: datetime | None = None
    uploads: int = 0
    uploads_bytes: int = 0
    initiated_at: datetime | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.objects or self.saves or self.uploads)


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint, or the place of one.

    Attributes:
        url: URL of the checkpoint.
        state: `committed`. `superseded`: committed, but by a job that no longer owns the run, so it
            does not count. `deleting`: a deletion has begun. `deleted`: there is a tombstone.
            `not committed`: a save has written objects, but there is no marker. `foreign`: another
            library wrote it, or its marker was removed. `damaged`, `unsupported`: the marker cannot
            be read; see `error`.
        total_bytes: size of the data objects.
        error: why the marker cannot be read, or None.
        objects: number of data objects; None if it is not committed or the marker cannot be read.
        tensors, world_size: numbers of tensors, and of ranks that saved; None without a marker.
        created_at: time of the commit by the committing host's clock, or None without a marker.
        commit_id: id of the commit, or None without a marker.
        claim: number of the claim of the job that saved or adopted it; 0 for none.
        pins: names of the pins that protect it.
        user_metadata: the values that were passed to `save`, among them those of `metrics`.
        is_fence: it was never committed: a sweep has put the tombstone, to defeat a dead save.
        leftovers: what no commit names; None without `everything`.
    """

    url: str
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
    leftovers: Leftovers | None = None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What lies at and below a URL.

    Attributes:
        url: the URL.
        checkpoints: that at the URL itself, then those below, in the natural order of their names.
        unread: the error of each marker or `_CLAIM` that cannot be read.
        unlisted: why the checkpoints below are not listed, if these credentials may not list.
        uploads_unseen: with `everything`, why unfinished uploads are not listed, or None.
    """

    url: str
    checkpoints: tuple[ListedCheckpoint, ...]
    unread: tuple[DcpObjstoreError, ...] = ()
    unlisted: DcpObjstoreError | None = None
    uploads_unseen: str | None = None


def list_checkpoints(
    url: str,
    *,
    everything: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> Listing:
    """List the checkpoints at and below a URL, and saves that were never committed.

    One listing of all objects below the URL (a request for each 1,000), and one request for each
    marker. It changes nothing.

    Args:
        url: URL of a checkpoint or a run, or a prefix above some.
        everything: also find what no commit names, unfinished uploads, and checkpoints of other
            libraries. This lists unfinished uploads, and reads the index of checkpoints at which
            there is more than their marker counts. Default False.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        CheckpointNotFoundError: there is no checkpoint and no save at or below the URL.
        CheckpointCorruptError, UnsupportedError: the marker at the URL itself cannot be read.
        RetryableError: other jobs kept claiming the runs here.
        DcpObjstoreError: the store refused or failed.
    """
    spec = StoreSpec(url, storage_options, config)
    store = InterruptibleStore(spec.open())
    itself = _describe(store, _base_above(spec))
    uploads: dict[str, list[UnfinishedUpload]] = defaultdict(list)
    unseen = None
    if everything:
        from dcp_objstore.stores.uploads.open import open_uploads

        try:
            for upload in open_uploads(spec).list():
                prefix, _, name = upload.key.rpartition("/")
                if is_upload_key(name):
                    uploads[prefix].append(upload)
        except (InputError, RetryableError) as error:
            unseen = error.message
    try:
        found, unread = _below(spec, store, itself, uploads if everything else None)
    except PermissionDeniedError as error:
        if itself is None:
            raise
        return Listing(url=spec.url, checkpoints=(itself,), unlisted=error, uploads_unseen=unseen)
    if not found:
        raise CheckpointNotFoundError(explain_object(spec) or explain_absence(store), url=spec.url)
    return Listing(url=spec.url, checkpoints=found, unread=unread, uploads_unseen=unseen)


@dataclass
class _Seen:
    """What a listing shows of one prefix."""

    has_marker: bool = False
    has_dot_metadata: bool = False
    data: int = 0
    data_bytes: int = 0
    foreign: int = 0
    foreign_bytes: int = 0
    objects: int = 0
    objects_bytes: int = 0
    written_at: datetime | None = None
    saves: int = 0
    began_at: datetime | None = None

    def add(self, name: str, meta: ObjectMeta) -> None:
        """Count an object."""
        if name == MARKER_KEY:
            self.has_marker = True
        elif name == DOT_METADATA_KEY:
            self.has_dot_metadata = True
        elif is_ours(name):
            self.objects += 1
            self.objects_bytes += meta.size_bytes
            self.written_at = _later(self.written_at, meta.last_modified)
            if parse_data_key(name) is not None:
                self.data += 1
                self.data_bytes += meta.size_bytes
        elif is_beacon_key(name):
            self.saves += 1
            self.began_at = _later(self.began_at, meta.last_modified)
        elif name.endswith(".distcp"):
            self.foreign += 1
            self.foreign_bytes += meta.size_bytes

    @property
    def is_save(self) -> bool:
        """Whether a save has begun here."""
        return self.has_marker or self.data > 0 or self.saves > 0


def _base_above(spec: StoreSpec) -> int:
    """Return the base of the run that contains a checkpoint; 0 if there is none, or unreadable."""
    run, _ = spec.parent()
    if run is None:
        return 0
    try:
        found = read_claim(run.open())
    except (PermissionDeniedError, CheckpointCorruptError, UnsupportedError):
        return 0
    return found[0].base if found is not None else 0


_Uploads: TypeAlias = Mapping[str, Sequence["UnfinishedUpload"]]
_Described: TypeAlias = tuple[tuple[ListedCheckpoint, ...], tuple[DcpObjstoreError, ...]]


def _below(
    spec: StoreSpec,
    store: ObjectStore,
    itself: ListedCheckpoint | None,
    uploads: _Uploads | None,
) -> _Described:
    """Do what `_below_once` does, again if a job claims a run meanwhile (rule C3 of `claim`)."""
    for _ in range(_TRIES):
        described, claims = _below_once(spec, store, itself, uploads)
        if _claims_of(spec, list(claims))[0] == claims:
            return described
    raise RetryableError("jobs kept claiming the runs here; try again", url=spec.url)


def _below_once(
    spec: StoreSpec,
    store: ObjectStore,
    itself: ListedCheckpoint | None,
    uploads: _Uploads | None,
) -> tuple[_Described, dict[str, ClaimRecord | None]]:
    """Describe the checkpoints and saves at and below a URL, in natural order.

    Args:
        spec: the URL and its options.
        store: rooted at the URL.
        itself: the checkpoint at the URL itself, if there is one.
        uploads: the unfinished uploads by their prefix; None to leave out what no commit names.

    Returns:
        The descriptions, the errors of what could not be read, and the `_CLAIM` of each run that
        has one.
    """
    seen: dict[str, _Seen] = defaultdict(_Seen)
    runs: list[str] = []
    for meta in store.list():
        prefix, _, name = meta.key.rpartition("/")
        if name == CLAIM_KEY:
            runs.append(prefix)
        else:
            seen[prefix].add(name, meta)
    claims, unread = _claims_of(spec, runs)

    def describe(prefix: str) -> tuple[ListedCheckpoint, DcpObjstoreError | None]:
        one = spec.child(prefix)
        opened = one.open()
        # The last segment is the step's name; the segments before it name the run.
        claim = claims.get(_above(prefix)) if prefix else None
        here = seen.get(prefix, _Seen())
        entry, failed = None if prefix else itself, None
        if entry is None and here.has_marker:
            try:
                entry = _describe(opened, claim.base if claim is not None else 0)
            except (CheckpointCorruptError, UnsupportedError) as error:
                failed = error
        if entry is None:
            entry = _without_marker(one.url, here, failed)
        if uploads is not None:
            left = _leftovers(opened, entry, here)
            entry = replace(entry, leftovers=_with_uploads(left, uploads.get(prefix, ())))
        return entry, failed

    prefixes = {
        prefix
        for prefix, one in seen.items()
        if one.is_save or (uploads is not None and (one.objects or one.has_dot_metadata))
    } | set(uploads or ())
    if itself is not None:
        prefixes.add("")
    described = list(in_waves(describe, sorted(prefixes, key=natural_order)))
    unread += [error for _, error in described if error is not None]
    return (tuple(entry for entry, _ in described), tuple(unread)), claims


def _claims_of(
    spec: StoreSpec, runs: Sequence[str]
) -> tuple[dict[str, ClaimRecord | None], list[DcpObjstoreError]]:
    """Return the `_CLAIM` of each run, or None, and the errors of those that cannot be read."""

    def read(run: str) -> tuple[ClaimRecord | None, DcpObjstoreError | None]:
        try:
            found = read_claim(spec.child(run).open())
        except (CheckpointCorruptError, UnsupportedError) as error:
            return None, error
        return (found[0] if found is not None else None), None

    found = list(in_waves(read, runs))
    claims = {run: claim for run, (claim, _) in zip(runs, found, strict=True)}
    return claims, [error for _, error in found if error is not None]


def _describe(store: ObjectStore, base: int) -> ListedCheckpoint | None:
    found = read_marker(store)
    if found is None:
        return None
    marker = found[0]
    return ListedCheckpoint(
        url=store.url,
        state="superseded" if marker.is_committed and not counts(marker, base) else marker.state,
        total_bytes=marker.counts.total_bytes,
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


def _without_marker(url: str, seen: _Seen, failed: DcpObjstoreError | None) -> ListedCheckpoint:
    """Describe what has no marker, or one that is damaged or of a newer version."""
    if failed is None and seen.has_dot_metadata:
        return ListedCheckpoint(
            url=url,
            state="foreign",
            total_bytes=seen.data_bytes + seen.foreign_bytes,
            objects=seen.data + seen.foreign,
        )
    state: CheckpointState = "not committed"
    if failed is not None:
        state = "damaged" if isinstance(failed, CheckpointCorruptError) else "unsupported"
    error = None if failed is None else failed.message
    return ListedCheckpoint(url=url, state=state, total_bytes=seen.data_bytes, error=error)


def _leftovers(store: ObjectStore, entry: ListedCheckpoint, seen: _Seen) -> Leftovers:
    """Find the objects that no commit names, and the saves that have not ended."""
    saves = Leftovers(saves=seen.saves, began_at=seen.began_at)
    loose = replace(
        saves,
        objects=seen.objects,
        objects_bytes=seen.objects_bytes,
        written_at=seen.written_at,
    )
    if entry.error is not None or entry.state == "foreign":
        return saves  # it is not known what the commit names; another library's files are kept
    if entry.state not in ("committed", "superseded"):
        return loose
    # One index, and the data objects that the marker counts.
    if (seen.objects, seen.data_bytes) == ((entry.objects or 0) + 1, entry.total_bytes):
        return saves
    # The listing comes first: so it shows nothing of a commit that replaces this one meanwhile.
    listed = list(store.list())
    try:
        found = read_marker(store)
        if found is None or found[0].index is None or found[0].commit_id != entry.commit_id:
            return saves  # it was replaced meanwhile
        from dcp_objstore.checkpoint import index as ix  # imports NumPy, and is rarely needed

        index = ix.decode(read_index(store, found[0]))
    except (CorruptDataError, LostRaceError, UnsupportedError):
        return saves
    named = {found[0].index.key, *(one.key for one in index.objects)}
    others = [meta for meta in listed if is_ours(meta.key) and meta.key not in named]
    return replace(
        saves,
        objects=len(others),
        objects_bytes=sum(meta.size_bytes for meta in others),
        written_at=max((meta.last_modified for meta in others), default=None),
    )


def _with_uploads(left: Leftovers, uploads: Sequence[UnfinishedUpload]) -> Leftovers:
    return replace(
        left,
        uploads=len(uploads),
        uploads_bytes=sum(one.size_bytes for one in uploads),
        initiated_at=max((one.initiated for one in uploads), default=None),
    )


def _above(key: str) -> str:
    return key.rpartition("/")[0]


def _later(one: datetime | None, other: datetime) -> datetime:
    return other if one is None else max(one, other)
