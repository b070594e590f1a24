"""`StoredCheckpoint`: a checkpoint opened for reading, of this library or of others.

Checkpoints of this library, of stock torch and safetensors become the same here: the metadata for
DCP's planners and, for each item, where its bytes lie, whether they are raw, and what they must
hash to. Looking into a checkpoint of stock torch needs torch; otherwise the metadata is made
when it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import xxhash

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.catalogue import next_step
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY, parse_data_key
from dcp_objstore.checkpoint.read import (
    LOOK_AROUND_LIMIT,
    Stored,
    explain_keys,
    explain_missing,
    explain_object,
    is_unfinished,
    look_around,
    open_marked,
    read_marker,
    retry_damaged,
)
from dcp_objstore.compat import safetensors
from dcp_objstore.compat.archive import unpacked_limit_bytes
from dcp_objstore.compat.transforms import FRAMING_SIZE_BYTES, check_transforms
from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsupportedError,
)
from dcp_objstore.read.geometry import check_filled
from dcp_objstore.read.items import (
    IndexItems,
    ItemLocation,
    Items,
    Offset,
    RenamedItems,
    StockItems,
)
from dcp_objstore.state.stored import known_dtype, unknown_dtype
from dcp_objstore.stores.wrappers import PinnedStore, is_same_state
from dcp_objstore.transfer.workers import concurrently

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from dcp_objstore.checkpoint.marker import Marker
    from dcp_objstore.read.items import Rename
    from dcp_objstore.stores import ObjectStore, StoreSpec
    from dcp_objstore.stores.protocol import ObjectMeta, Version

# An array of zeros as a pickled value packs well beyond 100 times; up to this size it may.
_LEAST_VALUE_LIMIT_BYTES = 64 * 1024**2
_MAX_DOT_METADATA_BYTES = 4 * 1024**3
# A read is planned in blocks before the first byte shows whether an object is as large as the
# `.metadata` says. Bytes that no tensor's shape accounts for have no other bound. (A length of
# 2**42 took 25 s and 600 MB before it was found to be wrong.)
_MAX_UNEXPLAINED_BYTES = 64 * 1024**3
_LOST_MARKER = (
    f"dcp_objstore wrote this checkpoint, but its marker ({MARKER_KEY}) is gone. Copy it here, too"
    " ('dcp-objstore cp' copies checkpoints as a whole), or load another checkpoint; verify=False"
    " reads what is here, unverified"
)
_REPLACED = "another writer replaced the checkpoint while it was opened; load it again"
# torch's FileSystemWriter writes this for rank 0 if dcp.save is called with
# use_collectives=False.
_RANK_METADATA_KEY = "__0.metadata"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was opened for reading.

    Attributes:
        object_keys: keys of the data objects, relative to what `open_store` opens.
        items: its tensors and values.
        marker: commit marker; None for a checkpoint that another library wrote.
        index: the index with the digests; None for a checkpoint that another library wrote.
        load_id: for the StorageMeta of the metadata.
        versions: the state of each object by its key, to which all reads are held; added to as it
            becomes known. None for a checkpoint of this library, whose objects never change.
        fingerprint: stands for the state in which another library's checkpoint was opened.
        is_file: whether the URL is that of a single file.
    """

    object_keys: tuple[str, ...]
    items: Items
    marker: Marker | None = None
    index: ix.Index | None = None
    load_id: str | None = None
    versions: dict[str, Version] | None = None
    fingerprint: str | None = None
    is_file: bool = False

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata that DCP's planners need.

        Raises:
            CheckpointCorruptError: torch does not have the layout or memory format of a tensor.
        """
        return self.items.describe(self.load_id)

    def open_store(self, spec: StoreSpec) -> ObjectStore:
        """Open the store that has the objects; of a single file it is the folder."""
        folder, _ = spec.parent() if self.is_file else (spec, "")
        assert folder is not None
        return folder.open()

    def renamed(self, rename: Rename, url: str) -> StoredCheckpoint:
        """Return the checkpoint under other keys. Ranks may have different rules.

        Raises:
            InputError: the rules do not fit the keys.
        """
        if not rename:
            return self
        assert not isinstance(self.items, RenamedItems)
        try:
            return dataclasses.replace(self, items=RenamedItems(self.items, rename))
        except InputError as error:
            raise error.at(url=url) from None

    def __getstate__(self) -> dict[str, object]:
        """Leave out the metadata, which each rank makes for itself."""
        return {name: value for name, value in vars(self).items() if name != "metadata"}

    @property
    def commit_id(self) -> str | None:
        """Identifier of the commit; None for a checkpoint that another library wrote."""
        return None if self.marker is None else self.marker.commit_id

    def item(self, key: str, offset: Offset = None, number: int | None = None) -> ItemLocation:
        """Return the location of the item that a read plan asks for.

        Args:
            key: key of the tensor or value.
            offset: the chunk's offset in its tensor; None for a value.
            number: which of the tensor's chunks it probably is.

        Raises:
            CheckpointCorruptError: the checkpoint does not say where the item lies.
            UnsupportedError: the item went through a stream extension that cannot be undone here,
                or its dtype is unknown.
        """
        location = self.items.find(key, offset, number)
        if location is None:
            offset = None if offset is None else tuple(offset)
            raise CheckpointCorruptError(
                f"the checkpoint describes a chunk at offset {offset} but not where it lies",
                key=key,
            )
        if location.dtype is not None and known_dtype(location.dtype) is None:
            raise unknown_dtype(location.dtype, key)
        if location.transforms:
            check_transforms(location.transforms, key)
        return location

    def check_whole(self, keys: Iterable[str]) -> None:
        """Refuse tensors that lack elements: such elements would stay as they were, unnoticed.

        Raises:
            CheckpointCorruptError: the chunks of a tensor do not cover it.
            UnsupportedError: it would take too long to check that.
        """
        checked: set[tuple[object, ...]] = set()  # most tensors are cut alike
        for key in dict.fromkeys(keys):
            saved = self.items.tensor(key)
            if saved is None:
                continue
            shape, _, offsets, sizes = saved
            division = shape, offsets.tobytes(), sizes.tobytes()
            if division not in checked:
                check_filled(key, shape, offsets, sizes)
            checked.add(division)

    def explain(self, store: ObjectStore, error: ObjectNotFoundError) -> DcpObjstoreError:
        """Return why a data object is missing: checkpoint deleted or replaced since, or corrupt."""
        if self.commit_id is None:  # another library's, with no marker that could say more
            return CheckpointCorruptError(
                "an object of the checkpoint is missing", object_key=error.object_key
            )
        return explain_missing(store, self.commit_id, error.object_key)


def open_stored_checkpoint(
    spec: StoreSpec, load_id: str | None = None, *, verify: bool = True
) -> StoredCheckpoint:
    """Open the checkpoint at a URL. Ctrl-C ends the wait for the store at once.

    Args:
        load_id: for the StorageMeta of the metadata.
        verify: refuse a checkpoint of this library whose marker is gone, and with it the digests.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or it was never committed, or its marker
            was removed.
        UnsupportedError: a newer version wrote it, or stock torch with use_collectives=False.
        CheckpointCorruptError: the marker, the index, `.metadata` or a header is damaged.
        CheckpointGoneError: the checkpoint was deleted or replaced while it was opened.
        UntrustedPickleError: its `.metadata` needs classes that are not safe to unpickle.
        InputError: there are several files of safetensors, and no index says which count.
    """
    try:
        return _open_at(spec, load_id, verify=verify)
    except CheckpointGoneError as error:
        name_next(error, spec)
        raise
    except CheckpointNotFoundError as error:
        reason = explain_object(spec)  # the URL may be that of an object
        if reason is None:
            name_next(error, spec)
            raise
        raise CheckpointNotFoundError(reason, url=spec.url) from None


def _open_at(spec: StoreSpec, load_id: str | None, *, verify: bool) -> StoredCheckpoint:
    """Open what is at a URL: a file of safetensors if it has such a name, else a checkpoint."""
    folder, name = spec.parent()
    if name.endswith(safetensors.SUFFIX):
        assert folder is not None  # a URL with a name in it has a parent
        # If there is no such file, the URL may be that of a checkpoint with such a name.
        with suppress(ObjectNotFoundError):
            return retry_damaged(partial(_open_file, folder.open(), name, load_id))
    return open_rooted(spec.open(), load_id, verify=verify)


def name_next(error: DcpObjstoreError, spec: StoreSpec) -> None:
    """Add to the error of a checkpoint that is not there which step of its run is next.

    In a run without a claim, or without the right to list it, the error stays as it is.
    """
    run, name = spec.parent()
    if run is None:
        return
    with suppress(DcpObjstoreError):
        following = next_step(run.open(), run.open_child, name)
        if following is not None:
            error.message += f"; the next step of the run is {following}"


def open_rooted(
    store: ObjectStore, load_id: str | None = None, *, verify: bool = True
) -> StoredCheckpoint:
    """Open the checkpoint at the store's root, with the errors of `open_stored_checkpoint`."""
    stored = read_marker(store)
    if stored is None:
        return retry_damaged(partial(_open_foreign, store, load_id, verify=verify))
    return _open_marked(store, stored, load_id)


