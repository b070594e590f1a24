"""`open`: look into a checkpoint without a process group and without downloading it.

    ckpt = dos.open("s3://bucket/run/step-1000")
    ckpt["model.embed.weight"].shape, ckpt["model.embed.weight"][:100]
    ckpt.read("model.*")

Opening reads only the marker and the index. Later reads fetch and verify only the needed blocks.
Looking into a checkpoint of this library needs no torch: the methods that read tensors import what
they need.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from dcp_objstore.checkpoint.index import ITEM_SIZE_BYTES
from dcp_objstore.config import TransferConfig
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import (
    AbsentKeyError,
    CheckpointCorruptError,
    ConfigError,
    ObjectNotFoundError,
    StateMismatchError,
    printable,
)
from dcp_objstore.inspect.selection import Patterns, box_of, matching, nested, whole
from dcp_objstore.inspect.slabs import Slab, cut
from dcp_objstore.inspect.verify import verify_at, without_digests
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.events import OnEvent, Opened
from dcp_objstore.observe.report import LoadReport, VerifyReport, first_few, size_text
from dcp_objstore.read.geometry import Box
from dcp_objstore.read.items import Rename, typed_paths
from dcp_objstore.read.mismatch import nearest
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, open_stored_checkpoint
from dcp_objstore.state.stored import known_dtype
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.workers import in_waves

if TYPE_CHECKING:
    import torch


# The bytes that a `.metadata` of another library may claim before the sizes of objects are read.
_BELIEVED_BYTES = 64 << 30
# The most bytes of a tensor that a stored byte may stand for.
_MOST_PACKED = 1000
# A name may be all dots, and each level of the tree of modules has the whole name before it.
_MAX_DEPTH = 64

_Chunk: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint that is not read yet.

    Attributes:
        checkpoint: the opened checkpoint.
        key: name of the tensor, as DCP flattens state dicts ("model.embed.weight").
        shape: shape of the whole tensor.
        dtype_name: torch's name of the dtype of the saved tensor, such as "bfloat16"; "unknown" if
            this version does not know it, and the tensor cannot be read.
        chunks: (offsets, sizes) of the boxes in which the tensor is stored.
    """

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, ...]
    dtype_name: str
    chunks: tuple[_Chunk, ...]

    # Without these, Python would iterate by indices, with a request for each row.
    __iter__: ClassVar[None] = None
    __contains__: ClassVar[None] = None

    def __repr__(self) -> str:
        return f"<TensorEntry {printable(self.key)} {self.shape} {self.dtype_name}>"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the saved tensor; None if this version or this torch does not know it."""
        return known_dtype(self.dtype_name)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole tensor; 0 if its dtype is unknown."""
        return math.prod(self.shape) * ITEM_SIZE_BYTES.get(self.dtype_name, 0)

    def read(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read the whole tensor.

        Args:
            device: device to make the tensor on. Default: CPU.

        Raises:
            DcpObjstoreError: any error that `Checkpoint.read` raises.
        """
        return self._read(whole(self.shape), device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part into CPU memory: `entry[10:20]`, `entry[..., 0]`, `entry[-1, :, 5:]`.

        An index may have integers, slices without a step, and one Ellipsis, with the same meaning
        as for tensors. Only the 4 MiB blocks that hold the part are fetched (of safetensors, and
        with `verify=False`, only its bytes). If stock torch wrote the checkpoint, whole chunks are
        fetched, because torch has to decode them.

        Raises:
            IndexError: an index is of another kind or out of range, or there are too many.
            DcpObjstoreError: any error that `Checkpoint.read` raises.
        """
        box, sizes = box_of(index, self.shape)
        return self._read(box, "cpu").reshape(sizes)

    def slabs(self) -> list[Slab]:
        """Cut the tensor into parts of at most 32 MiB, to read them one by one.

        If stock torch wrote the checkpoint, the parts are its chunks, because torch has to decode
        these as a whole.

        Raises:
            UnsupportedError: the dtype is unknown or quantized.
        """
        from dcp_objstore.inspect.fill import new_tensor

        dtype = self.dtype
        if dtype is None:
            self.read()  # this always raises the error that names the dtype
            raise AssertionError
        new_tensor(self.key, (), dtype, "meta")  # refuses what no new tensor can hold
        sizes_bytes = [math.prod(sizes) * dtype.itemsize for _, sizes in self.chunks]
        are_blobs = self.checkpoint._stored.items.are_blobs
        # If the sizes do not add up to the tensor's, chunks overlap, and would be read twice.
        if are_blobs and sum(sizes_bytes) == self.nbytes:
            chunks = zip(self.chunks, sizes_bytes, strict=True)
            return [Slab(self.key, Box(*chunk), size) for chunk, size in chunks if size]
        starts = sorted({offsets[0] for offsets, _ in self.chunks if offsets})
        return list(cut(self.key, self.shape, dtype, starts))

    def _read(self, box: Box, device: torch.device | str) -> torch.Tensor:
        tensors = self.checkpoint._read({self.key: box}, (), device=device, progress=False)
        tensor: torch.Tensor = tensors[self.key]
        return tensor


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A pickled value of a checkpoint (a step, a learning rate) that is not read yet.

    Attributes:
        checkpoint: the opened checkpoint.
        key: name of the value.
        nbytes: size of the pickle.
    """

    checkpoint: Checkpoint
    key: str
    nbytes: int

    def __repr__(self) -> str:
        return f"<ValueEntry {printable(self.key)}, {self.nbytes} bytes>"

    def read(self) -> Any:
        """Read the value.

        Raises:
            DcpObjstoreError: any error that `Checkpoint.read` raises.
        """
        return self.checkpoint._read({}, [self.key], progress=False)[self.key]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of a checkpoint: everything whose keys begin with its name and a dot.

    Attributes:
        name: its name, such as "model.layers.0"; empty for the root.
        entries: the tensors and values directly in it, by the last part of their keys.
        modules: the modules directly in it, by the last part of their names.
    """

    name: str
    entries: dict[str, TensorEntry | ValueEntry] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)

    def walk(self) -> Iterator[TensorEntry | ValueEntry]:
        """Iterate over all tensors and values in it, at any depth."""
        yield from self.entries.values()
        for module in self.modules.values():
            yield from module.walk()

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all tensors and values in it, without framing."""
        return sum(entry.nbytes for entry in self.walk())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Return the bytes of all tensors in it by dtype, the largest first; "value" for values.

        The dtype is named as in torch, such as "bfloat16", or "unknown".
        """
        sums: Counter[str] = Counter()
        for entry in self.walk():
            name = entry.dtype_name if isinstance(entry, TensorEntry) else "value"
            sums[name] += entry.nbytes
        return dict(sums.most_common())


