"""`with_object_store`: Lightning's Trainer and Fabric save sharded checkpoints to object stores.

Lightning has no seam for this, so methods are put before those of one strategy (public ones) and
of its `ModelCheckpoint` callbacks (two are private). Local paths stay Lightning's.

A checkpoint has the keys that Lightning gives it (`state_dict` or `model`, `optimizer_0`; in Fabric
the keys of the state), and under `meta.pt` the bytes of Lightning's file of that name: everything
else, such as loops, schedulers, callbacks and hyperparameters. So one commit holds all of it.

This module imports neither `lightning` nor `pytorch_lightning` nor `lightning_fabric`, and serves
all three.
"""

from __future__ import annotations

import io
import posixpath
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_objstore import errors
from dcp_objstore.checkpoint.names import MARKER_KEY, is_index_key
from dcp_objstore.checkpoint.read import read_marker
from dcp_objstore.compat.values import check_safe, unpickled
from dcp_objstore.config import Local, LocalFolder, TransferConfig, local_of
from dcp_objstore.convert.frameworks import META_KEY
from dcp_objstore.distributed.failures import on_first
from dcp_objstore.distributed.groups import sync_group
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.integrations.install import SCHEMES, url_in
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import logger
from dcp_objstore.read.api import load
from dcp_objstore.run.housekeeping import Deletions, Retainer, after_commit
from dcp_objstore.run.steps import catalogue
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import checked_config
from dcp_objstore.threads import Spawned
from dcp_objstore.write.api import save
from dcp_objstore.write.async_save import AsyncSaveHandle, async_save

T = TypeVar("T")

# Attributes of strategies that save full checkpoints.
_OF_FULL_CHECKPOINTS = {"_state_dict_type": "full", "_save_distributed_checkpoint": False}
# The note of a checkpoint without optimizers, in its `user_metadata`.
_WEIGHTS_ONLY = "weights_only"


def with_object_store(
    trainer: T,
    *,
    background: bool = False,
    grace_seconds: float = 0.0,
    sweep: bool = True,
    trust_pickle: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    on_event: OnEvent | None = None,
    local: LocalFolder = None,
) -> T:
    """Make a Trainer or a Fabric save to and load from object stores, wherever a path is a URL.

        trainer = with_object_store(
            Trainer(strategy=ModelParallelStrategy(), callbacks=[ModelCheckpoint("s3://bucket/run")])
        )
        trainer.fit(model, ckpt_path="last")

    A save returns when the whole checkpoint is committed, and replaces a checkpoint of the same
    URL. A load takes checkpoints of any number of ranks. The `ModelCheckpoint` callbacks of the
    Trainer ask this library which checkpoints exist, and delete by its rules: pinned checkpoints
    and the one that the job resumed from stay. `ckpt_path="last"` is the newest committed
    checkpoint in the `dirpath` of a `ModelCheckpoint`, whatever its name; checkpoints that were
    saved with `save_weights_only=True` do not count.

    Args:
        trainer: a Trainer or Fabric with a `ModelParallelStrategy` that saves distributed
            checkpoints, or with a `FSDPStrategy(state_dict_type="sharded")`, of `lightning`,
            `pytorch_lightning` or `lightning_fabric`. It is changed in place.
        background: return from a save as soon as the state was copied; upload and commit it while
            training goes on. The next save, a load and the end of `fit` wait for it and raise its
            error. Default False.
        grace_seconds: keep the objects of a deleted checkpoint this long, for jobs that are reading
            it. They go at the first deletion when it is over; what is left when this job ends goes
            by a sweep, a day later. Default 0: they are removed with the checkpoint.
        sweep: after the first commit of this job in the `dirpath` of a `ModelCheckpoint`, and then
            once an hour, remove what no commit names there and what is older than a day, by
            `dcp_objstore.sweep`. Default True.
        trust_pickle: load values (hyperparameters, mostly) that `torch.load(weights_only=True)`
            refuses. This may run code that the checkpoint's author chose. `weights_only=False` of
            Fabric's `load` means the same; that of `fit` does not reach sharded strategies. Default
            False.
        storage_options: credentials and endpoint, as for `dcp_objstore.save`. Default: taken from
            the environment, from which Lightning's own look at a `dirpath` takes them in any case.
        config: sizes, concurrency and time-outs.
        on_event: callable that receives each event of each save and load.
        local: a folder on each node, as a path or `dos.Local`, for copies from which a job that
            starts again reads. Default None: no copies.

    Returns:
        The same Trainer or Fabric.

    Raises:
        ConfigError: it is not a Trainer or Fabric, its strategy saves full checkpoints, `config` is
            not a TransferConfig, or `local` is not a folder of this machine.
        UnsupportedError: its strategy saves no sharded checkpoints.
    """
    strategy = getattr(trainer, "strategy", None)
    if strategy is None:
        raise errors.ConfigError(
            f"with_object_store takes a Lightning Trainer or Fabric, got {type(trainer).__name__}"
        )
    if not (_has_class(strategy, "ModelParallelStrategy") or _has_class(strategy, "FSDPStrategy")):
        raise errors.UnsupportedError(
            f"{type(strategy).__name__} saves no sharded checkpoints: rank 0 writes one file, also"
            " to s3:// if s3fs is installed",
            advice='use ModelParallelStrategy, or FSDPStrategy(state_dict_type="sharded")',
        )
    if any(getattr(strategy, name, None) == value for name, value in _OF_FULL_CHECKPOINTS.items()):
        raise errors.ConfigError(
            f"this {type(strategy).__name__} saves full checkpoints, from rank 0; make it with"
            ' state_dict_type="sharded" (ModelParallelStrategy: save_distributed_checkpoint=True)'
        )
    store = _ObjectStore(
        background=background,
        deletions=Deletions(grace_seconds),
        sweep=sweep,
        trust_pickle=trust_pickle,
        access={"storage_options": storage_options, "config": checked_config(config)},
        on_event=on_event,
        local=local_of(local),
    )
    if not hasattr(strategy, "remove_checkpoint"):  # Fabric's
        _hook(strategy, _FabricStrategy(strategy, store))
        return trainer
    _hook(strategy, _TrainerStrategy(strategy, store))
    _hook_callbacks(trainer, store)
    return trainer


