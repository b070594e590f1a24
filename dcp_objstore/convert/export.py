"""`export_checkpoint`: a checkpoint as one file of `torch.save`, or as safetensors."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dcp_objstore.compat import safetensors
from dcp_objstore.config import COPIED_MOST_BYTES
from dcp_objstore.contexts import contextmanager
from dcp_objstore.convert.names import TORCH_SUFFIXES, folder_and_name, options_of_other
from dcp_objstore.convert.sources import CheckpointSource, TensorInfo
from dcp_objstore.convert.torch_file import plan_file
from dcp_objstore.errors import ConfigError, DcpObjstoreError, InputError, ObjectNotFoundError
from dcp_objstore.inspect.checkpoint import open as open_checkpoint
from dcp_objstore.inspect.slabs import cut, read_ahead, stop
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.events import Planned
from dcp_objstore.read.renaming import Rename, renamed
from dcp_objstore.state.memory import byte_memory
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import upload_object
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.inspect.selection import Patterns
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.observe.events import OnEvent
    from dcp_objstore.transfer.upload import ByteArray

# The names of temporary files and folders begin with this.
_OWN_PREFIX = ".dcp-objstore."
# A file of this name in a temporary folder is locked while its export runs.
_ALIVE = f"{_OWN_PREFIX}alive"
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        url: URL of the checkpoint.
        files: the files, as paths or URLs.
        tensors: number of tensors.
        left_out: keys of the values that safetensors cannot hold.
        total_bytes: size of all files.
        seconds: how long it took.
    """

    url: str
    files: tuple[str, ...]
    tensors: int
    left_out: tuple[str, ...]
    total_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _File:
    """A file to be written.

    Attributes:
        name: its name in the folder.
        keys: keys of the tensors in it, in their order.
        size_bytes: about how large it gets.
        buffers: yields its bytes; is called with what yields the memory of one tensor.
    """

    name: str
    keys: Sequence[str]
    size_bytes: int
    buffers: Callable[[Callable[[str], Iterator[ByteArray]]], Iterator[ByteArray]]


def export_checkpoint(
    url: str,
    out: str | os.PathLike[str],
    keys: Patterns = None,
    *,
    rename: Rename = (),
    dtype: torch.dtype | None = None,
    max_shard_size_bytes: int = 5_000_000_000,
    copied_files: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    out_storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: bool = True,
    trust_pickle: bool = False,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> ExportReport:
    """Write a checkpoint as one `torch.save` file, or as safetensors for Hugging Face libraries.

        dos.export_checkpoint("s3://bucket/run/step-1000", "weights.safetensors", "model.*")

    The checkpoint streams through some 400 MiB of memory, however large it is. A file appears whole
    or not at all. If the export fails, the files that it has written are removed; of one that was
    killed, the next one to the same local folder removes them.

    Args:
        url: URL of the checkpoint, which this or another library wrote.
        out: the path or URL to write to. A name that ends in .pt, .pth, .bin or .ckpt gets one
            `torch.save` file, and one in .safetensors a single file of that format. Otherwise it is
            a folder: it gets model.safetensors, or several shards and their index, as
            `from_pretrained` reads them.
        keys: one or several shell patterns such as `"model.*"`, or exact keys. Default: all keys.
        rename: pairs of a regular expression and its replacement, applied to each key in turn, as
            `re.sub` does. `[(r"^model\\.", "")]` takes a prefix away. A `torch.save` file then
            holds a flat dict; otherwise it holds the nested dict that was saved.
        dtype: convert tensors of floating-point numbers to this floating-point dtype. Default: as
            saved.
        max_shard_size_bytes: size at which another safetensors shard begins. Default 5 GB.
        copied_files: local files to copy into the folder, such as config.json.
        overwrite: replace files that exist. Default False: refuse.
        storage_options: credentials and endpoint of the checkpoint, in fsspec's spelling. Default:
            taken from the environment.
        out_storage_options: the same for `out`. Default: `storage_options` if `out` is of the same
            scheme.
        config: sizes, concurrency, time-outs and the memory budget.
        verify: write no unverified byte. Default True.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that the checkpoint's author chose. Default False.
        progress: show a progress bar if standard error is a terminal. Default True.
        on_event: callable that receives each event of the export, in a thread of its own.
        trace: name of a local file to write a trace of the export to.

    Returns:
        What was written. safetensors holds tensors only: `left_out` names the values.

    Raises:
        InputError: a file exists, two keys get the same name, or a value is wrong.
        UnsupportedError: the format lacks the dtype of a tensor.
        DcpObjstoreError: any error of `dcp_objstore.open`, of reading, or of the store at `out`.
    """
    began_at = time.monotonic()
    folder, name = folder_and_name(out, (*TORCH_SUFFIXES, ".safetensors"))
    out_options = options_of_other(out_storage_options, url, storage_options, folder)
    spec = StoreSpec(folder, out_options, config)
    checkpoint = open_checkpoint(
        url,
        storage_options=storage_options,
        config=config,
        verify=verify,
        trust_pickle=trust_pickle,
    )
    is_torch = name is not None and name.endswith(TORCH_SUFFIXES)
    source = CheckpointSource(checkpoint, keys, values=is_torch)
    names = renamed(source.keys, rename)
    tensors = {key: _as_dtype(info, dtype) for key, info in source.tensors.items()}
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype} would lose what is behind the point; give a float dtype")
    small = _copied(copied_files)
    if name is None:
        files, index = _shards(tensors, names, max_shard_size_bytes)
        small += index
    elif is_torch:
        nest = partial(_flat, names) if rename else checkpoint.nested
        files = [_torch_file(name, tensors, lambda filled: nest({**filled, **source.values}))]
    else:
        files = [_safetensors_file(name, list(tensors), tensors, names)]
    channel = EventSettings(on_event, trace).channel("export", spec.url)
    channel.show(bar=progress, summary=False)
    with channel.watching(), _staged(spec) as staging:
        export = _Export(spec, staging, source, tensors=tensors, channel=channel)
        written = export.run(files, small, overwrite=overwrite)
    root = spec.url if "://" in str(out) else spec.url.removeprefix("file://")
    return ExportReport(
        url=checkpoint.url,
        files=tuple(f"{root.rstrip('/')}/{file}" for file in written),
        tensors=len(tensors),
        left_out=() if is_torch else tuple(key for key in source.keys if key not in tensors),
        total_bytes=sum(written.values()),
        seconds=time.monotonic() - began_at,
    )


