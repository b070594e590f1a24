"""One process of `scale`: the coordinator's side of a save or of a load, or one rank's of both.

The calls are those that DCP makes, in its order, with the library's planners, writer and reader.
What ranks send each other is pickled and unpickled, as DCP does it, but not sent. Stages that lie
inside one call of the writer are timed where it calls them.
"""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

import dcp_objstore as dos
from benchmarks.child import cpu_seconds, reset_peak_mib, status_mib
from benchmarks.processes import answer
from benchmarks.scale_state import ScaledState, fake_group, needs_of_rows
from dcp_objstore.checkpoint import index as ix, read
from dcp_objstore.checkpoint.index import Numbers
from dcp_objstore.config import TransferConfig
from dcp_objstore.read.peers.meeting import Offer, group_digest
from dcp_objstore.read.plan import PlannedLoad, plan_load
from dcp_objstore.read.planner import AgreeingLoadPlanner, _LocalItems, _OwnPlan
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.state.stored import StoredObject
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta, Version
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.transfer.ranges import grown_request_size, plan_requests
from dcp_objstore.write import session as session_module, writer as writer_module
from dcp_objstore.write.global_plan import LocalPlan
from dcp_objstore.write.planner import AgreeingSavePlanner, _KnownLayout, _Offer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.stores.protocol import ObjectStore, Precondition

T = TypeVar("T")
Found = dict[str, Any]
_PAGE = 1000  # keys in one answer to a LIST
# What `ObjectStoreWriter.finish` calls for each stage.
_IN_FINISH = (
    (writer_module, "build_index", "build_index"),
    (session_module, "_read_back", "encode_index"),
    (session_module, "_commit_with_events", "commit"),
    (session_module, "_publish", "dot_metadata"),
)


class Stages:
    """The stages of one process.

    Attributes:
        found: processor time and peak memory of each stage. The memory is counted above what was
            resident when the stage before ended, so it includes what the stage works on.
        peak_mib: the most that was resident.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self.peak_mib = 0.0
        self._before_mib = reset_peak_mib() or 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block."""
        start = cpu_seconds()
        yield
        seconds = cpu_seconds() - start
        peak_mib = status_mib("VmHWM") or 0.0
        self.peak_mib = max(self.peak_mib, peak_mib)
        self.found[name] = {"seconds": seconds, "mib": peak_mib - self._before_mib}
        self._before_mib = reset_peak_mib() or 0.0

    def timed(self, name: str, call: Callable[..., T]) -> Callable[..., T]:
        """Return the function, measured as a stage."""

        def measured(*args: Any, **kwargs: Any) -> T:
            with self.stage(name):
                return call(*args, **kwargs)

        return measured


