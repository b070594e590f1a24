"""`export_checkpoint`: a checkpoint as one file of `torch.save`, or as safetensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from typing_extensions import Buffer

from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.compare_and_swap import compare_and_swap
from dcp_objstore.checkpoint.names import TORCH_SUFFIXES, new_nonce
from dcp_objstore.checkpoint.probe import if_version, probed
from dcp_objstore.checkpoint.read import Stored
from dcp_objstore.config import COPIED_MOST_BYTES, MIB, TransferConfig, check_number
from dcp_objstore.convert.copied_files import named_files, names_in, trainer_files
from dcp_objstore.convert.files import (
    CLAIM_SUFFIX,
    INDEX,
    ONE_FILE,
    STEM,
    PlannedFile,
    folder_and_name,
    has_weights,
    replaced_by,
    safetensors_file,
    shards,
    share_out,
    tensor_bytes,
    torch_file,
)
from dcp_objstore.convert.frameworks import (
    CONFIG_FILE,
    META_KEY,
    WEIGHTS_FILE,
    adapter_folder,
    nest_for_lightning,
)
from dcp_objstore.convert.sources import CheckpointSource, TensorInfo
from dcp_objstore.distributed.arrivals import watching
from dcp_objstore.distributed.failures import (
    capture,
    every_rank,
    from_all,
    on_first,
    raise_on_all,
    typed_failures,
)
from dcp_objstore.distributed.groups import count_ranks, is_first, rank_in, sync_group
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import (
    ConfigError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RankFailedError,
    printable,
)
from dcp_objstore.inspect.checkpoint import Checkpoint
from dcp_objstore.inspect.selection import Patterns
from dcp_objstore.inspect.slabs import cut, read_ahead, stop
from dcp_objstore.observe.dispatch import Channel, EventSettings
from dcp_objstore.observe.events import OnEvent, Planned
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.read.items import Rename, new_names
from dcp_objstore.read.peers.meeting import open_once
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.state.memory import byte_memory
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.base import as_buffers
from dcp_objstore.stores.local import LocalStore
from dcp_objstore.stores.protocol import (
    Capabilities,
    ObjectMeta,
    ObjectStore,
    Precondition,
    Version,
)
from dcp_objstore.stores.spec import options_of_other
from dcp_objstore.stores.wrappers import PinnedStore, WrappedStore, is_same_state
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import Content, upload_object
from dcp_objstore.transfer.workers import in_waves

# A larger file is not put back if an export that has replaced it fails.
_KEPT_MOST_BYTES = 256 * MIB
# The arguments that `_Plan.digest` stands for, as an error names them.
_SHAPING = "keys=, rename=, dtype= and max_shard_size_bytes"


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export.

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

    def __str__(self) -> str:
        """Return what was exported, the files, and what was left out, on a few lines."""
        tensors = counted(self.tensors, "tensor")
        size = size_text(self.total_bytes)
        lines = [f"exported {tensors}, {size}, in {self.seconds:.1f} s to", *self.files]
        text = "\n  ".join(map(printable, lines))
        if self.left_out:
            count = counted(len(self.left_out), "value")
            left = printable(self.left_out[0])
            text += f"\nleft out {count} that safetensors cannot hold, such as {left}"
        return text


def export_checkpoint(
    url: str,
    out: str | os.PathLike[str],
    keys: Patterns = None,
    *,
    rename: Rename = (),
    dtype: torch.dtype | None = None,
    max_shard_size_bytes: int = 5_000_000_000,
    copied_files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
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

    The checkpoint streams through some 400 MiB of memory (on each rank that writes), however large
    it is. A file appears whole or not at all. Shards are written first, then small files, and last
    the index or the only file of weights, which makes the others count. If the export fails, the
    files that it has written are removed, and an earlier export is as it was.

    Args:
        url: URL of the checkpoint, which this or another library wrote.
        out: the path or URL to write to. A name that ends in .pt, .pth, .bin or .ckpt gets one
            `torch.save` file, and one in .safetensors a single file of that format. For a
            checkpoint of Lightning, .ckpt gets the file that Lightning reads. Otherwise it is a
            folder: it gets model.safetensors, or several shards and their index, as
            `from_pretrained` reads them. For a checkpoint of `peft_state`, or of a Trainer with a
            PEFT model, it gets what PEFT writes of an adapter.
        keys: one or several shell patterns such as `"model.*"`, or exact keys. Default: all keys.
            PEFT's folder has all tensors of an adapter, under PEFT's names; there the keys only say
            of which one. Default: of "default", or of the first one.
        rename: pairs of a regular expression and its replacement, applied to each key in turn, as
            `re.sub` does. `[(r"^model\\.", "")]` takes a prefix away. A `torch.save` file then
            holds a flat dict; otherwise it holds the nested dict that was saved.
        dtype: convert tensors of floating-point numbers to this floating-point dtype. Default: as
            saved.
        max_shard_size_bytes: size at which another safetensors shard begins. Default 5 GB.
        copied_files: one or several paths and URLs of files to copy beside the weights, such as
            config.json and the tokenizer's. The last part of one may be a shell pattern, or it may
            be a folder: of both, files of weights, hidden files and further folders are left out. A
            folder of safetensors also gets the small files that a Trainer of `with_object_store`
            has saved in the checkpoint, except where one of the same name is copied. A URL is
            opened with the options of `url` or of `out`, if it has the scheme of one of them. If
            an export that overwrites fails, files that it has replaced are put back; one of more
            than 256 MiB is not, because this process keeps them in memory.
        overwrite: replace files that exist. A folder of safetensors also loses the weights of an
            earlier export (model.safetensors, its shards and their index) once the new ones are
            there, because some servers read every shard that is there. Until then, the new shards
            have names such as model-1f3a9c02-00001-of-00003.safetensors, which they keep. Default
            False: refuse.
        process_group: the ranks that export together, such as `torch.distributed.group.WORLD`; all
            of them make this call. Each writes some of the files, and if one fails, all do. A local
            folder is one that all ranks share. So that the ranks have equal work, shards are equal,
            and smaller if there are fewer of them than ranks (but not below 250 MB). A single file
            is written by the first rank, which also writes `copied_files` and is the only one to
            read them. Default: this process exports alone, also in a job of several ranks: unlike a
            save, an export needs no part of what the other ranks have in memory.
        storage_options: credentials and endpoint of the checkpoint, in fsspec's spelling. Default:
            taken from the environment.
        out_storage_options: the same for `out`. Default: `storage_options` if `out` is of the same
            scheme.
        config: sizes, concurrency, time-outs and the memory budget.
        verify: write no unverified byte. Default True.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that the checkpoint's author chose. Default False.
        progress: show a progress bar if standard error is a terminal. Default True.
        on_event: callable that receives each event of the export, in another thread.
        trace: name of a local file to write a trace of the export to.

    Returns:
        What was written. safetensors holds tensors only: `left_out` names the values.

    Raises:
        InputError: a file exists, two files would get the same name, there is nothing to copy under
            a name of `copied_files`, a value is wrong, or the keys are of several adapters of PEFT.
        UnsupportedError: the format lacks the dtype of a tensor, or PEFT computes what it writes of
            an adapter (that of a prompt encoder).
        DcpObjstoreError: any error of `dcp_objstore.open`, of reading, or of the store at `out`; of
            several ranks, that of the lowest rank that failed.
        LostRaceError: another export has written to the folder. Its files stay, and the weights of
            this one are removed.
        RankFailedError: a rank died, or did not make this call.
    """
    began_at = time.monotonic()
    advice = every_rank("dcp_objstore.export_checkpoint")

    def check() -> tuple[StoreSpec, StoreSpec, str | None, EventSettings]:
        if not isinstance(verify, bool):
            raise ConfigError(f"verify must be True or False, got {verify!r}")
        check_number("max_shard_size_bytes", max_shard_size_bytes, 1)
        if dtype is not None and not dtype.is_floating_point:
            text = f"dtype={dtype} would lose what is behind the point; give a float dtype"
            raise ConfigError(text)
        folder, name = folder_and_name(out, (*TORCH_SUFFIXES, ".safetensors"))
        options = options_of_other(out_storage_options, url, storage_options, folder)
        specs = StoreSpec(url, storage_options, config), StoreSpec(folder, options, config)
        return *specs, name, EventSettings(on_event, trace)

    with watching(url, process_group, advice):
        with typed_failures(url, process_group, advice):
            group = _group(process_group, config)
        checked, refused = capture(check)
        same = {"url": url, "out": checked and checked[1].url, "overwrite": overwrite}
        raise_on_all(refused, None, group, advice, same)
        assert checked is not None
        source, target, name, events = checked
        stored = open_once(
            partial(open_stored_checkpoint, source, verify=verify), group, source.url
        )
        stem = on_first(lambda: STEM if name else _stem(target), target.url, group)
        plan, refused = capture(
            lambda: _plan(
                Checkpoint(
                    source,
                    stored,
                    verify=verify,
                    trust_pickle=trust_pickle,
                    event_settings=EventSettings(None, None),
                ),
                name,
                keys,
                rename=rename,
                dtype=dtype,
                most_bytes=max_shard_size_bytes,
                stem=stem,
                copied=partial(named_files, copied_files, partial(_of_copied, (source, target))),
                group=group,
                trust_pickle=trust_pickle,
            )
        )
        raise_on_all(refused, source.url, group, same={_SHAPING: plan and plan.digest})
        assert plan is not None
        channel = events.channel("export", target.url, *rank_and_world_size())
        channel.show(bar=progress and is_first(group), summary=False)
        with channel.watching():
            sizes = _Export(target, plan, channel, group).run(overwrite=overwrite)
    root = target.url if "://" in str(out) else target.url.removeprefix("file://")
    return ExportReport(
        url=source.url,
        files=tuple(f"{root.rstrip('/')}/{file}" for file in sizes),
        tensors=len(plan.tensors),
        left_out=plan.left_out,
        total_bytes=sum(sizes.values()),
        seconds=time.monotonic() - began_at,
    )


