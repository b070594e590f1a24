"""Assemble pickles opcode by opcode: what no pickler would write, for the tests of readers."""

from __future__ import annotations

import struct

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
REDUCE, NEWOBJ, BUILD = b"R", b"\x81", b"b"
EMPTY_TUPLE, NONE, TRUE, FALSE = b")", b"N", b"\x88", b"\x89"


def whole(value: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + value + b"."


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def listed(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def tupled(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def mapped(items: dict[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items.items()) + b"u"


def call(module: str, attribute: str, *args: bytes) -> bytes:
    return name(module, attribute) + tupled(*args) + REDUCE


def made(module: str, attribute: str, **state: bytes) -> bytes:
    fields = mapped({text(key): value for key, value in state.items()})
    return name(module, attribute) + EMPTY_TUPLE + NEWOBJ + fields + BUILD


def size(*numbers: int) -> bytes:
    return call("torch", "Size", tupled(*map(number, numbers)))


def properties(
    dtype: bytes | None = None,
    layout: bytes | None = None,
    requires_grad: bytes = FALSE,
    encoding: bytes | None = None,
    pinned: bytes = FALSE,
    *more: bytes,
) -> bytes:
    fields = (
        dtype or name("torch", "float32"),
        layout or call("torch.serialization", "_get_layout", text("torch.strided")),
        requires_grad,
        encoding or call(METADATA, "_MEM_FORMAT_ENCODING", number(0)),
        pinned,
        *more,
    )
    return name(METADATA, "TensorProperties") + EMPTY_TUPLE + NEWOBJ + tupled(*fields) + BUILD


def chunk(offsets: bytes | None = None, sizes: bytes | None = None) -> bytes:
    return made(
        METADATA, "ChunkStorageMetadata", offsets=offsets or size(0, 0), sizes=sizes or size(2, 3)
    )


def tensor(
    props: bytes | None = None, shape: bytes | None = None, chunks: bytes | None = None
) -> bytes:
    return made(
        METADATA,
        "TensorStorageMetadata",
        properties=props or properties(),
        size=shape or size(2, 3),
        chunks=chunks or listed(chunk()),
    )


def index(fqn: bytes | None = None, offset: bytes | None = None) -> bytes:
    return made(
        METADATA, "MetadataIndex", fqn=fqn or text("w"), offset=offset or size(0, 0), index=NONE
    )


def info(path: bytes | None = None, offset: bytes | None = None, length: bytes | None = None,
         **more: bytes) -> bytes:  # fmt: skip
    return made(
        FILESYSTEM,
        "_StorageInfo",
        relative_path=path or text("__0_0.distcp"),
        offset=offset or number(0),
        length=length or number(24),
        **more,
    )


def metadata(
    items: bytes | None = None,
    storage: bytes | None = None,
    planner: bytes = NONE,
    meta: bytes = NONE,
    **more: bytes,
) -> bytes:
    """A whole valid `.metadata` of one 2 x 3 tensor, with the given parts replaced."""
    return whole(
        made(
            METADATA,
            "Metadata",
            state_dict_metadata=items or mapped({text("w"): tensor()}),
            planner_data=planner,
            storage_data=storage or mapped({index(): info()}),
            storage_meta=meta,
            **more,
        )
    )
