"""`install` for Megatron-Core: its distributed checkpoints go to and come from a bucket.

Megatron-Core (0.19) takes no storage from outside: `dist_checkpointing.save` and `load` replace a
strategy that is not one of their own. So functions of this module take the place of four things,
and do nothing for a path that is not a URL of `install`:

- `megatron.core.msc_utils.maybe_msc`, the object through which Megatron looks at its own small
  files: `metadata.json`, which the commit stands for, and the tracker
  `latest_checkpointed_iteration.txt`, which is answered from the markers of the run and is never
  an object;
- `TorchDistSaveShardedStrategy.save` and `async_save`: tensors, ShardedObjects and the common state
  become one commit;
- `schedule_async_request` of Megatron's and nvidia-resiliency-ext's `AsyncCallsQueue`: a save that
  runs in a thread of this process is waited for like their processes, and nothing is forked;
- `TorchDistLoadShardedStrategy.load`: it reads with the `FileSystemReader` that
  `dcp_objstore.install` makes for a URL, and notes from which iteration a job resumes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import time
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.msc_utils import maybe_msc
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_objstore.checkpoint.read import read_marker
from dcp_objstore.config import local_of
from dcp_objstore.distributed.failures import capture, meeting, raise_on_all
from dcp_objstore.distributed.groups import sync_group, world_group
from dcp_objstore.errors import ObjectNotFoundError, UnsupportedError
from dcp_objstore.integrations.install import (
    Installation,
    for_urls,
    install as install_for_torch,
    installed_spec,
)
from dcp_objstore.run import claim_run as run_claim
from dcp_objstore.run.housekeeping import Retainer
from dcp_objstore.run.retention import RetentionPolicy, as_policy
from dcp_objstore.run.saves import RunSaves
from dcp_objstore.run.steps import StepNames, newest_step
from dcp_objstore.state.tensor_frame import check_kind
from dcp_objstore.stores import StoreSpec
from dcp_objstore.write.api import save_planned
from dcp_objstore.write.async_save import AsyncSaveHandle, BackgroundSaves, begin_save
from dcp_objstore.write.planner import AgreeingSavePlanner

TRACKER = "latest_checkpointed_iteration.txt"
# A note in the marker of a checkpoint that `dist_checkpointing.save` has written. Megatron's other
# formats (`torch_dcp`) are saved by torch's FileSystemWriter, and have no `metadata.json`.
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
# What Megatron reads of a committed checkpoint. Digests of ours are verified by every load, so its
# own list of them is empty.
_OF_COMMIT: Mapping[str, Mapping[str, Any]] = {
    "metadata.json": _FORMAT,
    "integrity.json": {"algorithm": "sha256", "files": {}},
}
_STEP_METADATA: Mapping[str, Any] = {"metrics": None, "user_metadata": _FORMAT}
_MOST_BYTES = 2**32  # of a file that is read whole, such as `common.pt` of an older Megatron
_ITERATION = re.compile(r"iter_([0-9]{7,17})\Z")


# The name that Megatron gives the checkpoint of an iteration.
iteration_name = "iter_{:07d}".format


def iteration_number(name: str) -> int | None:
    """Return the iteration in such a name; None for any other, `iter_00000010` too."""
    match = _ITERATION.match(name)
    number = int(match[1]) if match else None
    return number if number is not None and iteration_name(number) == name else None


ITERATIONS = StepNames(iteration_name, iteration_number)


# --- what is installed


class _Installed:
    """The hooks that are installed in this process.

    Attributes:
        keep, claims, housekeeping: the arguments of `install` for runs.
        overwrite: whether a committed checkpoint that is not an iteration of a run is replaced.
        saving: the arguments of `install` for each save.
        runs: the runs that this job saves to or has loaded from, by their URLs.
        background: the background saves of checkpoints that are not an iteration of a run.
    """

    keep: RetentionPolicy | None = None
    claims = True
    housekeeping: Mapping[str, Any] = {}
    overwrite = True
    saving: Mapping[str, Any] = {}
    runs: ClassVar[dict[str, _Run]] = {}
    background = BackgroundSaves()


def install(
    *,
    keep: RetentionPolicy | Iterable[RetentionPolicy] | None = None,
    claim_run: bool = True,
    grace_seconds: float = 0.0,
    sweep: bool = True,
    base: str | None = None,
    **options: Any,
) -> Installation:
    """Let Megatron-Core save to and load from a bucket with this library.

        from dcp_objstore.integrations import megatron
        megatron.install()

    Call it once on every rank, in place of `dcp_objstore.install`, which it calls. From then on, if
    a checkpoint's directory is a URL,

    - `dist_checkpointing.save` writes one checkpoint, with everything that Megatron saves, which
      one conditional PUT commits. With `async_sharded_save=True` the state is copied, and the copy
      is saved by threads of this process; Megatron's `AsyncCallsQueue`, or that of
      nvidia-resiliency-ext, finalizes the save and raises its error on every rank;
    - `dist_checkpointing.load`, `load_common_state_dict`, `load_tensors_metadata` and the others
      read it, and checkpoints that Megatron itself has written (`torch_dist`), in any layout that
      Megatron reshards;
    - an iteration `iter_0000100` is a step of the run above it, as one of `CheckpointManager`: the
      first save claims the run; if the job has resumed from an earlier iteration, later ones stop
      counting; and `keep` deletes after a commit. `--load` finds the newest iteration that counts.

    Other directories stay Megatron's.

    Args:
        keep: which iterations to keep, as for `CheckpointManager`. Default: all.
        claim_run: make this job the only one that adds to the run, with its first save, as for
            `CheckpointManager`. Default True.
        grace_seconds: keep the objects of a deleted iteration this long, for jobs that are reading
            it. Default 0: they go with it.
        sweep: remove what dead saves have left, after the first commit and then once an hour.
            Default True.
        base: a checkpoint from which what has not changed is copied, as for `CheckpointManager`.
            Default: upload all.
        options: those of `dcp_objstore.install`. `overwrite` does not apply to iterations.

    Returns:
        What `dcp_objstore.install` returns. `dcp_objstore.uninstall` ends both.

    Raises:
        UnsupportedError: this version of Megatron-Core or torch has no place to hook.
        ConfigError, InvalidUrlError: as `dcp_objstore.install`.
    """
    _Installed.keep, _Installed.claims = as_policy(keep), claim_run
    _hook()
    installation = install_for_torch(**options)
    _Installed.housekeeping = {"grace_seconds": grace_seconds, "sweeps": sweep}
    _Installed.overwrite = options.get("overwrite") is not False
    _Installed.saving = {
        "allow_unfenced": options.get("allow_unfenced", False),
        "local": local_of(options.get("local")),
        "base": base,
    }
    _Installed.runs = {}
    return installation


@functools.cache
def _hook() -> None:
    """Put our functions in place of Megatron's, once in a process."""
    if not hasattr(strategies, "get_async_strategy"):
        raise UnsupportedError(
            "install() cannot hook this version of Megatron-Core; use megatron-core 0.19"
        )
    save, load = strategies.TorchDistSaveShardedStrategy, strategies.TorchDistLoadShardedStrategy
    # Each library has classes of the same names: Megatron's own and, if it is installed,
    # nvidia-resiliency-ext.
    libraries = [strategies.get_async_strategy("mcore")[1]]
    with contextlib.suppress(ModuleNotFoundError):
        libraries.append(strategies.get_async_strategy("nvrx")[1])
    save.save = for_urls(_save, save.save, 2)
    save.async_save = for_urls(_async_save, save.async_save, 2)
    load.load = _with_resume(load.load)
    for library in libraries:
        queue, writer = library["AsyncCallsQueue"], library["FileSystemWriterAsync"]
        queue.schedule_async_request = _with_threads(queue.schedule_async_request)
        writer.__init__ = for_urls(_refuse, writer.__init__, 1)
    # An object without our functions, which answers for other paths.
    original = type(maybe_msc)()
    for name, ours in _REPLACEMENTS.items():
        # For "os.path.exists", `maybe_msc` gets an attribute `os`, that one `path` and so on.
        owner, path = maybe_msc, name.split(".")
        for number, part in enumerate(path[:-1], 1):
            owner = vars(owner).setdefault(part, _Original(original, ".".join(path[:number])))
        setattr(owner, path[-1], for_urls(ours, _Original(original, name)))


