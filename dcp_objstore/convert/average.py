"""`average`: the weights of several checkpoints as one checkpoint.

A save whose tensors are weighted sums, which `sums` makes while they are uploaded. What is laid out
is what the newest input has: the boxes of its tensors, cut into slabs, so that all inputs are read
front to back if they were saved alike. Each rank of a group makes one stretch of that.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItem

from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.config import TransferConfig
from dcp_objstore.convert.import_checkpoint import SourcePlanner, write_item
from dcp_objstore.convert.sources import Source, TensorInfo
from dcp_objstore.convert.sums import SUM_BYTES, Input, SummedSlab, weighted_sums
from dcp_objstore.distributed.failures import (
    capture,
    every_rank,
    meeting,
    on_first,
    raise_on_all,
)
from dcp_objstore.distributed.groups import count_ranks, rank_in, sync_group, world_group
from dcp_objstore.distributed.plugin import reporting_failures
from dcp_objstore.errors import ConfigError, InputError, StateMismatchError, UnsupportedError
from dcp_objstore.inspect.checkpoint import Checkpoint
from dcp_objstore.inspect.selection import Patterns, matching, whole
from dcp_objstore.inspect.slabs import Slab, cut
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import SaveReport
from dcp_objstore.read.geometry import Box
from dcp_objstore.read.items import ItemLocation, SavedTensor, typed_paths
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, open_stored_checkpoint
from dcp_objstore.state.stored import known_dtype
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import options_of_other
from dcp_objstore.transfer.workers import in_waves
from dcp_objstore.write.api import run_save
from dcp_objstore.write.writer import ObjectStoreWriter

# The share of input `number` of `count`, before the shares are divided by their sum.
_SHARES: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda _number, _count: 1.0,
    "linear": lambda number, _count: number + 1.0,
    "1-sqrt": lambda number, count: math.sqrt((number + 1) / count) - math.sqrt(number / count),
}
# Two numbers in each element, which torch converts to no other dtype.
_PACKED = torch.float4_e2m1fn_x2
# The least sum of the weights, against the sum of their sizes. Below it, dividing by the sum would
# magnify the differences between the inputs.
_LEAST_SUM = 1e-6


def average(
    urls: Sequence[str],
    out: str,
    weights: Sequence[float] | str | None = None,
    keys: Patterns = "model.*",
    *,
    overwrite: bool = False,
    claim: RunClaim | None = None,
    storage_options: Mapping[str, object] | None = None,
    source_storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    trust_pickle: bool = False,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    allow_unfenced: bool = False,
) -> SaveReport:
    """Save the weighted average of the tensors of several checkpoints as one checkpoint.

        steps = dos.steps("s3://bucket/run", newest=8)
        dos.average([step.url for step in steps], "s3://bucket/averages/step-1000")

    One process calls it, or every rank of a process group, which then share the work. The inputs
    stream through some 350 MiB of memory of each rank, however large they are; every byte is
    compared with its digest. The result is committed as `save` does it: when this returns, the
    whole checkpoint exists.

    A tensor is the sum of `weight * tensor` over the inputs, in their order, in float32 (in float64
    if one of them is of float64): each product and each sum is rounded to that, and the last one to
    the dtype of the newest input. So a float32 tensor has the same bits as the loop
    `total = w[0] * t[0]; total += w[1] * t[1]; ...`.

    The checkpoint also has the counters of the newest input, as they are: all values that are not
    tensors, whatever their keys are (step, epoch, state of a data loader, settings of an
    optimizer), and tensors of integers without dimensions that `keys` selects, such as
    `num_batches_tracked`. It has no other tensors, so no state of an optimizer unless `keys`
    selects it. Its `user_metadata` is that of the newest input, with `"average"`: the URL, commit
    and weight of each input, and `keys`.

    Args:
        urls: URLs of two or more checkpoints that this library wrote, the newest last.
        out: URL of the checkpoint to write. Below a run it would be one of its steps.
        weights: a number for each input; they are divided by their sum, and may be negative. Or a
            name: "uniform" (as a decay of the learning rate to 0 along a line would weigh the
            updates), "1-sqrt" (as a decay by `1 - sqrt(t)` would: with n inputs, input i from 0
            on has `sqrt((i + 1) / n) - sqrt(i / n)`, the oldest the most), or "linear" (1, 2, 3,
            ..., the newest the most). Default: "uniform".
        keys: one or several shell patterns such as `"model.*"`, or exact keys, of the tensors to
            average. Default: all below `model`.
        overwrite: replace a committed checkpoint at `out`. Default False: refuse.
        claim: the claim that `claim_run` returned for the run that `out` lies in. Default: none.
        storage_options: credentials and endpoint of `out`, in fsspec's spelling. Default: taken
            from the environment.
        source_storage_options: the same for the inputs. Default: `storage_options` if the inputs
            are of the same scheme.
        config: sizes, concurrency, time-outs, and the memory budget for what arrives.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that their author chose. Default False.
        progress: show a progress bar if standard error is a terminal. Default True.
        on_event: callable that receives each event of the save, in another thread.
        trace: name of a local file to write a trace of the save to.
        process_group: the ranks that work together. Default: all ranks.
        allow_unfenced: save even to a store without conditional writes. Default False: refuse.

    Returns:
        The report of the save, the same on every rank.

    Raises:
        ConfigError: fewer than two inputs, one of them twice, or weights that cannot be used.
        StateMismatchError: a key of `keys` is not a tensor of floating-point numbers in every
            input, or not of the same shape; the error names the key and the input. Or `keys`
            selects no tensor at all.
        CheckpointNotFoundError: there is no checkpoint at a URL.
        UnsupportedError: another library wrote an input, or torch pickled a tensor as a whole.
        CheckpointCorruptError: an input is damaged; the error names the tensor. Nothing was
            committed.
        CheckpointGoneError: an input was deleted or replaced during the call.
        DcpObjstoreError: any other error of `save`, or of reading an input.
    """

    # A list, because an iterator could be used only once; None (all keys) stays None.
    wanted = [keys] if isinstance(keys, str) else keys and list(keys)

    def check() -> tuple[list[StoreSpec], list[float], ObjectStoreWriter]:
        if isinstance(urls, str) or len(urls) < 2:
            raise ConfigError(f"urls must be a list of two or more checkpoints, got {urls!r}")
        options_of = partial(options_of_other, source_storage_options, out, storage_options)
        specs = [StoreSpec(url, options_of(url), config) for url in urls]
        for number, spec in enumerate(specs):
            if spec in specs[:number]:
                raise ConfigError("urls has this checkpoint twice; weigh it instead", url=spec.url)
        writer = ObjectStoreWriter(
            out,
            overwrite=overwrite,
            storage_options=storage_options,
            config=config,
            progress=progress,
            on_event=on_event,
            trace=trace,
            allow_unfenced=allow_unfenced,
            claim=claim,
        )
        return specs, _normalized(weights, len(specs)), writer

    advice = every_rank("dcp_objstore.average")
    checked, refused = capture(check)
    with meeting(out, process_group or world_group(), advice):
        group = sync_group(process_group, config)
        same = {"urls": list(urls), "weights": weights, "keys": wanted}
        raise_on_all(refused, out, group, advice, same=same)
    assert checked is not None
    specs, shares, writer = checked
    opened, tensors, counters = on_first(partial(_opened, specs, wanted, trust_pickle), out, group)
    inputs = list(map(Input, specs, opened, shares))
    input_records = [
        {"url": source.spec.url, "commit_id": source.stored.commit_id, "weight": source.weight}
        for source in inputs
    ]
    newest = opened[-1].marker
    assert newest is not None
    # A ConfigError of this (the metadata is too large) is the same on all ranks.
    writer._user_metadata = check_user_metadata(
        {**newest.user_metadata, "average": {"of": input_records, "keys": wanted}}
    )
    averages = _Averages(inputs, tensors, counters, writer._target.config)
    planner = _AveragePlanner(str(writer.checkpoint_id), averages, group)
    with closing(planner), reporting_failures(writer):
        return run_save(writer, planner.flat, group, lambda *_: planner)


def _normalized(weights: Sequence[float] | str | None, count: int) -> list[float]:
    """Return the weights divided by their sum.

    Raises:
        ConfigError: they cannot be used.
    """
    if weights is None or isinstance(weights, str):
        share = _SHARES.get(weights or "uniform")
        if share is None:
            raise ConfigError(f"weights {weights!r}: write one of {', '.join(_SHARES)}, or numbers")
        weights = [share(number, count) for number in range(count)]
    weights = list(weights)
    if len(weights) != count:
        raise ConfigError(f"there are {count} inputs and {len(weights)} weights")
    total = math.nan  # and so it stays if a weight is not a number, or the sum has no value
    if all(isinstance(weight, Real) for weight in weights):
        with suppress(OverflowError, ValueError):  # too large, or infinities of both signs
            weights = [float(weight) for weight in weights]
            total = math.fsum(weights)
    if not math.isfinite(total):
        raise ConfigError(f"weights must be finite numbers, and so must their sum: {weights}")
    if abs(total) <= _LEAST_SUM * max(map(abs, weights)):
        raise ConfigError(f"the weights sum to {total:g}, so there is no average: {weights}")
    return [weight / total for weight in weights]


def _opened(
    specs: Sequence[StoreSpec], keys: Patterns, trust_pickle: bool
) -> tuple[list[StoredCheckpoint], list[str], dict[str, Any]]:
    """Open the inputs; return them, the keys to average, and the counters of the newest by key.

    Args:
        specs: the inputs, the newest last.
        keys: as for `average`, in a list.
        trust_pickle: as for `average`.

    Raises:
        StateMismatchError: tensors have no average, or do not fit those of the newest.
        DcpObjstoreError: any error of opening an input, or of reading the counters.
    """
    opened = list(in_waves(open_stored_checkpoint, specs))
    tensors_of_inputs = list(map(partial(_averaged, keys=keys), specs, opened))
    newest_spec, newest, averaged = specs[-1], opened[-1], tensors_of_inputs[-1]
    for spec, tensors in zip(specs, tensors_of_inputs, strict=True):
        for key in {**averaged, **tensors}:
            shape, newest_shape = _shape_text(tensors.get(key)), _shape_text(averaged.get(key))
            if shape != newest_shape:
                raise StateMismatchError(
                    f"{shape} here, and {newest_shape} in {newest_spec.url}; leave it out of keys=",
                    key=key,
                    url=spec.url,
                )
    if not averaged:
        raise StateMismatchError("keys= selects no tensor to average", url=newest_spec.url)
    # All values, and of the tensors those that `keys` selects and that have no average.
    selected = {*matching(newest.items.keys, keys)} - averaged.keys()
    counters = [
        key for key in newest.items.keys if key in selected or newest.items.tensor(key) is None
    ]
    settings = EventSettings(None, None)
    checkpoint = Checkpoint(
        newest_spec, newest, verify=True, trust_pickle=trust_pickle, event_settings=settings
    )
    return opened, list(averaged), checkpoint.read(counters, progress=False)


def _averaged(spec: StoreSpec, stored: StoredCheckpoint, keys: Patterns) -> dict[str, SavedTensor]:
    """Return the tensors of an input that are averaged, by key.

    Values and counters (tensors of integers without dimensions) are left out.

    Raises:
        UnsupportedError: another library wrote the input.
        StateMismatchError: `keys` selects a tensor that has no average, or one of `keys` matches
            nothing.
        ConfigError: one of `keys` is not a `str`.
    """
    if stored.index is None:
        raise UnsupportedError(
            "another library wrote this checkpoint, without digests; import_checkpoint"
            " (dcp-objstore import) saves it as one that has them",
            url=spec.url,
        )
    averaged: dict[str, SavedTensor] = {}
    try:
        for key in matching(stored.items.keys, keys):
            saved = stored.items.tensor(key)
            dtype = None if saved is None else known_dtype(saved.dtype)
            if saved is None or dtype is None:
                continue  # a value, or a tensor of a dtype that this torch does not know
            is_float = dtype.is_floating_point and dtype != _PACKED
            is_counter = not (saved.shape or is_float or dtype.is_complex)
            if is_counter:
                continue
            rows = stored.index.rows(key)
            is_pickled = stored.index.columns.pickled[rows.start : rows.stop].any()
            if is_pickled or not is_float:
                raise StateMismatchError(
                    "only plain floating-point tensors have an average, and this one is"
                    f" {'pickled' if is_pickled else saved.dtype}; leave it out of keys=",
                    key=key,
                )
            averaged[key] = saved
    except InputError as error:  # a StateMismatchError or ConfigError, which lacks the URL
        raise error.at(url=spec.url) from None
    return averaged


def _shape_text(saved: SavedTensor | None) -> str:
    return "there is no such tensor" if saved is None else f"its shape is {saved.shape}"


class _Averages(Source):
    """The average of the inputs, and the counters of the newest, as what a save reads.

    Args:
        inputs: the inputs, whose tensors fit.
        averaged: the keys of the tensors to average.
        counters: what is taken from the newest, by key.
        config: sizes, concurrency, time-outs and the memory budget.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        averaged: Sequence[str],
        counters: Mapping[str, Any],
        config: TransferConfig,
    ) -> None:
        self._inputs, self._config = inputs, config
        newest = inputs[-1].stored.items
        self.tensors, self._sum_dtypes = {}, {}
        for key in averaged:
            dtypes = [getattr(torch, source.tensor(key).dtype) for source in inputs]
            self.tensors[key] = TensorInfo(inputs[-1].tensor(key).shape, dtypes[-1])
            self._sum_dtypes[key] = torch.float64 if torch.float64 in dtypes else torch.float32
        self.values = counters
        self.keys = [key for key in newest.keys if key in self.tensors or key in counters]
        self.paths = typed_paths(newest)

    def slabs(self) -> Iterator[Slab]:
        """Cut the tensors along the chunks of the newest input.

        If all inputs have the same chunks, the slabs come in the order in which the newest input
        stores the chunks. Otherwise the slabs of a tensor stay together, because another input may
        have elements of several of them in one block.
        """
        newest = self._inputs[-1].stored
        chunks: list[_Chunk] = []
        are_alike = True
        for key in self.tensors:
            boxes = [_boxes(source.tensor(key)) for source in self._inputs]
            are_alike = are_alike and boxes.count(boxes[0]) == len(boxes)
            for number, box in enumerate(boxes[-1]):
                chunks.append(_Chunk(key, box, newest.item(key, box.offsets, number)))
        if are_alike:
            place = operator.attrgetter("location.object_number", "location.payload_offset")
            chunks.sort(key=place)
        for key, box, _ in chunks:
            dtype = self.tensors[key].dtype
            # `SUM_BYTES` limits the size in the dtype of the sum, and `cut` counts in `dtype`.
            most_bytes = SUM_BYTES * dtype.itemsize // self._sum_dtypes[key].itemsize
            for slab in cut(key, box.sizes, dtype, most_bytes=most_bytes):
                offsets = map(operator.add, box.offsets, slab.box.offsets)
                yield slab._replace(box=Box(tuple(offsets), slab.box.sizes))
        for key, info in self.tensors.items():
            if 0 in info.shape:  # which `cut` leaves out
                yield Slab(key, whole(info.shape), 0)

    def read(self, slabs: Sequence[Slab]) -> list[torch.Tensor]:
        """Return the averages of slabs."""
        return list(self.stream(slabs, lambda: None))

    def stream(
        self, slabs: Sequence[Slab], check: Callable[[], object]
    ) -> Generator[torch.Tensor, None, None]:
        """Yield the average of each slab, in their order, while the next ones are made."""
        summed = [
            SummedSlab(slab, self._sum_dtypes[slab.key], self.tensors[slab.key].dtype)
            for slab in slabs
        ]
        return weighted_sums(self._inputs, summed, self._config, check)


