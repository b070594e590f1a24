"""`save`: save a checkpoint with one call on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.config import LocalFolder, TransferConfig
from dcp_objstore.distributed.failures import (
    capture,
    every_rank,
    from_first,
    meeting,
    raise_on_all,
    typed_failures,
)
from dcp_objstore.distributed.groups import count_ranks, sync_group, world_group
from dcp_objstore.distributed.plugin import reporting_failures, single_process_is_fine, url_of
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import SaveReport
from dcp_objstore.state.state_dict import ConvertedState
from dcp_objstore.write.planner import AgreeingSavePlanner
from dcp_objstore.write.writer import ObjectStoreWriter

# Makes the planner of a save, of its URL, its state and the number of ranks.
MakePlanner: TypeAlias = Callable[[str, Mapping[str, Any], int], AgreeingSavePlanner]
_MAYBE_SAVED = (
    "Look at the checkpoint before you save it again: it exists only if rank 0 had committed it"
    " already"
)


def save(
    state: Mapping[str, Any],
    url: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    user_metadata: Mapping[str, object] | None = None,
    stock_metadata: bool = True,
    allow_unfenced: bool = False,
    claim: RunClaim | None = None,
    base: str | None = None,
    local: LocalFolder = None,
) -> SaveReport:
    """Save a sharded state as one checkpoint. Call it on every rank, without `if rank == 0`.

        dos.save({"model": model, "optimizer": optimizer}, "s3://bucket/run/step-1540")

    When it returns, the whole checkpoint exists on the store. When it raises, it raises on every
    rank, and no torn checkpoint is visible.

    Args:
        state: a dict, nested as you like, of modules, optimizers, Stateful objects, tensors,
            DTensors and plain values. An optimizer finds its module in the state by the identity
            of its parameters. Do not change a tensor before this returns: its memory is read until
            then.
        url: URL of the checkpoint, the same on every rank.
        process_group: the ranks that save together. Default: all ranks.
        overwrite: replace a committed checkpoint at this URL. Default False: refuse.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: taken from the environment.
        config: sizes, concurrency and time-outs.
        progress: show a progress bar on rank 0 if standard error is a terminal. Default True.
        on_event: callable that receives each event of the save on this rank, in another
            thread. `ObjectStoreWriter` describes how it is called.
        trace: name of a local file to write a trace of the save to. `ObjectStoreWriter` describes
            how ranks name their files.
        user_metadata: small JSON values to store in the commit marker (metrics, step, config).
        stock_metadata: after the commit, write `.metadata`, by which stock torch finds the
            checkpoint. `ObjectStoreWriter` says what False means. Default True.
        allow_unfenced: save even to a store without conditional writes, where two writers of one
            checkpoint are not kept apart. Default False: refuse.
        claim: the claim that `claim_run` returned for the run. Default: none.
        base: a checkpoint of an earlier state, "latest" or a URL: what has not changed since is
            copied by the store instead of uploaded. `ObjectStoreWriter` says more. The same on
            every rank. Default: upload all.
        local: a folder of this node, as a path or `dos.Local`, for copies from which a job that
            starts again on the node loads. `ObjectStoreWriter` says more. Default None: none.

    Returns:
        A report on the work of all ranks, the same on every rank.

    Raises:
        DcpObjstoreError: the error of the lowest rank that failed. `ObjectStoreWriter` lists the
            possible types.
        InputError: a tensor was found to change while it was being saved, so its bytes do not
            match its digests.
        RankFailedError: a rank failed in another way, died, or did not make this call. If a rank
            dies, the others notice when its connections close. If it hangs or does not make the
            call, they notice after the process group's time-out (the one given to
            `init_process_group`, or `TransferConfig.peer_timeout_seconds`).
    """
    return save_planned(
        state,
        url,
        config=config,
        process_group=process_group,
        base=base,
        overwrite=overwrite,
        storage_options=storage_options,
        progress=progress,
        on_event=on_event,
        trace=trace,
        user_metadata=user_metadata,
        stock_metadata=stock_metadata,
        allow_unfenced=allow_unfenced,
        claim=claim,
        local=local,
    )


def save_planned(
    state: Mapping[str, Any],
    url: str,
    *,
    config: TransferConfig | None = None,
    process_group: dist.ProcessGroup | None = None,
    base: str | None = None,
    planner: MakePlanner = AgreeingSavePlanner,
    **settings: Any,
) -> SaveReport:
    """Save as `save` describes, with the planner of the caller.

    Args:
        planner: a function that makes the planner; `run_save` calls it.
        settings: further arguments of `ObjectStoreWriter`.
    """

    def make_writer() -> ObjectStoreWriter:
        return ObjectStoreWriter(url, config=config, base=base, **settings)

    advice = every_rank("dcp_objstore.save")
    # `capture` returns an error, and `raise_on_all` raises it on every rank. If it was raised here,
    # on this rank alone, the others would wait for this one.
    writer, refused = capture(make_writer)
    with reporting_failures(writer):
        with meeting(url_of(writer), process_group or world_group(), advice):
            group = sync_group(process_group, config)
            # A rank whose arguments were refused makes this call, too: some modules make their
            # state in collectives, for which the other ranks need it.
            converted, failed = capture(lambda: ConvertedState(state, loading=False))
            if writer is not None and converted is not None:
                converted, failed = capture(partial(writer._note_left_out, converted))
            raise_on_all(refused or failed, url_of(writer), group, advice, same={"base": base})
        assert writer is not None
        assert converted is not None
        return run_save(writer, converted.state_dict, group, planner)


def run_save(
    writer: ObjectStoreWriter,
    state_dict: dict[str, Any],
    group: dist.ProcessGroup | None,
    make_planner: MakePlanner = AgreeingSavePlanner,
) -> SaveReport:
    """Run `dcp.save`; raise the same typed error or return the coordinator's report on all ranks.

    Args:
        group: the ranks that save together; None if this process saves alone.
        make_planner: a function that makes the planner, from the URL of the checkpoint, the state
            and the number of ranks.
    """
    url, ranks = str(writer.checkpoint_id), count_ranks(group)
    single_process_is_fine()
    writer._share_base(group)
    planner = make_planner(url, state_dict, ranks)
    plain = planner.take(state_dict, group)
    planner.agree(group)
    with typed_failures(url, group, _MAYBE_SAVED):
        state_dict_saver.save(
            plain,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=ranks == 1,
        )
    report = from_first(writer.last_save, url, group, _MAYBE_SAVED)
    assert report is not None  # dcp.save returned, so the coordinator has committed
    return report
