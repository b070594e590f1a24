"""Only an archive that Python and torch read alike is read, with its records where they lie."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest

from dcp_objstore.compat.archive import Archive, ArchiveError, Record, unpacked_limit_bytes
from dcp_objstore.compat.transforms import check_archive
from dcp_objstore.config import MIB
from dcp_objstore.errors import CheckpointCorruptError
from tests.support import hostile as h


def made(**records: bytes) -> bytes:
    """An archive of these records, those that are longer than 1000 bytes packed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in records.items():
            method = zipfile.ZIP_DEFLATED if len(body) > 1000 else zipfile.ZIP_STORED
            archive.writestr(f"Top/{name}", body, method)
    return buffer.getvalue()


BODY = made(pickle=b"\x80\x02K\7.", packed=bytes(5000), raw=b"1234")
DIRECTORY = BODY.index(b"PK\1\2")
PICKLE, PACKED, RAW = (BODY.index(b"Top/" + one, DIRECTORY) - 46 for one in (b"pi", b"pa", b"ra"))
END = len(BODY) - 22
# Torch's own, which ends with a zip64 record, its locator and the end record.
TORCH = h.saved([1])
END_64, LOCATOR = len(TORCH) - 98, len(TORCH) - 42


def more(body: bytes, at: int, form: str, by: int) -> bytes:
    """The archive with a larger number in a record of its directory."""
    (number,) = struct.unpack_from(f"<{form}", body, at)
    size = struct.calcsize(form)
    return body[:at] + struct.pack(f"<{form}", number + by) + body[at + size :]


def test_records_lie_where_pythons_zipfile_finds_them():
    archive = Archive(BODY)
    with zipfile.ZipFile(io.BytesIO(BODY)) as stock:
        assert archive.records == {
            one.filename.lower(): Record(
                start := one.header_offset + 30 + len(one.filename),
                start + one.compress_size,
                one.file_size,
                one.compress_type == zipfile.ZIP_DEFLATED,
            )
            for one in stock.infolist()
        }
    assert (archive.root, archive.unpacked_bytes) == ("top", 5009)
    assert archive.read("pickle") == b"\x80\x02K\7."
    assert archive.read("packed") == bytes(5000)
    assert Archive(more(BODY, PACKED + 24, "I", -7)).read("packed") == bytes(4993)
    with pytest.raises(ArchiveError, match="no other"):
        archive.read("other")


# Of an entry: its packed and unpacked size and the start of its record, as the field orders them.
@pytest.mark.parametrize("places", [(24,), (20,), (42,), (24, 42), (24, 20, 42)], ids=str)
def test_numbers_that_do_not_fit_an_entry_are_in_its_zip64_field(places):
    entry = bytearray(BODY[RAW:END])
    numbers = [struct.unpack_from("<I", entry, place)[0] for place in places]
    for place in places:
        entry[place : place + 4] = b"\xff" * 4
    field = struct.pack(f"<HH2sHH{len(places)}Q", 7, 2, b"xx", 1, 8 * len(places), *numbers)
    entry[30:32] = struct.pack("<H", len(field))
    body = more(BODY[:RAW] + entry + field + BODY[END:], END + len(field) + 12, "I", len(field))
    assert Archive(body).records == Archive(BODY).records
    for cut in (body.replace(field, field[:6] + b"\2" + field[7:]), more(body, RAW + 30, "H", -1)):
        with pytest.raises(ArchiveError):  # no such field, or one that is too short
            Archive(cut)


REFUSED = {
    "an entry without its mark": (more(BODY, PACKED, "B", 1), "directory is damaged"),
    "an entry that ends after them": (more(BODY, RAW + 32, "H", 1), "directory is damaged"),
    "a method that torch has not": (more(BODY, PACKED + 10, "H", 4), "unknown way"),
    "a size that is not what is stored": (more(BODY, PICKLE + 24, "I", 1), "unknown way"),
    "a record that reaches too far": (more(BODY, RAW + 20, "I", 1), "into its directory"),
    "a record elsewhere": (more(BODY, PACKED + 42, "I", 1), "not where its directory says"),
    "a record beyond the end": (more(BODY, PACKED + 42, "I", 2**31), "cut off"),
    "more entries": (more(BODY, END + 10, "H", 1), "directory is damaged"),
    "a longer directory": (more(BODY, END + 12, "I", 1), "not where it should be"),
    "a later directory": (more(BODY, END + 16, "I", 1), "not where it should be"),
    "a comment": (more(BODY, END + 20, "H", 1), "something follows"),
    "no end": (more(BODY, END, "B", 1), "something follows"),
    "too short for an end": (BODY[-21:], "cut off"),
    "a locator of another place": (more(TORCH, LOCATOR + 8, "Q", 1), "not where it should be"),
    "a locator alone": (
        b"PK\6\7" + bytes(16) + b"PK\5\6" + struct.pack("<12xIH", 20, 0), "not where it should be"),
    "no locator": (more(TORCH, LOCATOR, "B", 1), "not where it should be"),
    "no zip64 end": (more(TORCH, END_64, "B", 1), "directory is damaged"),
    "more entries in the zip64 end": (more(TORCH, END_64 + 32, "Q", 1), "directory is damaged"),
    "a longer zip64 directory": (more(TORCH, END_64 + 40, "Q", 1), "not where it should be"),
    "a later zip64 directory": (more(TORCH, END_64 + 48, "Q", 1), "not where it should be"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_an_archive_that_is_not_what_torch_writes_is_refused(what):
    body, text = REFUSED[what]
    with pytest.raises(ArchiveError, match=text):
        Archive(body)


def test_an_archive_may_be_empty_and_no_larger_unpacked_than_it_can_be():
    end = b"PK\5\6" + bytes(18)
    assert Archive(end).records == {}
    assert Archive(b"PK\6\6" + bytes(52) + b"PK\6\7" + bytes(16) + end).records == {}
    room = 1032 * len(BODY) - 5009
    Archive(more(BODY, PACKED + 24, "I", room))
    with pytest.raises(ArchiveError, match="larger than they can be"):
        Archive(more(BODY, PACKED + 24, "I", room + 1))
    assert [unpacked_limit_bytes(size) for size in (0, 10_486)] == [MIB, 1_048_600]
    assert unpacked_limit_bytes(1, 7) == 100
    assert Archive(made(zeros=bytes(MIB))).read("zeros") == bytes(MIB)
    with pytest.raises(ArchiveError, match="unpacks to"):
        Archive(made(zeros=bytes(MIB + 1))).read("zeros")
    with pytest.raises(ArchiveError, match="cannot be unpacked"):
        Archive(more(BODY, Archive(BODY).records["top/packed"].start, "B", 2)).read("packed")


def test_an_item_may_unpack_to_its_limit_or_to_the_size_of_its_archive():
    for body, limit in ((BODY, 5009), (made(raw=bytes(900)), 0), (b"no archive", 0)):
        check_archive(io.BytesIO(body), "w", limit)
    for body, text in ((BODY, "more than 5008"), (BODY[:-1], "damaged archive")):
        with pytest.raises(CheckpointCorruptError, match=text) as caught:
            check_archive(io.BytesIO(body), "w", 5008)
        assert caught.value.key == "w"
