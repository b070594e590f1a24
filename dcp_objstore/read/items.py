"""The items of a checkpoint: where the bytes of each lie, and how they are encoded.

`IndexItems`, `StockItems` and `RenamedItems` are used alike. Those of an index need no torch until
`describe` is called.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.compat.transforms import check_archive, undo
from dcp_objstore.errors import ConfigError, StateMismatchError
from dcp_objstore.state.stored import constant_name, known_dtype

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.metadata import Metadata

Paths: TypeAlias = dict[str, tuple[str | int, ...]] | None
Offset: TypeAlias = Sequence[int] | None  # of a chunk in its tensor; None for a value


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

    def undo_transforms(self, payload: io.BytesIO, key: str) -> io.BytesIO:
        """Return the payload as it was before the stream extensions; unchanged if it has none.

        Raises:
            CheckpointCorruptError: an extension cannot be undone, or the payload becomes too large.
        """
        if self.limit_bytes is None:  # raw elements
            return payload
        body = undo(payload, self.transforms, key, self.limit_bytes)
        check_archive(body, key, self.limit_bytes)
        return body


class IndexItems:
    """The items of an index: keys and locations, which are made when they are asked for.

    Attributes:
        paths: the place of each key in the nested dict that was saved, if it is known.
        literal_keys: the steps of `paths` that were an int in a dict, as in `Index`.
        are_blobs: whether torch has to decode each tensor as a whole.
    """

    are_blobs = False

    def __init__(self, index: ix.Index) -> None:
        self._index = index
        self.paths: Paths = index.flatten_mapping
        self.literal_keys = index.literal_keys

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

    def find(self, key: str, offset: Offset, number: int | None) -> ItemLocation | None:
        """Return the location of an item, or None if there is no such item."""
        row = self._index.find(key, offset, number)
        return None if row is None else self._location(key, row)

    def _location(self, key: str, row: int) -> ItemLocation:
        """Return the location of the item in a row of the index."""
        item, tensor = self._index.item(row), self._index.tensors.get(key)
        sizes = dtype = None
        if tensor is not None:
            _, chunk_sizes = self._index.box(key, row - self._index.rows(key).start)
            sizes = tuple(chunk_sizes)
            # Only raw elements have a dtype. A dtype that is unknown here is kept in any case,
            # because `StoredCheckpoint.item` names it in an error.
            if not item.pickled or known_dtype(tensor.dtype) is None:
                dtype = tensor.dtype
        return ItemLocation(
            object_number=item.object_number,
            payload_offset=item.payload_offset,
            payload_length=item.payload_length,
            sizes=sizes,
            dtype=dtype,
            digests=item.digests or None,
            # An item that this library wrote never unpacks to more bytes than are stored, because
            # torch does not compress.
            limit_bytes=None if dtype is not None else item.payload_length,
        )

    def describe(self, load_id: str | None) -> Metadata:
        """Return what DCP's planners need.

        Raises:
            CheckpointCorruptError: torch does not have the layout or memory format of a tensor.
        """
        from dcp_objstore.state.dcp_metadata import describe  # imports torch

        return describe(self._index, load_id)


class StockItems:
    """The items of a checkpoint that stock torch or what derives from it wrote.

    Each is a `torch.save` blob or a pickled value.

    Args:
        metadata: its `.metadata`.
        locations: location of each item, by key and the chunk's offsets (None for a value).
    """

    are_blobs = True

    def __init__(
        self,
        metadata: Metadata,
        locations: dict[tuple[str, tuple[int, ...] | None], ItemLocation],
    ) -> None:
        self.metadata = metadata
        self.paths: Paths = metadata.planner_data
        # A `.metadata` does not tell an int that was a key of a dict from a position in a list.
        self.literal_keys: dict[str, tuple[int, ...]] = {}
        self._locations = locations

    @property
    def keys(self) -> KeysView[str]:
        """The keys of all tensors and values."""
        return self.metadata.state_dict_metadata.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """Return the tensor of this key, or None if it is that of a value."""
        saved: Any = self.metadata.state_dict_metadata.get(key)
        if not hasattr(saved, "chunks"):  # a value, or no key of the checkpoint
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

    def find(self, key: str, offset: Offset, _number: int | None) -> ItemLocation | None:
        """Return the location of an item, or None if the `.metadata` does not say it."""
        return self._locations.get((key, None if offset is None else tuple(offset)))

    def describe(self, load_id: str | None) -> Metadata:
        """Return what DCP's planners need: the `.metadata`, with the id of this load."""
        from torch.distributed.checkpoint.metadata import StorageMeta

        meta = self.metadata.storage_meta or StorageMeta()
        storage_meta = dataclasses.replace(meta, load_id=load_id)
        return dataclasses.replace(self.metadata, storage_meta=storage_meta)


