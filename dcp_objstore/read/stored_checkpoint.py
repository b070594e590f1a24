"""`StoredCheckpoint`: a checkpoint opened for reading, written by this library or by stock torch.

Both become the same here: the metadata for DCP's planners and, for each item, where its bytes lie,
whether they are raw, and what they must hash to. To look into a checkpoint of this library needs no
torch: the metadata is made when it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY, parse_data_key
from dcp_objstore.checkpoint.read import (
    explain_missing,
    explain_object,
    open_marked,
    read_marker,
)
from dcp_objstore.compat.transforms import (
    FRAMING_SIZE_BYTES,
    check_archive,
    check_transforms,
    undo,
    value_limit_bytes,
)
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsupportedError,
)
from dcp_objstore.state.geometry import fills
from dcp_objstore.state.stored import constant_name, known_dtype, unknown_dtype
from dcp_objstore.stores.wrappers import PinnedStore
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.metadata import Metadata

    from dcp_objstore.checkpoint.marker import Marker
    from dcp_objstore.stores import ObjectStore, StoreSpec
    from dcp_objstore.stores.protocol import ObjectMeta, Version

_MAX_DOT_METADATA_BYTES = 4 * 1024**3
# A read is planned in blocks before the first byte shows whether an object is as large as the
# `.metadata` says. Bytes that no tensor's shape accounts for have no other bound. (A length of
# 2**42 took 25 s and 600 MB before it was found to be wrong.)
_MAX_UNEXPLAINED_BYTES = 64 * 1024**3
_LOST_MARKER = (
    f"dcp_objstore wrote this checkpoint, but its marker ({MARKER_KEY}) is gone: it was removed, or"
    " left out of a copy, or the checkpoint is not whole; without it nothing can be verified. Copy"
    f" {MARKER_KEY} here, too ('dcp-objstore cp' copies checkpoints as a whole), or load another"
    " checkpoint; verify=False reads what is here, unverified"
)
# A page of S3.
_LISTED_KEYS = 1000
# torch's FileSystemWriter writes this for rank 0 if dcp.save is called with
# use_collectives=False.
_RANK_METADATA_KEY = "__0.metadata"


_Offset: TypeAlias = Sequence[int] | None  # of a chunk in its tensor; None for a value


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        shape: shape of the whole tensor.
        dtype: torch's name of its dtype, which may be unknown to this version.
        offsets: where its chunks begin, a row each.
        sizes: sizes of its chunks, a row each.
    """

    shape: tuple[int, ...]
    dtype: str
    offsets: ix.Matrix
    sizes: ix.Matrix


@dataclass(frozen=True, slots=True)
class ItemLocation:
    """The location of one item, and how its bytes are encoded.

    Attributes:
        object_number: index of the object in `StoredCheckpoint.object_keys`.
        payload_offset: offset of the item's bytes in that object.
        payload_length: number of the item's bytes in that object.
        sizes: shape of the chunk; None for a pickled value.
        dtype: torch's name of the dtype of raw elements, which may be unknown to this version; None
            if the payload is a whole `torch.save` blob or a pickled value.
        digests: 16 bytes per 4 MiB block of payload; None for a checkpoint without digests.
        transforms: names of the stream extensions that the payload went through. Only foreign
            checkpoints have any.
        limit_bytes: largest size that the payload may unpack to; None for raw elements.
    """

    object_number: int
    payload_offset: int
    payload_length: int
    sizes: tuple[int, ...] | None
    dtype: str | None
    digests: bytes | None
    transforms: tuple[str, ...] = ()
    limit_bytes: int | None = None

    def undone(self, payload: io.BytesIO, key: str) -> io.BytesIO:
        """Return the payload as it was before the stream extensions; unchanged if it has none.

        Raises:
            CheckpointCorruptError: an extension cannot be undone, or the payload becomes too large.
        """
        if self.limit_bytes is None:
            return payload
        body = undo(payload, self.transforms, key, self.limit_bytes)
        check_archive(body, key, self.limit_bytes)
        return body