def _open_marked(
    store: ObjectStore, stored: Stored[Marker], load_id: str | None
) -> StoredCheckpoint:
    """Open the checkpoint with this marker, unless the marker says that it was deleted."""
    marker, index_body = open_marked(store, stored)
    index = ix.decode(index_body)
    return StoredCheckpoint(
        object_keys=tuple(entry.key for entry in index.objects),
        items=IndexItems(index),
        marker=marker,
        index=index,
        load_id=load_id,
    )


def _open_foreign(store: ObjectStore, load_id: str | None, *, verify: bool) -> StoredCheckpoint:
    """Open a checkpoint without a marker, as other libraries write it.

    `.metadata` is read and the other objects are listed at the same time. If a listing tells the
    states of objects, `.metadata` must be in the state that was listed.
    """
    dot_metadata, listed = concurrently(partial(_dot_metadata, store), partial(_listed, store))
    if isinstance(listed, dict) and MARKER_KEY in listed:
        # A marker is there after all: the first answer was wrong, or a save has just ended.
        marker = read_marker(store)
        if marker is not None:
            return _open_marked(store, marker, load_id)
    if dot_metadata is None:  # it may be a folder of safetensors
        return _open_folder(store, listed, load_id)
    body, meta = dot_metadata
    stored = _stock_checkpoint(body, load_id)
    # If all objects have names that only this library gives, it is a checkpoint of this library
    # whose marker is gone.
    if verify and stored.object_keys and all(map(parse_data_key, stored.object_keys)):
        raise CheckpointNotFoundError(_LOST_MARKER, url=store.url)
    # Reads are held to the states that were listed. `metas` is empty if the listing has no states.
    metas = listed if isinstance(listed, dict) and _tells_versions(store) else {}
    listing_agrees = is_same_state(metas.get(DOT_METADATA_KEY, meta).version, meta.version)
    # If the listing has another state of `.metadata` than the read, either the object was replaced,
    # or a CDN on the way has other ETags. It was not replaced if a HEAD still gives the state of
    # the read, and a second listing is like the first one.
    if not listing_agrees and not (
        is_same_state(store.head(DOT_METADATA_KEY).version, meta.version)
        and _is_as_listed(store, metas)
    ):
        raise CheckpointGoneError(_REPLACED, url=store.url)
    # Another library replaces its objects in place, one after the other, and `.metadata` last. So
    # an object that a load reads late may be newer than the others, unless `versions` holds reads
    # to the listed state. Behind a CDN with other ETags, `versions` begins empty, and reads of an
    # object are held to the state of the first answer.
    present = [metas[key] for key in stored.object_keys if key in metas]
    return dataclasses.replace(
        stored,
        versions={meta.key: meta.version for meta in present if listing_agrees},
        fingerprint=_fingerprint(store, body, [meta, *present]),
    )


