"""The index: what is decoded is within bounds and agrees with itself; anything else is an error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import CheckpointCorruptError, DcpObjstoreError, UnsupportedError
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES

DIGEST = b"d" * 16


def item(**changes) -> ix.Item:
    values = {
        "object_number": 0,
        "offset": 0,
        "length": 200,
        "payload_offset": 64,
        "payload_length": 48,
        "digests": DIGEST,
    }
    return ix.Item(**{**values, **changes})


def tensor(**changes) -> ix.Tensor:
    values = {
        "shape": (3, 4),
        "dtype": "float32",
        "layout": "strided",
        "requires_grad": False,
        "memory_format": "contiguous_format",
        "pin_memory": False,
        "chunks": (ix.Chunk((0, 0), (3, 4), item()),),
    }
    return ix.Tensor(**{**values, **changes})


def index(**changes) -> ix.Index:
    values = {
        "format": ix.FORMAT,
        "objects": (ix.ObjectEntry("__0_0.abc.distcp", 1000, '"e"', DIGEST),),
        "tensors": {"w": tensor()},
        "blobs": {"step": item(offset=200, length=48, payload_offset=200)},
        "flatten_mapping": {"w": ("w",), "step": ("opt", 0, "step")},
    }
    return ix.Index(**{**values, **changes})


def chunk(**changes) -> ix.Index:
    values = {"offsets": (0, 0), "sizes": (3, 4), "item": item()}
    return index(tensors={"w": tensor(chunks=(ix.Chunk(**{**values, **changes}),))})


def test_an_index_survives_the_round_trip():
    assert ix.decode(ix.encode(index())) == index()
    assert index().payload_bytes == 96


CONTRADICTIONS = {
    "item beyond its object": chunk(item=item(offset=900)),
    "payload before its item": chunk(item=item(offset=100)),
    "payload after its item": chunk(item=item(payload_offset=190)),
    "negative offset": chunk(item=item(offset=-1)),
    "negative length": chunk(item=item(payload_length=-48)),
    "no such object": chunk(item=item(object_number=1)),
    "negative object": chunk(item=item(object_number=-1)),
    "a digest too few": chunk(item=item(digests=b"")),
    "half a digest": chunk(item=item(digests=b"d" * 8)),
    "a digest too many": chunk(item=item(digests=DIGEST * 2)),
    "payload of another size than the shape": chunk(item=item(payload_length=44)),
    "chunk outside the tensor": chunk(offsets=(1, 0)),
    "chunk of other rank": chunk(offsets=(0,), sizes=(12,)),
    "negative sizes that multiply right": chunk(sizes=(-3, -4)),
    "shape x itemsize overflow": index(
        tensors={"w": tensor(shape=(2**32, 2**32), chunks=())},
    ),
    "no chunks": index(tensors={"w": tensor(chunks=())}),
    "a chunk twice": index(tensors={"w": tensor(shape=(6, 4), chunks=tensor().chunks * 2)}),
    "chunks that overlap": index(
        tensors={"w": tensor(chunks=(*tensor().chunks, ix.Chunk((1, 0), (2, 4), item())))}
    ),
    "too many dimensions": index(tensors={"w": tensor(shape=(1,) * 65, chunks=())}),
    "tensor and value": index(blobs={"w": item()}),
    "absolute key": index(objects=(ix.ObjectEntry("/etc/passwd", 1000, None, DIGEST),)),
    "climbing key": index(objects=(ix.ObjectEntry("../../x", 1000, None, DIGEST),)),
    "key with a scheme": index(objects=(ix.ObjectEntry("s3://b/x", 1000, None, DIGEST),)),
    "key with NUL": index(objects=(ix.ObjectEntry("a\0b", 1000, None, DIGEST),)),
    "negative object size": index(objects=(ix.ObjectEntry("a", -1, None, DIGEST),)),
    "short framing digest": index(objects=(ix.ObjectEntry("a", 1000, None, b""),)),
    "format 0": index(format=0),
}


@pytest.mark.parametrize("wrong", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_an_index_that_contradicts_itself_is_corrupt(wrong):
    with pytest.raises(CheckpointCorruptError):
        ix.decode(ix.encode(wrong))


def test_a_newer_index_asks_for_an_upgrade_even_if_its_fields_are_unknown():
    newer = [ix.FORMAT + 1, {"everything": "else"}]
    with pytest.raises(UnsupportedError, match="upgrade"):
        ix.decode(msgspec.msgpack.encode(newer))
    with pytest.raises(UnsupportedError, match="upgrade"):
        ix.decode(ix.encode(index(format=ix.FORMAT + 1)))


def test_an_unknown_dtype_is_kept_for_the_key_that_has_it():
    newer = index(tensors={"w": tensor(dtype="float3"), "v": tensor()})
    assert ix.decode(ix.encode(newer)) == newer
    with pytest.raises(CheckpointCorruptError):  # its place is checked all the same
        ix.decode(ix.encode(index(tensors={"w": tensor(dtype="float3", shape=(3, 5))})))


def test_every_dtype_of_this_torch_that_has_memory_is_known_with_its_size():
    import torch

    for name, size_bytes in ix.ITEM_SIZE_BYTES.items():
        dtype = getattr(torch, name, None)
        if dtype is not None:
            assert dtype.itemsize == size_bytes, name


def test_a_payload_of_several_blocks_needs_a_digest_for_each():
    size = 2 * BLOCK_SIZE_BYTES + 4
    big = ix.Item(0, 0, size, 0, size, DIGEST * 3)
    entry = ix.ObjectEntry("a", size, None, DIGEST)
    wanted = index(objects=(entry,), tensors={})
    good = msgspec.structs.replace(wanted, blobs={"b": big})
    assert ix.decode(ix.encode(good)) == good
    bad = msgspec.structs.replace(good, blobs={"b": msgspec.structs.replace(big, digests=DIGEST)})
    with pytest.raises(CheckpointCorruptError):
        ix.decode(ix.encode(bad))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_index(body):
    with pytest.raises(DcpObjstoreError):
        ix.decode(body)