class IndexItems:
    """The items of an index: keys and locations, which are made when they are asked for.

    Attributes:
        paths: the place of each key in the nested dict that was saved, if it is known.
    """

    def __init__(self, index: ix.Index) -> None:
        self._index = index
        self.paths = index.flatten_mapping

    def __len__(self) -> int:
        return len(self._index.columns.offset)

    @property
    def keys(self) -> KeysView[str]:
        """The keys of all tensors and values."""
        return self._index.keys

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors and pickled values in bytes, without framing."""
        return self._index.payload_bytes

    def tensor(self, key: str) -> SavedTensor | None:
        """Return the tensor of this key, or None if it is that of a value."""
        tensor = self._index.tensors.get(key)
        if tensor is None:
            return None
        return SavedTensor(tensor.shape, tensor.dtype, *self._index.boxes(key))

    def find(self, key: str, offset: _Offset, number: int | None) -> ItemLocation | None:
        """Return the location of an item, or None if there is no such item."""
        row = self._index.find(key, offset, number)
        return None if row is None else self._location(key, row)

    def _location(self, key: str, row: int) -> ItemLocation:
        item, tensor = self._index.item(row), self._index.tensors.get(key)
        sizes = dtype = None
        if tensor is not None:
            sizes = tuple(self._index.box(key, row - self._index.rows(key).start)[1])
            if not item.pickled or known_dtype(tensor.dtype) is None:
                dtype = tensor.dtype
        return ItemLocation(
            item.object_number,
            item.payload_offset,
            item.payload_length,
            sizes,
            dtype,
            item.digests,
            # torch does not compress, so an item never unpacks to more than is stored; if it
            # would, this library did not write it.
            limit_bytes=None if dtype is not None else item.payload_length,
        )


class ForeignItems:
    """The items of a checkpoint that another library wrote; used like `IndexItems`.

    Args:
        metadata: its `.metadata`.
        locations: location of each item, by key and the chunk's offsets (None for a value).
    """

    def __init__(
        self,
        metadata: Metadata,
        locations: dict[tuple[str, tuple[int, ...] | None], ItemLocation],
    ) -> None:
        self.metadata = metadata
        self.paths: dict[str, tuple[str | int, ...]] | None = metadata.planner_data
        self._locations = locations

    def __len__(self) -> int:
        return len(self._locations)

    @property
    def keys(self) -> KeysView[str]:
        """The keys of all tensors and values."""
        return self.metadata.state_dict_metadata.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """Return the tensor of this key, or None if it is that of a value."""
        saved: Any = self.metadata.state_dict_metadata.get(key)
        if not hasattr(saved, "chunks"):
            return None
        shape = len(saved.chunks), len(saved.size)
        offsets = np.array([chunk.offsets for chunk in saved.chunks], np.uint64).reshape(shape)
        sizes = np.array([chunk.sizes for chunk in saved.chunks], np.uint64).reshape(shape)
        dtype = constant_name(saved.properties.dtype)
        return SavedTensor(tuple(saved.size), dtype, offsets, sizes)

    @property
    def payload_bytes(self) -> int:
        """Size of all items in bytes; they are `torch.save` blobs, whose framing counts here."""
        return sum(location.payload_length for location in self._locations.values())

    def find(self, key: str, offset: _Offset, number: int | None) -> ItemLocation | None:
        """Return the location of an item, or None if the `.metadata` does not say it."""
        del number
        return self._locations.get((key, None if offset is None else tuple(offset)))


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was opened for reading.

    Attributes:
        marker: commit marker; None for a checkpoint that another library wrote.
        index: the index; None for a checkpoint that another library wrote.
        load_id: for the StorageMeta of the metadata.
        versions: the state of each object by its key, to which all reads are held; added to as it
            becomes known. None for a checkpoint of this library, whose objects never change.
        fingerprint: stands for the state in which another library's checkpoint was opened.
    """

    object_keys: tuple[str, ...]
    items: IndexItems | ForeignItems
    marker: Marker | None = None
    index: ix.Index | None = None
    load_id: str | None = None
    versions: dict[str, Version] | None = None
    fingerprint: str | None = None

    @cached_property
    def metadata(self) -> Metadata:
        """What DCP's planners need.

        Raises:
            CheckpointCorruptError: torch does not have the layout or memory format of a tensor.
        """
        if isinstance(self.items, ForeignItems):
            return self.items.metadata
        from dcp_objstore.state.dcp_metadata import describe  # imports torch

        assert self.index is not None
        return describe(self.index, self.load_id)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the metadata, which each rank makes for itself."""
        return {name: value for name, value in vars(self).items() if name != "metadata"}

    @property
    def commit_id(self) -> str | None:
        """Identifier of the commit; None for a checkpoint that another library wrote."""
        return None if self.marker is None else self.marker.commit_id

    def item(self, key: str, offset: _Offset = None, number: int | None = None) -> ItemLocation:
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
        found = self.items.find(key, offset, number)
        if found is None:
            offset = None if offset is None else tuple(offset)
            raise CheckpointCorruptError(
                f"the checkpoint describes a chunk at offset {offset} but not where it lies",
                key=key,
            )
        if found.dtype is not None and known_dtype(found.dtype) is None:
            raise unknown_dtype(found.dtype, key)
        if found.transforms:
            check_transforms(found.transforms, key)
        return found

    def check_whole(self, keys: Iterable[str]) -> None:
        """Refuse tensors that lack elements: such elements would stay as they were, unnoticed.

        Raises:
            CheckpointCorruptError: the chunks of a tensor do not cover it exactly.
        """
        checked: set[tuple[object, ...]] = set()  # most tensors are cut alike
        for key in dict.fromkeys(keys):
            saved = self.items.tensor(key)
            if saved is None:
                continue
            shape, _, offsets, sizes = saved
            cut = shape, offsets.tobytes(), sizes.tobytes()
            if cut not in checked and not fills(shape, offsets, sizes):
                raise CheckpointCorruptError(
                    "the chunks in the checkpoint do not make up this tensor: they have"
                    f" {sum(map(math.prod, sizes.tolist()))} of its {math.prod(shape)}"
                    " elements, or overlap and leave some out",
                    key=key,
                )
            checked.add(cut)

    def explain(self, store: ObjectStore, error: ObjectNotFoundError) -> DcpObjstoreError:
        """Return why a data object is missing: checkpoint deleted or replaced since, or corrupt."""
        key = error.object_key or "?"
        if self.commit_id is None:
            return CheckpointCorruptError("an object of the checkpoint is missing", object_key=key)
        return explain_missing(store, self.commit_id, key)


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
        CheckpointCorruptError: the marker, the index or `.metadata` is damaged.
        CheckpointGoneError: the checkpoint was deleted or replaced while it was opened.
        UntrustedPickleError: its `.metadata` needs classes that are not safe to unpickle.
    """
    try:
        return wait_for(open_rooted, spec.open(), load_id, verify=verify)
    except CheckpointNotFoundError:
        reason = explain_object(spec)
        if reason is None:
            raise
        raise CheckpointNotFoundError(reason, url=spec.url) from None