def _dot_metadata(store: ObjectStore) -> tuple[bytes, ObjectMeta] | None:
    """Return the content and the state of `.metadata`; None if there is none."""
    try:
        return store.get(DOT_METADATA_KEY, max_size_bytes=_MAX_DOT_METADATA_BYTES)
    except ObjectNotFoundError:
        return None


def _listed(store: ObjectStore) -> dict[str, ObjectMeta] | CheckpointNotFoundError:
    """Return the objects that are here by their keys, or the error that says what is wrong."""
    try:
        return look_around(store)
    except CheckpointNotFoundError as error:
        return error


def _tells_versions(store: ObjectStore) -> bool:
    """Whether a listing tells in which state objects are, and reads can be held to it."""
    return store.capabilities.listed_versions and store.capabilities.conditional_update


def _is_as_listed(store: ObjectStore, listed: dict[str, ObjectMeta]) -> bool:
    """Whether all objects are still as they were listed.

    Where reads tell other states than a listing does, objects were replaced, or a CDN on the way
    has other ETags. If a second listing is like the first one, it is the CDN: each object is then
    held to the state of its first answer.
    """
    listed_now = _listed(store)
    return not isinstance(listed_now, CheckpointNotFoundError) and all(
        listed_now.get(key) == meta for key, meta in listed.items()
    )


