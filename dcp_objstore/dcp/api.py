"""`save` and `load`: a checkpoint in one line, called by every rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from dcp_objstore.dcp.failures import typed_failures
from dcp_objstore.dcp.groups import current_rank, sync_group
from dcp_objstore.dcp.planner import AgreeingLoadPlanner, AgreeingSavePlanner
from dcp_objstore.dcp.plugin import plugin_errors
from dcp_objstore.dcp.reader import ObjectStoreReader
from dcp_objstore.dcp.state import restore, to_state_dict
from dcp_objstore.dcp.writer import ObjectStoreWriter
from dcp_objstore.errors import DcpObjstoreError

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.dcp.report import LoadReport, SaveReport


def save(
    state: Mapping[str, Any],
    url: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
    process_group: dist.ProcessGroup | None = None,
    user_metadata: Mapping[str, object] | None = None,
    allow_unfenced: bool = False,
) -> SaveReport:
    """Save a sharded state as one checkpoint. Called by every rank, without `if rank == 0`.

    When it returns, the checkpoint exists, whole, on the store. When it raises, it raises on
    every rank, and no torn checkpoint is visible.

    Args:
        state: dict, nested as you like, of modules, optimizers, Stateful objects, tensors,
            DTensors and plain values. An optimizer finds its module in the state by the identity
            of its parameters.
        url: the checkpoint, the same on every rank.
        process_group: the ranks that save together. Default: all.
        overwrite, storage_options, config, progress, user_metadata, allow_unfenced: see
            `ObjectStoreWriter`.

    Returns:
        The report of all ranks' work, the same on every rank.

    Raises:
        DcpObjstoreError: that of the lowest rank that failed; see `ObjectStoreWriter` for which.
        RankFailedError: a rank failed otherwise, or died. When a rank dies the others notice
            when its connections close; when it hangs, after the process group's time-out.
    """
    writer = ObjectStoreWriter(
        url,
        overwrite=overwrite,
        storage_options=storage_options,
        config=config,
        progress=progress,
        allow_unfenced=allow_unfenced,
        user_metadata=user_metadata,
    )
    state_dict, failed = prepare(state)
    return run_save(writer, state_dict, failed, sync_group(process_group))


def prepare(
    state: Mapping[str, Any],
) -> tuple[dict[str, Any], DcpObjstoreError | None]:
    """The state dict; or the error, to be raised where all ranks hear of it."""
    try:
        with plugin_errors(current_rank(), None):
            return to_state_dict(state), None
    except DcpObjstoreError as error:
        return {}, error


def run_save(
    writer: ObjectStoreWriter,
    state_dict: dict[str, Any],
    failed: DcpObjstoreError | None,
    group: dist.ProcessGroup | None,
) -> SaveReport:
    """`dcp.save` with one typed error for all ranks and the coordinator's report for each."""
    url = str(writer.checkpoint_id)
    with typed_failures(url, current_rank()), single_process_is_fine():
        state_dict_saver.save(
            state_dict,
            storage_writer=writer,
            planner=AgreeingSavePlanner(failed),
            process_group=group,
        )
        return _from_coordinator(writer.last_save, group)


def _from_coordinator(report: SaveReport | None, group: dist.ProcessGroup | None) -> SaveReport:
    """Rank 0's report, on every rank."""
    held = [report]
    if current_rank() is not None:
        dist.broadcast_object_list(held, group=group, group_src=0)
    assert held[0] is not None  # dcp.save returned, so the coordinator has committed
    return held[0]


def load(
    state: MutableMapping[str, Any],
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
    verify: Literal["strict", "off"] = "strict",
    trust_pickle: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place, with any number of ranks or in one process.

    Modules, optimizers and Stateful objects are restored in place, tensors are filled, and plain
    values are replaced in `state`. The state may ask for less than the checkpoint has.

    Args:
        state: as for `save`; its shapes and keys say what is read.
        url: the checkpoint, the same on every rank.
        process_group: the ranks that load together. Default: all.
        storage_options, config, progress, verify, trust_pickle: see `ObjectStoreReader`.

    Returns:
        What this rank fetched.

    Raises:
        StateMismatchError: keys or shapes that the checkpoint does not have, with the nearest
            names.
        DcpObjstoreError: that of the lowest rank that failed; see `ObjectStoreReader` for which.
            Tensors may then be partly filled; load again or from another checkpoint.
        RankFailedError: a rank failed otherwise, or died.
    """
    reader = ObjectStoreReader(
        url,
        storage_options=storage_options,
        config=config,
        progress=progress,
        verify=verify,
        trust_pickle=trust_pickle,
    )
    state_dict, failed = prepare(state)
    with typed_failures(str(reader.checkpoint_id), current_rank()), single_process_is_fine():
        state_dict_loader.load(
            state_dict,
            storage_reader=reader,
            planner=AgreeingLoadPlanner(failed),
            process_group=sync_group(process_group),
        )
    restore(state, state_dict)
    assert reader.last_load is not None
    return reader.last_load


@contextlib.contextmanager
def single_process_is_fine() -> Iterator[None]:
    """Without torch's warning that there is no process group, which here needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        yield
