"""Hostile checkpoints by name: what somebody who can write to the bucket may put there.

Each case builds the objects of a checkpoint, of which one part is hostile and the rest is valid,
so that nothing else is what is refused. `hostile_worker` loads them through the public doors.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch
import xxhash

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.marker import Counts, IndexRef, Marker, encode_marker
from dcp_objstore.transfer.digests import block_digest
from tests.support import indexes, pickles as p

Objects = dict[str, bytes]
CORRUPT = ("CheckpointCorruptError",)
UNTRUSTED = ("UntrustedPickleError",)
UNSUPPORTED = ("UnsupportedError",)
REFUSED = (*CORRUPT, *UNTRUSTED, *UNSUPPORTED)
HARMLESS = ("value",)

THIS = __name__
fired: list[object] = []


def fire(*args: object) -> object:
    """The canary: what hostile code would call, if any were run."""
    fired.append(args)
    return fire


@dataclass(frozen=True)
class Case:
    """One hostile checkpoint.

    Attributes:
        build: its objects.
        expect: the error classes, one of which reading it must end in; or `value`: it is harmless.
    """

    family: str
    name: str
    build: Callable[[], Objects]
    expect: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.family}: {self.name}"


CASES: dict[str, Case] = {}
WARM_UP = (
    *(f"valid: {name}" for name in ("ours", "foreign", "foreign value", "zstd", "tensor blob")),
    "our value is damaged: half",
    "foreign tensor is damaged: half",
    "our value runs code: os.system",
    "our value takes memory: two directories",
    "index is no msgpack: half",
    "marker is no JSON: half",
    ".metadata is damaged: another value",
)


def add(
    family: str,
    name: str,
    build: Callable[[], Objects],
    expect: tuple[str, ...] = CORRUPT,
) -> None:
    case = Case(family, name, build, expect)
    assert case.id not in CASES, case.id
    CASES[case.id] = case


def add_all(
    family: str,
    wrap: Callable[[Any], Objects],
    parts: Mapping[str, Any],
    expect: tuple[str, ...] = CORRUPT,
) -> None:
    """A case for each named part; a callable makes its part only when the case is built."""
    for name, part in parts.items():
        add(family, name, lambda part=part: wrap(part() if callable(part) else part), expect)


# --- valid checkpoints to start from -------------------------------------------------------------

DATA_KEY = "__0_0.0123456789abcdef.distcp"
INDEX_KEY = "index.0123456789abcdef.msgpack"


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


PAYLOAD = bytes(range(24))  # of `w`, 2 x 3 float32
STEP = saved(7)


def sealed(index: bytes, data: Mapping[str, bytes], **changes: Any) -> Objects:
    """A committed checkpoint with this index; `changes` are of the marker."""
    marker = Marker(
        state="committed",
        commit_id="c" * 32,
        write_id="d" * 32,
        generation=1,
        index=IndexRef(
            key=INDEX_KEY, size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest()
        ),
        counts=Counts(tensors=1, blobs=1, objects=1, total_bytes=sum(map(len, data.values()))),
        world_size=1,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
    )
    marker = msgspec.structs.replace(marker, **changes)
    return {"_COMMIT": encode_marker(marker), INDEX_KEY: index, **data}


def item(offset: int, body: bytes) -> indexes.Item:
    return indexes.Item(
        0, offset, len(body), offset, len(body), block_digest(body) if body else b""
    )


def tensor(**changes: Any) -> indexes.Tensor:
    chunk = indexes.Chunk((0, 0), (2, 3), item(0, PAYLOAD))
    plain = indexes.Tensor(
        (2, 3), "float32", "strided", False, "contiguous_format", False, (chunk,)
    )
    return msgspec.structs.replace(plain, **changes)


def index_of(data: bytes, **changes: Any) -> indexes.Index:
    """An index of one object `data`, which begins with PAYLOAD and STEP if it is DATA."""
    entry = ix.ObjectEntry(DATA_KEY, len(data), None, xxhash.xxh3_128(b"").digest())
    plain = indexes.Index(
        (entry,),
        {"w": tensor()},
        {"step": item(len(PAYLOAD), STEP)},
        {"w": ("w",), "step": ("step",)},
    )
    return msgspec.structs.replace(plain, **changes)


DATA = PAYLOAD + STEP


def ours(index: indexes.Index | bytes | None = None, **marker: Any) -> Objects:
    body = index if isinstance(index, bytes) else indexes.encode(index or index_of(DATA))
    return sealed(body, {DATA_KEY: DATA}, **marker)


def with_index(**changes: Any) -> Objects:
    return ours(index_of(DATA, **changes))


def with_tensor(**changes: Any) -> Objects:
    return with_index(tensors={"w": tensor(**changes)})


def with_chunk(**changes: Any) -> Objects:
    chunk = msgspec.structs.replace(tensor().chunks[0], **changes)
    return with_tensor(chunks=(chunk,))


def with_item(**changes: Any) -> Objects:
    return with_chunk(item=msgspec.structs.replace(item(0, PAYLOAD), **changes))


def with_object(**changes: Any) -> Objects:
    entry = msgspec.structs.replace(index_of(DATA).objects[0], **changes)
    return with_index(objects=(entry,))


def with_key(key: str) -> Objects:
    return with_object(key=key)


def with_raw(edit: Callable[[list[Any]], None]) -> Objects:
    """The index as plain msgpack values, edited past what our types would encode."""
    plain = msgspec.msgpack.decode(indexes.encode(index_of(DATA)))
    edit(plain)
    return ours(msgspec.msgpack.encode(plain))


def with_marker_body(body: bytes) -> Objects:
    return {**ours(), "_COMMIT": body}


def signed(body: bytes) -> bytes:
    """A marker's JSON with a right digest of itself."""
    return body[:-1] + b',"digest":"%s"}' % hashlib.sha256(body).hexdigest().encode()


