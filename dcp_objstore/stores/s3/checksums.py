"""Checksums that go with bodies over boto3, taken of the memory that is sent, ahead of sending it.

Not botocore's own: over TLS it sends them behind the body, which it copies into chunks for that and
which some servers that speak S3 refuse. Sent in the head, as obstore does, they need neither.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.s3.endpoint import s3_checksum

if TYPE_CHECKING:
    from dcp_objstore.stores.s3.options import S3Options

_Crc = Callable[[memoryview, int], int]

# Python has neither.
_OF_AWSCRT: Final = ("CRC32C", "CRC64NVME")
_DIGEST_BYTES: Final = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8}


class Checksums:
    """What goes with the requests of an upload so that the store refuses a body that was damaged.

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
        self._crc: _Crc | None = None
        if algorithm in _DIGEST_BYTES:
            self._crc = _crc(algorithm)

    @property
    def beginning(self) -> dict[str, str]:
        """Arguments of the request that begins an upload in parts."""
        return {} if self._algorithm is None else {"ChecksumAlgorithm": self._algorithm}

    def of(self, buffers: Sequence[memoryview]) -> dict[str, str]:
        """Arguments of a request whose body these make together; of a part also when it is listed.

        One pass over the memory, which is not copied.
        """
        if self._algorithm is None:
            return {}
        if self._crc is None:
            sha256 = hashlib.sha256()
            for buffer in buffers:
                sha256.update(buffer)
            digest = sha256.digest()
        else:
            value = 0
            for buffer in buffers:
                value = self._crc(buffer, value)
            digest = value.to_bytes(_DIGEST_BYTES[self._algorithm], "big")
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
    if algorithm not in _OF_AWSCRT:
        return zlib.crc32
    crc: _Crc | None = None
    if importlib.util.find_spec("awscrt") is not None:
        from awscrt import checksums

        crc = getattr(checksums, algorithm.lower(), None)
    if crc is None:
        raise ConfigError(
            f"transports 'boto3' and 'fsspec' take {algorithm} from awscrt, which is not installed"
            " or too old: pip install 'botocore[crt]', or choose CRC32 or SHA256"
        )
    return crc
