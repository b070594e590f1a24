"""`import_checkpoint`: save what others have written as a checkpoint."""

from __future__ import annotations

import errno
import io
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_objstore.checkpoint.names import TORCH_SUFFIXES
from dcp_objstore.compat.archive import ZIP_START, Archive, ArchiveError, unpacked_limit_bytes
from dcp_objstore.compat.inert_pickle import HostilePickleError
from dcp_objstore.compat.values import unpickled
from dcp_objstore.compat.vet import vet
from dcp_objstore.config import TransferConfig
from dcp_objstore.contexts import contextmanager
from dcp_objstore.convert.copied_files import pieces_of
from dcp_objstore.convert.files import folder_and_name
from dcp_objstore.convert.sources import CheckpointSource, Source, TensorInfo, TorchSource
from dcp_objstore.distributed.plugin import reporting_failures
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    UntrustedPickleError,
)
from dcp_objstore.inspect.checkpoint import open as open_checkpoint
from dcp_objstore.inspect.selection import Patterns, matching
from dcp_objstore.inspect.slabs import Slab, cut, stop
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import SaveReport
from dcp_objstore.read.geometry import Box
from dcp_objstore.read.items import Rename, new_names
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.stores.errors import of_os
from dcp_objstore.stores.spec import options_of_other
from dcp_objstore.stores.wrappers import PinnedStore
from dcp_objstore.write.api import run_save
from dcp_objstore.write.planner import AgreeingSavePlanner
from dcp_objstore.write.upload_items import upload_order
from dcp_objstore.write.writer import ObjectStoreWriter


def import_checkpoint(
    source: str | os.PathLike[str],
    url: str,
    keys: Patterns = None,
    *,
    rename: Rename = (),
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    source_storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    trust_pickle: bool = False,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
    user_metadata: Mapping[str, object] | None = None,
    allow_unfenced: bool = False,
) -> SaveReport:
    """Save what others have written as one checkpoint, in bounded memory and in one process.

        dos.import_checkpoint("weights.safetensors", "s3://bucket/run/imported")

    It is committed as `save` does it: when this returns, the whole checkpoint exists.

    Args:
        source: path or URL of a `torch.save` file (a name in .pt, .pth, .bin or .ckpt), of a
            safetensors file, of a folder of safetensors (as on the Hugging Face hub; with an index
            if there are several files), or of a checkpoint by any library that DCP reads.
        url: URL of the checkpoint to write.
        keys: one or several shell patterns such as `"model.*"`, or exact keys. Default: all keys.
        rename: pairs of a regular expression and its replacement, applied to each key in turn, as
            `re.sub` does. `[("^", "model.")]` puts a prefix before each key.
        overwrite: replace a committed checkpoint at this URL. Default False: refuse.
        storage_options: credentials and endpoint of the checkpoint, in fsspec's spelling. Default:
            taken from the environment.
        source_storage_options: the same for the source. Default: `storage_options` if the source is
            a URL of the same scheme.
        config: sizes, concurrency, time-outs and the memory budget.
        trust_pickle: unpickle what `torch.load(weights_only=True)` refuses. This may run code that
            the source's author chose. Default False.
        progress: show a progress bar if standard error is a terminal. Default True.
        on_event: callable that receives each event of the save, in another thread.
        trace: name of a local file to write a trace of the save to.
        user_metadata: small JSON values to store in the commit marker.
        allow_unfenced: save even to a store without conditional writes. Default False: refuse.

    Returns:
        The report of the save.

    Raises:
        CheckpointNotFoundError: there is nothing at the source.
        CheckpointCorruptError: the source is damaged or cut off.
        PreconditionFailedError, CheckpointGoneError: another writer replaced the source while it
            was read; nothing was committed.
        UntrustedPickleError: the source needs `trust_pickle=True`.
        InputError: no key is left to import, two keys get the same name, or an argument is wrong.
        DcpObjstoreError: any error of `save`, or of reading the source.
    """
    writer = ObjectStoreWriter(
        url,
        overwrite=overwrite,
        storage_options=storage_options,
        config=config,
        progress=progress,
        on_event=on_event,
        trace=trace,
        user_metadata=user_metadata,
        allow_unfenced=allow_unfenced,
    )
    if keys is not None and not isinstance(keys, str):
        keys = list(keys)  # an iterator could be used only once
    source_options = options_of_other(source_storage_options, url, storage_options, source)
    with _open_source(
        source, keys, source_options, config=config, trust_pickle=trust_pickle
    ) as opened:
        names = new_names(matching(dict.fromkeys(opened.keys), keys), rename)
        if not names:
            raise InputError(f"{source} has no key to import, or keys= is empty")
        planner = SourcePlanner(str(writer.checkpoint_id), opened, names)
        with closing(planner), reporting_failures(writer):
            return run_save(writer, planner.flat, None, lambda *_: planner)


