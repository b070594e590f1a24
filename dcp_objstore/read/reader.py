"""`ObjectStoreReader`: DCP's StorageReader, from ranged GETs to the destinations' own memory.

A load trusts only the marker, the index that the marker names and the objects that the index names
(`checkpoint.commit`, rule 7). It plans what it needs before it fetches anything (`tensor_read`,
`transfer.ranges`), and verifies every block before the block reaches a tensor.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_objstore import torch_private
from dcp_objstore.checkpoint.marker import LeftOut, left_out_of
from dcp_objstore.config import LocalFolder, TransferConfig, local_of
from dcp_objstore.distributed.failures import drop_state
from dcp_objstore.distributed.groups import exchange_group
from dcp_objstore.distributed.plugin import Target, plugin_errors
from dcp_objstore.distributed.ranks import current_rank, rank_and_world_size
from dcp_objstore.errors import (
    CheckpointGoneError,
    ConfigError,
    DcpObjstoreError,
    StateMismatchError,
    UnsupportedError,
)
from dcp_objstore.local.copies import LoadCopies
from dcp_objstore.observe.dispatch import Channel, EventSettings
from dcp_objstore.observe.events import OnEvent, Opened
from dcp_objstore.observe.report import LoadReport, logger
from dcp_objstore.read.item_read import Destination
from dcp_objstore.read.items import Rename, new_names, typed_paths
from dcp_objstore.read.mismatch import OnDtype
from dcp_objstore.read.peers.exchange import Exchange, PeerFailedError, Share
from dcp_objstore.read.peers.meeting import Offer, all_arrived, make_offer, open_once, share_out
from dcp_objstore.read.plan import PlannedLoad, plan_load
from dcp_objstore.read.session import report_loaded, run_load
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, name_next, open_stored_checkpoint
from dcp_objstore.read.tensor_read import is_value
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.urls import is_supported_url
from dcp_objstore.torch_private import is_wrapper, parts


@dataclass(slots=True)
class _Load:
    """The state of one load on one rank, from reading the metadata to the end.

    Attributes:
        is_together: whether other ranks take part, as far as this rank knows.
        planned: the reads that `prepare_local_plan` has planned, until `read_data` takes them.
        copies: the copies on this node; None if there are none to read.
        error: the error of `read_metadata`, which the next call raises.
        rank: this rank, for errors; None until DCP has told it.
        has_met: whether the ranks have already met to read.
    """

    spec: StoreSpec
    channel: Channel
    is_together: bool
    checkpoint: StoredCheckpoint | None = None
    planned: PlannedLoad | None = None
    copies: LoadCopies | None = None
    error: DcpObjstoreError | None = None
    rank: int | None = None
    has_met: bool = False

    def raise_error(self) -> None:
        """Raise the error that was kept, if any, and forget it: its frames hold the whole state."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error.at(rank=self.rank)
        finally:
            # The raised error refers to this frame. If the frame referred to the error, too, that
            # would be a reference cycle.
            del error