class _Chunk(NamedTuple):
    """A chunk of the newest input: its tensor, its box there, and the place of its bytes."""

    key: str
    box: Box
    location: ItemLocation


def _boxes(saved: SavedTensor) -> list[Box]:
    """Return the boxes of a tensor's chunks, in the order of the index."""
    boxes = zip(saved.offsets.tolist(), saved.sizes.tolist(), strict=True)
    return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]


class _AveragePlanner(SourcePlanner):
    """Plans this rank's share of the slabs, and the counters.

    Args:
        url: URL of the checkpoint.
        source: the average.
        group: the ranks that work together.
    """

    def __init__(self, url: str, source: _Averages, group: dist.ProcessGroup | None) -> None:
        self._averages = source
        self._rank, ranks = rank_in(group), count_ranks(group)
        super().__init__(url, source, {key: key for key in source.keys}, ranks)

    def make_items(self) -> list[WriteItem]:
        """Override `SourcePlanner.make_items`: each rank has one stretch of the slabs.

        All slabs one after the other are cut into as many equal stretches as there are ranks. A
        rank writes the slabs that begin in its stretch.
        """
        # Of the base class, only the items of the values: its slabs are cut in another way.
        items = [item for item in super().make_items() if not self._is_read(item)]
        slabs = list(self._averages.slabs())
        total_bytes, start = sum(slab.size_bytes for slab in slabs), 0
        for slab in slabs:
            rank = start * self._ranks // max(1, total_bytes)
            # Empty slabs at the very end begin where the last stretch ends.
            if min(rank, self._ranks - 1) == self._rank:
                items.append(write_item(slab, self._averages.tensors[slab.key]))
            start += slab.size_bytes
        return items