class SourcePlanner(AgreeingSavePlanner):
    """Plans tensors in slabs, and reads each when the upload asks for it.

    Args:
        url: URL of the checkpoint.
        source: what to read.
        names: the new name of each key to save.
        ranks: the number of ranks that save together.

    Attributes:
        flat: the state dict: values, and tensors without memory.
    """

    is_copied = True

    def __init__(self, url: str, source: Source, names: Mapping[str, str], ranks: int = 1) -> None:
        self.flat: dict[str, Any] = {
            name: source.values[key] if key in source.values else _meta(source.tensors[key])
            for key, name in names.items()
        }
        super().__init__(url, self.flat, ranks)
        self._source = source
        # The key in the source, by the new name.
        self._keys = {name: key for key, name in names.items()}
        # A key that was renamed stands at the top of the nested dict, under its whole name.
        self._paths = {
            name: source.paths.get(key, (name,)) if name == key else (name,)
            for key, name in names.items()
        }
        # No tensors: `finish_plan` knows which ones are read, and in what order.
        self._tensors = source.stream((), self._check)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Override `DefaultSavePlanner.set_up_planner`: do not flatten the state dict.

        It is flat already, and a value in it must stay as it is: it may be a dict (of a checkpoint
        that was saved without flattening), or contain itself. The option is on again afterwards,
        because only then does the index get the paths of the keys.
        """
        self.flatten_state_dict = self.flatten_sharded_tensors = False
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.flatten_state_dict = True

    def make_items(self) -> list[WriteItem]:
        """Override `AgreeingSavePlanner.make_items`; cut large tensors into slabs."""
        self.mappings = self._paths
        return [slab for item in super().make_items() for slab in self._cut(item)]

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        """Return the items that write the slabs of a tensor; the item itself if it is of one slab.

        An item of a value stays as it is, also if the value is a tensor (in memory).
        """
        info = self._source.tensors.get(self._keys[item.index.fqn])
        if item.tensor_data is None or info is None:
            return [item]
        slabs = list(cut(item.index.fqn, info.shape, info.dtype, info.starts))
        return [item] if len(slabs) < 2 else [write_item(slab, info) for slab in slabs]

    def _check(self) -> None:
        """Raise if the save was stopped; called while a stream waits for tensors."""
        if self.check_stopped is not None:
            self.check_stopped()

    def _is_read(self, item: WriteItem) -> bool:
        """Return whether the source has the item as a tensor, not as a value in memory."""
        return self._keys[item.index.fqn] in self._source.tensors

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Override `DefaultSavePlanner.finish_plan`: begin to read, in the order of upload.

        That is the order in which `resolve_data` takes the tensors. Empty slabs are not read.
        """
        plan: SavePlan = super().finish_plan(new_plan)
        slabs = [
            _slab(item, self._keys[item.index.fqn])
            for item, _ in upload_order(plan.items)
            if self._is_read(item)
        ]
        nonempty = [slab for slab in slabs if slab.size_bytes]
        self._tensors = self._source.stream(nonempty, self._check)
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Override `DefaultSavePlanner.resolve_data`; called in the order of upload."""
        if not self._is_read(write_item) or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        # Only its size and box count here, so the slab need not have the key of the source.
        slab = _slab(write_item, write_item.index.fqn)
        if slab.size_bytes:
            return next(self._tensors)
        dtype = write_item.tensor_data.properties.dtype
        return torch.empty(slab.box.sizes, dtype=dtype, device="cpu")

    def close(self) -> None:
        """Stop reading."""
        stop(self._tensors)


def _meta(info: TensorInfo) -> torch.Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def write_item(slab: Slab, info: TensorInfo) -> WriteItem:
    """Return the item that writes a slab of a tensor."""
    chunk = ChunkStorageMetadata(torch.Size(slab.box.offsets), torch.Size(slab.box.sizes))
    properties = TensorProperties(dtype=info.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(info.shape))
    return WriteItem(MetadataIndex(slab.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _slab(item: WriteItem, key: str) -> Slab:
    """Return the slab of the tensor `key` that an item writes."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    size_bytes = chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return Slab(key, Box(tuple(chunk.offsets), tuple(chunk.sizes)), size_bytes)