def open_rooted(
    store: ObjectStore, load_id: str | None = None, *, verify: bool = True
) -> StoredCheckpoint:
    """Open the checkpoint at the store's root, with the errors of `open_stored_checkpoint`."""
    try:
        return _open(store, load_id, verify=verify)
    except CheckpointCorruptError:
        # Try once more: the answer may be damaged, not the object.
        return _open(store, load_id, verify=verify)


def _open(store: ObjectStore, load_id: str | None, *, verify: bool) -> StoredCheckpoint:
    found = read_marker(store)
    if found is None:
        try:
            body, meta = store.get(DOT_METADATA_KEY, max_size_bytes=_MAX_DOT_METADATA_BYTES)
        except ObjectNotFoundError:
            _check_no_rank_metadata(store)
        else:
            stored = _foreign(body, load_id)
            if verify and stored.object_keys and all(map(parse_data_key, stored.object_keys)):
                raise CheckpointNotFoundError(_LOST_MARKER, url=store.url)
            versions, fingerprint = _present_state(store, body, meta, stored.object_keys)
            return dataclasses.replace(stored, versions=versions, fingerprint=fingerprint)
    marker, body = open_marked(store, found)
    index = ix.decode(body)
    return StoredCheckpoint(
        object_keys=tuple(entry.key for entry in index.objects),
        items=IndexItems(index),
        marker=marker,
        index=index,
        load_id=load_id,
    )


