"""`load`: fill a state from a checkpoint with one call on every rank."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader

from dcp_objstore.config import LocalFolder, TransferConfig
from dcp_objstore.distributed.failures import (
    advised,
    capture,
    every_rank,
    meeting,
    raise_on_all,
    typed_failures,
)
from dcp_objstore.distributed.groups import count_ranks, sync_group, world_group
from dcp_objstore.distributed.plugin import reporting_failures, single_process_is_fine, url_of
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import DcpObjstoreError, RankFailedError, StateMismatchError
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import LoadReport, first_few, logger
from dcp_objstore.read.items import Rename
from dcp_objstore.read.mismatch import OnDtype
from dcp_objstore.read.planner import AgreeingLoadPlanner
from dcp_objstore.read.reader import ObjectStoreReader
from dcp_objstore.state.record import Place
from dcp_objstore.state.state_dict import ConvertedState

_PARTLY = (
    "tensors of the state may be partly filled: load again, or load another checkpoint, before you"
    " use them"
)


def load(
    state: MutableMapping[str, Any],
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
    verify: bool = True,
    trust_pickle: bool = False,
    read_once: bool = True,
    strict: bool = True,
    rename: Rename = (),
    on_dtype: OnDtype = "warn",
    process_group: dist.ProcessGroup | None = None,
    local: LocalFolder = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place, with any number of ranks or in one process.

        dos.load({"model": model, "optimizer": optimizer}, "s3://bucket/run/step-1000")

    Modules, optimizers and Stateful objects are restored in place, tensors are filled, and plain
    values are replaced in `state`. The state may ask for less than the checkpoint has. If the
    checkpoint has a parameter but no optimizer state for it (it was frozen or never used), the
    optimizer gets no state for that parameter, and a warning is logged. A tensor whose key is
    missing is filled by the one that it is tied to, if the checkpoint has that one.

    Args:
        state: the state to fill: a nested dict like the one passed to `save`. Its keys and shapes
            determine what is read.
        url: URL of the checkpoint, the same on every rank: one of this library, stock torch or what
            derives from it, a folder of safetensors as on the Hugging Face hub, or one such file.
        strict: raise if the state asks for a key that the checkpoint does not have. If False, such
            parameters, tensors and values stay as they are, their optimizer state is left out, and
            the report names them. Default True. Keys that only the checkpoint has (an optimizer,
            when only the weights are asked for) are never an error.
        rename: pairs of a regular expression and its replacement, applied to each key of the
            checkpoint in turn, as `re.sub` does; the state has the new keys. `[("^", "model.")]`
            puts a prefix before each key. Each rank may have its own rules, as the stages of a
            pipeline do. Default: the keys as they are.
        on_dtype: what to do if a tensor of the state has another dtype than the stored one: "warn"
            (default) converts it, and warns if the state's dtype cannot hold every value; "error"
            refuses on all ranks before anything is read.
        process_group: the ranks that load together. Default: all ranks.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: taken from the environment.
        config: sizes, concurrency, time-outs and the memory budget.
        progress: show a progress bar on rank 0 if standard error is a terminal. Default True.
        on_event: callable that receives each event of the load on this rank, in another
            thread. `ObjectStoreWriter` describes how it is called.
        trace: name of a local file to write a trace of the load to. `ObjectStoreWriter` describes
            how ranks name their files.
        verify: let no unverified byte reach a tensor. With False, only the bytes that are needed
            are read, and they are not checked, also if the marker is gone. Default True.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that the checkpoint's author chose. Default False.
        read_once: bytes that several ranks need are fetched by one of them, which hands them to
            the others. Default True. `ObjectStoreReader` describes the conditions.
        local: a folder of this node, as a path or `dos.Local`, in which saves have left copies:
            they are read first, and the store gives the rest. `ObjectStoreReader` says more.
            Default None: read the store alone.

    Returns:
        A report: what this rank fetched, which keys of its state were missing, and which keys of
        the checkpoint it did not ask for.

    Raises:
        StateMismatchError: the state has keys or shapes that the checkpoint does not have (the
            message lists the nearest names), or other dtypes and `on_dtype` is "error"; or `rename`
            gives two keys the same name.
        UnsupportedError: a module or tensor of the state is on the meta device. Give it memory
            first (`to_empty`).
        DcpObjstoreError: the error of the lowest rank that failed. `ObjectStoreReader` lists the
            possible types.
        RankFailedError: a rank failed in another way, died, or did not make this call.

    A load that fails while data is read (its error says so), or that Ctrl-C stops during that time,
    leaves tensors of the state partly filled. Load again, or from another checkpoint, before you
    use them.
    """

    def make_reader() -> ObjectStoreReader:
        return ObjectStoreReader(
            url,
            storage_options=storage_options,
            config=config,
            progress=progress,
            on_event=on_event,
            trace=trace,
            verify=verify,
            trust_pickle=trust_pickle,
            read_once=read_once,
            rename=rename,
            on_dtype=on_dtype,
            local=local,
        )

    advice = every_rank("dcp_objstore.load")
    reader, reader_error = capture(make_reader)
    with reporting_failures(reader):
        with meeting(url_of(reader), process_group or world_group(), advice):
            group = sync_group(process_group, config)
            converted, error = capture(lambda: ConvertedState(state, loading=True, strict=strict))
            # With read_once opening the checkpoint is a collective, and without it is not. So all
            # ranks must have passed the same value before the load begins.
            same = {"read_once": bool(read_once)}
            raise_on_all(reader_error or error, url_of(reader), group, advice, same=same)
        assert reader is not None
        assert converted is not None
        reader._process_group = group
        return _run_load(reader, converted, group, strict=strict, on_dtype=on_dtype)