@contextmanager
def _open_source(
    source: str | os.PathLike[str],
    keys: Patterns,
    storage_options: Mapping[str, object] | None,
    config: TransferConfig | None,
    trust_pickle: bool,
) -> Iterator[Source]:
    """Yield the opened source: a `torch.save` file if its name ends so, otherwise a checkpoint.

    A local file is mapped, and must stay as it is; another one is downloaded first.
    """
    folder, name = folder_and_name(source, TORCH_SUFFIXES)
    if name is None:
        try:
            checkpoint = open_checkpoint(
                folder, storage_options=storage_options, config=config, trust_pickle=trust_pickle
            )
        except CheckpointNotFoundError as error:
            error.message += "; nor is there a file of torch.save or safetensors"
            raise
        yield CheckpointSource(checkpoint, keys)
        return
    spec = StoreSpec(folder, storage_options, config)
    store = PinnedStore(spec.open(), {})
    if spec.parsed.scheme == "file":
        # The first HEAD pins the state of the file; a later one raises if it has changed.
        path, check = Path(spec.url.removeprefix("file://")) / name, partial(store.head, name)
        check()
        state = _loaded(path, trust_pickle)
        check()
        yield TorchSource(f"{spec.url}/{name}", state, check)
        return
    with _downloaded(store, name) as path:
        yield TorchSource(f"{spec.url}/{name}", _loaded(path, trust_pickle))


@contextmanager
def _downloaded(store: ObjectStore, name: str) -> Iterator[Path]:
    """Yield the path of an object, downloaded to a folder that is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        pieces = pieces_of(store, name, store.head(name).size_bytes)
        try:
            with closing(pieces), path.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
        except DcpObjstoreError:
            raise  # an error of the store; some of these are OSErrors, too
        except OSError as error:  # an error of the temporary folder
            raise of_os(error).at(object_key=name, url=f"file://{folder}") from error
        yield path


def _is_mappable(path: Path, trust_pickle: bool) -> bool:
    """Return whether a `torch.save` file can be mapped; refuse a file that would harm torch.

    It cannot be mapped if its records are packed: torch would take the packed bytes for the
    tensors' memory.

    Raises:
        ArchiveError, HostilePickleError, ValueError: it is not such a file, or torch would allocate
            far more than it has, or crash.
    """
    with path.open("rb") as file:
        if file.read(len(ZIP_START)) != ZIP_START:
            raise ValueError("it is not a zip file, as torch writes since 1.6; torch.save it again")
        body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not trust_pickle:
        vet(memoryview(body))
    archive = Archive(memoryview(body))
    is_packed = any(record.is_packed for record in archive.records.values())
    if is_packed and archive.unpacked_bytes > unpacked_limit_bytes(len(body)):
        raise ArchiveError(f"its records unpack to {archive.unpacked_bytes} bytes")
    return not is_packed


# What torch raises for a damaged file. Its unpickler for `weights_only=True`, where no other code
# runs, raises errors of any type.
_DAMAGED = (UnpicklingError, RuntimeError, EOFError, ValueError, ArchiveError, OSError)


def _loaded(path: Path, trust_pickle: bool) -> dict[str, Any]:
    """Return the state dict of a `torch.save` file, mapped; in memory if its records are packed.

    Raises:
        ObjectNotFoundError: there is no such file.
        UntrustedPickleError: it has what only `trust_pickle` allows.
        CheckpointCorruptError: it is damaged, cut off, or not a `torch.save` file.
        InputError: it cannot be read, or holds no dict.
    """
    # With `trust_pickle` the file may run code, whose errors of other types are not caught.
    of_damage = _DAMAGED if trust_pickle else (Exception,)
    try:
        is_mapped = _is_mappable(path, trust_pickle)
        state = unpickled(path, mmap=is_mapped, weights_only=not trust_pickle)
    except FileNotFoundError:
        raise ObjectNotFoundError(f"there is no file {path}", object_key=path.name) from None
    except MemoryError:  # says nothing of the file
        raise
    except of_damage as error:
        # An OSError is of the disk, except EINVAL: mmap raises it for a position behind the end of
        # a file that is cut off.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        # The text of an IndexError or KeyError may be only a number, that of an EOFError empty.
        says_little = isinstance(error, LookupError | EOFError)
        text = repr(error) if says_little else str(error).partition("\n")[0]
        if isinstance(error, UnpicklingError | HostilePickleError) and not trust_pickle:
            raise UntrustedPickleError(
                f"{path.name} is not loaded with weights_only=True: {text}. If you trust who made"
                " it, allow it with trust_pickle=True"
            ) from None
        raise CheckpointCorruptError(
            f"{path.name} is not a whole torch.save file: {text}"
        ) from None
    if not isinstance(state, Mapping):
        raise InputError(f"{path.name} holds a {type(state).__name__}, not a dict")
    return dict(state)
