"""`gpu`: a save and a load of CUDA tensors, compared with what the bus and host memory allow.

The floor is the time in which as many bytes are copied between the same tensors and pinned host
memory, on one stream, with nothing else to do. Then the state is saved and loaded, to the sink (a
process of its own) or to `memory://`, and a state of the same size that lies in host memory as
well. `held` is how long `async_save` keeps training waiting. Saves go to a sink that drops what it
gets, because one that keeps it is slower. Without a GPU nothing is measured, and it says so.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import dcp_objstore as dos
from benchmarks.child import cpu_seconds, reset_peak_mib, status_mib
from benchmarks.processes import answer, medians, run_module
from benchmarks.settings import GIB, MIB, Settings
from benchmarks.sink import Sink
from benchmarks.table import Result, Table

State = dict[str, torch.Tensor]
_Target = tuple[str, "dict[str, object] | None"]

_MODULE = "benchmarks.gpu"
_PINNED_BYTES = 64 * MIB
_COLUMNS = {
    "GiB/s": ("gib_per_second", ".2f"),
    "to floor": ("to_floor", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "extra MiB": ("extra_mib", ".0f"),
    "pinned MiB": ("pinned_mib", ".0f"),
}
_ROWS = {
    "floor_out": "pinned copies, GPU to host",
    "held": "async_save, until it is staged",
    "save": "save",
    "save_cpu": "save of host memory",
    "floor_in": "pinned copies, host to GPU",
    "load": "load",
    "load_cpu": "load into host memory",
}


def gpu(
    settings: Settings, target: str, rounds: int, memory_budget_mib: int
) -> tuple[Table, Result]:
    """Measure in a fresh process; medians of the rounds.

    Args:
        settings: sizes of the state and of the requests.
        target: `sink` or `memory`.
        memory_budget_mib: as `memory_budget_bytes` of `TransferConfig`.
    """
    job = {
        "settings": dataclasses.asdict(settings),
        "target": target,
        "rounds": rounds,
        "memory_budget_bytes": memory_budget_mib * MIB,
    }
    result: Result = {"command": "gpu", **job}
    if not torch.cuda.is_available():
        reason = "no GPU here: torch.cuda.is_available() is False, nothing was measured"
        return Table(reason, ["what", "GiB/s"], []), {**result, "gpu": None, "reason": reason}
    found = run_module(_MODULE, job)
    measured = medians(found["rounds"])
    for name, floor in (
        ("held", "floor_out"),
        ("save", "floor_out"),
        ("save_cpu", "floor_out"),
        ("load", "floor_in"),
        ("load_cpu", "floor_in"),
    ):
        speeds = [
            statistics.median(one["gib_per_second"] for one in found["rounds"][each])
            for each in (name, floor)
        ]
        measured[name]["to_floor"], measured[floor]["to_floor"] = speeds[0] / speeds[1], None
    table = Table.of(
        f"{settings.gib:g} GiB in {settings.tensors} tensors on {found['gpu']}, {target},"
        f" medians of {rounds} rounds",
        "what",
        _COLUMNS,
        {what: measured[name] for name, what in _ROWS.items()},
        ["Extra: resident memory of this process; pinned: what torch has allocated of it."],
    )
    return table, {**result, "gpu": found["gpu"], "measured": measured, "raw": found["rounds"]}


def _make_state(
    settings: Settings, *, blank: bool, device: str = "cuda"
) -> dict[str, torch.Tensor]:
    return {
        f"tensor-{i:05d}": torch.full(
            (settings.tensor_elements,), -1.0 if blank else i + 1.0, device=device
        )
        for i in range(settings.tensors)
    }


def _check(state: dict[str, torch.Tensor]) -> None:
    for i, (name, tensor) in enumerate(state.items()):
        if not bool((tensor == i + 1.0).all()):
            raise AssertionError(f"{name} was not loaded")


def _measure(act: Callable[[], object], settings: Settings) -> dict[str, float | None]:
    """Run `act` once; what it cost. What it queued is complete when it returns, or here."""
    torch.cuda.synchronize()
    before_mib = reset_peak_mib()
    cpu, start = cpu_seconds(), time.perf_counter()
    act()
    torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    peak_mib = status_mib("VmHWM")
    gib = settings.total_bytes / GIB
    pinned_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    return {
        "seconds": seconds,
        "gib_per_second": gib / seconds,
        "cpu_seconds_per_gib": cpu / gib,
        "extra_mib": None if before_mib is None or peak_mib is None else peak_mib - before_mib,
        "pinned_mib": None if pinned_bytes is None else pinned_bytes / MIB,
    }


def _copy_all(state: dict[str, torch.Tensor], pinned: torch.Tensor, *, out: bool) -> None:
    """Copy every byte between the tensors and one pinned buffer, over and over."""
    for tensor in state.values():
        flat = tensor.view(torch.uint8)
        for start in range(0, flat.numel(), _PINNED_BYTES):
            piece = flat[start : start + _PINNED_BYTES]
            host = pinned[: piece.numel()]
            if out:
                host.copy_(piece, non_blocking=True)
            else:
                piece.copy_(host, non_blocking=True)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    settings = Settings(**job["settings"])
    config = dos.TransferConfig(
        part_size_bytes=settings.part_size_bytes,
        upload_concurrency=settings.upload_concurrency,
        request_size_bytes=settings.request_size_bytes,
        download_concurrency=settings.download_concurrency,
        memory_budget_bytes=job["memory_budget_bytes"],
    )
    small = dataclasses.replace(settings, gib=64 * MIB / GIB, tensors=2)
    rounds: dict[str, list[dict[str, float | None]]] = {name: [] for name in _ROWS}
    with ExitStack() as stack:
        keeping, dropping = _targets(job["target"], stack)

        def save(state: State, name: str, target: _Target = dropping) -> None:
            url, options = target
            dos.save(state, f"{url}/{name}", storage_options=options, config=config)

        def load(state: State, name: str) -> None:
            url, options = keeping
            dos.load(state, f"{url}/{name}", storage_options=options, config=config)

        def stage(state: State, name: str) -> dos.AsyncSaveHandle:
            url, options = dropping
            handle = dos.async_save(state, f"{url}/{name}", storage_options=options, config=config)
            handle.staged()
            return handle

        state = _make_state(small, blank=False)
        save(state, "warm-up", keeping)  # imports, and the GPU's context
        load(state, "warm-up")
        # In the order of the memory they need: the pinned memory of one stays for those after it.
        state = _make_state(settings, blank=False)
        save(state, "kept", keeping)
        for number_of_round in range(job["rounds"]):
            for device, suffix in (("cuda", ""), ("cpu", "_cpu")):
                name = f"round-{number_of_round}{suffix}"
                saved = _make_state(settings, blank=False, device=device)
                rounds[f"save{suffix}"].append(_measure(partial(save, saved, name), settings))
                _forget(*dropping, name)
                loaded = _make_state(settings, blank=True, device=device)
                rounds[f"load{suffix}"].append(_measure(partial(load, loaded, "kept"), settings))
                _check(loaded)
                del saved, loaded
        for number_of_round in range(job["rounds"] + 1):
            handles: list[dos.AsyncSaveHandle] = []
            name = f"held-{number_of_round}"
            measured = _measure(lambda: handles.append(stage(state, name)), settings)  # noqa: B023
            handles.pop().result()
            _forget(*dropping, name)
            if number_of_round:  # the first makes the memory that the others use again
                rounds["held"].append(measured)
    pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    for _ in range(job["rounds"]):
        for name, out in (("floor_out", True), ("floor_in", False)):
            copy = partial(_copy_all, state, pinned, out=out)
            rounds[name].append(_measure(copy, settings))
    return {"gpu": torch.cuda.get_device_name(), "rounds": rounds}


def _targets(kind: str, stack: ExitStack) -> tuple[_Target, _Target]:
    """Return where a load finds what was saved, and where saves are measured."""
    if kind != "sink":
        return (("memory://bench", None),) * 2
    keeping, dropping = (stack.enter_context(Sink(keep=keep)) for keep in (True, False))
    return ("s3://bench", keeping.storage_options), ("s3://bench", dropping.storage_options)


def _forget(url: str, options: dict[str, object] | None, name: str) -> None:
    """Delete what a round has saved, so that rounds do not pile up in memory."""
    from dcp_objstore.stores import open_store

    store = open_store(f"{url}/{name}", options)
    for meta in list(store.list()):
        store.delete(meta.key)


if __name__ == "__main__":
    answer(_run)
