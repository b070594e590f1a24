"""Read the directory of a `torch.save` archive so strictly that torch can see no other one.

Python's `zipfile` and torch's own reader disagree about unusual archives: where the directory
begins if bytes precede or follow it, and which of two zip64 records counts. So a hostile archive
could show harmless sizes to a check and other sizes to torch. This module accepts only what both
read in the same way, which is what torch writes: one directory that ends where its end record
begins, no comment, and each name once.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple

ZIP_START: Final = b"PK\x03\x04"

_END = struct.Struct("<4sHHHHIIH")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_IN_ZIP_64: Final = 2**32 - 1
_STORED, _DEFLATED = 0, 8
_MOST_PACKED: Final = 1032  # bytes that a deflated byte can stand for
_LEAST_LIMIT_BYTES: Final = 1024 * 1024
_LIMIT_RATIO: Final = 100


def unpacked_limit_bytes(stored_bytes: int, least_bytes: int = _LEAST_LIMIT_BYTES) -> int:
    """Return the size to which something may unpack that has no shape to tell it.

    That is 100 times the stored size. To unpickle takes up to 100 times a hostile pickle.

    Args:
        least_bytes: the least limit. Default 1 MiB, of a pickle.
    """
    return max(least_bytes, _LIMIT_RATIO * stored_bytes)


class ArchiveError(Exception):
    """The bytes are not an archive that torch writes. Callers raise CheckpointCorruptError."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record: its bytes `[start, end)` in the archive, and its unpacked size."""

    start: int
    end: int
    size_bytes: int
    packed: bool


class Archive:
    """The records of an archive. Names are in lower case, because torch ignores their case.

    Args:
        body: the whole archive, which is not copied.

    Attributes:
        root: the folder of torch's records.
        records: the records by their names, folder included.

    Raises:
        ArchiveError: the archive is damaged, or not of the form that torch writes.
    """

    def __init__(self, body: bytes | memoryview) -> None:
        self._body = body
        self.records: dict[str, Record] = {}
        self.root = ""
        try:
            self._read()
        except struct.error as error:
            raise ArchiveError("it is cut off") from error

    @property
    def unpacked_bytes(self) -> int:
        """The unpacked size of all records."""
        return sum(record.size_bytes for record in self.records.values())

    def read(self, name: str) -> bytes:
        """Return a record below the root, unpacked to at most the size in the directory.

        Raises:
            ArchiveError: there is no such record, or it cannot be unpacked, or gets too large.
        """
        record = self.records.get(f"{self.root}/{name}")
        if record is None:
            raise ArchiveError(f"it has no {name}")
        stored = bytes(self._body[record.start : record.end])
        if not record.packed:
            return stored
        if record.size_bytes > unpacked_limit_bytes(len(stored)):
            raise ArchiveError(f"{name} unpacks to {record.size_bytes} bytes")
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, record.size_bytes)
        except zlib.error as error:
            raise ArchiveError(f"{name} cannot be unpacked") from error

    def _read(self) -> None:
        """Note where the directory says that records lie; refuse what torch never writes."""
        directory = _find_directory(self._body)
        at = directory.start
        while at < directory.end:
            fields = _ENTRY.unpack_from(self._body, at)
            mark, method, packed_bytes, size_bytes = fields[0], fields[4], fields[8], fields[9]
            name_length, extra_length, comment_length, local = *fields[10:13], fields[16]
            name_at = at + _ENTRY.size
            extra_at = name_at + name_length
            at = extra_at + extra_length + comment_length
            if mark != b"PK\x01\x02" or at > directory.end:
                raise ArchiveError("its directory is damaged")
            if _IN_ZIP_64 in (size_bytes, packed_bytes, local):
                extra = bytes(self._body[extra_at : extra_at + extra_length])
                size_bytes, packed_bytes, local = _from_zip_64(
                    extra, size_bytes, packed_bytes, local
                )
            name = bytes(self._body[name_at:extra_at]).decode("utf-8", "replace").lower()
            if name in self.records:
                raise ArchiveError("it has two records of one name")
            if not self.records:
                self.root = name.partition("/")[0]
            start = self._data_of(local)
            if start + packed_bytes > directory.start:
                raise ArchiveError("a record reaches into its directory")
            if method not in (_STORED, _DEFLATED) or (
                method == _STORED and size_bytes != packed_bytes
            ):
                raise ArchiveError("a record is packed in an unknown way")
            self.records[name] = Record(
                start, start + packed_bytes, size_bytes, method == _DEFLATED
            )
        if len(self.records) != directory.records:
            raise ArchiveError("its directory is damaged")
        if self.unpacked_bytes > _MOST_PACKED * len(self._body):
            raise ArchiveError("its records say that they are larger than they can be")

    def _data_of(self, local: int) -> int:
        """Return where the data begins whose local header is at this offset."""
        fields = _LOCAL.unpack_from(self._body, min(local, len(self._body)))
        if fields[0] != ZIP_START:
            raise ArchiveError("a record is not where its directory says")
        name_length, extra_length = fields[9:11]
        return int(local + _LOCAL.size + name_length + extra_length)


class _Directory(NamedTuple):
    start: int
    end: int
    records: int


def _find_directory(body: bytes | memoryview) -> _Directory:
    """Return where the directory lies and how many records it has.

    An archive ends with an end record. If it has a zip64 end record, that lies before a locator,
    which lies before the end record, and the numbers in it count.
    """
    end = len(body) - _END.size
    if end < 0:
        raise ArchiveError("it is cut off")
    mark, _, _, _, records, size, start, comment_length = _END.unpack_from(body, end)
    if mark != b"PK\x05\x06" or comment_length:
        raise ArchiveError("it is cut off, or something follows it")
    locator = end - _LOCATOR_64.size
    if locator >= 0 and bytes(body[locator : locator + 4]) == b"PK\x06\x07":
        end = locator - _END_64.size
        if end < 0 or _LOCATOR_64.unpack_from(body, locator)[2] != end:
            raise ArchiveError("its directory is not where it should be")
        mark, _, _, _, _, _, _, records, size, start = _END_64.unpack_from(body, end)
        if mark != b"PK\x06\x06":
            raise ArchiveError("its directory is damaged")
    if start + size != end:
        raise ArchiveError("its directory is not where it should be")
    return _Directory(start, end, records)


def _from_zip_64(extra: bytes, *numbers: int) -> tuple[int, ...]:
    """Replace numbers that did not fit by those in the first zip64 field, as torch does."""
    kind, start, end = 0, 0, 0
    while kind != 1:
        kind, length = struct.unpack_from("<HH", extra, end)
        start = end + 4
        end = start + length
    numbers_64 = iter(struct.unpack_from(f"<{numbers.count(_IN_ZIP_64)}Q", extra[start:end]))
    return tuple(next(numbers_64) if number == _IN_ZIP_64 else number for number in numbers)