def _open_folder(
    store: ObjectStore,
    listed: dict[str, ObjectMeta] | CheckpointNotFoundError,
    load_id: str | None,
) -> StoredCheckpoint:
    """Open a folder of safetensors, of which a listing tells the files."""
    if isinstance(listed, CheckpointNotFoundError):
        raise listed
    if _RANK_METADATA_KEY in listed:
        raise UnsupportedError(
            "every rank has its own .metadata here, as torch writes it with use_collectives=False;"
            " load it with stock torch, and save it without that",
            object_key=_RANK_METADATA_KEY,
            url=store.url,
        )
    metas = listed.values() if _tells_versions(store) else ()
    # First hold all reads to the listed states.
    try:
        return _open_listed(
            store, dict(listed), load_id, {meta.key: meta.version for meta in metas}
        )
    except CheckpointGoneError:
        # Something was replaced, or a CDN on the way has other ETags; see `_is_as_listed`. If it is
        # the CDN, each object is held to the state of its first answer.
        stored = _open_listed(store, dict(listed), load_id, {}) if metas else None
        if stored is None or not _is_as_listed(store, listed):
            raise
        return stored


def _open_listed(
    store: ObjectStore,
    listed: dict[str, ObjectMeta],
    load_id: str | None,
    versions: dict[str, Version],
) -> StoredCheckpoint:
    """Open the files of safetensors of a listing, each in the state that `versions` has of it.

    Args:
        listed: the objects by their keys. Objects that are not listed and are found by their names
            are added.
        versions: states to which reads are held, by key. Those of other objects are added when they
            are first read.
    """
    is_cut = len(listed) >= LOOK_AROUND_LIMIT  # there may be more than were listed
    pinned = PinnedStore(store, versions)
    with _opening_errors(store):

        def add_unlisted(names: Iterable[str]) -> str | None:
            """Ask for objects by name that were not listed; return the first that is not there."""
            for name in names:
                if name not in listed:
                    try:
                        listed[name] = pinned.head(name)
                    except ObjectNotFoundError:
                        return name
            return None

        if is_cut:  # the listing may lack the files by which a folder is recognized
            for name in safetensors.BY_NAME:
                add_unlisted([name])
        # Where a save of this library has not ended, there is no checkpoint to read.
        files = None
        if not is_unfinished(listed):
            files = safetensors.choose_files(pinned, listed, is_cut=is_cut)
        if files is None:
            raise CheckpointNotFoundError(explain_keys(store.url, listed), url=store.url)
        absent = add_unlisted(files.names)
        if absent is not None:
            text = f"the index names {absent}, which is not in the folder"
            raise CheckpointCorruptError(text, object_key=absent, url=store.url)
        return _open_files(pinned, files, [listed[name] for name in files.names], load_id, versions)


def _open_file(folder: ObjectStore, name: str, load_id: str | None) -> StoredCheckpoint:
    """Open a single file of safetensors."""
    versions: dict[str, Version] = {}
    pinned = PinnedStore(folder, versions)
    metas, files = [pinned.head(name)], safetensors.WeightFiles([name], {})
    with _opening_errors(folder):
        stored = _open_files(pinned, files, metas, load_id, versions)
    return dataclasses.replace(stored, is_file=True)