def _present_state(
    store: ObjectStore, body: bytes, dot_metadata: ObjectMeta, keys: Iterable[str]
) -> tuple[dict[str, Version], str]:
    """Return the state of the objects, as far as a page of a listing says it; and a fingerprint.

    Another library replaces its objects in place, one after the other, and `.metadata` last. So an
    object that is first read late in a load may be newer than the others.

    Args:
        body: the `.metadata`.
        dot_metadata: what the store says of it.
        keys: of the objects that it names.

    Raises:
        CheckpointGoneError: the checkpoint was replaced just now.
    """
    versions = {DOT_METADATA_KEY: dot_metadata.version}
    listed: dict[str, ObjectMeta] = {}
    can = store.capabilities
    if can.listed_versions and can.conditional_update:
        listing = islice(PinnedStore(store, versions).list(), _LISTED_KEYS)
        try:
            listed = {meta.key: meta for meta in listing}
        except PreconditionFailedError as error:
            raise CheckpointGoneError(
                "another writer replaced the checkpoint while it was opened; load it again",
                url=store.url,
            ) from error
        except DcpObjstoreError:  # not allowed, or no such call: the first answers count
            listed = {}
    metas = [dot_metadata, *(listed[key] for key in keys if key in listed)]
    # Not the versions: on file:// hosts may number files differently.
    told = [(one.key, one.size_bytes, can.modified_times and one.last_modified) for one in metas]
    fingerprint = xxhash.xxh3_128_hexdigest(body) + xxhash.xxh3_128_hexdigest(repr(told).encode())
    return {one.key: one.version for one in metas[1:]}, fingerprint


def _check_no_rank_metadata(store: ObjectStore) -> None:
    """Raise for the only checkpoint that stock torch writes without a common `.metadata`."""
    try:
        store.head(_RANK_METADATA_KEY)
    except ObjectNotFoundError:
        return
    raise UnsupportedError(
        "every rank has its own .metadata here, as torch writes it with use_collectives=False;"
        " only stock torch loads that, with the same number of ranks: save it again without"
        " use_collectives=False",
        object_key=_RANK_METADATA_KEY,
        url=store.url,
    )


def _foreign(body: bytes, load_id: str | None) -> StoredCheckpoint:
    """Describe a checkpoint of stock torch: every item is a `torch.save` blob or pickled value."""
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    from dcp_objstore.compat.foreign import decode_metadata

    metadata = decode_metadata(body)
    meta = metadata.storage_meta or StorageMeta()
    metadata.storage_meta = dataclasses.replace(meta, load_id=load_id)
    chunks = {
        (key, tuple(chunk.offsets)): (tuple(chunk.sizes), item.properties.dtype.itemsize)
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
        for chunk in item.chunks
    }
    numbers: dict[str, int] = {}
    items: dict[tuple[str, tuple[int, ...] | None], ItemLocation] = {}
    unexplained_bytes = 0
    for place, info in metadata.storage_data.items():
        offset = None if place.offset is None else tuple(place.offset)
        sizes, limit_bytes = None, value_limit_bytes(info.length)
        if offset is not None:
            sizes, itemsize = chunks.get((place.fqn, offset), ((), 0))
            limit_bytes = math.prod(sizes) * itemsize + FRAMING_SIZE_BYTES
        unexplained_bytes += max(0, info.length - (limit_bytes if offset is not None else 0))
        if unexplained_bytes > _MAX_UNEXPLAINED_BYTES:
            raise CheckpointCorruptError(
                "the .metadata says that pickled values and the framing of tensors take more than"
                f" {_MAX_UNEXPLAINED_BYTES} bytes",
                key=place.fqn,
            )
        items[place.fqn, offset] = ItemLocation(
            numbers.setdefault(info.relative_path, len(numbers)),
            info.offset,
            info.length,
            sizes,
            None,
            None,
            tuple(info.transform_descriptors or ()),
            limit_bytes,
        )
    if not items and metadata.state_dict_metadata:
        raise CheckpointNotFoundError("the .metadata found describes items but not where they lie")
    return StoredCheckpoint(tuple(numbers), ForeignItems(metadata, items))