def _group(
    process_group: dist.ProcessGroup | None, config: TransferConfig | None
) -> dist.ProcessGroup | None:
    """Return the group for the collectives of an export; None if this process is alone."""
    if process_group is None:
        return None
    everyone = process_group is dist.group.WORLD  # which may be NCCL's, and is the training's
    return sync_group(None if everyone else process_group, config)


def _stem(target: StoreSpec) -> str:
    """Return what the names of shards begin with: another stem than those of an earlier export."""
    names = names_in(target, target.open())
    return f"{STEM}-{new_nonce()[:8]}" if has_weights(names) else STEM


def _of_copied(known: Iterable[StoreSpec], url: str) -> StoreSpec:
    """Return how to open the store at a URL: as one of these, if it is of the same scheme."""
    for spec in known:
        if url.partition("://")[0] == spec.parsed.scheme:
            return spec.at(url)
    return StoreSpec(url)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The content of an export.

    Attributes:
        source: the checkpoint to read.
        tensors: its tensors, in the form that is written.
        shards: the shards that this rank writes.
        then: what the first rank writes when all shards are there: small files, and last the file
            that makes the others count (the index, or the only file of weights).
        names: names of the files that this rank knows of; on the first rank, of all files.
        left_out: keys of the values that are not written.
        stem: what the names of shards begin with.
        digest: stands for the arguments that say which tensors lie where; the same on all ranks.
    """

    source: CheckpointSource
    tensors: Mapping[str, TensorInfo]
    shards: list[PlannedFile]
    then: list[PlannedFile]
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    stem: str
    digest: str


def _plan(
    checkpoint: Checkpoint,
    name: str | None,
    keys: Patterns,
    *,
    rename: Rename,
    dtype: torch.dtype | None,
    most_bytes: int,
    stem: str,
    copied: Callable[[], list[PlannedFile]],
    group: dist.ProcessGroup | None,
    trust_pickle: bool,
) -> _Plan:
    """Plan the files. Their names come first, so that what cannot be written is refused at once.

    Args:
        checkpoint: the opened checkpoint.
        name: name of the one file to write; None for a folder of safetensors.
        keys: the keys to write.
        rename: rules for their names in the files.
        dtype: dtype of floating-point tensors.
        most_bytes: size at which another shard begins.
        stem: what the names of shards begin with.
        copied: returns the files to copy; called on the first rank.
        group: the ranks that write.
        trust_pickle: as for `export_checkpoint`.
    """
    is_torch = name is not None and name.endswith(TORCH_SUFFIXES)
    selected = None if keys is None else checkpoint.matching(keys)
    adapter = adapter_folder(checkpoint, selected) if name is None else None
    if adapter and rename:
        raise InputError(
            "PEFT has its own names for the tensors of an adapter, so rename= cannot change them",
            advice="export to one file, such as adapter.safetensors, to choose the names",
            url=checkpoint.url,
        )
    if adapter:
        selected = list(adapter.names)
    source = CheckpointSource(checkpoint, selected, values=is_torch and is_first(group))
    names = adapter.names if adapter else new_names(source.keys, rename)
    tensors = {key: _as_dtype(info, dtype) for key, info in source.tensors.items()}
    if not (source.keys if is_torch else tensors):
        raise InputError(
            "nothing to export: no key is that of a tensor, and safetensors hold only these",
            advice="choose others with keys=, or export to a .pt file",
            url=checkpoint.url,
        )
    cut: list[PlannedFile] = []
    then: list[PlannedFile] = []
    if adapter:
        then = [safetensors_file(WEIGHTS_FILE, list(tensors), tensors, names)]
    elif name is None:
        cut, last = shards(tensors, names, most_bytes, stem, count_ranks(group))
        then = [last]
    elif is_torch and is_first(group):
        nest = partial(_flat, names) if rename else checkpoint.nested
        if name.endswith(".ckpt") and META_KEY in source.values and not rename:
            nest = partial(nest_for_lightning, checkpoint.nested, trust_pickle=trust_pickle)
        then = [torch_file(name, tensors, lambda filled: nest({**filled, **source.values}))]
    elif not is_torch:
        then = [safetensors_file(name, list(tensors), tensors, names)]
    if is_first(group):
        small = copied()
        named = {file.name for file in small}
        if name is None:
            own_files = trainer_files(checkpoint)
            if adapter:
                own_files += [PlannedFile.of(CONFIG_FILE, adapter.config.encode())]
            small += [file for file in own_files if file.name not in named]
        then = small + then
    else:
        then = []
    dtypes = [str(info.dtype) for info in tensors.values()]
    return _Plan(
        source=source,
        tensors=tensors,
        shards=share_out(cut, count_ranks(group))[rank_in(group)],
        then=then,
        names=tuple(file.name for file in (*then[:-1], *cut, *then[-1:])),
        left_out=() if is_torch else tuple(key for key in source.keys if key not in tensors),
        stem=stem,
        digest=xxhash.xxh3_64_hexdigest(repr((names, dtypes, most_bytes)).encode()),
    )


def _as_dtype(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    if dtype is None or not info.dtype.is_floating_point:
        return info
    return TensorInfo(info.shape, dtype, info.starts)


def _flat(names: Mapping[str, str], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under their new names, in the order of the checkpoint."""
    return {names[key]: flat[key] for key in names}