def _hook_callbacks(trainer: Any, store: _ObjectStore) -> None:
    """Put hooks before the methods of the `ModelCheckpoint` callbacks."""
    for callback in trainer.checkpoint_callbacks:
        if _has_class(callback, "ModelCheckpoint"):
            _hook(callback, _ModelCheckpoint(callback, store))


def _hook(target: Any, hooks: _Hooks) -> None:
    """Put the hooks before the methods of an object that have the same names."""
    for name, value in vars(type(hooks)).items():
        if callable(value):
            setattr(target, name, getattr(hooks, name))


def _has_class(value: object, name: str) -> bool:
    """Whether an object is of the class of this name of any of Lightning's packages."""
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _url(path: object) -> str | None:
    """Return the URL of the checkpoint that a path of Lightning's stands for; None for a local one.

    An index or a marker stands for its checkpoint, too: `ckpt_path="last"` needs an object that
    fsspec finds.
    """
    text = str(path)
    # A text with "://" is a URL, as it is for Lightning; `StoreSpec` refuses an unknown scheme. A
    # `pathlib.Path` has made "s3:/bucket/run" of "s3://bucket/run"; `url_in` undoes that.
    url = text if "://" in text else url_in(text, SCHEMES)
    if url is None:
        return None
    above, _, name = url.rstrip("/").rpartition("/")
    return above if name == MARKER_KEY or is_index_key(name) else url.rstrip("/")


class _Meta:
    """Lightning's `meta.pt`: read and written with the rest, so that all ranks see its errors."""

    def __init__(self, values: Mapping[str, Any], *, trust_pickle: bool) -> None:
        self.values = values
        self._trust_pickle = trust_pickle

    def state_dict(self) -> Any:
        """Return the bytes of the file."""
        file = io.BytesIO()
        torch.save(self.values, file)
        return file.getvalue()

    def load_state_dict(self, body: Any) -> None:
        """Read the bytes of the file."""
        check_safe(body, META_KEY, trust_pickle=self._trust_pickle)
        self.values = unpickled(io.BytesIO(body), weights_only=False)


