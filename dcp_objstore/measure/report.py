"""What a measurement found, as data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The figures of some rounds.

    Attributes:
        lowest, median, highest: the lowest, median and highest figure of the rounds.
        rounds: the number of them.
    """

    lowest: float
    median: float
    highest: float
    rounds: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Sum figures up; there is at least one."""
        return cls(
            lowest=min(figures),
            median=statistics.median(figures),
            highest=max(figures),
            rounds=len(figures),
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What one way of moving the bytes gave.

    Attributes:
        gib_per_second: the speed, counting the bytes of the tensors.
        cpu_seconds_per_gib: user and system time of this process; the median of the rounds.
        requests: the number of requests that carried these bytes in one round, the median.
        request_size_bytes: size of the largest of them.
        connections: the largest number of them in flight together, the median.
    """

    gib_per_second: Spread
    cpu_seconds_per_gib: float
    requests: int
    request_size_bytes: int
    connections: int


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What `dcp_objstore.measure.bench` measured, in one process.

    Attributes:
        url: URL below which it wrote.
        size_bytes: size of the tensors of one save or load.
        seconds: time that all of it took.
        processors: number of processors that this process may use.
        copy_gib_per_second: memory copied by one thread.
        hash_gib_per_second: blocks hashed by `TransferConfig.hash_threads` threads.
        get_ms: milliseconds until the first byte of a GET comes, on a connection that is open.
        put_ms: milliseconds of the PUT of an object of one byte.
        put_alone, get_alone: plain requests one after the other.
        save, load: `dcp_objstore.save` and `load`, with the settings as they are.
        plain_puts, plain_gets: plain requests, as many at a time as the saves and loads had, of the
            same size, without digests.
        sent_bytes, received_bytes: all that was moved.
        warnings: reasons to doubt the figures, and what could not be removed.
    """

    url: str
    size_bytes: int
    seconds: float
    processors: int
    copy_gib_per_second: Spread
    hash_gib_per_second: Spread
    get_ms: Spread
    put_ms: Spread
    put_alone: Throughput
    get_alone: Throughput
    save: Throughput
    load: Throughput
    plain_puts: Throughput
    plain_gets: Throughput
    sent_bytes: int
    received_bytes: int
    warnings: tuple[str, ...] = ()
