"""How fast this machine moves bytes to and from a store, in a few settings; and the best of them.

Bounded in bytes and in seconds, whatever the network does: a setting that would take too long at
the rate seen so far is left out, and a stream ends when its time is over.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dcp_objstore.config import MIB
from dcp_objstore.transfer.parts import PartPlan
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import ByteArray, upload_object
from dcp_objstore.transfer.workers import DaemonPool

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.doctor.scratch import Scratch
    from dcp_objstore.stores.protocol import ObjectStore

# Part size in MiB, and connections. Requests of a download are half as large as parts, as in the
# defaults of `TransferConfig`.
_SETTINGS: Final = ((8, 4), (16, 8), (32, 16))
# The smallest setting that is about as fast as the best one is recommended.
_ABOUT: Final = 0.9
_SLICE_BYTES: Final = 8 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a measurement may cost.

    Attributes:
        seconds: of each upload and each download, about.
        bytes: of each.
    """

    seconds: float = 3.0
    bytes: int = 512 * MIB


@dataclass(frozen=True, slots=True)
class Rate:
    """One setting, measured; rates in bytes per second."""

    part_size_bytes: int
    request_size_bytes: int
    concurrency: int
    upload: float
    download: float


class Stop:
    """Tells what is under way to end soon."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """From any thread."""
        self._event.set()

    def check(self) -> None:
        """Raise `StoppedError` once `set` was called."""
        if self._event.is_set():
            raise StoppedError


class StoppedError(BaseException):
    """The checks were told to stop. No Exception: nothing may take it for an answer."""


def measure(
    scratch: Scratch, config: TransferConfig, limits: Limits, stop: Stop
) -> tuple[Sequence[Rate], int]:
    """The rates of the settings, and the number of settings left out as too slow here.

    Raises:
        As `upload_object` and `ObjectStore.get_range`; StoppedError.
    """
    block = np.frombuffer(os.urandom(_SLICE_BYTES), np.uint8)
    seen = _warm_up(scratch, block)
    rates: list[Rate] = []
    for number, (part_mib, concurrency) in enumerate(_SETTINGS):
        part = part_mib * MIB
        if rates and part * concurrency / seen > 2 * limits.seconds:
            break
        # One connection has shown what to expect; several may do better.
        budget = min(limits.bytes, max(part, int(4 * seen * limits.seconds)))
        bounded = replace(limits, bytes=budget)
        with scratch.writing(f"speed-{number}") as key:
            setting = replace(config, part_size_bytes=part, upload_concurrency=concurrency)
            size, up = _upload(scratch.store, key, block, setting, bounded, stop)
        down = _download(scratch.store, key, size, part // 2, concurrency, limits, stop)
        scratch.store.delete(key)
        rates.append(Rate(part, part // 2, concurrency, up, down))
        seen = max(seen, up)
    return rates, len(_SETTINGS) - len(rates)


def recommend(rates: Sequence[Rate]) -> dict[str, int]:
    """Fields of `TransferConfig` for what was measured."""
    up = _smallest(rates, [rate.upload for rate in rates])
    down = _smallest(rates, [rate.download for rate in rates])
    in_flight = 2 * down.request_size_bytes * down.concurrency
    return {
        "part_size_bytes": up.part_size_bytes,
        "upload_concurrency": up.concurrency,
        "request_size_bytes": down.request_size_bytes,
        "download_concurrency": down.concurrency,
        "memory_budget_bytes": max(in_flight, 128 * MIB),
    }


def _smallest(rates: Sequence[Rate], values: Sequence[float]) -> Rate:
    enough = _ABOUT * max(values)
    return next(rate for rate, value in zip(rates, values, strict=True) if value >= enough)


def _warm_up(scratch: Scratch, block: ByteArray) -> float:
    """One small object over one connection: the rate is a first guess."""
    began = time.monotonic()
    with scratch.writing("speed-first") as key:
        scratch.store.put(key, block[: 2 * MIB])
    return 2 * MIB / max(time.monotonic() - began, 1e-6)


def _upload(
    store: ObjectStore,
    key: str,
    block: ByteArray,
    config: TransferConfig,
    limits: Limits,
    stop: Stop,
) -> tuple[int, float]:
    plan = PartPlan(config.part_size_bytes, _SLICE_BYTES, limits.bytes)
    least = min(config.part_size_bytes * config.upload_concurrency, limits.bytes)
    began = time.monotonic()

    def buffers() -> Iterator[ByteArray]:
        sent = 0
        while sent < limits.bytes:
            stop.check()
            if sent >= least and time.monotonic() - began > limits.seconds:
                return
            piece = block[: min(block.nbytes, limits.bytes - sent)]
            sent += piece.nbytes
            yield piece

    progress = Progress(config.stall_timeout_seconds)
    uploaded = upload_object(store, key, buffers(), plan, config, progress)
    return uploaded.size_bytes, uploaded.size_bytes / max(time.monotonic() - began, 1e-6)


def _download(
    store: ObjectStore,
    key: str,
    size_bytes: int,
    request_size_bytes: int,
    concurrency: int,
    limits: Limits,
    stop: Stop,
) -> float:
    starts = iter(range(0, size_bytes, request_size_bytes))
    lock = threading.Lock()
    began = time.monotonic()

    def fetch() -> int:
        into = memoryview(bytearray(request_size_bytes))
        received = 0
        while True:
            with lock:
                start = next(starts, None)
            if start is None or time.monotonic() - began > limits.seconds:
                return received
            stop.check()
            end = min(start + request_size_bytes, size_bytes)
            store.get_range(key, start, end, into=into[: end - start])
            received += end - start

    with DaemonPool(concurrency, "speed") as pool:
        tasks = [pool.submit(fetch) for _ in range(concurrency)]
        received = sum(task.result() for task in tasks)
    return received / max(time.monotonic() - began, 1e-6)