class _Original:
    """What Megatron's object has under a name. It is looked up at each use: settings change it."""

    def __init__(self, owner: Any, name: str) -> None:
        self._find = functools.partial(operator.attrgetter(name), owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._find()(*args, **kwargs)


def _refuse(spec: StoreSpec, *_: Any, **__: Any) -> None:
    """Refuse to make Megatron's own writer for the background, which takes no URL."""
    raise UnsupportedError(
        "Megatron saves this format in the background by a writer of files; save without"
        " --async-save, or with --ckpt-format torch_dist",
        url=spec.url,
    )


# --- small files


# The content of the file whose existence was last asked for, by its URL, for the read that follows.
_last_looked_up: dict[str, bytes | None] = {}


def _exists(spec: StoreSpec, _path: Any) -> bool:
    """Return whether one of Megatron's files exists; keep its content, which is read next."""
    _last_looked_up.clear()
    _last_looked_up[spec.url] = _body(spec)
    return _last_looked_up[spec.url] is not None


def _open(spec: StoreSpec, _path: Any, mode: str = "r", **_: Any) -> Any:
    """Open a file that Megatron reads or writes in a checkpoint or run on a bucket."""
    name = spec.parent()[1]
    if "r" not in mode:
        if name != TRACKER and name not in _OF_COMMIT:
            raise UnsupportedError(
                "Megatron writes this as a local file; name a local folder for it", url=spec.url
            )
        # What Megatron writes there goes nowhere: the commit says all of it.
        return io.BytesIO() if "b" in mode else io.StringIO()
    body = _last_looked_up.pop(spec.url) if spec.url in _last_looked_up else _body(spec)
    if body is None:
        raise FileNotFoundError(f"there is no object {spec.url!r}")
    return io.BytesIO(body) if "b" in mode else io.StringIO(body.decode())


def _body(spec: StoreSpec) -> bytes | None:
    """Return the content of one of Megatron's files, or None if there is none."""
    folder, name = spec.parent()
    if folder is None:
        return None
    if name == TRACKER and (tracker := _tracker_text(folder)) is not None:
        return tracker.encode()
    # A checkpoint that `_save` has written has no such objects; one of Megatron's own writer has.
    metadata = _metadata_of(folder) if name in _OF_COMMIT else None
    if metadata is not None and _FORMAT.items() <= metadata.items():
        return json.dumps(_OF_COMMIT[name]).encode()
    with contextlib.suppress(ObjectNotFoundError):
        return folder.open().get(name, max_size_bytes=_MOST_BYTES)[0]
    return None


def _metadata_of(checkpoint: StoreSpec) -> Mapping[str, Any] | None:
    """Return the `user_metadata` of a committed checkpoint, or None if there is none."""
    stored = read_marker(checkpoint.open())
    if stored is None or not stored.record.is_committed:
        return None
    return stored.record.user_metadata


def _tracker_text(run: StoreSpec) -> str | None:
    """Return what the tracker of a run says: the newest iteration that counts, or "release"."""
    newest = newest_step(run, ITERATIONS)
    if newest is not None:
        return str(newest)
    return "release" if _metadata_of(run.child("release")) is not None else None


class _Path:
    """What Megatron asks of a `pathlib.Path` of a checkpoint."""

    def __init__(self, spec: StoreSpec, _path: Any = None) -> None:
        self._spec = spec

    def iterdir(self) -> Iterator[_Path]:
        """Yield nothing: no file of a name is looked for in a distributed checkpoint."""
        return iter(())

    def joinpath(self, name: str) -> _Path:
        """Return the path of an object below."""
        return _Path(self._spec.child(name))

    def exists(self) -> bool:
        """Return whether the object exists."""
        folder, name = self._spec.parent()
        with contextlib.suppress(ObjectNotFoundError):
            return folder is not None and bool(folder.open().head(name))
        return False


def _load_file(spec: StoreSpec, path: Any, **settings: Any) -> Any:
    """Load a file as `torch.load` does."""
    return torch.load(_open(spec, path, "rb"), **settings)


# By their names in `maybe_msc`. What is not here stays its own.
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "open": _open,
    "Path": _Path,
    "path_isdir": lambda *_, **__: True,  # `metadata.json` is looked for next
    "os.makedirs": lambda *_, **__: None,
    "os.path.exists": _exists,
    "os.path.isfile": _exists,
    "torch.load": _load_file,
}