def _part_advice(left_out: Iterable[str], parts: Iterable[Place], state_keys: Iterable[str]) -> str:
    """Return the advice for a mismatch with a checkpoint that has only a part of some modules.

    The text is empty if the state asks for none of these modules.

    Args:
        left_out: names of the modules that were saved as `dos.trainable(...)`, without the rest.
        parts: the places at which the state has a `dos.trainable(...)`.
        state_keys: keys of the state.
    """
    for name in left_out:
        if not any(key.startswith(f"{name}.") for key in state_keys):
            continue
        text = f"of {name!r} the checkpoint has only what trained when it was saved: load it "
        if tuple(name.split(".")) in parts:  # the state has a `dos.trainable(...)` there, too
            return f"{text}into a model in which the same parameters train"
        return f"{text}as dos.trainable(...), into a model that has the frozen weights"
    return ""


def _run_load(
    reader: ObjectStoreReader,
    converted: ConvertedState,
    group: dist.ProcessGroup | None,
    *,
    strict: bool,
    on_dtype: OnDtype,
) -> LoadReport:
    """Run `dcp.load`, then restore the user's state; raise the same typed error on all ranks."""
    url = str(reader.checkpoint_id)
    planner = AgreeingLoadPlanner(
        url,
        converted,
        reader._paths,
        strict=strict,
        on_dtype=on_dtype,
    )
    try:
        single_process_is_fine()
        with typed_failures(url, group):
            state_dict_loader.load(
                converted.state_dict,
                storage_reader=reader,
                planner=planner,
                process_group=group,
                no_dist=count_ranks(group) == 1,
            )
        _, restore_error = capture(converted.restore)
        raise_on_all(restore_error, url, group)
    except DcpObjstoreError as error:
        advice = error.advice
        if isinstance(error, StateMismatchError):
            # DCP gives the planner its `state_dict`; a load may have failed before that.
            state_keys = getattr(planner, "state_dict", {})
            advice = _part_advice(reader._left_out(), converted.left_out, state_keys) or advice
        if planner.reading:  # some tensors may have been filled before the error
            advice = f"{advice}; {_PARTLY}" if advice else _PARTLY
        # `advised` copies the error; the copy gets the traceback and the cause of the original.
        raise advised(error, advice or None).with_traceback(
            error.__traceback__
        ) from error.__cause__
    if converted.lacking and not current_rank():
        logger.warning(
            "%s has no optimizer state for %d parameters; the optimizer starts without it (%s)",
            url,
            len(converted.lacking),
            first_few(converted.lacking, 5),
        )
    if not strict and planner.missing and not current_rank():
        logger.warning(
            "%s does not have %d keys of the state; their values stay as they are (%s)",
            url,
            len(planner.missing),
            first_few(planner.missing, 5),
        )
    # `read_data` returns without a report if another rank failed. The error of that rank should
    # have been raised above.
    if reader.last_load is None:
        raise RankFailedError("another rank has failed without reporting its error", url=url)
    return dataclasses.replace(
        reader.last_load, missing=planner.missing, unexpected=planner.unexpected
    )