def with_marker_json(edit: Callable[[bytes], bytes]) -> Objects:
    """The marker's JSON without its digest, edited as text and signed again."""
    body = ours()["_COMMIT"]
    return with_marker_body(signed(edit(body[: body.rindex(b',"digest"')] + b"}")))


def with_field(name: str, value: object) -> Objects:
    def edit(body: bytes) -> bytes:
        fields = json.loads(body)
        fields[name] = value
        return json.dumps(fields, separators=(",", ":")).encode()

    return with_marker_json(edit)


def our_value(body: bytes) -> Objects:
    """A value of our own format, with right digests: only the value itself is hostile."""
    index = index_of(body, tensors={}, blobs={"step": item(0, body)}, flatten_mapping=None)
    return sealed(indexes.encode(index), {DATA_KEY: body})


def our_blob(body: bytes) -> Objects:
    """The same of a tensor that was stored as a whole `torch.save` blob."""
    chunk = indexes.Chunk((0, 0), (2, 3), item(0, body), pickled=True)
    index = index_of(body, tensors={"w": tensor(chunks=(chunk,))}, blobs={}, flatten_mapping=None)
    return sealed(indexes.encode(index), {DATA_KEY: body})


def foreign(metadata: bytes, data: bytes = b"") -> Objects:
    return {".metadata": metadata, "__0_0.distcp": data or saved(torch.zeros(2, 3))}


def foreign_value(body: bytes, **fields: bytes) -> Objects:
    items = p.mapped({p.text("step"): p.made(p.METADATA, "BytesStorageMetadata")})
    info = p.info(length=p.number(len(body)), **fields)
    storage = p.mapped({p.index(p.text("step"), p.NONE): info})
    return foreign(p.metadata(items, storage), body)


def foreign_tensor(body: bytes, **fields: bytes) -> Objects:
    info = p.info(**{"length": p.number(len(body)), **fields})
    return foreign(p.metadata(storage=p.mapped({p.index(): info})), body)


def foreign_tensor_info(fields: Mapping[str, bytes]) -> Objects:
    return foreign_tensor(saved(torch.zeros(2, 3)), **fields)


def zstd(body: bytes) -> Objects:
    return foreign_tensor(body, transform_descriptors=p.listed(p.text("stream.zstd/1")))


# --- archives ------------------------------------------------------------------------------------

PICKLE_OF_4 = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
    b"X\1\0\0\x000X\3\0\0\0cpuK\4tQK\0K\4\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR."
)


def archive(
    pickled: bytes, records: Mapping[str, bytes] | None = None, packed: bool = False
) -> bytes:
    """What `torch.save` writes, with another pickle, or packed."""
    made = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", method) as new:
        new.writestr("archive/data.pkl", pickled)
        new.writestr("archive/byteorder", b"little")
        new.writestr("archive/version", b"3\n")
        for name, body in (records or {}).items():
            new.writestr(f"archive/{name}", body)
    return made.getvalue()


def old(value: bytes, facts: bytes = b"\x80\x02}.") -> bytes:
    """What torch wrote before 1.6: a number, its version, facts of the machine, and the value."""
    head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    return head + facts + value + b"\x80\x02]."


def v2(value: bytes) -> bytes:
    return archive(b"\x80\x02" + value + b".")