# --- runs


def _access(spec: StoreSpec) -> dict[str, Any]:
    """Return the arguments by which a save or a claim reaches the store."""
    return {"storage_options": spec.storage_options, "config": spec.config}


class _Run:
    """A run that this job saves to, or has loaded from."""

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._saves: RunSaves | None = None
        self.resumed: int | None = None  # an iteration that was loaded since the last save

    def saves(self) -> RunSaves:
        """Return the saves of this job. A collective, before each save."""
        spec = self._spec
        if self._saves is None:
            with meeting(spec.url, world_group()):
                group = sync_group(None, spec.config)
            retainer = Retainer(spec, _Installed.keep, names=ITERATIONS, **_Installed.housekeeping)
            if _Installed.claims:
                retainer.claim = run_claim.claim_run(spec.url, **_access(spec))
            saving = {**_access(spec), **_Installed.saving}
            self._saves = RunSaves(
                spec, group, retainer, user_metadata={}, max_failed=0, saving=saving
            )
        if self.resumed is not None:
            self._saves.finish_pending()  # wait for a save that began before the load
            self._saves.resume(self.resumed, went_back=True)
            self.resumed = None
        return self._saves


def _run_at(spec: StoreSpec) -> tuple[_Run | None, int]:
    """Return the run of which a checkpoint is an iteration, and its number; (None, 0) if none."""
    folder, name = spec.parent()
    number = iteration_number(name)
    if folder is None or number is None:
        return None, 0
    return _Installed.runs.setdefault(folder.url, _Run(folder)), number


