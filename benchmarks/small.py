"""`small`: what each of many small tensors costs inside `write_data`, beyond its bytes.

The same bytes are saved to `memory://` as many small tensors and as one; the difference, divided
by the number of tensors, is the cost of one. No network is involved.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_objstore as dos
from benchmarks.processes import answer, run_module
from benchmarks.table import Result, Table, number

_MODULE = "benchmarks.small"


def small(tensors: int, tensor_bytes: int, rounds: int) -> tuple[Table, Result]:
    """Measure in a fresh process; medians of the rounds."""
    job = {"tensors": tensors, "tensor_bytes": tensor_bytes, "rounds": rounds}
    found: dict[str, list[float]] = run_module(_MODULE, job)
    wall, cpu = (statistics.median(found[name]) for name in ("wall_us", "cpu_us"))
    table = Table(
        f"write_data of {tensors} tensors of {tensor_bytes} bytes, medians of {rounds} rounds",
        ["what", "us per tensor"],
        [["wall time", number(wall, ".1f")], ["processor time", number(cpu, ".1f")]],
    )
    return table, {"command": "small", **job, "wall_us": wall, "cpu_us": cpu, "rounds_us": found}


def _write_seconds(state: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Wall and processor seconds inside `write_data`, driven as DCP drives it on one rank."""
    writer = dos.ObjectStoreWriter(f"memory://small/{time.monotonic_ns()}", progress=False)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict=dict(state), storage_meta=None, is_coordinator=True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    start, cpu = time.perf_counter(), time.process_time()
    results = writer.write_data(plan, planner).wait()
    seconds = time.perf_counter() - start, time.process_time() - cpu
    # Ends the save, as DCP does.
    writer.finish(metadata=metadata, results=[results])
    return seconds


def measure(job: dict[str, int]) -> dict[str, list[float]]:
    """The figures of every round, in this process."""
    count, elements = job["tensors"], max(1, job["tensor_bytes"] // 4)
    many = {f"layer.{i}.weight": torch.randn(elements) for i in range(count)}
    one = {"weight": torch.randn(elements * count)}
    for state in (one, many):  # imports and caches
        _write_seconds(state)
    found: dict[str, list[float]] = {"wall_us": [], "cpu_us": []}
    for _ in range(job["rounds"]):
        (wall, cpu), (wall_one, cpu_one) = _write_seconds(many), _write_seconds(one)
        found["wall_us"].append((wall - wall_one) / count * 1e6)
        found["cpu_us"].append((cpu - cpu_one) / count * 1e6)
    return found


if __name__ == "__main__":
    answer(measure)