def storage(name: str, count: int, cls: str = "FloatStorage") -> bytes:
    """What protocol 2 writes for the storage of a tensor."""
    return p.tupled(
        p.text("storage"), f"ctorch\n{cls}\n".encode(), p.text(name), p.text("cpu"), p.number(count)
    ) + b"Q"  # fmt: skip


def called(name: str, *args: bytes) -> bytes:
    """A call as protocol 2 writes it."""
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode() + p.tupled(*args) + p.REDUCE


@functools.cache
def packed_text(size: int) -> bytes:
    """A pickle of one long string, packed."""
    text = b"X" + struct.pack("<I", size) + b"x" * size
    return archive(b"\x80\x02" + text + b".", packed=True)


@functools.cache
def bomb(size: int) -> bytes:
    """A record of zeros, packed about a thousand to one."""
    return archive(b"\x80\x02K\7.", {"data/0": bytes(size)}, packed=True)


def directory(body: bytes) -> tuple[bytes, bytes, int]:
    count, size, at = struct.unpack("<HII", body[-12:-2])
    return body[:at], body[at : at + size], count


def moved(entries: bytes, by: int) -> bytes:
    """A directory whose records lie elsewhere."""
    made, at = b"", 0
    while at < len(entries):
        name, extra, comment = struct.unpack_from("<HHH", entries, at + 28)
        end = at + 46 + name + extra + comment
        (local,) = struct.unpack_from("<I", entries, at + 42)
        made += entries[at : at + 42] + struct.pack("<I", local + by) + entries[at + 46 : end]
        at = end
    return made


@functools.cache
def two_directories(size: int) -> bytes:
    """Python's zipfile takes the directory before the end record, torch the one that it names."""
    shown = archive(PICKLE_OF_4, {"data/0": bytes(16)})
    hidden = archive(PICKLE_OF_4, {"data/0": bytes(size)}, packed=True)
    (shown_data, shown_entries, count), (data, entries, _) = directory(shown), directory(hidden)
    front = data + entries + shown_data
    believed = len(front) - len(data)  # how far zipfile thinks that everything was moved
    own = moved(shown_entries, len(data) + len(entries) - believed)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(own), len(data), 0)
    return front + own + end


def claims(body: bytes, name: bytes, size: int) -> bytes:
    """The directory gives the record another unpacked size."""
    at = body.rindex(name) - 46 + 24
    return body[:at] + struct.pack("<I", size) + body[at + 4 :]


def with_extra(body: bytes, extra: bytes) -> bytes:
    """The directory has the sizes of the last record elsewhere, as it has those above 4 GiB."""
    data, entries, count = directory(body)
    at = entries.rindex(b"PK\1\2")
    name = entries[at + 32 :]
    entries = entries[: at + 20] + b"\xff" * 8 + entries[at + 28 : at + 30]
    entries += struct.pack("<H", len(extra)) + name + extra
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(entries), len(data), 0)
    return data + entries + end


@functools.cache
def overlapping(count: int) -> bytes:
    """One packed record under many names."""
    body = archive(b"\x80\x02K\7.", {"data/0": bytes(1 << 20)}, packed=True)
    data, entries, have = directory(body)
    entry = entries[entries.rindex(b"PK\1\2") :]
    many = entries + b"".join(
        entry.replace(b"data/0", f"data{n:x}"[-6:].encode().rjust(6, b"/")) for n in range(count)
    )
    total = have + count
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, total, total, len(many), len(data), 0)
    return data + many + end


def frame(content: bytes, *, window_log: int = 20, repeat: int = 1) -> bytes:
    """zstd frames of `content`, one after the other."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=0)
    one = zstandard.ZstdCompressor(compression_params=parameters).compress(content)
    return one * repeat


def long_number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def nested(opening: bytes, depth: int) -> bytes:
    return opening * depth


class Reducer:
    """What somebody would pickle who wants code to run."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.made = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made


def pickled(value: object) -> bytes:
    return pickle.dumps(value, 2)


# --- checkpoints that name another place ---------------------------------------------------------


def tensor_index_elsewhere(url: str) -> Objects:
    return with_index(storage=ix.StorageInfo(checkpoint_id=f"{url}/other", save_id=url))


def foreign_path(path: str) -> Objects:
    return foreign(p.metadata(storage=p.mapped({p.index(): p.info(p.text(path))})))


def foreign_id(checkpoint_id: str) -> Objects:
    body = saved(torch.zeros(2, 3))
    storage = p.mapped({p.index(): p.info(length=p.number(len(body)))})
    meta = p.made(p.METADATA, "StorageMeta", checkpoint_id=p.text(checkpoint_id))
    return foreign(p.metadata(storage=storage, meta=meta), body)