@dataclass
class _ObjectStore:
    """The saves, loads and deletions of one Trainer or Fabric. All ranks call `save` and `load`.

    Attributes:
        access: the storage options and the `TransferConfig`.
        deletions: deletes checkpoints, and their objects when the grace period is over.

    The others are the arguments of `with_object_store`.
    """

    background: bool
    deletions: Deletions
    sweep: bool
    trust_pickle: bool
    access: dict[str, Any]
    on_event: OnEvent | None
    local: Local | None = None

    def __post_init__(self) -> None:
        others = {"on_event": self.on_event, "local": self.local, "progress": False}
        self._transfer = {**self.access, **others}
        self._sweepers: dict[str, Retainer] = {}  # by the URL of the run
        self._pending: AsyncSaveHandle | None = None  # the save under way in the background
        self._deletions: list[Spawned] = []  # those that may still run

    def save(
        self,
        url: str,
        parts: dict[str, Any],
        meta: Mapping[str, Any],
        user_metadata: Mapping[str, object] | None = None,
        run_url: str | None = None,
    ) -> None:
        """Save a checkpoint; then sweep its run, if that is known.

        Args:
            url: the URL of the checkpoint.
            parts: what all ranks save together: the model and the optimizers.
            meta: what only rank 0 saves: the rest of Lightning's checkpoint.
            user_metadata: what the marker says of it.
            run_url: the URL of the run. Default: not known.
        """
        self._finish_deletions()  # one may be of an earlier checkpoint at this URL
        if not current_rank():  # rank 0, or the only process
            parts = {**parts, META_KEY: _Meta(meta, trust_pickle=True)}
        options: Any = {**self._transfer, "overwrite": True, "user_metadata": user_metadata}
        if self.background:
            self._pending = async_save(parts, url, **options)
        else:
            save(parts, url, **options)
        if run_url is not None and self.sweep and not current_rank():
            sweeper = self._sweepers.setdefault(
                run_url, Retainer(StoreSpec(run_url, **self.access))
            )
            after_commit(self._pending, sweeper.sweep)

    def load(
        self, url: str, parts: dict[str, Any], *, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load into the parts in place; return what rank 0 saved besides."""
        self.finish_pending()
        trust_pickle = self.trust_pickle or weights_only is False
        meta = _Meta({}, trust_pickle=trust_pickle)
        state = {**parts, META_KEY: meta}
        report = load(state, url, strict=strict, trust_pickle=trust_pickle, **self._transfer)
        if META_KEY in report.missing:
            raise errors.StateMismatchError("Lightning did not save this checkpoint", url=url)
        return dict(meta.values)

    def exists(self, url: str) -> bool:
        """Whether a checkpoint is committed at a URL. A collective."""

        def is_committed() -> bool:
            self._finish_deletions()  # one may be of this checkpoint
            stored = read_marker(StoreSpec(url, **self.access).open())
            return stored is not None and stored.record.is_committed

        return on_first(is_committed, url, sync_group(None, self.access["config"]))

    def newest(self, run_url: str) -> str | None:
        """Return the URL of the index of the newest checkpoint to resume from, if there is one."""
        steps = catalogue(StoreSpec(run_url, **self.access)).steps
        resumable = [step for step in steps if _WEIGHTS_ONLY not in step.marker.user_metadata]
        newest = max(resumable, key=lambda step: step.committed_at, default=None)
        if newest is None or newest.marker.index is None:
            return None
        return f"{newest.store.url}/{newest.marker.index.key}"

    def delete(self, url: str) -> None:
        """Delete a checkpoint, if it exists, after the save under way. Rank 0 calls it."""

        def remove() -> None:
            try:
                # None: claims do not matter. It may be the newest: Lightning's tuner saves one only
                # for a moment.
                self.deletions.delete(StoreSpec(url, **self.access), None, allow_newest=True)
            except errors.CheckpointNotFoundError:
                pass
            except errors.CheckpointPinnedError as error:
                logger.info("%s", error)
            except errors.DcpObjstoreError as error:
                logger.warning("%s was not deleted: %s", url, error)

        self._deletions.append(after_commit(self._pending, remove))

    def finish_pending(self) -> None:
        """Wait for the save under way, raise its error, and wait for deletions."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        finally:
            self._finish_deletions()

    def _finish_deletions(self) -> None:
        """Wait for the deletions, which raise no errors."""
        while self._deletions:
            self._deletions.pop().join()


class _Hooks:
    """Methods that stand before those of an object of Lightning's, and call them for local paths.

    Args:
        target: the object.
        store: what saves, loads and deletes.
    """

    def __init__(self, target: Any, store: _ObjectStore) -> None:
        self._target = target
        self._store = store

    def _original(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the object's own method: that of its class, which the hook hides."""
        return getattr(type(self._target), name)(self._target, *args, **kwargs)

    def _shared_path(self, path: object) -> tuple[Any, str | None]:
        """Return the path of rank 0, and the URL that it stands for, if it does."""
        path = self._target.broadcast(path)
        return path, _url(path)


class _TrainerStrategy(_Hooks):
    """Before a strategy of `lightning.pytorch`."""

    def setup(self, trainer: Any) -> None:
        _hook_callbacks(trainer, self._store)  # those that the module has brought, too
        self._original("setup", trainer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        filepath, url = self._shared_path(filepath)
        if url is None or storage_options is not None:  # Lightning's method refuses storage options
            self._original("save_checkpoint", checkpoint, filepath, storage_options)
            return
        meta = dict(checkpoint)
        parts = {_model_key(self._target): meta.pop("state_dict")}
        states = meta.pop("optimizer_states", None)
        parts |= {f"optimizer_{number}": state for number, state in enumerate(states or ())}
        user_metadata: dict[str, object] = {
            name: meta[name] for name in ("epoch", "global_step") if name in meta
        }
        if states is None:  # saved with `save_weights_only=True`
            user_metadata[_WEIGHTS_ONLY] = True
        # A run, which may be swept, is a folder of one of the callbacks.
        callbacks = self._target.lightning_module.trainer.checkpoint_callbacks
        folders = {_url(getattr(callback, "dirpath", None)) for callback in callbacks}
        run_url = posixpath.dirname(url)
        self._store.save(
            url, parts, meta, user_metadata, run_url=run_url if run_url in folders else None
        )

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> dict[str, Any]:
        checkpoint_path, url = self._shared_path(checkpoint_path)
        if url is None:
            return dict(self._original("load_checkpoint", checkpoint_path, **options))
        strategy = self._target
        module = strategy.lightning_module
        parts = {_model_key(strategy): strategy.model}
        if module.trainer.state.fn == "fit":  # validation and the like need the model alone
            parts |= {
                f"optimizer_{number}": optimizer
                for number, optimizer in enumerate(strategy.optimizers)
            }
        weights_only = options.get("weights_only")
        return self._store.load(url, parts, strict=module.strict_loading, weights_only=weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        url = _url(filepath)
        if url is None:
            self._original("remove_checkpoint", filepath)
        elif self._target.is_global_zero:
            self._store.delete(url)

    def teardown(self) -> None:
        try:
            self._store.finish_pending()
        finally:
            self._original("teardown")


class _FabricStrategy(_Hooks):
    """Before a strategy of `lightning.fabric`."""

    def save_checkpoint(
        self,
        path: Any,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002 - Fabric's name
    ) -> None:
        path, url = self._shared_path(path)
        if url is None or storage_options is not None or filter is not None:
            self._original("save_checkpoint", path, state, storage_options, filter)
            return
        parts, others = _split_state(state)
        meta = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in others.items()
        }
        self._store.save(url, parts, meta)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, **options: Any
    ) -> dict[str, Any]:
        """Load into the state as Fabric does; return the values that it did not ask for."""
        path, url = self._shared_path(path)
        if url is None:
            return dict(self._original("load_checkpoint", path, state, strict, **options))
        if not isinstance(state, MutableMapping):
            raise errors.ConfigError(
                "Fabric loads a sharded checkpoint into a state, as {'model': model, ...}",
                advice="dcp_objstore.read_state_dict(url) reads it without one",
                url=url,
            )
        parts, others = _split_state(state)
        weights_only = options.get("weights_only")
        values = self._store.load(url, parts, strict=strict, weights_only=weights_only)
        absent = others.keys() - values.keys()
        if absent and strict:
            raise errors.StateMismatchError(
                f"the checkpoint does not have {', '.join(sorted(absent))}, which the state asks"
                " for (with strict=False it stays as it is)",
                url=url,
            )
        # What the state asks for is put into it, and taken from the values to return.
        for key in others.keys() - absent:
            if isinstance(others[key], Stateful):
                others[key].load_state_dict(values.pop(key))
            else:
                state[key] = values.pop(key)
        return values


class _ModelCheckpoint(_Hooks):
    """Before a `ModelCheckpoint` of a Trainer: asks for markers, not for listed objects.

    Prefixes have objects of deleted checkpoints and of saves that died, too, and s3fs lists them
    from a cache.
    """

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        url = _url(filepath)
        if url is None:
            return bool(self._original("file_exists", filepath, trainer))
        return self._store.exists(url)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return the newest checkpoint to resume from, by an object whose time fsspec can read.

        Of the last of several callbacks, Lightning takes the one with the latest time.
        """
        dirpath = self._target.dirpath
        if dirpath is None and not trainer.loggers:  # the folder that Lightning sets only later
            dirpath = posixpath.join(trainer.default_root_dir, "checkpoints")
        url = _url(dirpath)
        if url is None:
            return set(self._original("_find_last_checkpoints", trainer))
        newest = self._store.newest(url)
        return {newest} if newest is not None else set()

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        """Keep what the job resumed from, as Lightning does on a local disk."""
        url = _url(previous)
        if url is not None and trainer.ckpt_path is not None and url == _url(trainer.ckpt_path):
            return False
        return bool(self._original("_should_remove_checkpoint", trainer, previous, current))


def _model_key(strategy: object) -> str:
    """Return the key under which a strategy of the Trainer saves the model."""
    return "model" if _has_class(strategy, "FSDPStrategy") else "state_dict"


def _split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a state of Fabric's into modules and optimizers, and the rest."""
    kinds = torch.nn.Module | torch.optim.Optimizer
    parts = {key: value for key, value in state.items() if isinstance(value, kinds)}
    return parts, {key: value for key, value in state.items() if key not in parts}
