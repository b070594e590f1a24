"""`ObjectStoreReader`: DCP's StorageReader, from ranged GETs to the destinations' own memory.

Reading trusts nothing but the marker, the index that it names and the objects that this names
(`checkpoint.commit`, rule 7). What is needed is planned before anything is fetched (`reads.py`,
`transfer.ranges`), and every block is verified before it reaches a tensor.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_objstore.distributed.groups import current_rank, own_group, rank_and_world_size
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.errors import (
    CheckpointGoneError,
    ConfigError,
    DcpObjstoreError,
    UnsupportedError,
)
from dcp_objstore.observe.events import Opened
from dcp_objstore.observe.hooks import Hooks, show
from dcp_objstore.observe.report import LoadReport, logger
from dcp_objstore.read.peers.exchange import Exchange, PeerFailedError, Share
from dcp_objstore.read.peers.meeting import Offer, all_come, make_offer, open_once, share_out
from dcp_objstore.read.session import PlannedLoad, plan_load, run_load
from dcp_objstore.read.stored_checkpoint import Source, open_stored_checkpoint
from dcp_objstore.stores.target import Target
from dcp_objstore.stores.urls import is_supported_url

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.observe.events import OnEvent
    from dcp_objstore.stores import StoreSpec


@dataclass(slots=True)
class _Load:
    """One load on one rank, from the metadata to its end."""

    spec: StoreSpec
    channel: Channel
    source: Source | None = None
    together: bool = False  # with other ranks, as far as this one knows
    planned: PlannedLoad | None = None
    error: DcpObjstoreError | None = None
    rank: int | None = None
    is_coordinator: bool = False
    met: bool = False  # with the other ranks, to read


class ObjectStoreReader(StorageReader):
    """Loads with `dcp.load` from an object store, with any number of ranks or without any.

    Reads checkpoints that `ObjectStoreWriter` committed, and those of stock torch's
    `FileSystemWriter` and `FsspecWriter`, s3torchconnector, Megatron-Core and
    multi-storage-client (which carry no digests, so nothing of them can be verified).

    Args:
        url: the checkpoint, as `s3://bucket/run/step-1000`; may be left out when
            `dcp.load(..., checkpoint_id=url)` gives it. Another `checkpoint_id` in the first load
            is refused; a later one re-targets the reader.
        storage_options: credentials and endpoint in fsspec's spelling. Default: from the
            environment.
        config: sizes, concurrency, time-outs and the memory budget.
        progress: show a bar on rank 0 where standard error is a terminal. Default True.
        on_event: called with each event of a load on this rank, in a thread of its own; as for
            `ObjectStoreWriter`.
        trace: name of a local file that gets each load as a trace; as for `ObjectStoreWriter`.
        verify: "strict" (default): no unverified byte reaches a tensor; reads are widened to
            whole 4 MiB blocks. "off": only what is needed is read, and not checked.
        trust_pickle: unpickle every value, which may run code that the checkpoint's author chose.
            Default False: values load if `torch.load(weights_only=True)` allows them, with what you
            declared by `torch.serialization.add_safe_globals`, or if they are of a few types that
            run nothing (`BytesIO`, numeric NumPy arrays and scalars, `datetime`, `Decimal`,
            `Path`, `range`, `deque`, enums of the standard library).
        read_once: what several ranks need (replicas, values, blocks that another layout cuts) is
            fetched and verified by one of them, which hands it to the others; so the store sees
            each byte once, whatever the number of ranks. Ranks of one host hand it on through
            shared memory, others through gloo. A rank that fails fails all in the next round. If
            some have not come to `read_data` and for 5 s none does, as a planner's `finish_plan`
            has raised or is slow, each loads by itself. The ranks must agree on this, and where it
            is on also on `verify`. Default True: 8 replicas on one host loaded
            2.5 to 3 times as fast (`python -m benchmarks resume --layout replicated`), and where
            nothing is shared it costs nothing.
        process_group: the ranks that load together, all of which take part in every load; then
            one of them opens the checkpoint for all. Default None: the ranks of the default group,
            if it is they who load, and each opens the checkpoint. Bytes pass between ranks in a
            gloo group of our own with the same ranks.

    Attributes:
        last_load: a `LoadReport` of this rank's last finished load, or None.
        load_id: names the latest load, or None; it is the `load_id` of the `StorageMeta` that the
            planner gets, as with torch's readers.

    The DCP call raises these errors as `CheckpointException.failures`; `dos.load` raises them
    plainly.

    Raises:
        CheckpointNotFoundError: nothing is committed at this URL.
        CheckpointCorruptError: objects are missing or differ from what was saved.
        CheckpointGoneError: the checkpoint was deleted or replaced meanwhile.
        UntrustedPickleError: a value needs `torch.serialization.add_safe_globals`, or
            `trust_pickle=True`.
        StateMismatchError: the state asks for keys or shapes that the checkpoint does not have.
        UnsupportedError: a newer version wrote the checkpoint, or it holds what cannot be loaded.
        StoreUnavailableError: the store did not answer, after all retries.
        TransferStalledError: no range was completed for `config.stall_timeout_seconds`.
        CredentialsError: there are no credentials, or they are wrong or expired.
        PermissionDeniedError: the credentials do not allow it.
        BucketNotFoundError: there is no such bucket.

    A load that fails may have filled some of the destinations, in whole or in part, and left the
    others as they were (what it did place was verified, under "strict"). Nothing writes to them
    any more once it has raised. Load again, or do not use that state.

    Threads may load with one reader at the same time, each into a state of its own.
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
        verify: Literal["strict", "off"] = "strict",
        trust_pickle: bool = False,
        read_once: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if verify not in ("strict", "off"):
            raise ConfigError(f"verify must be 'strict' or 'off', got {verify!r}")
        self._target = Target(url, storage_options, config)
        self._progress = progress
        self._hooks = Hooks(on_event, trace)
        self._verify = verify == "strict"
        self._trust_pickle = trust_pickle
        self._read_once = read_once
        self._process_group = process_group
        self._of_thread = threading.local()
        self.last_load: LoadReport | None = None
        self.load_id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Settings only, without secrets, process group or an opened checkpoint."""
        kept = ("_target", "_progress", "_hooks", "_verify", "_trust_pickle", "_read_once")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A reader with these settings that has not loaded yet."""
        self.__dict__.update(state)
        self._process_group = None
        self._of_thread = threading.local()
        self.last_load = None
        self.load_id = None

    def __repr__(self) -> str:
        return f"ObjectStoreReader({self.checkpoint_id!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The URL of the checkpoint that is loaded next."""
        return self._target.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL that we can load from."""
        return is_supported_url(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim at another checkpoint, keeping every option; None keeps the URL.

        Raises:
            ConfigError: the reader was made with another URL and has loaded nothing yet.
        """
        self._of_thread.load = None
        if checkpoint_id is not None:
            self._target.aim(checkpoint_id)  # type: ignore[arg-type]  # StoreSpec checks it

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Open the checkpoint; on failure an empty Metadata, and the next call raises.

        DCP turns whatever is raised here into a bare AssertionError (up to torch 2.11 without its
        text), but lets through what `set_up_storage_reader` raises.
        """
        spec = self._target.begin()
        load = _Load(spec, self._hooks.channel("load", spec.url, *rank_and_world_size()))
        self._of_thread.load = load
        try:
            with load.channel.current(), plugin_errors(None, load.spec.url):
                load.source = self._open(load)
        except DcpObjstoreError as error:
            load.error = error
            return Metadata(state_dict_metadata={})
        meta = load.source.metadata.storage_meta
        self.load_id = None if meta is None else meta.load_id
        load.channel.emit(Opened, load.channel.began_at, commit_id=load.source.commit_id)
        return load.source.metadata

    def _open(self, load: _Load) -> Source:
        def open_here() -> Source:
            return open_stored_checkpoint(load.spec, load_id=str(uuid.uuid4()))

        load.together = self._read_once and current_rank() is not None
        if not load.together or self._process_group is None:
            return open_here()
        try:
            group = self._group()
        except UnsupportedError as error:  # on all of its ranks
            logger.info("%s: every rank loads by itself: %s", load.spec.url, error.message)
            load.together = False
            return open_here()
        return open_once(open_here, group, load.spec.url)

    def _group(self) -> dist.ProcessGroup:
        """The group for exchanging blocks. A collective of its ranks, the first time."""
        given = None if self._process_group is dist.group.WORLD else self._process_group
        group = own_group("read once", given, self._target.config)
        assert group is not None
        return group

    def _group_ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self._process_group or dist.group.WORLD))

    # The parameter must be called `kwargs`: DCP looks for that name before it passes them.
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **kwargs: Any
    ) -> None:
        """Raise what `read_metadata` met."""
        del metadata
        load = self._opened()
        load.rank = kwargs.get("rank")
        load.is_coordinator = is_coordinator
        with load.channel.watching():
            show(load.channel, bar=self._progress and is_coordinator, summary=is_coordinator)
            if load.error is not None:
                raise load.error.at(rank=load.rank)

    def _tell_failed(self, error: BaseException) -> None:
        """Tell of the end of this thread's load, for what fails outside of the methods here."""
        load: _Load | None = getattr(self._of_thread, "load", None)
        if load is None:
            channel = self._hooks.channel("load", str(self.checkpoint_id), *rank_and_world_size())
        else:
            channel = load.channel
        channel.fail(error)
        channel.settle()

    def _opened(self) -> _Load:
        """The load that this thread has under way: DCP makes all calls of one from one thread."""
        load: _Load | None = getattr(self._of_thread, "load", None)
        if load is None:
            self.read_metadata()
            load = self._of_thread.load
        assert load is not None
        return load

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Plan what is to be read, and tell the coordinator which commit and bytes that is."""
        load = self._opened()
        with plugin_errors(load.rank, load.spec.url):
            if load.source is not None:
                load.source.check_whole(item.dest_index.fqn for item in plan.items)
                load.planned = plan_load(
                    load.source, plan.items, verify=self._verify, whole_blocks=load.together
                )
            ranks = self._group_ranks() if load.together else None
            offer = make_offer(
                self.checkpoint_id,
                load.source,
                load.planned,
                ranks,
                self._target.config,
                verify=self._verify,
            )
            return dataclasses.replace(plan, storage_data=offer)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Share out what several ranks need, if all have opened the same checkpoint.

        Raises:
            CheckpointGoneError: the checkpoint was replaced between the ranks' openings of it, or
                they were given different URLs.
            ConfigError: the ranks were given different settings where they must agree.
        """
        offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Offer)]
        if len({(offer.url, offer.commit_id) for offer in offers}) > 1:
            raise CheckpointGoneError(
                "the ranks have opened different checkpoints: it was replaced meanwhile, or they"
                " were given different URLs; load again",
                url=self.checkpoint_id,
            )
        if len(offers) < len(plans):  # a planner that makes plans of its own
            return plans
        load = self._opened()
        with plugin_errors(load.rank, load.spec.url):
            shares = share_out(offers)
        return [
            dataclasses.replace(plan, storage_data=share)
            for plan, share in zip(plans, shares, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, verify and place all that this rank's plan asks for; returns when done.

        Also when another rank has failed meanwhile: the call of DCP that follows raises the error
        of that rank on all of them.
        """
        load = self._opened()
        with load.channel.watching(), plugin_errors(load.rank, load.spec.url):
            if load.error is not None:
                raise load.error
            try:
                self.last_load = self._read(load, plan, planner)
            except PeerFailedError as error:
                load.channel.fail(error.cause)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, load: _Load, plan: LoadPlan, planner: LoadPlanner) -> LoadReport:
        assert load.source is not None
        planned, load.planned = load.planned, None
        plan_changed = planned is None or planned.items != plan.items
        share = plan.storage_data
        if isinstance(share, Share) and self._all_come(load, share):
            with Exchange(share, self._group(), load.spec.url) as exchange:
                if planned is None or plan_changed:
                    raise UnsupportedError(
                        "the planner's finish_plan has changed which items are read, after it was"
                        " planned which rank fetches them; pass read_once=False to the reader"
                    )
                exchange.prepare(planned, self._target.config.memory_budget_bytes // 8)
                return self._run(load, planned, planner, exchange)
        if planned is None or plan_changed:
            planned = plan_load(load.source, plan.items, verify=self._verify)
        return self._run(load, planned, planner, None)

    def _all_come(self, load: _Load, share: Share) -> bool:
        if load.met:
            raise UnsupportedError(
                "the ranks have read this plan already, and failed or not, they do so once: load"
                " again, on all ranks"
            )
        load.met = True
        ranks = len(self._group_ranks())
        return all_come(share.meeting, ranks, self._target.config, load.spec.url)

    def _run(
        self, load: _Load, planned: PlannedLoad, planner: LoadPlanner, exchange: Exchange | None
    ) -> LoadReport:
        return run_load(
            load.spec.open(),
            planned,
            planner,
            self._target.config,
            trust_pickle=self._trust_pickle,
            channel=load.channel,
            exchange=exchange,
        )
