"""Settings: frozen, keyword-only data that is checked when it is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dcp_objstore.errors import ConfigError

MIB = 1024 * 1024
# The largest object that S3 (Amazon S3 user guide, "multipart upload limits"; 48.8 TiB since the
# end of 2025, which other servers do not know), GCS ("Quotas and limits") and Azure (190.7 TiB,
# "Scalability targets for Blob storage") all take.
MAX_OBJECT_SIZE_BYTES = 5 * 1024 * 1024 * MIB

Concurrency = int | Literal["auto"]
# The largest number of requests in flight where it is found, and where each takes pinned memory.
AUTO_MOST = 64
PINNED_MOST = 8
# Parts in flight where they take extra memory.
COPIED_MOST_BYTES = 128 * MIB

TRANSPORTS = ("native", "boto3", "fsspec")


def at_most(concurrency: Concurrency, most: int = AUTO_MOST) -> int:
    """Return the largest number of requests in flight: the number given, or `most` for "auto"."""
    return most if concurrency == "auto" else concurrency


def check_number(
    name: str, value: object, least: float, *, whole: bool = True, unless: str = ""
) -> None:
    """Raise ConfigError unless a value is a number of at least `least`, and whole if it must be.

    Args:
        name: name of the argument.
        value: its value.
        least: the smallest number that is allowed.
        whole: whether it must be a whole number.
        unless: what else the argument may be, for the message.
    """
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not fits or not value >= least:  # type: ignore[operator]  # NaN is not
        kind = f"{unless}{'an integer' if whole else 'a number'}"
        raise ConfigError(f"{name} must be {kind} of at least {least:.12g}, got {value!r}")


def processors() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Options of uploads and downloads. The defaults suit a cloud VM and a regional bucket.

        config = dos.TransferConfig(memory_budget_bytes=512 << 20)
        dos.load(state, "s3://bucket/run/step-1000", config=config)

    Extra memory of a save:

    - From CPU memory: 10 MiB, however large a part is, because bytes are sent from the tensors' own
      memory. Tensors of up to 1 MiB are copied together first, and take what is in flight: 128 MiB
      (at least two parts) and two parts more, or `(upload_concurrency + 2) x part_size_bytes` if
      that is a number.
    - From a GPU: pinned memory of `(upload_concurrency + 2) x part_size_bytes` ("auto" counts as 8
      here, whatever it finds), but at least 80 MiB.

    For both, the part size is the size that parts have grown to. It is at most 32 MiB, so 192 MiB
    and 320 MiB by default. It is larger only if `part_size_bytes` is, or for an object above
    281 GiB (5 TiB: 583 MiB a part, so 5.7 GiB from a GPU).

    Extra memory of a load:

    - Tensors: at most `memory_budget_bytes`. If they are on a GPU, this includes the pinned memory
      that the bytes pass through. Each request then counts three times, so
      `4 x request_size_bytes x download_concurrency` keeps all connections busy ("auto": up to
      64). On the GPU itself it takes some 4 MiB blocks where values are converted or are not
      contiguous.
    - Plus the tensors that only torch can decode: those of checkpoints that stock torch wrote, and
      quantized or subclass tensors. About as many are in progress at a time as requests are in
      flight, and each takes up to twice its size.
    - Plus pickled values: those that have arrived and wait for the planner take up to
      `memory_budget_bytes`, plus what one request per connection completes.

    torch keeps pinned memory for the next save or load.

    Attributes:
        part_size_bytes: size of one part of a multipart upload; an object of up to this size is
            sent in a single PUT. Parts grow to 32 MiB for large payloads, and further if an object
            would need more than 10,000 parts. At least 5 MiB (the S3 minimum). Default 16 MiB.
        upload_concurrency: parts in flight per rank, however many objects the rank writes: it
            writes them one after the other. "auto" adapts to the store: 8 where it answers at
            once; where it answers late, up to 64 (at most 1 GiB) for all saves and loads of the
            process to the bucket together; fewer if a request takes more than a quarter of its
            time-out. A number is used as is, unless the store throttles. Default "auto".
        max_object_size_bytes: a rank that has more than this to save writes several objects; it
            starts the next one before a tensor that would exceed this size. The share of one tensor
            that a rank holds is never split: above this size it gets its own object, up to
            5 TiB. At least 5 MiB, at most 5 TiB (which all stores accept). Default 256 GiB, which
            keeps parts at 32 MiB.
        request_size_bytes: the largest ranged GET. Where large ranges come past the transport
            ("Transfers" in the documentation), it grows to 32 MiB for large loads of one rank into
            host memory, to 16 MiB where the store answers late. Default 8 MiB.
        download_concurrency: ranged GETs in flight per rank; "auto" as for uploads. Default "auto".
        memory_budget_bytes: memory for the requests in flight, per rank. Each thread that reads
            takes one block (4 MiB) and what the transport holds: 4 MiB at most, over fsspec twice
            the request (up to 16 MiB). One request is always made, whatever its size. Default
            128 MiB, enough for 64 requests in flight by 16 threads.
        hash_threads: threads that compute block digests during a save. Default 2.
        connect_timeout_seconds: time to establish a connection. Default 10.
        request_timeout_seconds: deadline for one request with its body. For an upload it must
            allow one part at the slowest rate that you accept. Default 150 (32 MiB at 220 KiB/s,
            in each connection; "auto" opens fewer on a slow line).
        stall_timeout_seconds: a transfer in which no part completes for this long fails with
            `TransferStalledError`. Default 180.
        max_retries: retries of one request, with jittered exponential backoff. With the default, a
            store may be down for about half a minute (31 to 62 s). Default 10.
        retry_timeout_seconds: no retry starts later than this after the first try, or after a body
            broke off of which some had come. A server that this process has never reached is given
            up after 5 to 10 s. Default 180.
        peer_timeout_seconds: how long a rank waits for the others in the process groups that this
            package makes. It bounds the wait for a rank that hangs. It must allow the slowest rank
            to finish its upload after the fastest one has. Groups that are passed as
            `process_group=` keep their own time-out. Default 1800.
        transport: the library that sends the requests: `native` (obstore; for file:// this
            package's own adapter), `boto3` (s3:// only) or `fsspec` (any scheme).
            `storage_options={"transport": ...}` sets the same. Default `native`.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    part_size_bytes: int = 16 * MIB
    upload_concurrency: Concurrency = "auto"
    max_object_size_bytes: int = 256 * 1024 * MIB
    request_size_bytes: int = 8 * MIB
    download_concurrency: Concurrency = "auto"
    memory_budget_bytes: int = 128 * MIB
    hash_threads: int = 2
    connect_timeout_seconds: float = 10.0
    request_timeout_seconds: float = 150.0
    stall_timeout_seconds: float = 180.0
    max_retries: int = 10
    retry_timeout_seconds: float = 180.0
    peer_timeout_seconds: float = 1800.0
    transport: Literal["native", "boto3", "fsspec"] = "native"

    def __post_init__(self) -> None:
        """Check every bound."""
        least: dict[str, float] = {
            "part_size_bytes": 5 * MIB,
            "upload_concurrency": 1,
            "max_object_size_bytes": 5 * MIB,
            "request_size_bytes": 4 * MIB,
            "download_concurrency": 1,
            "memory_budget_bytes": 8 * MIB,
            "hash_threads": 1,
            "connect_timeout_seconds": 0.001,
            "request_timeout_seconds": 0.001,
            "stall_timeout_seconds": 0.001,
            "max_retries": 0,
            "retry_timeout_seconds": 0,
            "peer_timeout_seconds": 0.001,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            may_be_auto = name.endswith("_concurrency")
            if may_be_auto and value == "auto":
                continue
            check_number(
                f"TransferConfig.{name}",
                value,
                bound,
                whole=not name.endswith("_seconds"),
                unless='"auto" or ' if may_be_auto else "",
            )
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"TransferConfig.transport must be one of {', '.join(TRANSPORTS)},"
                f" got {self.transport!r}"
            )
        if self.part_size_bytes > 5 * 1024 * MIB:
            raise ConfigError("TransferConfig.part_size_bytes must be at most 5 GiB (S3's maximum)")
        if self.max_object_size_bytes > MAX_OBJECT_SIZE_BYTES:
            raise ConfigError(
                "TransferConfig.max_object_size_bytes must be at most 5 TiB (what all stores take)"
            )


# What begins a URL, also with the one slash that os.path.normpath leaves of two.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


@dataclass(frozen=True)
class Local:
    """A folder on each node for copies of what a run saves; `local="/mnt/nvme"` is short for it.

        with dos.CheckpointManager(url, local=dos.Local("/dev/shm", max_bytes=64 << 30)) as run:
            start = run.load(state)

    A job that starts again on its nodes reads the copies, and from the bucket only what no node
    has. They can never fail a save or load: what goes wrong with them is one warning and one
    `LocalUnused` event, and the bucket's bytes.

    Attributes:
        folder: an existing folder of this machine: of an NVMe disk, a tmpfs or `/dev/shm`. In it
            `dcp-objstore-<uid>` is made, which only this user may use. A relative path counts from
            where the program is now.
        max_bytes: the most that the copies of all runs of this user may take there. Two states of
            the node's ranks must fit: the newest one, and the one that is being saved. Default
            None: what is free, but a tenth of the file system stays free.

    Raises:
        ConfigError: `folder` is a URL or no path, or `max_bytes` is not a number of bytes.
    """

    folder: str
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check both fields. Make the folder absolute: the program may change its own folder."""
        try:
            folder = os.fsdecode(self.folder)
        except TypeError:
            raise ConfigError(f"local must be a path or dos.Local, got {self.folder!r}") from None
        if not folder or "\0" in folder or _SCHEME.match(folder):
            raise ConfigError(
                f"local must be a folder of this machine, such as '/mnt/nvme', got {folder!r}"
            )
        if self.max_bytes is not None:
            check_number("max_bytes", self.max_bytes, 0, unless="None or ")
        object.__setattr__(self, "folder", os.path.abspath(folder))  # noqa: PTH100 - resolves no link


LocalFolder: TypeAlias = "str | os.PathLike[str] | Local | None"


def local_of(local: LocalFolder) -> Local | None:
    """Return the settings that an argument `local=` stands for.

    Raises:
        ConfigError: it is not a path of this machine.
    """
    if local is None or isinstance(local, Local):
        return local
    return Local(local)  # type: ignore[arg-type]  # made a str there