def _with_resume(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note from which iteration a job resumes."""

    @functools.wraps(original)
    def load(self: Any, state: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        spec = installed_spec(checkpoint_dir)
        if spec is None:
            return original(self, state, checkpoint_dir, *args, **kwargs)
        # With a cache, Megatron would read by a class of its own, and not by ours.
        self.cache_metadata = False
        loaded = original(self, state, checkpoint_dir, *args, **kwargs)
        run, iteration = _run_at(spec)
        if run is not None:
            run.resumed = iteration
        return loaded

    return load


# --- saves


class _Parts(NamedTuple):
    """A sharded state as a flat dict, and how DCP names its parts.

    Attributes:
        values: this rank's shards, each a plain tensor, and its objects, pickled.
        items: what DCP writes of each, by the same names.
    """

    values: dict[str, Any]
    items: dict[str, WriteItem]

    @classmethod
    def of(cls, state: Any, keep_only_main_replica: bool) -> _Parts:
        """Return the parts of a state, as Megatron's own strategy divides it."""
        parts = cls({}, {})
        flat = strategies._replace_state_dict_keys_with_sharded_keys(state, keep_only_main_replica)
        for key, shards in flat[0].items():
            if isinstance(shards[0], ShardedObject):
                body = io.BytesIO()
                torch.save([shard.data for shard in shards], body)
                parts.values[key] = body.getvalue()
                parts.items[key] = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
                continue
            for number, shard in enumerate(shards):
                name = f"{key}#{number}"
                parts.values[name], parts.items[name] = _shard(key, shard)
        return parts

    def planner(self, url: str, state: Mapping[str, Any], ranks: int) -> _Planner:
        """Return the planner of a save of these parts."""
        return _Planner(url, state, ranks, self.items)


def _shard(key: str, shard: ShardedTensor) -> tuple[torch.Tensor, WriteItem]:
    """Return the tensor that a ShardedTensor of Megatron has on this rank, and its write item."""
    if shard.data is None or shard.flattened_range is not None:
        what = "no data" if shard.data is None else "a flattened_range"
        raise UnsupportedError(f"this ShardedTensor has {what}, and cannot be saved", key=key)
    tensor = shard.data.detach()
    check_kind(tensor, key)
    if shard.prepend_axis_num:
        tensor = tensor.reshape((1,) * shard.prepend_axis_num + tuple(shard.local_shape))
    offsets = torch.Size(shard.global_offset)
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, tensor.size()),
        TensorProperties.create_from_tensor(tensor),
        torch.Size(shard.global_shape),
    )
    return tensor, WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