class CountingStore(WrappedStore):
    """Counts requests as S3 does, and lists data objects that are not there.

    Args:
        inner: the store.
        requests: the counts, by verb.
        pretended: size of each object to list, by its key.
    """

    def __init__(
        self, inner: ObjectStore, requests: Counter[str], pretended: Mapping[str, int]
    ) -> None:
        super().__init__(inner)
        self.requests = requests
        self.pretended = pretended

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """Count a PUT."""
        self.requests["PUT"] += 1
        return self.inner.put(key, data, precondition=precondition, retry=retry)

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Count a GET."""
        self.requests["GET"] += 1
        return self.inner.get(key, max_size_bytes=max_size_bytes)

    def head(self, key: str) -> ObjectMeta:
        """Count a HEAD."""
        self.requests["HEAD"] += 1
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """Count a LIST for each page."""
        now = datetime.now(UTC)
        there = [ObjectMeta(key, size, Version(), now) for key, size in self.pretended.items()]
        there += self.inner.list(prefix)
        self.requests["LIST"] += -(-len(there) // _PAGE)
        yield from there

    def delete(self, key: str) -> None:
        """Count a DELETE."""
        self.requests["DELETE"] += 1
        self.inner.delete(key)


@contextmanager
def counted(pretended: Mapping[str, int]) -> Iterator[Counter[str]]:
    """Count the requests of all stores that are opened while the block runs.

    Args:
        pretended: size of each object that is listed without being there, by its key.
    """
    requests, real = Counter[str](), StoreSpec.open

    def opened(spec: StoreSpec) -> ObjectStore:
        return CountingStore(real(spec), requests, pretended)

    with patch.object(StoreSpec, "open", opened):
        yield requests


def coordinate_save(state: ScaledState, url: str) -> Found:
    """Save twice, as the coordinator does; the data objects are only said to be there.

    The second save finds the layout known, and its stages are called "again_...". What DCP's
    default planner takes for the same plans is called "dcp_...".
    """
    stages, ranks = Stages(), range(state.ranks)
    pretended: dict[str, int] = {}
    objects: set[StoredObject] = set()
    known: _KnownLayout | None = None
    # A rank's items and what it writes of them.
    items = [state.save_items(rank) for rank in ranks]
    kept: list[Numbers] = []
    _plan_as_dcp(state, items, stages)
    with counted(pretended) as requests:
        for prefix in ("", "again_"):
            planner = AgreeingSavePlanner(url, {}, state.ranks)
            planner.set_up_planner({}, is_coordinator=True)
            planner._known_layout = known
            writer = dos.ObjectStoreWriter(url, progress=False, overwrite=known is not None)
            writer.storage_meta()
            writer.set_up_storage_writer(True, rank=0, use_collectives=True)
            bodies = []
            for rank in ranks:
                plan = LocalPlan.of(items[rank], state.mappings) if known is None else None
                bodies.append(pickle.dumps(SavePlan([], storage_data=_Offer(url, plan))))
            if known is None:
                plan_bytes = len(bodies[0])
            with stages.stage(f"{prefix}gather_plans"):
                local: list[SavePlan] = [pickle.loads(body) for body in bodies]
            bodies.clear()
            with stages.stage(f"{prefix}global_plan"):
                plans, metadata = planner.create_global_plan(local)
                plans = writer.prepare_global_plan(plans)
            local.clear()
            with stages.stage(f"{prefix}scatter_plans"):
                bodies += [pickle.dumps(plan) for plan in plans]
            bodies.clear()
            if known is None:
                kept = [plan.storage_data.own for plan in plans]
            known = _KnownLayout(0, planner._planned, kept[0])
            objects.clear()
            pretended.clear()
            for rank in ranks:
                written = [items[rank][at] for at in kept[rank].tolist()]
                results = state.results(rank, written, url)
                objects |= {one.storage_data.object for one in results}
                bodies.append(pickle.dumps(results))
            result_bytes = max(map(len, bodies))
            with stages.stage(f"{prefix}gather_results"):
                reported = [pickle.loads(body) for body in bodies]
            bodies.clear()
            pretended |= {one.entry.key: one.entry.size_bytes for one in objects}
            with ExitStack() as stack:
                for module, name, stage in _IN_FINISH:
                    timed = stages.timed(f"{prefix}{stage}", getattr(module, name))
                    stack.enter_context(patch.object(module, name, timed))
                writer.finish(metadata=metadata, results=reported)
            with stages.stage(f"{prefix}send_metadata"):
                described = pickle.dumps(metadata)
            if not prefix:
                of_first = dict(requests)
    stored = StoreSpec(url).open()
    return {
        "stages": stages.found,
        "peak_mib": stages.peak_mib,
        "requests": of_first,
        # Of each rank, for its data: one PUT, or a multipart upload's first and last request
        # on top of its parts.
        "data_puts": sum(one.parts + 2 if one.parts > 1 else 1 for one in objects),
        "data_bytes": sum(one.entry.size_bytes for one in objects),
        "plan_bytes": plan_bytes,
        "result_bytes": result_bytes,
        "metadata_bytes": len(described),
        "index_bytes": next(
            meta.size_bytes for meta in stored.list() if meta.key.startswith("index.")
        ),
    }


def _plan_as_dcp(state: ScaledState, items: Sequence[list[WriteItem]], stages: Stages) -> None:
    """Plan the same save with DCP's default planner, for comparison."""
    planner = DefaultSavePlanner()
    bodies = [
        pickle.dumps(SavePlan(of_rank, planner_data=dict(state.mappings))) for of_rank in items
    ]
    with stages.stage("dcp_gather_plans"):
        local: list[SavePlan] = [pickle.loads(body) for body in bodies]
    bodies.clear()
    with stages.stage("dcp_global_plan"):
        plans, _ = planner.create_global_plan(local)
    local.clear()
    with stages.stage("dcp_scatter_plans"):
        bodies += [pickle.dumps(plan) for plan in plans]


