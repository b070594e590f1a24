"""A multipart upload of a stream of buffers, in parts that are sent in parallel without a copy.

s3transfer is not used: it reads each part of a stream into its own bytes, and it reads in another
thread, where the caller's iterator (which may wait for a device, and whose errors are the caller's)
does not belong. Its threads are joined at interpreter exit, too.

Checksums of the memory are made before it is sent, and sent in the head, as obstore does.
botocore's are not used: over TLS it sends them behind the body, which it copies into chunks for
that and which some servers that speak S3 refuse.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import queue
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.s3.endpoint import s3_checksum
from dcp_objstore.stores.s3.errors import code_of, drop_request, is_upload_gone
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.threads import Spawned, spawn


@dataclass(frozen=True)
class CopiedPart:
    """A part that the store copies from another object.

    Attributes:
        arguments: the arguments of `UploadPartCopy` that say what to copy.
        done: a function that is called in the thread of the part when it was copied.
    """

    arguments: Mapping[str, Any]
    done: Callable[[], None]


# Buffers to send, or what the store copies.
_Part = list[memoryview] | CopiedPart


class _UploadStoppedError(BaseException):
    """Ends a request whose upload is given up.

    It is not an `Exception`, so the retries let it through. `MultipartUpload._work` catches it.
    """


@dataclass
class MultipartUpload:
    """One multipart upload: `send` parts in their order, then `complete`, or else `abort`.

    Args:
        send_request: `S3Store._send` for one verb.
        target: Bucket, Key and the other arguments of every request.
        sealing: the arguments of the first request only.
        checksums: the checksums that go with the parts.
        threads: the number of threads that send parts.
    """

    send_request: Callable[..., Any]
    target: Mapping[str, str]
    sealing: Mapping[str, str | bool]
    checksums: Checksums
    threads: int

    # Parts with their numbers; None ends one thread.
    _tasks: queue.SimpleQueue[tuple[int, _Part] | None] = field(default_factory=queue.SimpleQueue)
    # What `complete` says of each part, by its number. The threads write it.
    _entries: dict[int, dict[str, str]] = field(default_factory=dict)
    # The first error of a thread: it ends the others' requests and is raised by `send` or `wait`.
    _error: BaseException | None = None
    _stopped: bool = False
    _upload_id: str | None = None
    _workers: list[Spawned] = field(default_factory=list)
    _last_number: int = 0

    def __post_init__(self) -> None:
        # A slot for each part that a thread has, so no part waits in the queue.
        self._slots = threading.Semaphore(self.threads)

    def create(self) -> None:
        """Open the upload."""
        arguments = {**self.target, **self.sealing, **self.checksums.beginning}
        answer = self.send_request("create_multipart_upload", arguments)
        self._upload_id = answer["UploadId"]

    def send(self, part: _Part) -> None:
        """Hand a part to a thread; wait while all are busy.

        Raises:
            What an earlier part met.
        """
        self._slots.acquire()
        if self._error is not None:
            raise self._error
        self._last_number += 1
        self._tasks.put((self._last_number, part))
        if len(self._workers) < self.threads:
            # `spawn` makes daemon threads: a request that hangs must not keep alive a program that
            # was told to stop.
            self._workers.append(spawn(self._work, f"part-{self._last_number}"))

    def wait(self) -> None:
        """Wait for all parts.

        Raises:
            What a part met.
        """
        self._end_workers()
        if self._error is not None:
            raise self._error

    def complete(self) -> Mapping[str, Any]:
        """Wait for all parts and make the object of them; return the store's answer.

        Raises:
            What a part met.
        """
        self.wait()
        # An entry is the ETag of a part and its checksum, if any. S3 wants the parts' checksums
        # again if it makes the object's checksum of them ("Checking object integrity": composite
        # checksums).
        listed = [
            {"PartNumber": number, **self._entries[number]} for number in sorted(self._entries)
        ]
        answer: Mapping[str, Any] = self.send_request(
            "complete_multipart_upload", {**self._place(), "MultipartUpload": {"Parts": listed}}
        )
        return answer

    def abort(self) -> bool:
        """End the requests under way, then have the store remove the parts.

        In this order, because a part that arrives after the abort would stay. The abort is sent
        twice at most: a store that does not answer has been waited for already.

        Returns:
            Whether no part is left.
        """
        self._stopped = True
        self._end_workers()
        if self._upload_id is None:
            return True
        for _ in range(2):
            try:
                self.send_request("abort_multipart_upload", self._place(), retry=False)
            except Exception as error:  # noqa: BLE001  the caller raises what ended the upload
                # An upload that is gone, or whose bucket is gone, has no parts.
                if not (is_upload_gone(error) or code_of(error) == "NoSuchBucket"):
                    continue
            return True
        return False

    def _end_workers(self) -> None:
        """Wait until the parts that were handed over are sent or given up, and the threads end."""
        for _ in self._workers:
            self._tasks.put(None)
        for thread in self._workers:
            thread.join()

    def _work(self) -> None:
        """Send parts until there are no more. Runs in a thread of the upload."""
        while (task := self._tasks.get()) is not None:
            number, part = task
            del task  # whose buffers must not outlive their request while this thread waits
            try:
                self._entries[number] = self._send_part(number, part)
            except _UploadStoppedError:
                pass  # the reason is `_error`, or the error for which `abort` was called
            except BaseException as error:  # noqa: BLE001  `send` or `wait` raises it
                drop_request(error)
                self._error = self._error or error
            del part
            self._slots.release()

    def _send_part(self, number: int, part: _Part) -> dict[str, str]:
        """Send a part; return its entry for `complete`, without the number."""
        place = {**self._place(), "PartNumber": number}
        if isinstance(part, CopiedPart):
            arguments = {**place, **part.arguments}
            answer = self.send_request("upload_part_copy", arguments, check=self._check_wanted)
            e_tag = answer["CopyPartResult"]["ETag"]
            part.done()
            return {"ETag": e_tag}
        checksum = self.checksums.of(part)
        arguments = {**place, **checksum}
        answer = self.send_request("upload_part", arguments, body=part, check=self._check_wanted)
        return {"ETag": answer["ETag"], **checksum}

    def _place(self) -> dict[str, Any]:
        """Return the arguments of every request of this upload but the first."""
        return {**self.target, "UploadId": self._upload_id}

    def _check_wanted(self) -> None:
        """End a request by raising once the upload was given up or another part has failed."""
        if self._stopped or self._error is not None:
            raise _UploadStoppedError


# A function that continues the CRC of earlier bytes, at first 0, over a buffer.
_Crc = Callable[[memoryview, int], int]

# Python has neither; awscrt has both.
_AWSCRT_ALGORITHMS: Final = ("CRC32C", "CRC64NVME")
_DIGEST_BYTES: Final = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8}


class Checksums:
    """The checksums of an upload, by which the store refuses a damaged body.

    Args:
        algorithm: `CRC32`, `CRC32C`, `CRC64NVME`, `SHA256`, or None: nothing goes with them.

    Raises:
        ConfigError: another algorithm, or one that needs awscrt, which is not installed.
    """

    def __init__(self, algorithm: str | None) -> None:
        if algorithm not in (None, "SHA256", *_DIGEST_BYTES):
            raise ConfigError(
                "transports 'boto3' and 'fsspec' send CRC32, CRC32C, CRC64NVME or SHA256,"
                f" not {algorithm!r}"
            )
        self._algorithm = algorithm
        self._crc = _crc(algorithm) if algorithm in _DIGEST_BYTES else None

    @property
    def beginning(self) -> dict[str, str]:
        """The arguments of the request that begins an upload in parts."""
        return {} if self._algorithm is None else {"ChecksumAlgorithm": self._algorithm}

    def of(self, buffers: Sequence[memoryview]) -> dict[str, str]:
        """Return the arguments of a request whose body is these buffers, one behind the other.

        The arguments of a part are sent again when the upload is completed. The memory is read once
        and not copied.
        """
        if self._algorithm is None:
            return {}
        if self._crc is None:
            sha256 = hashlib.sha256()
            for buffer in buffers:
                sha256.update(buffer)
            digest = sha256.digest()
        else:
            crc = 0
            for buffer in buffers:
                crc = self._crc(buffer, crc)
            digest = crc.to_bytes(_DIGEST_BYTES[self._algorithm], "big")
        return {f"Checksum{self._algorithm}": base64.b64encode(digest).decode()}


def checksums_for(settings: S3Options, endpoint_url: str | None) -> Checksums:
    """Return the checksums that `s3_checksum` chooses; none by default if awscrt is not installed.

    Raises:
        ConfigError: see `Checksums`.
    """
    if settings.checksum_algorithm is None and importlib.util.find_spec("awscrt") is None:
        return Checksums(None)
    return Checksums(s3_checksum(settings, endpoint_url))


def _crc(algorithm: str) -> _Crc:
    """Return the function that computes a CRC.

    Raises:
        ConfigError: the CRC needs awscrt, which is not installed, or too old to have this CRC.
    """
    if algorithm not in _AWSCRT_ALGORITHMS:
        return zlib.crc32
    try:
        from awscrt import checksums

        crc: _Crc = getattr(checksums, algorithm.lower())
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"transports 'boto3' and 'fsspec' take {algorithm} from awscrt, which is not installed"
            " or too old: pip install 'botocore[crt]', or choose CRC32 or SHA256"
        ) from error
    return crc