def _open_files(
    store: PinnedStore,
    files: safetensors.WeightFiles,
    metas: Sequence[ObjectMeta],
    load_id: str | None,
    versions: dict[str, Version],
) -> StoredCheckpoint:
    """Open files of safetensors: make an index of their headers.

    Args:
        metas: what the store says of each file.
        versions: the state of each object that `store` holds reads to. `store` adds the state of
            an object when it first reads it.
    """
    sizes_bytes = {meta.key: meta.size_bytes for meta in metas}
    headers = safetensors.read_headers(store, sizes_bytes)
    index = safetensors.index_of(store, headers, sizes_bytes, files.weight_map)
    return StoredCheckpoint(
        object_keys=tuple(headers),
        items=IndexItems(index),
        load_id=load_id,
        versions={key: versions[key] for key in headers if key in versions},
        fingerprint=_fingerprint(store, b"".join(headers.values()), metas),
    )


@contextmanager
def _opening_errors(store: ObjectStore) -> Iterator[None]:
    """Translate a store's errors while a foreign checkpoint is opened.

    A length that cannot be right means that the checkpoint is damaged. An object that has changed
    or gone since it was first seen means that another writer has replaced the checkpoint.
    """
    try:
        yield
    except CheckpointCorruptError:  # a subclass of CorruptDataError that needs no translation
        raise
    except CorruptDataError as error:
        raise CheckpointCorruptError(
            error.message, object_key=error.object_key, url=store.url
        ) from error
    except (PreconditionFailedError, ObjectNotFoundError) as error:
        raise CheckpointGoneError(_REPLACED, url=store.url) from error


def _fingerprint(store: ObjectStore, body: bytes, metas: Iterable[ObjectMeta]) -> str:
    """Return what stands for a state of objects, and of what was read of them."""
    is_timed = store.capabilities.modified_times
    # Not the versions: on file:// hosts may number files differently.
    listed = [(meta.key, meta.size_bytes, is_timed and meta.last_modified) for meta in metas]
    return xxhash.xxh3_128_hexdigest(body) + xxhash.xxh3_128_hexdigest(repr(listed).encode())


def _stock_checkpoint(body: bytes, load_id: str | None) -> StoredCheckpoint:
    """Describe a checkpoint of stock torch: every item is a `torch.save` blob or pickled value."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from dcp_objstore.compat.foreign import decode_metadata

    metadata = decode_metadata(body)
    # The shape of each chunk and the size of its elements in bytes, by key and offset.
    chunks = {
        (key, tuple(chunk.offsets)): (tuple(chunk.sizes), item.properties.dtype.itemsize)
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
        for chunk in item.chunks
    }
    object_numbers: dict[str, int] = {}
    items: dict[tuple[str, tuple[int, ...] | None], ItemLocation] = {}
    unexplained_bytes = 0
    for stored, info in metadata.storage_data.items():
        offset = None if stored.offset is None else tuple(stored.offset)
        # A value has no shape that would explain its bytes or bound what it unpacks to.
        sizes, limit_bytes = None, unpacked_limit_bytes(info.length, _LEAST_VALUE_LIMIT_BYTES)
        explained_bytes = 0
        if offset is not None:  # part of a tensor
            sizes, itemsize = chunks.get((stored.fqn, offset), ((), 0))
            limit_bytes = explained_bytes = math.prod(sizes) * itemsize + FRAMING_SIZE_BYTES
        unexplained_bytes += max(0, info.length - explained_bytes)
        if unexplained_bytes > _MAX_UNEXPLAINED_BYTES:
            raise CheckpointCorruptError(
                "the .metadata says that pickled values and the framing of tensors take more than"
                f" {_MAX_UNEXPLAINED_BYTES} bytes",
                key=stored.fqn,
            )
        items[stored.fqn, offset] = ItemLocation(
            object_number=object_numbers.setdefault(info.relative_path, len(object_numbers)),
            payload_offset=info.offset,
            payload_length=info.length,
            sizes=sizes,
            dtype=None,
            digests=None,
            transforms=tuple(info.transform_descriptors or ()),
            limit_bytes=limit_bytes,
        )
    if not items and metadata.state_dict_metadata:
        raise CheckpointNotFoundError("the .metadata found describes items but not where they lie")
    return StoredCheckpoint(tuple(object_numbers), StockItems(metadata, items), load_id=load_id)
