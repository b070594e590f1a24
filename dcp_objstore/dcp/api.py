"""`save` and `load`: a checkpoint in one line, called by every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from dcp_objstore.dcp.failures import agree, attempt, extended, typed_failures
from dcp_objstore.dcp.groups import current_rank, is_alone, sync_group, world_group
from dcp_objstore.dcp.planner import AgreeingLoadPlanner, AgreeingSavePlanner
from dcp_objstore.dcp.reader import ObjectStoreReader
from dcp_objstore.dcp.report import logger
from dcp_objstore.dcp.state import ConvertedState, Place
from dcp_objstore.dcp.writer import ObjectStoreWriter
from dcp_objstore.errors import DcpObjstoreError

if TYPE_CHECKING:
    import os

    from dcp_objstore.checkpoint.epoch import RunEpoch
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.dcp.report import LoadReport, SaveReport
    from dcp_objstore.events import OnEvent


_PARTLY = (
    "; tensors of the state may be partly filled, so load again, or from another checkpoint, before"
    " you use them"
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
    allow_unfenced: bool = False,
    epoch: RunEpoch | None = None,
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
        overwrite, storage_options, config, progress, on_event, trace, user_metadata,
        allow_unfenced, epoch: see `ObjectStoreWriter`.

    Returns:
        The report of all ranks' work, the same on every rank.

    Raises:
        DcpObjstoreError: that of the lowest rank that failed; see `ObjectStoreWriter` for which.
        RankFailedError: a rank failed otherwise, or died. When a rank dies the others notice
            when its connections close; when it hangs, after the process group's time-out (that
            given to `init_process_group`; see also `TransferConfig.peer_timeout_seconds`).
    """
    group = sync_group(process_group, config)
    writer, refused = attempt(
        lambda: ObjectStoreWriter(
            url,
            overwrite=overwrite,
            storage_options=storage_options,
            config=config,
            progress=progress,
            on_event=on_event,
            trace=trace,
            allow_unfenced=allow_unfenced,
            user_metadata=user_metadata,
            epoch=epoch,
        )
    )
    # Also on a rank whose arguments were refused: some modules make their state in collectives.
    converted, failed = attempt(lambda: ConvertedState(state, loading=False))
    with telling_failures(writer):
        agree(refused or failed, aim(writer), group)
        assert writer is not None
        assert converted is not None
        return run_save(writer, converted.state_dict, group)


@contextlib.contextmanager
def telling_failures(plugin: ObjectStoreWriter | ObjectStoreReader | None) -> Iterator[None]:
    """Tell of an error that leaves, unless the plug-in has told of it itself."""
    try:
        yield
    except BaseException as error:
        if plugin is not None:
            plugin._tell_failed(error)
        raise


def aim(plugin: ObjectStoreWriter | ObjectStoreReader | None) -> str | None:
    """The checkpoint's URL, for errors; None where the URL or another argument was refused."""
    return None if plugin is None else plugin.checkpoint_id


def run_save(
    writer: ObjectStoreWriter, state_dict: dict[str, Any], group: dist.ProcessGroup | None
) -> SaveReport:
    """`dcp.save` with one typed error for all ranks and the coordinator's report for each."""
    url = str(writer.checkpoint_id)
    with typed_failures(url, group), single_process_is_fine():
        state_dict_saver.save(
            state_dict,
            storage_writer=writer,
            planner=AgreeingSavePlanner(url, state_dict),
            process_group=group,
            no_dist=is_alone(group),
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
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
    verify: Literal["strict", "off"] = "strict",
    trust_pickle: bool = False,
    read_once: bool = True,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place, with any number of ranks or in one process.

    Modules, optimizers and Stateful objects are restored in place, tensors are filled, and plain
    values are replaced in `state`. The state may ask for less than the checkpoint has. Where it has
    a parameter but no optimizer state for it (it was frozen or never used), the optimizer is left
    without state for it as well, and a warning is logged.

    Args:
        state: as for `save`; its shapes and keys say what is read.
        url: the checkpoint, the same on every rank.
        strict: raise if the state asks for a key that the checkpoint does not have. With False
            such parameters, tensors and values stay as they are, their optimizer state is left
            out, and the report names them. Default True. What the checkpoint has beyond the state
            (an optimizer, where only the weights are asked for) is never an error.
        process_group: the ranks that load together. Default: all.
        storage_options, config, progress, on_event, trace, verify, trust_pickle, read_once: see
            `ObjectStoreReader`.

    Returns:
        What this rank fetched, what of its state was missing, and what it did not ask for.

    Raises:
        StateMismatchError: keys or shapes that the checkpoint does not have, with the nearest
            names.
        DcpObjstoreError: that of the lowest rank that failed; see `ObjectStoreReader` for which.
        RankFailedError: a rank failed otherwise, or died.

    A load that fails while data is read (its error says so), or that is stopped by Ctrl-C then,
    leaves tensors of the state partly filled: load again, or from another checkpoint, before you
    use them.
    """
    group = sync_group(process_group, config)
    reader, refused = attempt(
        lambda: ObjectStoreReader(
            url,
            storage_options=storage_options,
            config=config,
            progress=progress,
            on_event=on_event,
            trace=trace,
            verify=verify,
            trust_pickle=trust_pickle,
            read_once=read_once,
            process_group=group or world_group(),
        )
    )
    converted, failed = attempt(lambda: ConvertedState(state, loading=True))
    try:
        with telling_failures(reader):
            agree(refused or failed, aim(reader), group)
            assert reader is not None
            assert converted is not None
            return _run_load(reader, converted, group, strict=strict)
    except BaseException:
        if converted is not None:
            converted.undo()
        raise


def _run_load(
    reader: ObjectStoreReader,
    converted: ConvertedState,
    group: dist.ProcessGroup | None,
    *,
    strict: bool,
) -> LoadReport:
    """`dcp.load` and the way back into the user's state, with one typed error for all ranks."""
    url = str(reader.checkpoint_id)
    planner = AgreeingLoadPlanner(url, converted.optimizers, converted.per_rank, strict=strict)
    try:
        with typed_failures(url, group), single_process_is_fine():
            state_dict_loader.load(
                converted.state_dict,
                storage_reader=reader,
                planner=planner,
                process_group=group,
                no_dist=is_alone(group),
            )
        _, failed = attempt(lambda: converted.restore(planner.without_state))
        agree(failed, url, group)
    except DcpObjstoreError as error:
        if not planner.reading:
            raise
        raise extended(error, _PARTLY).with_traceback(error.__traceback__) from error.__cause__
    if strict:
        _tell_of_missing_state(url, planner.without_state)
    elif planner.missing and not current_rank():
        logger.warning(
            "%s does not have %d keys of the state, which stay as they are (%s%s)",
            url,
            len(planner.missing),
            ", ".join(planner.missing[:5]),
            ", ..." if len(planner.missing) > 5 else "",
        )
    assert reader.last_load is not None
    return dataclasses.replace(
        reader.last_load, missing=planner.missing, unexpected=planner.unexpected
    )


def _tell_of_missing_state(url: str, without_state: Collection[tuple[Place, str]]) -> None:
    if without_state and not current_rank():
        first = ", ".join(name for _, name in sorted(without_state)[:5])
        logger.warning(
            "%s has no optimizer state for %d parameters, which go on without (%s%s)",
            url,
            len(without_state),
            first,
            ", ..." if len(without_state) > 5 else "",
        )


@contextlib.contextmanager
def single_process_is_fine() -> Iterator[None]:
    """Without torch's warning that there is no process group, which here needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        yield
