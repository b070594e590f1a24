"""Upload a rank's items of one save, from the tensors' memory to data objects.

`layout` decides which item goes where, and `transfer.upload` transfers each object.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.names import data_key
from dcp_objstore.compat.values import warn_unsafe_value
from dcp_objstore.config import AUTO_MOST, COPIED_MOST_BYTES, Local, TransferConfig
from dcp_objstore.errors import InputError, StoreFullError
from dcp_objstore.local.copies import SaveCopies
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.events import Hashed, Planned
from dcp_objstore.observe.report import logger, size_text
from dcp_objstore.state.device import Outbound, wait_for_streams
from dcp_objstore.state.stored import StoredObject
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.ranges import read_range
from dcp_objstore.transfer.copies import LEAST_PART_BYTES
from dcp_objstore.transfer.digests import block_digests
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.parts import PartPlan, part_count, plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import DEFAULT_GAP_BYTES
from dcp_objstore.transfer.upload import Content, upload_object
from dcp_objstore.transfer.workers import DaemonPool, worker_number
from dcp_objstore.write.base import Base, Unchanged, find_unchanged
from dcp_objstore.write.layout import SMALL_BYTES, ChangedSlice, Layout, SizedItem, item_bytes
from dcp_objstore.write.planner import AgreeingSavePlanner
from dcp_objstore.write.results import WriteResults

if TYPE_CHECKING:
    from dcp_objstore.write.session import Save


def upload_items(
    save: Save,
    plan: SavePlan,
    planner: SavePlanner,
    *,
    config: TransferConfig,
    warned_keys: set[str],
    base: Base | None = None,
    local: Local | None = None,
) -> tuple[WriteResults, list[StoredObject]]:
    """Upload the items of a rank's plan and return when all of them are on the store.

    Before that, the store copies what has not changed since the base.

    Args:
        warned_keys: the keys of values that a warning was given for; new keys are added.
        base: the base of the save, if it can be copied from.
        local: the folder of this node for copies of the objects. Objects that the store copies have
            none there.

    Returns:
        A result for each item, and the objects: those that were copied, then the uploaded ones.
    """
    wait_for_streams()  # because another thread reads the tensors
    store = save.open()
    own_planner = planner if isinstance(planner, AgreeingSavePlanner) else None
    known_digests = {} if own_planner is None else own_planner.digests
    digests_of = partial(_hash, save.channel) if save.channel.detailed else block_digests
    resolve = planner.resolve_data
    if own_planner is None or _has_sharded(own_planner.state_dict):
        # With gradients, `DTensor.to_local` would make a view.
        resolve = torch.no_grad()(resolve)
    # For all items, also those that the store is to copy: if it cannot, they are uploaded.
    part_plan = _plan_parts(plan.items, store, config)
    unchanged = Unchanged()
    if base is not None:
        unchanged = find_unchanged(
            base,
            plan.items,
            resolve,
            known_digests=known_digests,
            config=config,
            part_plan=part_plan,
            digests_of=digests_of,
            whole_only=not store.capabilities.range_copies,
        )
    order = upload_order(plan.items, unchanged.items)
    _emit_planned(save, unchanged, order, part_plan)
    unchanged.copy(save, config)
    results, objects = WriteResults(unchanged.results), list(unchanged.stored)
    progress = Progress(config.stall_timeout_seconds, save.channel)
    if own_planner is not None:
        # The coordinator knows this plan, so results name only positions in it.
        results.planned = plan.items
        own_planner.check_stopped = progress.check_stopped
    groups = _groups(order, unchanged, unchanged.copied)
    is_copied = own_planner is not None and own_planner.is_copied
    most_parts = _most_parts(groups, part_plan, is_copied=is_copied)
    # The first numbers belong to the objects that the store was to copy.
    object_numbers = itertools.count(len(unchanged.objects))
    save.copies = None if local is None else SaveCopies(local, save.spec, save.channel, save.rank)
    upload = partial(_upload_object, save, config=config, progress=progress, most=most_parts)
    with DaemonPool(config.hash_threads, "hash") as hashers:
        outbound = Outbound(part_plan, config, progress.check_stopped)
        # Each layout takes, from the left of the first group with items, what its object holds.
        while pending := next(filter(None, groups), None):
            layout = Layout(
                pending=pending,
                resolve=resolve,
                plan=part_plan,
                hash_slice=partial(hashers.submit, digests_of),
                on_value=lambda key, body: warn_unsafe_value(body, key, warned_keys),
                outbound=outbound,
                known_digests=known_digests,
            )
            try:
                stored = upload(data_key(save.rank, next(object_numbers), save.nonce), layout)
            except StoreFullError as error:
                size_bytes = sum(size for _, size in order)
                error.message += f"; this rank saves {size_text(size_bytes)}"
                raise
            objects.append(stored)
            results.extend(placed.result(stored) for placed in layout.placed)
    if save.copies is not None:
        save.copies.end()
    return results, objects


def _has_sharded(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a flat state has a DTensor."""
    return any(isinstance(value, DTensor) for value in state_dict.values())


