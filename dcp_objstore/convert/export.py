"""`export_checkpoint`: a checkpoint as one file of `torch.save`, or as safetensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from dcp_objstore.checkpoint.names import TORCH_SUFFIXES, new_nonce
from dcp_objstore.config import TransferConfig, check_number
from dcp_objstore.convert.copied_files import named_files, names_in, trainer_files
from dcp_objstore.convert.export_folder import ExportPlan, FolderWriter
from dcp_objstore.convert.files import (
    STEM,
    PlannedFile,
    folder_and_name,
    has_weights,
    safetensors_file,
    shards,
    share_out,
    torch_file,
)
from dcp_objstore.convert.frameworks import (
    CONFIG_FILE,
    META_KEY,
    WEIGHTS_FILE,
    AdapterFolder,
    adapter_folder,
    nest_for_lightning,
)
from dcp_objstore.convert.sources import CheckpointSource
from dcp_objstore.distributed.arrivals import watching
from dcp_objstore.distributed.failures import (
    capture,
    every_rank,
    on_first,
    raise_on_all,
    typed_failures,
)
from dcp_objstore.distributed.groups import count_ranks, is_first, rank_in, sync_group
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import ConfigError, InputError, printable
from dcp_objstore.inspect.checkpoint import Checkpoint
from dcp_objstore.inspect.selection import Patterns
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.read.items import Rename, new_names
from dcp_objstore.read.peers.meeting import open_once
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import options_of_other

# The arguments that `ExportPlan.digest` stands for, as an error names them.
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
            example = printable(self.left_out[0])
            text += f"\nleft out {count} that safetensors cannot hold, such as {example}"
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
        # The first rank chooses the names of shards for all ranks. A single file has no shards.
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
                copied=partial(named_files, copied_files, partial(_spec_at, (source, target))),
                group=group,
                trust_pickle=trust_pickle,
            )
        )
        raise_on_all(refused, source.url, group, same={_SHAPING: plan and plan.digest})
        assert plan is not None
        channel = events.channel("export", target.url, *rank_and_world_size())
        channel.show(bar=progress and is_first(group), summary=False)
        with channel.watching():
            sizes = FolderWriter(target, plan, channel, group).run(overwrite=overwrite)
    # The report has URLs if `out` is a URL, and paths if it is a path.
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
    # For the default group, `sync_group(None)` makes a gloo group of all ranks, because the default
    # group itself may be NCCL's, and the training uses it.
    is_default = process_group is dist.group.WORLD
    return sync_group(None if is_default else process_group, config)


def _stem(target: StoreSpec) -> str:
    """Return what the names of shards begin with: with digits, if the folder has weights.

    So these shards never have the name of a shard that is there.
    """
    names = names_in(target, target.open())
    return f"{STEM}-{new_nonce()[:8]}" if has_weights(names) else STEM


def _spec_at(specs: Iterable[StoreSpec], url: str) -> StoreSpec:
    """Return how to open the store at a URL: as the first of these that has its scheme, if any."""
    for spec in specs:
        if url.partition("://")[0] == spec.parsed.scheme:
            return spec.at(url)
    return StoreSpec(url)


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
) -> ExportPlan:
    """Return the files that this rank writes; refuse what no file can hold, before any is written.

    Args:
        checkpoint: the opened checkpoint.
        name: name of the one file to write; None for a folder of safetensors.
        keys: the keys to write; None: all.
        rename: rules for their names in the files.
        dtype: dtype of floating-point tensors; None: as saved.
        most_bytes: size at which another shard begins.
        stem: what the names of shards begin with.
        copied: returns the files to copy; called on the first rank.
        group: the ranks that write; None if this process is alone.
        trust_pickle: as for `export_checkpoint`.

    Raises:
        InputError: there is nothing to write, nothing to copy, or `rename` does not fit an adapter.
        UnsupportedError: the format cannot hold a tensor.
    """
    is_torch = name is not None and name.endswith(TORCH_SUFFIXES)
    selected = None if keys is None else checkpoint.matching(keys)
    # PEFT's own form is a folder; one file gets the adapter's tensors as any others.
    adapter = adapter_folder(checkpoint, selected) if name is None else None
    if adapter and rename:
        raise InputError(
            "PEFT has its own names for the tensors of an adapter, so rename= cannot change them",
            advice="export to one file, such as adapter.safetensors, to choose the names",
            url=checkpoint.url,
        )
    if adapter:
        selected = list(adapter.names)
    # Only a torch.save file holds values, and the first rank writes it.
    source = CheckpointSource(checkpoint, selected, values=is_torch and is_first(group))
    names = adapter.names if adapter else new_names(source.keys, rename)
    tensors = {
        key: info._replace(dtype=dtype) if dtype and info.dtype.is_floating_point else info
        for key, info in source.tensors.items()
    }
    if not (source.keys if is_torch else tensors):
        raise InputError(
            "nothing to export: no key is that of a tensor, and safetensors hold only these",
            advice="choose others with keys=, or export to a .pt file",
            url=checkpoint.url,
        )
    shard_files: list[PlannedFile] = []
    deciding: PlannedFile | None = None
    if adapter or (name is not None and not is_torch):
        deciding = safetensors_file(name or WEIGHTS_FILE, list(tensors), tensors, names)
    elif name is None:
        shard_files, deciding = shards(tensors, names, most_bytes, stem, count_ranks(group))
    elif is_first(group):  # the other ranks have no values to make this file of
        nest = partial(_renamed_values, names) if rename else checkpoint.nested
        if name.endswith(".ckpt") and META_KEY in source.values and not rename:
            nest = partial(nest_for_lightning, checkpoint.nested, trust_pickle=trust_pickle)
        deciding = torch_file(name, tensors, lambda filled: nest({**filled, **source.values}))
    # The first rank writes all files but shards. Another one has planned `deciding` only to refuse
    # what the first rank refuses, too.
    after_shards: list[PlannedFile] = []
    if is_first(group):
        assert deciding is not None
        after_shards = copied()
        if name is None:
            after_shards += _from_checkpoint(checkpoint, adapter, after_shards)
        after_shards.append(deciding)
    dtypes = [str(info.dtype) for info in tensors.values()]
    return ExportPlan(
        source=source,
        tensors=tensors,
        own_shards=share_out(shard_files, count_ranks(group))[rank_in(group)],
        after_shards=after_shards,
        # The deciding file is the last of `after_shards`, and of all names.
        names=tuple(file.name for file in (*after_shards[:-1], *shard_files, *after_shards[-1:])),
        left_out=() if is_torch else tuple(key for key in source.keys if key not in tensors),
        stem=stem,
        digest=xxhash.xxh3_64_hexdigest(repr((names, dtypes, most_bytes)).encode()),
    )


def _from_checkpoint(
    checkpoint: Checkpoint, adapter: AdapterFolder | None, copied: Iterable[PlannedFile]
) -> list[PlannedFile]:
    """Return the small files that the checkpoint has for a folder, without namesakes of copies."""
    files = trainer_files(checkpoint)
    if adapter:
        files.append(PlannedFile.of(CONFIG_FILE, adapter.config.encode()))
    copied_names = {file.name for file in copied}
    return [file for file in files if file.name not in copied_names]


def _renamed_values(names: Mapping[str, str], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under their new names, in the order of the checkpoint."""
    return {names[key]: flat[key] for key in names}