class _Planner(AgreeingSavePlanner):
    """Plans a save of `_Parts`; the objects are pickled as Megatron's own planner wants them."""

    def __init__(
        self, url: str, state: Mapping[str, Any], ranks: int, items: Mapping[str, WriteItem]
    ) -> None:
        super().__init__(url, state, ranks)
        self.flatten_state_dict = self.flatten_sharded_tensors = False
        self._items = list(items.values())
        self._names = {item.index: name for name, item in items.items()}

    def make_items(self) -> list[WriteItem]:
        """Return what this rank has."""
        return self._items

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the part that an item stands for."""
        return self.state_dict[self._names[index]]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's
        """Return an object's pickle as it is."""
        return io.BytesIO(object) if write_item.type is WriteItemType.BYTE_IO else object


def _parts(spec: StoreSpec, strategy: Any, state: Any) -> _Parts:
    """Return what this rank saves; raise on every rank if one cannot. A collective."""
    parts, failed = capture(lambda: _Parts.of(state, strategy.keep_only_main_replica))
    raise_on_all(failed, spec.url, sync_group(None, spec.config))
    assert parts is not None
    return parts


def _settings(spec: StoreSpec) -> dict[str, Any]:
    """Return the arguments of a save of a checkpoint that is not an iteration of a run."""
    own = {"overwrite": _Installed.overwrite, "progress": False, "user_metadata": _FORMAT}
    return {**_access(spec), **_Installed.saving, **own}


def _save(spec: StoreSpec, strategy: Any, state: Any, _path: Any) -> None:
    """Save a state: as a step if it is an iteration of a run, else as a checkpoint."""
    parts, (run, number) = _parts(spec, strategy, state), _run_at(spec)
    if run is None:
        save_planned(parts.values, spec.url, planner=parts.planner, **_settings(spec))
    else:
        run.saves().save(number, parts.values, parts.planner, **_STEP_METADATA)


def _async_save(
    spec: StoreSpec, strategy: Any, state: Any, _path: Any, async_strategy: str = "nvrx"
) -> Any:
    """Begin a save in the background; return Megatron's request, which stands for it."""
    request = strategies.get_async_strategy(async_strategy, "AsyncRequest")[1]
    parts, (run, number) = _parts(spec, strategy, state), _run_at(spec)
    values, planner = parts.values, parts.planner
    if run is None:
        background = _Installed.background
        handle = begin_save(background, values, spec.url, planner=planner, **_settings(spec))
        return request(_Thread(handle), (), [handle.result])
    saves = run.saves()
    of_step = saves.async_save(number, values, "wait", planner, **_STEP_METADATA)
    assert of_step is not None  # with "wait", no save is skipped
    return request(_Thread(of_step), (), [functools.partial(saves.finish_pending, of_step)])


class _Thread:
    """A save in the background, as the process that Megatron would have forked for it.

    Its error is raised on every rank when the request is finalized.
    """

    def __init__(self, handle: AsyncSaveHandle) -> None:
        self._handle = handle

    def __call__(self) -> None:
        """Wait for the save, as a request that is executed at once does."""
        self._handle._wait()

    def is_alive(self) -> bool:
        """Return whether the save runs."""
        return not self._handle.done()

    join = __call__

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed, so the save goes on."""


def _with_threads(original: Callable[..., int]) -> Callable[..., int]:
    """Wrap `schedule_async_request`: if a save runs in a thread, queue it, and fork no process."""

    @functools.wraps(original)
    def schedule_async_request(self: Any, request: Any) -> int:
        if not isinstance(request.async_fn, _Thread):
            return original(self, request)
        # Do as the original does, with the thread in the place of its process.
        library = sys.modules[original.__module__]
        caller = library.TemporalAsyncCaller()
        caller.process, caller.start_time = request.async_fn, time()
        self.call_idx += 1
        self.async_calls.append(
            library._ActiveAsyncRequest(self.call_idx, caller, request.freeze())
        )
        return int(self.call_idx)

    return schedule_async_request