class RenamedItems:
    """The items of a checkpoint under other keys.

    Args:
        items: the items under their own keys.
        rename: pairs of a regular expression and its replacement.

    Raises:
        StateMismatchError: two keys get the same name.
        ConfigError: a rule cannot be used.
    """

    def __init__(self, items: IndexItems | StockItems, rename: Rename) -> None:
        self._items = items
        # The key in the checkpoint of each new name.
        self._own_keys = {name: key for key, name in new_names(items.keys, rename).items()}
        self.are_blobs = items.are_blobs
        self.payload_bytes = items.payload_bytes
        # A key whose name is new lies at the top of the state, under this name. A key that keeps
        # its name also keeps its place. (If no places are known, this is None or empty.)
        self.paths: Paths = items.paths and {
            name: items.paths.get(key, (name,)) if name == key else (name,)
            for name, key in self._own_keys.items()
        }
        self.literal_keys = {  # of the keys that keep their names
            name: items.literal_keys[name]
            for name, key in self._own_keys.items()
            if name == key and name in items.literal_keys
        }

    @property
    def keys(self) -> KeysView[str]:
        """The new keys of all tensors and values."""
        return self._own_keys.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """Return the tensor of this key, or None if it is that of a value."""
        own_key = self._own_keys.get(key)
        return None if own_key is None else self._items.tensor(own_key)

    def find(self, key: str, offset: Offset, number: int | None) -> ItemLocation | None:
        """Return the location of an item, or None if there is no such item."""
        own_key = self._own_keys.get(key)
        return None if own_key is None else self._items.find(own_key, offset, number)

    def describe(self, load_id: str | None) -> Metadata:
        """Return what DCP's planners need, under the new keys."""
        metadata = self._items.describe(load_id)
        saved = metadata.state_dict_metadata
        return dataclasses.replace(
            metadata,
            state_dict_metadata={name: saved[key] for name, key in self._own_keys.items()},
            planner_data=self.paths,
        )


Items: TypeAlias = IndexItems | StockItems | RenamedItems


def typed_paths(items: Items) -> dict[str, tuple[str | int, ...]]:
    """Return the place of each key, as far as it is known.

    A step that was an int in a dict is a `LiteralKey`: other ints are positions in lists.
    """
    paths = dict(items.paths or {})
    for key, dict_levels in items.literal_keys.items():
        paths[key] = tuple(
            ix.LiteralKey(step) if level in dict_levels else step
            for level, step in enumerate(paths[key])
        )
    return paths


# Pairs of a regular expression and its replacement.
Rename: TypeAlias = Sequence[tuple[str, str]]


def new_names(keys: Iterable[str], rename: Rename) -> dict[str, str]:
    """Return the new name of each key.

    Raises:
        ConfigError: a rule is not a regular expression, or its replacement does not fit it.
        StateMismatchError: two keys get the same name.
    """
    names: dict[str, str] = {}
    key_of_name: dict[str, str] = {}
    try:
        if isinstance(rename, Iterator):
            raise TypeError("pass a list, for an iterator could be used only once")
        pairs = [*rename]
        if any(isinstance(pair, str) for pair in pairs):  # "ab" could be unpacked as a pair
            raise TypeError(f"write [('^module.', 'model.')], not {rename!r}")
        rules = [(re.compile(pattern), replacement) for pattern, replacement in pairs]
        for key in keys:
            name = key
            for pattern, replacement in rules:
                name = pattern.sub(replacement, name)
            if key and not name:  # the empty key itself may stay empty
                raise StateMismatchError("the rules of rename= leave no name for this key", key=key)
            other = key_of_name.setdefault(name, key)
            if other != key:
                raise StateMismatchError(f"{other!r} and {key!r} both become {name!r}")
            names[key] = name
    except (re.error, TypeError, ValueError) as error:
        raise ConfigError(
            f"rename= takes pairs of a regular expression and its replacement: {error}"
        ) from None
    return names