class ObjectStoreReader(StorageReader):
    """A reader for `dcp.load` from an object store, with any number of ranks or in one process.

        dcp.load(state, storage_reader=dos.ObjectStoreReader("s3://bucket/run/step-1000"))

    It reads checkpoints that `ObjectStoreWriter` committed, and those of stock torch's
    `FileSystemWriter` and `FsspecWriter`, s3torchconnector, Megatron-Core and
    multi-storage-client. It also reads safetensors: a folder as on the Hugging Face hub, or the URL
    of one file. Those carry no digests, so their bytes cannot be verified.

    Args:
        url: URL of the checkpoint, such as `s3://bucket/run/step-1000`. May be left out if
            `dcp.load(..., checkpoint_id=url)` gives it. A different `checkpoint_id` in the first
            load is refused; in a later load it re-targets the reader.
        storage_options: credentials and endpoint in fsspec's spelling. Default: taken from the
            environment.
        config: sizes, concurrency, time-outs and the memory budget.
        progress: show a progress bar on rank 0 if standard error is a terminal. Default True.
        on_event: callable that receives each event of a load on this rank, in another thread.
            `ObjectStoreWriter` describes how it is called.
        trace: name of a local file to write a trace of each load to. `ObjectStoreWriter` describes
            how ranks and loads name their files.
        verify: let no unverified byte reach a tensor; reads are widened to whole 4 MiB blocks. With
            False, only the bytes that are needed are read, and they are not checked; a checkpoint
            that has lost its marker, and with it its digests, is then read, too. Default True.
        trust_pickle: unpickle every value, which may run code that the checkpoint's author chose.
            Default False: values load if `torch.load(weights_only=True)` allows them, including
            what you declared with `torch.serialization.add_safe_globals`, or if they are of a few
            types that run no code (`BytesIO`, numeric NumPy arrays and scalars, `datetime`,
            `Path`, `range`, `deque`).
        read_once: bytes that several ranks need (replicas, values, blocks that another layout cuts)
            are fetched and verified by one rank, which hands them to the others. The store then
            serves each byte once, whatever the number of ranks. Ranks on one host pass bytes
            through shared memory, others through gloo. If a rank fails, all ranks fail in the next
            round. If some ranks have not reached `read_data` and none arrives for 5 s, because a
            planner's `finish_plan` has raised or is slow, each rank loads by itself. The ranks must
            agree on this setting and, if it is on, also on `verify`. Default True: 8 replicas on
            one host loaded 2.5 to 3 times as fast
            (`python -m benchmarks resume --layout replicated`), and a load that shares nothing
            pays nothing.
        process_group: the ranks that load together. All of them take part in every load, and one
            opens the checkpoint for all; bytes pass between them in this group. Default None: the
            ranks of the default group, if these are the ones that load; each then opens the
            checkpoint itself. Bytes then pass in a separate gloo group, and also if the given group
            has no CPU backend.
        rename: pairs of a regular expression and its replacement, applied to each key of the
            checkpoint in turn, as `re.sub` does. The state asks for the new keys:
            `[("^", "model.")]` loads the weights of a model into `{"model": model}`. Default: the
            keys as they are.
        on_dtype: what to do if a tensor of the state has another dtype than the stored one: "warn"
            (default) converts, and warns if the state's dtype cannot hold every value; "error"
            refuses before anything is read.
        local: a folder of this node, as a path or `dos.Local`, in which saves with the same setting
            have left copies. They are read first, and what is damaged or missing comes from the
            store. With `read_once` a rank also reads what only ranks of other nodes need. Not used
            with `verify=False`, nor for checkpoints of other libraries, which have no digests.
            Default None: read the store alone.

    Attributes:
        last_load: the `LoadReport` of this rank's last finished load, or None.
        load_id: identifier of the latest load, or None. It is the `load_id` of the `StorageMeta`
            that the planner receives, as with torch's readers.

    The DCP call raises these errors as `CheckpointException.failures`; `dos.load` raises them
    directly.

    Raises:
        CheckpointNotFoundError: nothing is committed at this URL.
        CheckpointCorruptError: objects are missing or differ from what was saved.
        CheckpointGoneError: the checkpoint was deleted or replaced during the load.
        UntrustedPickleError: a value needs `torch.serialization.add_safe_globals`, or
            `trust_pickle=True`.
        StateMismatchError: the state asks for keys or shapes that the checkpoint does not have, or
            for other dtypes and `on_dtype` is "error"; or `rename` gives two keys the same name.
        UnsupportedError: a newer version wrote the checkpoint, or it holds something that cannot
            be loaded.
        StoreUnavailableError: the store did not answer, after all retries.
        TransferStalledError: no range was completed for `config.stall_timeout_seconds`.
        CredentialsError: credentials are missing, wrong or expired.
        PermissionDeniedError: the credentials do not allow the request.
        BucketNotFoundError: the bucket does not exist.

    A load that fails may have filled some destinations, in whole or in part, and left the others as
    they were. With `verify` the bytes that it did place were verified. Nothing writes to the
    destinations once the load has raised. Load again, or do not use that state.

    Several threads may load with one reader at the same time, each into its own state.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
        config: TransferConfig | None = None,
        progress: bool = True,
        on_event: OnEvent | None = None,
        trace: str | os.PathLike[str] | None = None,
        verify: bool = True,
        trust_pickle: bool = False,
        read_once: bool = True,
        rename: Rename = (),
        on_dtype: OnDtype = "warn",
        process_group: dist.ProcessGroup | None = None,
        local: LocalFolder = None,
    ) -> None:
        """Make a reader, with the arguments of the class."""
        super().__init__()
        if not isinstance(verify, bool):
            raise ConfigError(f"verify must be True or False, got {verify!r}")
        if on_dtype not in ("warn", "error"):
            raise ConfigError(f"on_dtype must be 'warn' or 'error', got {on_dtype!r}")
        new_names((), rename)  # refuses wrong rules now, not when a checkpoint is opened
        self._target = Target(url, storage_options, config)
        self._progress = progress
        self._event_settings = EventSettings(on_event, trace)
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._read_once = read_once
        self._rename = rename
        self._on_dtype: OnDtype = on_dtype
        self._process_group = process_group
        self._local = local_of(local)
        self._of_thread = threading.local()  # its `load` is the current `_Load` of each thread
        self.last_load: LoadReport | None = None
        self.load_id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without secrets, process group or opened checkpoint."""
        unset = dict.fromkeys(("_process_group", "_of_thread", "last_load", "load_id"))
        return vars(self) | unset

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore a reader with these settings that has not loaded yet."""
        self.__dict__.update(state)
        self._of_thread = threading.local()

    def __repr__(self) -> str:
        return f"ObjectStoreReader({self.checkpoint_id!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The URL of the checkpoint that the next load reads."""
        return self._target.url

    @property
    def _load(self) -> _Load | None:
        """This thread's current load: DCP makes all calls of a load from one thread."""
        return getattr(self._of_thread, "load", None)

    def _left_out(self) -> Mapping[str, LeftOut]:
        """Return what the save of this thread's checkpoint has left out of its modules."""
        load = self._load
        marker = None if load is None or load.checkpoint is None else load.checkpoint.marker
        return {} if marker is None else left_out_of(marker.user_metadata)

    def _paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """Return the place of each key of this thread's checkpoint, as far as it is known."""
        load = self._load
        if load is None or load.checkpoint is None:
            return {}
        return typed_paths(load.checkpoint.items)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL that a reader can load from."""
        return is_supported_url(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim at another checkpoint and keep every option; None keeps the URL.

        Raises:
            ConfigError: the reader was made with another URL and has loaded nothing yet.
        """
        self._of_thread.load = None
        if checkpoint_id is not None:
            self._target.aim(checkpoint_id)  # type: ignore[arg-type]  # StoreSpec checks it

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Open the checkpoint; on failure return an empty Metadata and let the next call raise.

        DCP turns an error raised here into a bare AssertionError (up to torch 2.11 without its
        text), but passes on what `set_up_storage_reader` raises.
        """
        spec = self._target.used_now()
        channel = self._event_settings.channel("load", spec.url, *rank_and_world_size())
        load = _Load(spec, channel, self._read_once and current_rank() is not None)
        self._of_thread.load = load
        try:
            with load.channel.current(), plugin_errors(None, load.spec.url):
                load.checkpoint = self._open(load).renamed(self._rename, load.spec.url)
                metadata = load.checkpoint.metadata
        except DcpObjstoreError as error:
            load.error = error
            return Metadata(state_dict_metadata={})
        meta = metadata.storage_meta
        self.load_id = None if meta is None else meta.load_id
        load.channel.emit(Opened, load.channel.began_at, commit_id=load.checkpoint.commit_id)
        return metadata

    def _open(self, load: _Load) -> StoredCheckpoint:
        """Open the checkpoint on one rank for all, or on each rank if they do not read together."""

        def open_here() -> StoredCheckpoint:
            return open_stored_checkpoint(load.spec, str(uuid.uuid4()), verify=self._verify)

        # If no group was given, it is not sure that all ranks of the default group make this call.
        if not load.is_together or self._process_group is None:
            return open_here()
        try:
            group = self._group()
        except UnsupportedError as error:  # all ranks of the group get it
            logger.info("%s: every rank loads by itself: %s", load.spec.url, error.message)
            load.is_together = False
            return open_here()
        return open_once(open_here, group, load.spec.url)

    def _group(self, meeting: str | None = None) -> dist.ProcessGroup:
        """Return the group for exchanging blocks; its first call is a collective of its ranks."""
        group = exchange_group(self._process_group, self._target.config, meeting)
        assert group is not None
        return group

    def _group_ranks(self) -> tuple[int, ...]:
        """Return the ranks of the group that loads together, in its order."""
        return tuple(dist.get_process_group_ranks(self._process_group or dist.group.WORLD))

    # The parameter must be called `kwargs`: DCP looks for that name before it passes them.
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **kwargs: Any
    ) -> None:
        """Begin to show the progress, and raise the error that `read_metadata` kept."""
        del metadata
        load = self._current_load()
        load.rank = kwargs.get("rank")
        with load.channel.watching():
            load.channel.show(bar=self._progress and is_coordinator, summary=is_coordinator)
            load.raise_error()

    def _report_failure(self, error: BaseException) -> None:
        """Report that this thread's load has failed outside of the methods of this class."""
        load, settings = self._load, self._event_settings
        if load is None:  # it has failed before `read_metadata`, which makes the channel
            channel = settings.channel("load", str(self.checkpoint_id), *rank_and_world_size())
        else:
            channel = load.channel
        channel.fail(error)
        channel.flush()

    def _current_load(self) -> _Load:
        """Return this thread's current load; begin one if there is none."""
        if self._load is None:
            self.read_metadata()
        load: _Load = self._of_thread.load
        return load

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Plan what to read, and send the coordinator the commit and the bytes that it needs."""
        load = self._current_load()
        with plugin_errors(load.rank, load.spec.url):
            # The checkpoint is None if `_current_load` has just failed to open it. `read_data` then
            # raises the error.
            if load.checkpoint is not None:
                load.checkpoint.check_whole(item.dest_index.fqn for item in plan.items)
                load.copies = self._open_copies(load, load.checkpoint)
                load.planned = plan_load(
                    load.checkpoint,
                    plan.items,
                    verify=self._verify,
                    whole_blocks=load.is_together,
                )
            offer = make_offer(
                self.checkpoint_id,
                load.checkpoint,
                load.planned,
                group_ranks=self._group_ranks() if load.is_together else None,
                config=self._target.config,
                verify=self._verify,
                copies=load.copies,
            )
            return dataclasses.replace(plan, storage_data=offer)

    def _open_copies(self, load: _Load, checkpoint: StoredCheckpoint) -> LoadCopies | None:
        """Open the copies on this node: only digests say that a copy is right."""
        if self._local is None or not self._verify or checkpoint.index is None:
            return None
        copies = LoadCopies(self._local, load.spec, load.channel, checkpoint.object_keys)
        return copies if copies.numbers else None

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Divide what several ranks need among them, if all have opened the same checkpoint.

        Raises:
            CheckpointGoneError: the checkpoint was replaced after some ranks had opened it, or the
                ranks were given different URLs.
            ConfigError: the ranks were given different values of a setting on which they must
                agree.
        """
        offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Offer)]
        if len({(offer.url, offer.commit_id) for offer in offers}) > 1:
            raise CheckpointGoneError(
                "the ranks have opened different checkpoints: it was replaced while they opened it,"
                " or they were given different URLs; load again",
                url=self.checkpoint_id,
            )
        if len(offers) < len(plans):  # a planner has replaced plans by its own, without an offer
            return plans
        load = self._current_load()
        with plugin_errors(load.rank, load.spec.url):
            shares = share_out(offers)
        return [
            dataclasses.replace(plan, storage_data=share)
            for plan, share in zip(plans, shares, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, verify and place everything in this rank's plan, and return when done.

        It also returns if another rank has failed: the next call of DCP then raises that rank's
        error on all ranks.
        """
        load = self._current_load()
        with load.channel.watching(), plugin_errors(load.rank, load.spec.url):
            load.raise_error()
            try:
                self.last_load = self._read(load, plan, planner)
            except PeerFailedError as error:
                load.channel.fail(error.cause)
                # The workers' stop refers to the error, and the error's frames refer to the stop:
                # without its frames, the error does not keep the state in memory.
                drop_state(error)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, load: _Load, plan: LoadPlan, planner: LoadPlanner) -> LoadReport:
        """Read a plan into the destinations that the planner gives, with other ranks or alone."""
        assert load.checkpoint is not None
        planned, load.planned = load.planned, None
        share, config = plan.storage_data, self._target.config
        exchanging: AbstractContextManager[Exchange | None] = nullcontext()
        if isinstance(share, Share) and self._all_arrived(load, share):
            exchanging = Exchange(share, self._group(share.meeting), load.spec.url)
        with exchanging as exchange:
            # Either the planner has changed the items since `prepare_local_plan` planned their
            # reads, or that method was not called.
            if planned is None or [read.item for read in planned.reads] != list(plan.items):
                if exchange is not None:
                    raise UnsupportedError(
                        "the planner's finish_plan has changed the items to read after the ranks"
                        " had planned who fetches them; pass read_once=False to the reader"
                    )
                planned = plan_load(load.checkpoint, plan.items, verify=self._verify)
            if exchange is not None:
                exchange.prepare(planned, ahead_bytes=config.memory_budget_bytes // 8)
            destinations: list[Destination] = [
                partial(planner.load_bytes, item) if is_value(item) else _destination(planner, item)
                for item in plan.items
            ]
            try:
                report = run_load(
                    load.checkpoint.open_store(load.spec),
                    planned,
                    destinations,
                    config,
                    trust_pickle=self._trust_pickle,
                    channel=load.channel,
                    exchange=exchange,
                    copies=load.copies,
                    on_dtype=self._on_dtype,
                    takes=getattr(planner, "takes", None),
                )
            except CheckpointGoneError as error:
                # One rank looks for the next step. The error of the lowest rank is raised on all.
                if not load.rank:
                    name_next(error, load.spec)
                raise
        for item, destination in zip(plan.items, destinations, strict=True):
            if isinstance(destination, torch.Tensor):
                planner.commit_tensor(item, destination)
        report_loaded(load.channel, report)
        return report

    def _all_arrived(self, load: _Load, share: Share) -> bool:
        """Whether all ranks have arrived to load together; asked once for a plan."""
        if load.has_met:
            raise UnsupportedError(
                "the ranks have already read this plan, and a plan is read once, even if reading"
                " fails: load again, on all ranks"
            )
        load.has_met = True
        ranks = len(self._group_ranks())
        return all_arrived(share.meeting, ranks, self._target.config, load.spec.url)


def _destination(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """Return the tensor that the planner gives for an item, not detached if it is a wrapper.

    Raises:
        StateMismatchError: part of a wrapper is asked for, and its class gives no view of it.
    """
    # A user's planner may have no `state_dict`. What it gives is treated as a plain tensor.
    in_state = getattr(planner, "state_dict", {}).get(item.dest_index.fqn)
    whole = torch_private.local_tensor(in_state)
    if not is_wrapper(whole):
        return planner.resolve_tensor(item).detach()
    try:
        # With gradients, `DTensor.to_local` would give a view and not the wrapper itself.
        with torch.no_grad():
            tensor = torch_private.waited(planner.resolve_tensor(item))
        # A view shares memory with the state; what is loaded into a copy would be lost.
        storages = {*map(torch_private.storage_number, parts(tensor))}
        if storages.isdisjoint(map(torch_private.storage_number, parts(whole))):
            raise NotImplementedError("its class gives a copy")
    except Exception as error:
        raise StateMismatchError(
            f"a part of the state's {type(whole).__name__}, which a stored chunk fills, cannot be"
            f" reached ({error}); load into a plain tensor, or with the sharding that was saved",
            key=item.dest_index.fqn,
        ) from error
    return tensor