def _plan_parts(items: Sequence[WriteItem], store: ObjectStore, config: TransferConfig) -> PartPlan:
    """Choose the sizes of parts, slices and objects for all of these items."""
    sizes_bytes = [item_bytes(item) for item in items]
    return plan_parts(
        sum(sizes_bytes),
        config.part_size_bytes,
        max_object_size_bytes=config.max_object_size_bytes,
        largest_item_bytes=max(sizes_bytes, default=0),
        is_near=config.upload_concurrency != "auto" or limiter_of(store).window.is_near,
    )


def _most_parts(
    groups: Iterable[Iterable[SizedItem]], part_plan: PartPlan, *, is_copied: bool
) -> int:
    """Return how many parts of an object may be under way at a time.

    Parts of copied payload take memory; other parts are views of the tensors. If little is copied,
    their number is only limited by `AUTO_MOST`.

    Args:
        is_copied: whether all payload is copied, and not only that of small items.
    """
    uploads = itertools.chain.from_iterable(groups)
    copied_bytes = sum(size for _, size in uploads if is_copied or size <= SMALL_BYTES)
    if copied_bytes <= COPIED_MOST_BYTES:
        return AUTO_MOST
    return max(2, COPIED_MOST_BYTES // part_plan.part_size_bytes)


def _upload_object(
    save: Save,
    key: str,
    layout: Layout,
    *,
    config: TransferConfig,
    progress: Progress,
    most: int,
) -> StoredObject:
    """Upload one object, and write its copy on this node.

    Args:
        most: the largest number of parts under way at a time.
    """
    store, copies = save.open(), save.copies
    # About how large the object becomes, and so its copy on this node.
    size_bytes = sum(size for _, size in layout.pending) if copies is not None else 0
    size_bytes = min(size_bytes, layout.plan.max_object_size_bytes)
    try:
        with ExitStack() as open_copy:

            def begin_buffers() -> Iterator[ByteArray]:
                """Return the object's bytes from the start, for each try of the upload."""
                if copies is None:
                    return layout.buffers()
                open_copy.close()  # gives up the copy that the try before this one has begun
                return open_copy.enter_context(copies.tee(key, layout.buffers(), size_bytes))

            uploaded = upload_object(
                store,
                key,
                Content(begin_buffers),
                plan=layout.plan,
                config=config,
                progress=progress,
                most=most,
                is_own=True,
            )
    finally:
        layout.is_over = True  # what the transport releases from now on is not compared
    _check_changed(store, key, layout.changed)
    entry = ix.ObjectEntry(key, uploaded.size_bytes, uploaded.version.e_tag, layout.framing_digest)
    return StoredObject(entry, uploaded.parts, save.spec.url)


def _emit_planned(
    save: Save, unchanged: Unchanged, order: Sequence[SizedItem], part_plan: PartPlan
) -> None:
    """Emit how much the store is to copy, and how much is uploaded.

    Pickled values count as no bytes, but a rank with nothing else has an object all the same.
    """
    groups = _groups(order, unchanged, unchanged.to_copy)
    uploads_bytes = [sum(size for _, size in group) for group in groups]
    objects = sum(-(-size // part_plan.max_object_size_bytes) for size in uploads_bytes)
    save.channel.emit(
        Planned,
        save.channel.began_at,
        operation="save",
        items=len(order),
        size_bytes=sum(size_bytes for _, size_bytes in order),
        objects=max(1, len(unchanged.objects) + objects),
        requests=unchanged.parts
        + sum(part_count(size, part_plan.part_size_bytes) for size in uploads_bytes),
    )


def upload_order(
    items: Iterable[WriteItem], unchanged: Collection[MetadataIndex] = ()
) -> list[SizedItem]:
    """Return items in the order in which they are uploaded, each with its size in bytes.

    Pickled values come first, as in stock writers. Tensors follow in the plan's order, but with the
    small ones together, so that a reader gets them with one request: every rank reads an
    optimizer's step counts, whichever of the large tensors it reads. What has not changed since the
    base stays together too, so that the next save may copy it.
    """
    return sorted(
        (SizedItem(item, item_bytes(item)) for item in items),
        key=lambda sized: (
            sized.item.tensor_data is not None,
            sized.size_bytes > DEFAULT_GAP_BYTES,
            not (unchanged and sized.item.index in unchanged),
        ),
    )


def _groups(
    order: Sequence[SizedItem], unchanged: Unchanged, copied: Collection[MetadataIndex]
) -> list[deque[SizedItem]]:
    """Return what is uploaded into separate objects: what has changed, and what has not.

    There are two groups only if the store copies whole objects only, and what has not changed is
    large enough to be copied: the next save can then have the objects of that group copied.

    Args:
        copied: the items that the store copies, which are not uploaded.
    """
    # Most saves have no base. For them nothing is looked up, because the hash of an index costs as
    # much as a tenth of the item.
    uploads = [sized for sized in order if sized.item.index not in copied] if copied else order
    unchanged_items: deque[SizedItem] = deque()
    changed_items: deque[SizedItem] = deque()
    if unchanged.whole_only:
        for sized in uploads:
            is_unchanged = sized.item.index in unchanged.items
            (unchanged_items if is_unchanged else changed_items).append(sized)
    if sum(sized.size_bytes for sized in unchanged_items) < LEAST_PART_BYTES:
        return [deque(uploads)]
    return [group for group in (changed_items, unchanged_items) if group]


def _check_changed(store: ObjectStore, object_key: str, changed: Sequence[ChangedSlice]) -> None:
    """Read back the slices that changed during their upload, and compare them with their digests.

    A slice that has its digest was sent as it was when it was hashed, so the checkpoint is whole.

    Raises:
        InputError: the bytes on the store do not have the digest that the index would give.
    """
    for changed_slice in changed:
        start, end = changed_slice.offset, changed_slice.offset + changed_slice.size_bytes
        body = read_range(store, object_key, start, end)
        if block_digests(body) != changed_slice.digests.result():
            raise InputError(
                "the tensor changed while it was being saved: dcp_objstore.async_save copies it"
                " first",
                key=changed_slice.key,
            )
    if changed:
        logger.warning(
            "%s: %s changed while it was being saved; its values may mix old and new ones",
            store.url,
            ", ".join(dict.fromkeys(changed_slice.key for changed_slice in changed)),
        )


def _hash(channel: Channel, piece: ByteArray) -> bytes:
    """Return the digests of a slice's blocks, and emit an event."""
    began_at = time.monotonic()
    digests = block_digests(piece)
    channel.emit(Hashed, began_at, size_bytes=piece.nbytes, worker=worker_number())
    return digests