class Checkpoint(Mapping[str, TensorEntry | ValueEntry]):
    """An opened checkpoint, as a mapping from keys to entries. `open` returns it.

        checkpoint = dos.open("s3://bucket/run/step-1000")
        checkpoint["model.weight"].shape
        weights = checkpoint.read("model.*")

    It stays with the commit that was opened. If that commit is replaced or deleted, and its objects
    are removed, reading raises CheckpointGoneError. It is thread-safe, and each process of a job
    reads for itself. Nothing needs to be closed. Like a reader, it is pickled without the
    credentials that were given in `storage_options`.

    Attributes:
        url: URL of the checkpoint.
        last_read: report of the last finished read, or None.
    """

    def __init__(
        self,
        spec: StoreSpec,
        stored: StoredCheckpoint,
        *,
        verify: bool,
        trust_pickle: bool,
        event_settings: EventSettings,
    ) -> None:
        self.url = spec.url
        self.last_read: LoadReport | None = None
        self._spec = spec
        self._stored = stored
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._event_settings = event_settings

    def __repr__(self) -> str:
        tensors = sum(isinstance(entry, TensorEntry) for entry in self.values())
        return (
            f"<Checkpoint {self.url}: {tensors} tensors, {len(self) - tensors} values,"
            f" {size_text(self.total_bytes)}, commit {self.commit_id}>"
        )

    # By identity: a Mapping would compare contents, and read them for that.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def commit_id(self) -> str | None:
        """Identifier of the commit; None if another library wrote the checkpoint."""
        return self._stored.commit_id

    @property
    def created_at(self) -> datetime | None:
        """Time of the commit by the committing host's clock; None if another library wrote it."""
        return None if self._stored.marker is None else self._stored.marker.created_at

    @property
    def world_size(self) -> int | None:
        """Number of ranks that saved the checkpoint; None if another library wrote it."""
        return None if self._stored.marker is None else self._stored.marker.world_size

    @property
    def user_metadata(self) -> dict[str, Any] | None:
        """The `user_metadata` passed to `save`; None if another library wrote the checkpoint.

        Of a state with `trainable`, it also counts what was left out, as `left_out`.
        """
        return None if self._stored.marker is None else dict(self._stored.marker.user_metadata)

    @property
    def objects(self) -> tuple[str, ...]:
        """Keys of the data objects, relative to the checkpoint."""
        return self._stored.object_keys

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all tensors and pickled values, without framing."""
        return self._stored.items.payload_bytes

    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """The place of each key in the nested dict that was saved, as far as it is known."""
        return typed_paths(self._stored.items)

    def __len__(self) -> int:
        return len(self._stored.items.keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.items.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._stored.items.keys

    def __getitem__(self, key: str) -> TensorEntry | ValueEntry:
        if key not in self:
            near = nearest(key, list(self)) if isinstance(key, str) else []
            hint = f"; nearest: {first_few(near, 3)}" if near else ""
            raise AbsentKeyError(f"the checkpoint has no key {key!r}{hint}", url=self.url)
        saved = self._stored.items.tensor(key)
        if saved is None:
            return ValueEntry(self, key, self._stored.item(key).payload_length)
        offsets, sizes = (map(tuple, rows.tolist()) for rows in (saved.offsets, saved.sizes))
        chunks = tuple(zip(offsets, sizes, strict=True))
        name = saved.dtype if saved.dtype in ITEM_SIZE_BYTES else "unknown"
        return TensorEntry(self, key, saved.shape, dtype_name=name, chunks=chunks)

    def matching(self, patterns: Patterns = None) -> list[str]:
        """Return the keys that match any of the patterns, in the order of the checkpoint.

        Args:
            patterns: one or several shell patterns such as `"model.*"`, which must match whole keys
                and are case-sensitive, or exact keys. Default: all keys.

        Raises:
            StateMismatchError: a pattern matches nothing. The message lists the nearest keys.
            ConfigError: a pattern is not a `str`.
        """
        try:
            return matching(self, patterns)
        except (ConfigError, StateMismatchError) as error:
            raise error.at(url=self.url) from None

    def modules(self, patterns: Patterns = None) -> Module:
        """Arrange the tensors and values in a tree, by the dots in their keys. Reads nothing.

        The tree is at most 64 deep: further parts of a name stay together.

        Args:
            patterns: one or several shell patterns such as `"model.*"`, or exact keys. Default: all
                keys.

        Returns:
            The root of the tree.

        Raises:
            StateMismatchError: a pattern matches nothing.
        """
        root = Module("")
        for key in self.matching(patterns):
            *parts, last = key.split(".", _MAX_DEPTH)
            module = root
            for part in parts:
                name = f"{module.name}.{part}" if module.name else part
                module = module.modules.setdefault(part, Module(name))
            module.entries[last] = self[key]
        return root

    def read(
        self,
        patterns: Patterns = None,
        *,
        device: torch.device | str = "cpu",
        progress: bool = True,
    ) -> dict[str, Any]:
        """Read tensors and values by key, in one parallel read.

        Args:
            patterns: one or several shell patterns such as `"model.*"`, or exact keys. Default: all
                keys.
            device: device to make the tensors on. Arriving bytes are copied there block by block,
                so CPU memory never holds a copy of the whole.
            progress: show a progress bar if standard error is a terminal. Default True.

        Raises:
            StateMismatchError: a pattern matches nothing.
            CheckpointCorruptError: objects are missing or differ from what was saved.
            CheckpointGoneError: the checkpoint was deleted or replaced since it was opened.
            UntrustedPickleError: a value needs `trust_pickle=True`.
            UnsupportedError: the checkpoint holds something that this version cannot read.
            StoreUnavailableError: the store did not answer, after all retries.
            PermissionDeniedError: the credentials do not allow the request.
        """
        keys = self.matching(patterns)
        self._check_whole(keys)  # before memory is allocated for missing elements
        tensors = {key: self._stored.items.tensor(key) for key in keys}
        boxes = {key: whole(saved.shape) for key, saved in tensors.items() if saved is not None}
        values = [key for key in keys if key not in boxes]
        contents = self._read(boxes, values, device=device, progress=progress)
        return {key: contents[key] for key in keys}

    def _read_slabs(self, slabs: Sequence[Slab]) -> list[torch.Tensor]:
        """Read slabs of different tensors into new CPU memory, in one parallel read."""
        boxes = {key: box for key, box, _ in slabs}
        return list(self._read(boxes, (), in_one_piece=True, progress=False).values())

    def _check_whole(self, keys: Sequence[str]) -> None:
        """Raise if elements of these tensors are missing, or the objects cannot hold so many.

        A read plans every part of a tensor before it fetches any, but a `.metadata` of a few bytes
        may claim a tensor of any size. So if a `.metadata` claims much, this compares it with the
        sizes of the objects, by a HEAD for each. (The digests in an index bound what the index may
        claim, and the headers of safetensors were compared with the sizes of the files.)
        """
        self._stored.check_whole(keys)
        if not self._stored.items.are_blobs:
            return
        saved = filter(None, map(self._stored.items.tensor, keys))
        claimed = sum(
            math.prod(tensor.shape) * ITEM_SIZE_BYTES.get(tensor.dtype, 0) for tensor in saved
        )
        if claimed <= _BELIEVED_BYTES:
            return
        store = self._spec.open()
        try:
            stored = sum(meta.size_bytes for meta in in_waves(store.head, self.objects))
        except ObjectNotFoundError as error:
            raise self._stored.explain(store, error).at(url=self.url) from error
        if claimed > _MOST_PACKED * stored:
            raise CheckpointCorruptError(
                f"the .metadata claims tensors of {claimed} bytes, and its objects have {stored}",
                url=self.url,
            )

    def verify(
        self,
        *,
        quick: bool = False,
        deep: bool = False,
        progress: bool = True,
    ) -> VerifyReport:
        """Read everything, compare it with its digests, and report all damage.

        The marker and the index are read again, too: they may be damaged since this was opened.
        Damage is reported and never raised, and the report lists all of it, not only the first. The
        bytes are not kept, so this takes the memory of a load (see `TransferConfig`). ETags are not
        compared: they change when a checkpoint is copied, and the digests cover every byte. If the
        verification is interrupted or fails, notes of the error give the damage so far.

        Args:
            quick: whether to read nothing and check only that all objects exist, with their sizes.
                Default False.
            deep: whether to compare the bytes around the payloads (framing and padding), too, and
                `.metadata`, which only stock torch's readers use, and the marker's counts with
                those of the index. Default False.
            progress: show a progress bar if standard error is a terminal. Default True.

        Raises:
            ConfigError: `quick` and `deep` contradict each other.
            UnsupportedError: another library wrote the checkpoint, without digests.
            CheckpointGoneError: the checkpoint was replaced or deleted since it was opened.
            StoreUnavailableError: the store did not answer, after all retries.
            PermissionDeniedError: the credentials do not allow the request.
        """
        if self.commit_id is None:
            raise without_digests(self.url)
        return verify_at(
            self._spec,
            self._event_settings,
            quick=quick,
            deep=deep,
            progress=progress,
            commit_id=self.commit_id,
        )

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a result of `read` to the nested dict that was saved.

        Keys of dicts that were numbers, bools, None or tuples of these are so again. (Stock writers
        leave only their text in a checkpoint, and stock readers return it.)

        If only some entries of a list were read, the others are None.

        Raises:
            CheckpointCorruptError: the places that the checkpoint gives contradict each other.
        """
        try:
            return nested(flat, self.paths)
        except CheckpointCorruptError as error:
            raise error.at(url=self.url) from None

    def _read(
        self,
        boxes: Mapping[str, Box],
        values: Iterable[str],
        *,
        device: torch.device | str = "cpu",
        in_one_piece: bool = False,
        progress: bool,
    ) -> dict[str, Any]:
        """Read boxes of tensors into new memory, and values; return all by key.

        Args:
            device: device to make the tensors on.
            in_one_piece: make them in one piece of CPU memory.
        """
        from dcp_objstore.inspect.fill import read_new

        channel = self._event_settings.channel("read", self.url, *rank_and_world_size())
        channel.show(bar=progress, summary=False)
        with channel.watching():
            self.last_read, content = read_new(
                self._spec,
                self._stored,
                boxes,
                values,
                device=device,
                in_one_piece=in_one_piece,
                verify=self._verify,
                trust_pickle=self._trust_pickle,
                channel=channel,
            )
        return content


