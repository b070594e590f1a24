"""`digests`: how fast blocks are hashed, alone and with a busy Python thread.

`xxhash` releases the GIL for every call and then has to get it back. Beside a thread that runs
Python all the time this may take the switch interval (`sys.getswitchinterval()`, 5 ms), so there
the number of calls counts more than the number of bytes.
"""

from __future__ import annotations

import itertools
import json
import mmap
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass

import xxhash

from benchmarks.processes import run_module
from benchmarks.settings import GIB, MIB
from benchmarks.table import Result, Table, number
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES, block_digest

_MODULE = "benchmarks.digests"
_DATA_BYTES = 256 * MIB
_STEP_ITERATIONS = 10_000  # about a millisecond


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to hash the data.

    Attributes:
        threads: that hash.
        call_bytes: how much one call hashes.
        busy: whether one more thread runs Python all the time.
    """

    threads: int
    call_bytes: int
    busy: bool

    @property
    def label(self) -> str:
        """What the table says."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        busy = ", with a busy Python thread" if self.busy else ""
        return f"{threads}, {self.call_bytes // MIB} MiB per call{busy}"


CASES = [
    Case(threads=threads, call_bytes=call_bytes, busy=busy)
    for busy in (False, True)
    for call_bytes in (BLOCK_SIZE_BYTES, 64 * MIB)
    for threads in (1, 2)
]


def digests(rounds: int) -> tuple[Table, Result]:
    """Every case once per round, in one fresh process; medians of the rounds."""
    found = run_module(_MODULE, {"rounds": rounds})
    medians = [statistics.median(speeds) for speeds in found["gib_per_second"]]
    table = Table(
        f"XXH3-128 of {_DATA_BYTES // MIB} MiB, medians of {rounds} rounds",
        ["how", "GiB/s"],
        [[case.label, number(speed)] for case, speed in zip(CASES, medians, strict=True)],
    )
    cases = [
        {**asdict(case), "gib_per_second": speed}
        for case, speed in zip(CASES, medians, strict=True)
    ]
    return table, {"command": "digests", "cases": cases, "rounds": found["gib_per_second"]}


def measure(case: Case, data: memoryview) -> float:
    """Hash all of `data` once; GiB/s."""
    calls = [data[at : at + case.call_bytes] for at in range(0, len(data), case.call_bytes)]
    hash_call = block_digest if case.call_bytes == BLOCK_SIZE_BYTES else xxhash.xxh3_128_digest

    def hash_share(first: int) -> None:
        for view in itertools.islice(calls, first, None, case.threads):
            hash_call(view)

    stop = threading.Event()
    busy = threading.Thread(target=_run_python_until, args=(stop,))
    if case.busy:
        busy.start()
    workers = [threading.Thread(target=hash_share, args=(n,)) for n in range(case.threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    stop.set()
    if case.busy:
        busy.join()
    return len(data) / GIB / seconds


def _run_python_until(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for i in range(_STEP_ITERATIONS):
            total += i * i & 7


def main() -> None:
    """Read the number of rounds from stdin, measure, print every speed as JSON."""
    rounds = json.loads(sys.stdin.read())["rounds"]
    # Anonymous memory, every page touched; the bytes themselves make no difference to XXH3.
    data = memoryview(mmap.mmap(-1, _DATA_BYTES))
    for at in range(0, _DATA_BYTES, mmap.PAGESIZE):
        data[at] = 1
    speeds: list[list[float]] = [[] for _ in CASES]
    for _ in range(rounds):
        for case, own in zip(CASES, speeds, strict=True):
            own.append(measure(case, data))
    print(json.dumps({"gib_per_second": speeds}))


if __name__ == "__main__":
    main()