def coordinate_load(state: ScaledState, url: str) -> Found:
    """Plan a load by all ranks, as the coordinator does; each rank gets back what it saved."""
    stages, ranks = Stages(), range(state.ranks)
    planner, reader = AgreeingLoadPlanner(url), dos.ObjectStoreReader(url, progress=False)
    planner.set_up_planner({}, reader.read_metadata(), is_coordinator=True)
    marker, stored = read.open_committed(StoreSpec(url).open())
    index = ix.decode(stored)
    # As DCP's default planner sends them, for comparison.
    bodies = [pickle.dumps(LoadPlan(state.read_items(rank))) for rank in ranks]
    with stages.stage("dcp_gather_read_plans"):
        plans: list[LoadPlan] = [pickle.loads(body) for body in bodies]
    bodies.clear()
    with stages.stage("dcp_scatter_read_plans"):
        bodies += [pickle.dumps(plan) for plan in plans]
    plans.clear()
    bodies = [pickle.dumps(_load_plan(state, index, rank, url, marker.commit_id)) for rank in ranks]
    plan_bytes = max(map(len, bodies))
    with stages.stage("gather_read_plans"):
        plans += [pickle.loads(body) for body in bodies]
    bodies.clear()
    with stages.stage("share_out"):
        plans = reader.prepare_global_plan(planner.create_global_plan(plans))
    with stages.stage("scatter_read_plans"):
        bodies += [pickle.dumps(plan) for plan in plans]
    return {
        "stages": stages.found,
        "peak_mib": stages.peak_mib,
        "read_plan_bytes": plan_bytes,
    }


def _load_plan(
    state: ScaledState, index: ix.Index, rank: int, url: str, commit_id: str
) -> LoadPlan:
    """Return what a rank sends the coordinator of a load."""
    items = state.read_items(rank)
    rows = [
        index.rows(item.dest_index.fqn).start + (item.storage_index.index or 0) for item in items
    ]
    config = TransferConfig()
    offer = Offer(
        *(url, commit_id, rank, group_digest(range(state.ranks)), needs_of_rows(index, rows), {}),
        memory_budget_bytes=config.memory_budget_bytes,
        request_size_bytes=config.request_size_bytes,
    )
    return _OwnPlan(items, storage_data=offer, planner_data=_LocalItems(url, 0, len(items)))


def _requests(planned: PlannedLoad) -> int:
    """Return the number of GETs by which a rank reads its data alone from S3."""
    total_bytes = sum(span.end - span.start for span in planned.spans)
    size = grown_request_size(total_bytes, TransferConfig().request_size_bytes)
    return len(plan_requests(planned.spans, request_size_bytes=size))


def be_rank(state: ScaledState, url: str, rank: int) -> Found:
    """Plan a save and a load of what was saved at `url`, as one rank does.

    Both plans are compared with the simulated ones.
    """
    fake_group(rank, state.ranks)
    own = state.build(rank)
    stages = Stages()
    planner = AgreeingSavePlanner(url, {}, state.ranks)
    writer = dos.ObjectStoreWriter(url, progress=False)
    with stages.stage("local_plan"):
        planner.set_up_planner(dict(own), writer.storage_meta(), is_coordinator=rank == 0)
        plan = planner.create_local_plan()
    with stages.stage("send_plan"):
        body = pickle.dumps(plan)
    simulated = state.save_items(rank)
    assert planner.plan.items == simulated
    assert planner.mappings == state.mappings
    assert pickle.loads(body).storage_data.plan == LocalPlan.of(simulated, state.mappings)
    results = state.results(rank, simulated, url)
    with stages.stage("send_results"):
        body = pickle.dumps(results)
    del plan, simulated, results, body
    with counted({}) as requests:
        reader, loader = dos.ObjectStoreReader(url, progress=False), AgreeingLoadPlanner(url)
        with stages.stage("open"):
            metadata = reader.read_metadata()
        with stages.stage("local_read_plan"):
            loader.set_up_planner(dict(own), metadata, is_coordinator=rank == 0)
            wanted = loader.create_local_plan()
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank)
        with stages.stage("plan_ranges"):
            offered = reader.prepare_local_plan(wanted)
        with stages.stage("send_read_plan"):
            pickle.dumps(offered)
        opened = dict(requests)
    marker, body = read.open_committed(StoreSpec(url).open())
    simulated_plan = _load_plan(state, ix.decode(body), rank, url, marker.commit_id)
    assert offered.items == simulated_plan.items
    assert np.array_equal(offered.storage_data.needs, simulated_plan.storage_data.needs)
    stored = open_stored_checkpoint(StoreSpec(url))
    planned = plan_load(stored, wanted.items, verify=True, whole_blocks=True)
    with stages.stage("plan_requests"):
        gets = _requests(planned)
    dist.destroy_process_group()
    return {"stages": stages.found, "open_requests": opened, "data_gets": gets}


def run(job: dict[str, Any]) -> Found:
    """Do a job in this process."""
    if not job["collector"]:
        gc.disable()
    state = ScaledState.of(job["model"], job["ranks"], job["tensors"])
    if job["what"] == "rank":
        return be_rank(state, job["url"], job["rank"])
    act = {"save": coordinate_save, "load": coordinate_load}[job["what"]]
    return act(state, job["url"])


if __name__ == "__main__":
    answer(run)