class _Export:
    """Writes files, and removes them again if that fails on any rank.

    Another export may write to the same place at the same time. The first to write what makes its
    files count wins. The other one fails, and spoils nothing of the first:

    - Shards have names that no other export uses. An export that finds nothing there creates a
      claim, which only one can, and has the usual names. Another has names with digits of its own.
    - The other files are put on the condition that they are as they were when the export began. (In
      parts there are no conditions: of two that write one large file, the last to end stays.)
    - An index and one file are not kept apart so. Who has put one of them looks for the other.
    - A file is only put back or removed while it is as this export has written it. A store cannot
      delete on a condition, so that look comes right before.

    Where the store has no conditional writes, exports to one place must not overlap.

    Args:
        spec: the folder.
        plan: what to write.
        channel: channel for the events.
        group: the ranks that write; None if this process is alone.
    """

    def __init__(
        self, spec: StoreSpec, plan: _Plan, channel: Channel, group: dist.ProcessGroup | None
    ) -> None:
        self._spec = spec
        self._store = spec.open()
        self._plan = plan
        self._channel = channel
        self._group = group
        self._progress = Progress(spec.config.stall_timeout_seconds, channel)
        # The files of an earlier export that are replaced or removed.
        self._earlier: dict[str, ObjectMeta] = {}
        # The version of each file that this rank has written; None while it is written, or if it is
        # not known whether it arrived. (One that Ctrl-C has not stopped in time arrives yet.)
        self._written: dict[str, Version | None] = {}
        # Files that this rank has replaced, to be put back if the export fails.
        self._replaced: dict[str, bytes] = {}
        # The content of the claim, by which this export knows it.
        self._nonce = new_nonce().encode()

    def run(self, *, overwrite: bool) -> dict[str, int]:
        """Write the files; return the sizes of those of all ranks, by name. A collective."""
        url, group = self._spec.url, self._group
        self._earlier, new_folders = on_first(
            lambda: self._check_destination(overwrite=overwrite), url, group
        )
        try:
            on_first(self._claim, url, group)
            _, failed = capture(self._write_shards)
            written_by_ranks = from_all(self._written, url, group)
            raise_on_all(failed, url, group)
            shards = {name: written[name] for written in written_by_ranks for name in written}
            sizes = on_first(lambda: self._finish(shards), url, group)
        except BaseException as error:
            self._undo(error)
            self._remove_lock()
            for folder in new_folders:
                with suppress(OSError):  # other ranks have files in it, or have removed it
                    folder.rmdir()
            raise
        on_first(self._remove_earlier, url, group)
        return sizes

    @property
    def _claim_name(self) -> str:
        """The name of the file that only one of several exports can create."""
        names = self._plan.names
        return f"{ONE_FILE if has_weights(names) else names[-1]}{CLAIM_SUFFIX}"

    @property
    def _shards(self) -> set[str]:
        """The names of the shards of all ranks."""
        return {*self._plan.names} - {file.name for file in self._plan.then}

    @cached_property
    def _can(self) -> Capabilities:
        """The conditional writes that the store has."""
        is_here = self._spec.parsed.scheme in ("file", "memory")
        return self._store.capabilities if is_here else probed(self._store)

    def _check_destination(self, *, overwrite: bool) -> tuple[dict[str, ObjectMeta], list[Path]]:
        """Return the existing files that the export replaces or removes, and the folders it makes.

        Raises:
            InputError: there are such files, and they are not to be replaced.
        """
        names = self._plan.names
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two files would be called {name}", url=self._store.url)
        earlier = self._present()
        if earlier and not overwrite:
            text = f"{min(earlier)} exists there already; overwrite=True replaces or removes it"
            if [*earlier] == [self._claim_name]:
                text = (
                    f"another export is under way there, or has died ({min(earlier)} is there);"
                    " overwrite=True goes on all the same"
                )
            raise InputError(text, url=self._store.url)
        folder = Path(self._spec.parsed.prefix)
        above = (folder, *folder.parents) if self._spec.parsed.scheme == "file" else ()
        return earlier, [directory for directory in above if not directory.exists()]

    def _present(self) -> dict[str, ObjectMeta]:
        """Return the files that are there and are replaced or removed by this export.

        What makes files count is looked at first. Whoever puts it later makes this export fail;
        whoever has put it before had written its shards by then, so the listing has them.
        """
        counting = {name: self._head(name) for name in self._counting}
        names = {*self._plan.names, self._claim_name}
        if has_weights(self._plan.names):
            names = replaced_by(names, names_in(self._spec, self._store))
        others = in_waves(self._head, sorted(names - counting.keys()))
        return {meta.key: meta for meta in (*counting.values(), *others) if meta}

    def _claim(self) -> None:
        """Claim the place, if nothing is there that counts.

        Raises:
            LostRaceError: another export has begun there since this one looked.
        """
        can_create = self._can.conditional_create
        weights_go = has_weights(self._plan.names)
        if has_weights(self._earlier) if weights_go else self._earlier:
            if self._shards and self._plan.stem == STEM:
                raise self._lost(min(self._earlier))
        elif can_create:
            name = self._claim_name
            self._written[name] = None
            self._target({name: None}).put(name, self._nonce)

    def _head(self, name: str) -> ObjectMeta | None:
        try:
            return self._store.head(name)
        except ObjectNotFoundError:
            return None

    def _write_shards(self) -> None:
        """Write the shards of this rank."""
        own = [*self._plan.shards, *self._plan.then]
        self._channel.emit(
            Planned,
            self._channel.began_at,
            operation="export",
            items=sum(len(file.keys) for file in own),
            size_bytes=sum(file.size_bytes for file in own),
            objects=len(own),
            requests=len(own),
        )
        for file in self._plan.shards:
            self._write(file)

    @property
    def _counting(self) -> tuple[str, ...]:
        """The names of the files that make others count."""
        names = self._plan.names
        return (INDEX, ONE_FILE) if has_weights(names) else names[-1:]

    def _changed(self) -> str | None:
        """Return what makes files count and was written since this export began; None if none."""
        changed = (name for name in self._counting if self._is_changed(name, self._head(name)))
        return next(changed, None)

    def _is_changed(self, name: str, now: ObjectMeta | None) -> bool:
        earlier = self._earlier.get(name)
        return (now and now.version) != (earlier and earlier.version)

    def _lost(self, name: str) -> LostRaceError:
        return LostRaceError(
            f"another export has written or removed {name} there meanwhile",
            advice="export again when none is under way (the weights of this one are removed)",
            url=self._store.url,
        )

    def _finish(self, shards: Mapping[str, Version | None]) -> dict[str, int]:
        """Write all other files, now that the shards are there; return the sizes of all files."""
        *small, last = self._plan.then
        for file in small:
            self._write(file)
        written = {**shards, **self._written}
        sizes = self._sizes(written)
        sizes[last.name] = self._write(last)
        self._check_that_it_counts(last.name, written)
        return {name: sizes[name] for name in self._plan.names}

    def _sizes(self, written: Mapping[str, Version | None]) -> dict[str, int]:
        """Return the sizes of files of this export.

        Raises:
            LostRaceError: one is not as this export has written it.
            InputError: one of another rank is not there.
        """
        try:
            heads = in_waves(self._pinned(written).head, [*written])
            return {meta.key: meta.size_bytes for meta in heads}
        except PreconditionFailedError as error:
            raise self._lost(str(error.object_key)) from error
        except ObjectNotFoundError as error:
            if error.object_key in self._written:
                raise self._lost(str(error.object_key)) from error
            raise InputError(
                f"another rank has written {error.object_key}, and this one does not see it: all"
                " ranks need one folder or object store that they share",
                url=self._store.url,
            ) from error

    def _check_that_it_counts(self, last: str, written: Mapping[str, Version | None]) -> None:
        """Check that the weights of this export count, and not those of another export.

        An index and one file have no condition in common, so both may have been put. Then the index
        counts, if its shards are there, and this export removes the file.

        Raises:
            LostRaceError: the file of this export does not count.
        """
        if last == ONE_FILE and self._is_changed(INDEX, self._head(INDEX)):
            raise self._lost(INDEX)
        if last == INDEX and self._is_changed(ONE_FILE, one := self._head(ONE_FILE)) and one:
            self._sizes(written)
            self._earlier[ONE_FILE] = one

    def _pinned(self, written: Mapping[str, Version | None]) -> PinnedStore:
        """Return the store, which refuses files that are not as this export has written them."""
        is_known = self._store.capabilities.conditional_update
        versions = {name: version for name, version in written.items() if version and is_known}
        return PinnedStore(self._store, versions)

    def _write(self, file: PlannedFile) -> int:
        """Write one file from slabs that are read ahead; return its size in bytes.

        Raises:
            LostRaceError: another export has ended, whose files this one would replace.
        """
        if (changed := self._changed()) is not None:
            raise self._lost(changed)
        earlier = self._earlier.get(file.name)
        if earlier is not None and earlier.size_bytes <= _KEPT_MOST_BYTES:
            get = partial(self._store.get, max_size_bytes=_KEPT_MOST_BYTES)
            self._replaced[file.name], _ = get(file.name)
        source, tensors = self._plan.source, self._plan.tensors
        self._written[file.name] = None
        plan = plan_parts(file.size_bytes, self._spec.config.part_size_bytes)

        def read() -> Iterator[ByteArray]:
            reading.close()  # the reads of an earlier try of this upload
            slabs = (
                slab
                for key in file.keys
                for slab in cut(key, *source.tensors[key][:2], source.tensors[key].starts)
            )
            parts = read_ahead(slabs, source.read)
            reading.callback(stop, parts)

            def tensor(key: str) -> Iterator[ByteArray]:
                remaining_bytes = tensor_bytes(tensors[key])
                while remaining_bytes:
                    memory = byte_memory(next(parts).to(tensors[key].dtype))
                    assert memory is not None
                    remaining_bytes -= memory.nbytes
                    for at in range(0, memory.nbytes, plan.slice_size_bytes):
                        yield memory[at : at + plan.slice_size_bytes]

            return file.buffers(tensor)

        # No other export has the names of shards.
        expected: dict[str, Version | None] = {}
        if file not in self._plan.shards:
            expected[file.name] = earlier.version if earlier else None
        with ExitStack() as reading:
            uploaded = upload_object(
                self._target(expected),
                file.name,
                Content(read),
                plan,
                config=self._spec.config,
                progress=self._progress,
                most=max(2, COPIED_MOST_BYTES // plan.part_size_bytes),
            )
        return uploaded.size_bytes

    def _target(self, expected: Mapping[str, Version | None]) -> _Target:
        return _Target(
            self._store,
            self._can if expected else self._store.capabilities,
            expected=expected,
            written=self._written,
            clock=Clock.of_job(self._spec.config.stall_timeout_seconds),
            lost=self._lost,
        )

    def _undo(self, error: BaseException) -> None:
        """Remove the files that this rank has written, and put back those that it has replaced.

        What another export has written since stays. Where one has ended, earlier weights are not
        put back, and no small file is removed: it may have written the same bytes, which look the
        same. If a rank has died, the first removes its shards; if it was the first, after the end
        of the export, the export stays.
        """
        names = list(reversed(self._written))
        if self._group is not None and isinstance(error, RankFailedError):
            if is_first(self._group):
                names += sorted(self._shards - {*names, *self._earlier})
            elif self._changed():
                return
        small = {file.name for file in self._plan.then[:-1]}
        is_lost = type(error) is LostRaceError
        unremoved = []
        for name in names:
            may_remove, may_put_back = not (is_lost and name in small), not is_lost or name in small
            try:
                self._undo_file(name, may_remove=may_remove, may_put_back=may_put_back)
            except (ObjectNotFoundError, PreconditionFailedError):
                continue
            except DcpObjstoreError:
                unremoved.append(name)
        if unremoved:
            error.add_note(f"{', '.join(unremoved)} could not be removed from {self._store.url}")

    def _undo_file(self, name: str, *, may_remove: bool, may_put_back: bool) -> None:
        """Remove one file, or put back what it has replaced, if it is known to be of this export.

        Raises:
            ObjectNotFoundError, PreconditionFailedError: it is not there, or is another's.
        """
        version = self._written.get(name)
        if name.endswith(CLAIM_SUFFIX):
            if self._store.get(name, max_size_bytes=1024)[0] != self._nonce:
                return
        elif version is None and name not in self._shards:
            return
        self._pinned(self._written).head(name)
        if name not in self._earlier or not may_put_back:
            if may_remove:
                self._store.delete(name)
        elif name in self._replaced:
            condition = None
            if version is not None and self._can.conditional_update:
                condition = if_version(self._store, version)
            self._store.put(name, self._replaced[name], precondition=condition)

    def _remove_lock(self) -> None:
        if isinstance(self._store, LocalStore):
            self._store.remove_lock()

    def _remove_earlier(self) -> None:
        """Remove the claim, and the files of an earlier export that were not replaced.

        The index goes first, and nothing goes once there is another index: its shards may be among
        what this export has taken for leftovers.
        """
        if self._claim_name in self._written:
            self._remove_unchanged(self._claim_name, self._written[self._claim_name])
        earlier = {name: meta.version for name, meta in self._earlier.items()}
        index = self._written.get(INDEX, earlier.get(INDEX))
        for name in sorted(earlier.keys() - {*self._plan.names}, key=lambda name: name != INDEX):
            now = self._head(INDEX)
            if now and not (index and is_same_state(now.version, index)):
                break
            self._remove_unchanged(name, earlier[name])
        self._remove_lock()

    def _remove_unchanged(self, name: str, version: Version | None) -> None:
        """Remove a file, unless it is not in this state, as far as that is known."""
        with suppress(ObjectNotFoundError, PreconditionFailedError):
            self._pinned({name: version}).head(name)
            self._store.delete(name)


class _Target(WrappedStore):
    """The folder of an export: notes what is written, and puts a file only where it is as it was.

    Args:
        inner: the store.
        can: the conditional writes that it has.
        expected: the state in which a file must be when it is put in one request; None: it must not
            be there. Other files are put whatever is there.
        written: gets the version of each file that arrives.
        clock: bounds how long a file is put again until it is known whether it arrived.
        lost: makes the error of a file that was in another state.
    """

    def __init__(
        self,
        inner: ObjectStore,
        can: Capabilities,
        *,
        expected: Mapping[str, Version | None],
        written: dict[str, Version | None],
        clock: Clock,
        lost: Callable[[str], LostRaceError],
    ) -> None:
        super().__init__(inner)
        self._can, self._expected, self._written = can, expected, written
        self._clock, self._lost = clock, lost

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """Write a file in one request.

        Raises:
            LostRaceError: it is not in the state that was expected.
            CommitUnknownError: the store did not say in time whether it arrived.
        """
        before = self._expected.get(key)
        fenced = self._can.conditional_create if before is None else self._can.conditional_update
        if key not in self._expected or not fenced:
            self._written[key] = super().put(key, data, precondition=precondition, retry=retry)
            return self._written[key] or Version()
        body = b"".join(as_buffers(data))
        outcome = compare_and_swap(
            self.inner,
            key,
            body,
            before,
            tries=self._clock.tries(),
            what=key,
            read=lambda store: _read(store, key, len(body)),
            landed=lambda seen: seen == body,
        )
        if not outcome.landed:
            raise self._lost(key)
        version = outcome.version
        if key == INDEX and outcome.stored:  # no other has these names in it
            version = outcome.stored.version
        self._written[key] = version
        return version or Version()

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """Write a file in parts, whatever is there."""
        version = super().put_stream(
            key, buffers, part_size_bytes=part_size_bytes, max_concurrency=max_concurrency
        )
        self._written[key] = version
        return version


def _read(store: ObjectStore, key: str, size_bytes: int) -> Stored[bytes] | None:
    """Return a file and its state; no bytes of one of another size, and None if there is none."""
    try:
        meta = store.head(key)
        if meta.size_bytes != size_bytes:
            return Stored(b"", meta)
        return Stored(*store.get(key, max_size_bytes=size_bytes))
    except ObjectNotFoundError:
        return None
