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
from typing import Final, NamedTuple

ZIP_START: Final = b"PK\x03\x04"

# The records of the format, as far as they are read here. Each begins with its mark.
_END = struct.Struct("<4s6xHIIH")  # number of entries, size, start, length of the comment
_END_64 = struct.Struct("<4s28xQQQ")  # number of entries, size, start
_LOCATOR_64 = struct.Struct("<4s4xQ4x")  # where `_END_64` begins
# Method; packed and unpacked size; lengths of name, extra and comment; where `_LOCAL` begins.
_ENTRY = struct.Struct("<4s6xH8xIIHHH8xI")
_LOCAL = struct.Struct("<4s22xHH")  # lengths of name and extra; the data follows them
_IN_ZIP_64: Final = 2**32 - 1
_STORED, _DEFLATED = 0, 8
_MOST_PACKED: Final = 1032  # bytes that a deflated byte can stand for
_LEAST_LIMIT_BYTES: Final = 1024 * 1024
_LIMIT_RATIO: Final = 100


def unpacked_limit_bytes(stored_bytes: int, least_bytes: int = _LEAST_LIMIT_BYTES) -> int:
    """Return the size to which something may unpack that has no shape to tell it.

    That is 100 times the stored size: to unpickle it takes as much memory if it is hostile.

    Args:
        least_bytes: the least limit. Default 1 MiB, of a pickle.
    """
    return max(least_bytes, _LIMIT_RATIO * stored_bytes)


class ArchiveError(Exception):
    """The bytes are not an archive that torch writes. Callers raise CheckpointCorruptError."""


class Record(NamedTuple):
    """A record: its bytes `[start, end)` in the archive, and its unpacked size."""

    start: int
    end: int
    size_bytes: int
    is_packed: bool


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
        if not record.is_packed:
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
        entry_start = directory.start
        while entry_start < directory.end:
            entry = _ENTRY.unpack_from(self._body, entry_start)
            mark, method, packed_bytes, size_bytes, *lengths, header_start = entry
            name_length, extra_length, comment_length = lengths
            name_start = entry_start + _ENTRY.size
            extra_start = name_start + name_length
            extra_end = extra_start + extra_length
            entry_start = extra_end + comment_length
            if mark != b"PK\x01\x02" or entry_start > directory.end:
                raise ArchiveError("its directory is damaged")
            if _IN_ZIP_64 in (size_bytes, packed_bytes, header_start):
                extra = bytes(self._body[extra_start:extra_end])
                size_bytes, packed_bytes, header_start = _from_zip_64(
                    extra, size_bytes, packed_bytes, header_start
                )
            name = bytes(self._body[name_start:extra_start]).decode("utf-8", "replace").lower()

            if not self.records:  # torch, too, takes the folder of the first record for the root
                self.root = name.partition("/")[0]
            start = self._data_start(header_start)
            if start + packed_bytes > directory.start:
                raise ArchiveError("a record reaches into its directory")
            is_packed = method == _DEFLATED
            is_stored = method == _STORED and size_bytes == packed_bytes
            if not (is_packed or is_stored):
                raise ArchiveError("a record is packed in an unknown way")
            self.records[name] = Record(start, start + packed_bytes, size_bytes, is_packed)
        if len(self.records) != directory.record_count:  # or two have the same name
            raise ArchiveError("its directory is damaged")
        if self.unpacked_bytes > _MOST_PACKED * len(self._body):
            raise ArchiveError("its records say that they are larger than they can be")

    def _data_start(self, header_start: int) -> int:
        """Return where the data of a record begins, by its local header, which precedes it."""
        # struct takes no offset of 2**63 or more; at the end of the body it finds too few bytes.
        offset = min(header_start, len(self._body))
        mark, name_length, extra_length = _LOCAL.unpack_from(self._body, offset)
        if mark != ZIP_START:
            raise ArchiveError("a record is not where its directory says")
        return int(header_start + _LOCAL.size + name_length + extra_length)


class _Directory(NamedTuple):
    """Bytes `[start, end)` of the archive, which describe so many records."""

    start: int
    end: int
    record_count: int


def _find_directory(body: bytes | memoryview) -> _Directory:
    """Return where the directory lies and how many records it has.

    An archive ends with an end record. If it has a zip64 end record, that lies before a locator,
    which lies before the end record, and the numbers in it count.
    """
    end = len(body) - _END.size
    if end < 0:
        raise ArchiveError("it is cut off")
    mark, record_count, size, start, comment_length = _END.unpack_from(body, end)
    if mark != b"PK\x05\x06" or comment_length:
        raise ArchiveError("it is cut off, or something follows it")
    locator = end - _LOCATOR_64.size
    if locator >= 0 and bytes(body[locator : locator + 4]) == b"PK\x06\x07":
        end = locator - _END_64.size
        if end < 0 or _LOCATOR_64.unpack_from(body, locator)[1] != end:
            raise ArchiveError("its directory is not where it should be")
        mark, record_count, size, start = _END_64.unpack_from(body, end)
        if mark != b"PK\x06\x06":
            raise ArchiveError("its directory is damaged")
    if start + size != end:
        raise ArchiveError("its directory is not where it should be")
    return _Directory(start, end, record_count)


def _from_zip_64(extra: bytes, *numbers: int) -> tuple[int, ...]:
    """Replace numbers that did not fit by those in the first zip64 field, as torch does.

    Args:
        extra: the fields of an entry: of each its kind, the length of its data, and the data.
        numbers: the numbers in the entry. `_IN_ZIP_64` stands for each that did not fit.
    """
    kind, start, end = 0, 0, 0
    while kind != 1:  # the kind of a zip64 field; without one, unpack_from raises struct.error
        kind, length = struct.unpack_from("<HH", extra, end)
        start = end + 4
        end = start + length
    numbers_64 = iter(struct.unpack_from(f"<{numbers.count(_IN_ZIP_64)}Q", extra[start:end]))
    return tuple(next(numbers_64) if number == _IN_ZIP_64 else number for number in numbers)