def _copied(paths: Iterable[str | os.PathLike[str]]) -> list[tuple[str, bytes]]:
    try:
        return [(Path(path).name, Path(path).read_bytes()) for path in paths]
    except OSError as error:
        raise InputError(f"{error.filename} cannot be copied: {error.strerror}") from error


def _as_dtype(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    if dtype is None or not info.dtype.is_floating_point:
        return info
    return TensorInfo(info.shape, dtype, info.starts)


def _flat(names: Mapping[str, str], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under their new names, in the order of the checkpoint."""
    return {names[key]: flat[key] for key in names}


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _torch_file(
    name: str,
    tensors: Mapping[str, TensorInfo],
    nest: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> _File:
    planned = plan_file(tensors, nest)
    size_bytes = sum(map(_size, tensors.values()))
    return _File(name, planned.keys, size_bytes, planned.buffers)


def _safetensors_file(
    name: str, keys: Sequence[str], tensors: Mapping[str, TensorInfo], names: Mapping[str, str]
) -> _File:
    # As the library orders them: the widest elements first, so that all are aligned.
    keys = sorted(keys, key=lambda key: (-tensors[key].dtype.itemsize, names[key]))
    for key in keys:
        safetensors.check(key, names[key], tensors[key].dtype)
    header = safetensors.header_bytes(
        (names[key], tensors[key].dtype, tensors[key].shape) for key in keys
    )

    def buffers(tensor: Callable[[str], Iterator[ByteArray]]) -> Iterator[ByteArray]:
        yield np.frombuffer(header, np.uint8)
        for key in keys:
            yield from tensor(key)

    size_bytes = len(header) + sum(_size(tensors[key]) for key in keys)
    return _File(name, keys, size_bytes, buffers)


def _shards(
    tensors: Mapping[str, TensorInfo], names: Mapping[str, str], most_bytes: int
) -> tuple[list[_File], list[tuple[str, bytes]]]:
    """Return the files of a folder, and the index if there are several."""
    groups: list[list[str]] = [[]]
    filled_bytes = 0
    for key, info in tensors.items():
        filled_bytes += _size(info)
        if groups[-1] and filled_bytes > most_bytes:
            groups.append([])
            filled_bytes = _size(info)
        groups[-1].append(key)
    count = len(groups)
    if count == 1:
        return [_safetensors_file(_ONE_FILE, groups[0], tensors, names)], []
    files = [
        _safetensors_file(f"model-{n:05d}-of-{count:05d}.safetensors", keys, tensors, names)
        for n, keys in enumerate(groups, 1)
    ]
    index = {
        "metadata": {"total_size": sum(map(_size, tensors.values()))},
        "weight_map": {names[key]: file.name for file in files for key in file.keys},
    }
    return files, [(_INDEX, json.dumps(index, indent=2).encode())]


@contextmanager
def _staged(spec: StoreSpec) -> Iterator[StoreSpec]:
    """Return where to write: the folder itself, or if it is local a temporary one inside it.

    The files of a local folder are moved there at the end of the block, if it does not raise; if it
    does, folders that were made for them are removed. In a bucket nothing can be moved, but an
    object appears whole or not at all.
    """
    if spec.parsed.scheme != "file":
        yield spec
        return
    folder = Path(spec.url.removeprefix("file://"))
    new = [directory for directory in (folder, *folder.parents) if not directory.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left(folder)
        with _temporary(folder) as temporary:
            yield spec.at(f"file://{temporary}")
            for path in temporary.iterdir():
                if not path.name.startswith(_OWN_PREFIX):  # locks
                    path.replace(folder / path.name)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}", url=spec.url) from error
    finally:
        with suppress(OSError):  # it has files in it
            for directory in new:
                directory.rmdir()


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Make a folder in a folder, which is removed at the end, and is locked until then."""
    with ExitStack() as stack:
        while True:
            path = Path(tempfile.mkdtemp(prefix=_OWN_PREFIX, dir=folder))
            with suppress(FileNotFoundError):  # an export that began just then has removed it
                lock = stack.enter_context(_locked(path, fcntl.LOCK_EX))
                if os.path.samestat(os.fstat(lock), (path / _ALIVE).stat()):
                    break
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def _remove_left(folder: Path) -> None:
    """Remove what killed exports have left in a folder: the system has given their locks back."""
    for path in folder.glob(f"{_OWN_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(temporary: Path, how: int) -> Iterator[int]:
    lock = os.open(temporary / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, how)
        yield lock
    finally:
        os.close(lock)


class _Export:
    """Writes files, and removes them again if that fails.

    Args:
        spec: the folder.
        staging: the folder to write to; its files are moved to `spec` in the end.
        source: the checkpoint to read.
        tensors: its tensors, as they are to be written.
        channel: channel for the events.
    """

    def __init__(
        self,
        spec: StoreSpec,
        staging: StoreSpec,
        source: CheckpointSource,
        tensors: Mapping[str, TensorInfo],
        channel: Channel,
    ) -> None:
        self._folder = spec.open()
        self._store = staging.open()
        self._config = spec.config
        self._source = source
        self._tensors = tensors
        self._channel = channel
        self._progress = Progress(spec.config.stall_timeout_seconds, channel)

    def run(
        self, files: Sequence[_File], small: Sequence[tuple[str, bytes]], *, overwrite: bool
    ) -> dict[str, int]:
        """Write the files, the small ones last, and return their sizes by name."""
        names = [file.name for file in files] + [name for name, _ in small]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two files would be called {name}", url=self._folder.url)
        # A folder with both would be read by the one that this export does not write.
        others = [name for name in (_ONE_FILE, _INDEX) if {_ONE_FILE, _INDEX} & {*names} - {name}]
        present = wait_for(self._present, dict.fromkeys((*names, *others)))
        if present and not overwrite:
            text = f"{present[0]} exists there already; overwrite=True replaces it"
            raise InputError(text, url=self._folder.url)
        self._channel.emit(
            Planned,
            self._channel.began_at,
            operation="export",
            items=len(self._tensors),
            size_bytes=sum(file.size_bytes for file in files),
            objects=len(names),
            requests=len(names),
        )
        written: dict[str, int] = {}
        new = {*names} - {*present}
        begun: set[str] = set()  # one that Ctrl-C has not stopped in time arrives yet
        try:
            for file in files:
                begun.add(file.name)
                written[file.name] = self._write(file)
            for name, body in small:
                wait_for(self._store.put, name, body)
                written[name] = len(body)
            for name in {*present} - {*names}:
                wait_for(self._folder.delete, name)
        except BaseException as error:
            self._remove({*written, *(begun & new)}, error)
            raise
        return written

    def _present(self, names: Iterable[str]) -> list[str]:
        present = []
        for name in names:
            try:
                self._folder.head(name)
            except ObjectNotFoundError:
                continue
            present.append(name)
        return present

    def _write(self, file: _File) -> int:
        """Write one file from slabs that are read ahead; return its size in bytes."""
        slabs = (
            slab
            for key in file.keys
            for slab in cut(key, *self._source.tensors[key][:2], self._source.tensors[key].starts)
        )
        plan = plan_parts(file.size_bytes, self._config.part_size_bytes)
        tensors = read_ahead(slabs, self._source.read)

        def tensor(key: str) -> Iterator[ByteArray]:
            remaining_bytes = _size(self._tensors[key])
            while remaining_bytes:
                memory = byte_memory(next(tensors).to(self._tensors[key].dtype))
                assert memory is not None
                remaining_bytes -= memory.nbytes
                for at in range(0, memory.nbytes, plan.slice_size_bytes):
                    yield memory[at : at + plan.slice_size_bytes]

        most = max(2, COPIED_MOST_BYTES // plan.part_size_bytes)
        try:
            uploaded = upload_object(
                self._store,
                file.name,
                file.buffers(tensor),
                plan,
                config=self._config,
                progress=self._progress,
                most=most,
            )
        finally:
            stop(tensors)
        return uploaded.size_bytes

    def _remove(self, names: Iterable[str], error: BaseException) -> None:
        unremoved = []
        for name in names:
            try:
                self._store.delete(name)
            except DcpObjstoreError:
                unremoved.append(name)
        if unremoved:
            error.add_note(f"{', '.join(unremoved)} could not be removed from {self._store.url}")