def open(  # noqa: A001 - `dos.open`, like gzip.open
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: bool = True,
    trust_pickle: bool = False,
    rename: Rename = (),
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open a checkpoint to look into it, with two requests and without a process group.

        checkpoint = dos.open("s3://bucket/run/step-1000")
        report = checkpoint.verify()

    Args:
        url: URL of the checkpoint, which this or another library wrote, or of safetensors.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: taken from the environment.
        config: sizes, concurrency, time-outs and the memory budget.
        verify: let no unverified byte reach a tensor. With False, only the bytes that are needed
            are read, and they are not checked, also if the marker is gone. Default True.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that the checkpoint's author chose. Default False.
        rename: pairs of a regular expression and its replacement, applied to each key in turn, as
            `re.sub` does. Default: the keys as they are.
        on_event: callable that receives each event of a read or verification, in another
            thread. `ObjectStoreWriter` describes how it is called.
        trace: name of a local file to write a trace of each read and verification to.
            `ObjectStoreWriter` describes how the file is named.

    Returns:
        The opened checkpoint.

    Raises:
        CheckpointNotFoundError: nothing is committed at this URL.
        CheckpointCorruptError: the marker, the index or a header is damaged.
        CheckpointGoneError: the checkpoint was deleted or replaced while it was opened.
        StateMismatchError: `rename` gives two keys the same name.
        InputError: there are several files of safetensors and no index.
        UnsupportedError: a newer version wrote the checkpoint, or it holds something that this
            version cannot read.
        UntrustedPickleError: the `.metadata` needs a type that stock torch does not write.
        StoreUnavailableError: the store did not answer, after all retries.
        CredentialsError: credentials are missing, wrong or expired.
        PermissionDeniedError: the credentials do not allow the request.
        BucketNotFoundError: the bucket does not exist.
        InvalidUrlError: the URL has an unknown scheme, no bucket, or a form that cannot be used.
        ConfigError: an argument has a wrong type or value.
    """
    if not isinstance(verify, bool):
        raise ConfigError(f"verify must be True or False, got {verify!r}")
    spec = StoreSpec(url, storage_options, config)
    event_settings = EventSettings(on_event, trace)
    channel = event_settings.channel("open", spec.url, *rank_and_world_size())
    with channel.watching():
        stored = open_stored_checkpoint(spec, verify=verify).renamed(rename, spec.url)
        channel.emit(Opened, channel.began_at, commit_id=stored.commit_id)
    return Checkpoint(
        spec,
        stored,
        verify=verify,
        trust_pickle=trust_pickle,
        event_settings=event_settings,
    )


def read_state_dict(
    url: str,
    keys: Patterns = None,
    *,
    nested: bool = True,
    device: torch.device | str = "cpu",
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: bool = True,
    trust_pickle: bool = False,
    rename: Rename = (),
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Read a state dict, or part of one, into new tensors; no state to load into is needed.

        weights = dos.read_state_dict("s3://bucket/run/step-1000", "model.*")["model"]

    This is not a collective: every process that calls it reads what it asks for. To load into a
    sharded model use `load`, which reads each byte once for all ranks.

    Args:
        url: URL of the checkpoint, which this or another library wrote, or of safetensors.
        keys: one or several shell patterns such as `"model.*"`, or exact keys. Default: all keys.
        nested: return the nested dict that was saved (default); if False, return a flat dict by
            key.
        device: device to make the tensors on. Default: CPU.
        progress: show a progress bar if standard error is a terminal. Default True.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: taken from the environment.
        config: sizes, concurrency, time-outs and the memory budget.
        verify: let no unverified byte reach a tensor. With False, only the bytes that are needed
            are read, and they are not checked, also if the marker is gone. Default True.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that the checkpoint's author chose. Default False.
        rename: pairs of a regular expression and its replacement, applied to each key in turn, as
            `re.sub` does. Default: the keys as they are.
        on_event: callable that receives each event of the read, in another thread.
            `ObjectStoreWriter` describes how it is called.
        trace: name of a local file to write a trace of the read to. `ObjectStoreWriter` describes
            how the file is named.

    Returns:
        The tensors and values.

    Raises:
        DcpObjstoreError: any error that `open` or `Checkpoint.read` raises.
    """
    checkpoint = open(
        url,
        storage_options=storage_options,
        config=config,
        verify=verify,
        trust_pickle=trust_pickle,
        rename=rename,
        on_event=on_event,
        trace=trace,
    )
    values = checkpoint.read(keys, device=device, progress=progress)
    return checkpoint.nested(values) if nested else values
