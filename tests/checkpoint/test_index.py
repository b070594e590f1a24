"""The index: what is decoded is within bounds and agrees with itself; anything else is an error."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
import torch
from hypothesis import example, given, strategies as st

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.errors import CheckpointCorruptError, DcpObjstoreError, UnsupportedError
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from tests.support import indexes
from tests.support.states import ALL_DTYPES

DIGEST = b"d" * 16


def item(**changes) -> indexes.Item:
    values = {
        "object_number": 0,
        "offset": 0,
        "length": 200,
        "payload_offset": 64,
        "payload_length": 48,
        "digests": DIGEST,
    }
    return indexes.Item(**{**values, **changes})


def tensor(**changes) -> indexes.Tensor:
    values = {
        "shape": (3, 4),
        "dtype": "float32",
        "layout": "strided",
        "requires_grad": False,
        "memory_format": "contiguous_format",
        "pin_memory": False,
        "chunks": (indexes.Chunk((0, 0), (3, 4), item()),),
    }
    return indexes.Tensor(**{**values, **changes})


def index(**changes) -> indexes.Index:
    values = {
        "objects": (ix.ObjectEntry("__0_0.abc.distcp", 1000, '"e"', DIGEST),),
        "tensors": {"w": tensor()},
        "blobs": {"step": item(offset=200, length=48, payload_offset=200)},
        "flatten_mapping": {"w": ("w",), "step": ("opt", 0, "step")},
    }
    return indexes.Index(**{**values, **changes})


def chunk(**changes) -> indexes.Index:
    values = {"offsets": (0, 0), "sizes": (3, 4), "item": item()}
    return index(tensors={"w": tensor(chunks=(indexes.Chunk(**{**values, **changes}),))})


def replaced(one: indexes.Chunk, **changes) -> indexes.Chunk:
    return msgspec.structs.replace(one, item=msgspec.structs.replace(one.item, **changes))


def halves() -> tuple[indexes.Chunk, indexes.Chunk]:
    """Two chunks of shapes (1, 4) and (2, 4) that make up the tensor."""
    first = item(length=100, payload_length=16)
    second = item(offset=100, length=100, payload_offset=164, payload_length=32)
    return indexes.Chunk((0, 0), (1, 4), first), indexes.Chunk((1, 0), (2, 4), second)


def wrapping() -> tuple[indexes.Chunk, ...]:
    """Overlapping chunks of 2**64 + 2**62 elements in all."""
    empty = item(length=0, payload_offset=0, payload_length=0, digests=b"")
    return tuple(
        indexes.Chunk((number,), (size,), empty)
        for number, size in enumerate([2**62, *[2**62 - 8] * 4, 32])
    )


def test_an_index_survives_the_round_trip():
    body = indexes.encode(index())
    decoded = ix.decode(body)
    assert ix.encode(decoded) == body
    assert decoded.payload_bytes == 96
    assert list(decoded.tensors) == ["w"]
    assert decoded.blobs == ("step",)
    assert decoded.item(0) == (0, 0, 200, 64, 48, False, DIGEST)
    assert decoded.item(1) == (0, 200, 48, 200, 48, False, DIGEST)


def grid(*order: int) -> indexes.Index:
    """A tensor of four chunks, stored in this order."""
    at = [(0, 0), (0, 2), (2, 0), (2, 2)]
    places = [item(offset=100 * n, length=80, payload_offset=100 * n + 64) for n in range(4)]
    chunks = [
        indexes.Chunk(at[number], (2, 2), msgspec.structs.replace(place, payload_length=16))
        for number, place in zip(order, places, strict=True)
    ]
    return index(tensors={"w": tensor(shape=(4, 4), chunks=chunks)}, blobs={})


CONTRADICTIONS = {
    "item beyond its object": chunk(item=item(offset=900, payload_offset=964)),
    "offset beyond the object": chunk(item=item(offset=1001, length=48, payload_offset=1001)),
    "payload before its item": chunk(item=item(offset=100)),
    "payload after its item": chunk(item=item(payload_offset=190)),
    "negative offset": chunk(item=item(offset=-1)),
    "no such object": chunk(item=item(object_number=1)),
    "a digest too few": chunk(item=item(digests=b"")),
    "half a digest": chunk(item=item(digests=b"d" * 8)),
    "a digest too many": chunk(item=item(digests=DIGEST * 2)),
    "payload of another size than the shape": chunk(item=item(payload_length=44)),
    "payload of half an element more": chunk(item=item(payload_length=50)),
    "extents that overflow behind a 0": index(
        tensors={"w": tensor(shape=(0, 2**62, 2**62), chunks=())}
    ),
    "65 dimensions": index(
        tensors={
            "w": tensor(
                shape=(1,) * 65,
                chunks=(indexes.Chunk((0,) * 65, (1,) * 65, item(payload_length=4)),),
            )
        }
    ),
    "chunk outside the tensor": chunk(offsets=(1, 0)),
    "chunk of other rank": chunk(offsets=(0,), sizes=(12,)),
    "negative sizes that multiply right": chunk(sizes=(-3, -4)),
    "shape x itemsize overflow": index(tensors={"w": tensor(shape=(2**32, 2**32), chunks=())}),
    "no chunks": index(tensors={"w": tensor(chunks=())}),
    "chunks that are not in the order of their offsets": index(
        tensors={"w": tensor(chunks=halves()[::-1])}
    ),
    "items that overlap": index(
        tensors={"w": tensor(chunks=(halves()[0], replaced(halves()[1], offset=99, length=101)))}
    ),
    "a value in the bytes of a tensor": index(
        blobs={"step": item(offset=199, length=48, payload_offset=199)}
    ),
    "items that overlap, with one of another object before and in between": index(
        objects=(ix.ObjectEntry("a", 1000, None, DIGEST), ix.ObjectEntry("b", 1000, None, DIGEST)),
        tensors={"w": tensor(chunks=(replaced(tensor().chunks[0], object_number=1),))},
        blobs={
            "first": item(offset=100, length=48, payload_offset=100),
            "step": item(object_number=1, offset=199, length=48, payload_offset=199),
        },
        flatten_mapping={},
    ),
    "items that overlap behind the first": index(
        blobs={
            "step": item(offset=200, length=48, payload_offset=200),
            "epoch": item(offset=247, length=48, payload_offset=247),
        }
    ),
    "a flag of 2": chunk(pickled=2),
    "a grid out of order at first": grid(1, 0, 2, 3),
    "a grid out of order in the middle": grid(0, 2, 1, 3),
    "a grid out of order at last": grid(0, 1, 3, 2),
    "volumes that add up modulo 2**64": index(
        objects=(ix.ObjectEntry("a", 2**63 - 1, None, DIGEST),),
        tensors={"w": tensor(shape=(2**62,), dtype="float3", chunks=wrapping())},
        blobs={},
    ),
    "a chunk twice": index(tensors={"w": tensor(shape=(6, 4), chunks=tensor().chunks * 2)}),
    "chunks that overlap": index(
        tensors={"w": tensor(chunks=(*tensor().chunks, indexes.Chunk((1, 0), (2, 4), item())))}
    ),
    "tensor and value": index(blobs={"w": item()}),
    "climbing key": index(objects=(ix.ObjectEntry("../../x", 1000, None, DIGEST),)),
    "an object that is too large": index(objects=(ix.ObjectEntry("a", 2**63, None, DIGEST),)),
    "an extent that is too large": index(tensors={"w": tensor(shape=(2**63, 0), chunks=())}),
    "digests of a part of a block": index(
        blobs={"step": item(offset=200, length=48, payload_offset=200, digests=DIGEST + b"d")}
    ),
    "a block without a digest": index(
        objects=(ix.ObjectEntry("a", 3 * BLOCK_SIZE_BYTES, None, DIGEST),),
        tensors={},
        blobs={
            "b": indexes.Item(0, 0, BLOCK_SIZE_BYTES + 4, 0, BLOCK_SIZE_BYTES + 4, DIGEST),
        },
    ),
    "negative object size": index(objects=(ix.ObjectEntry("a", -1, None, DIGEST),)),
    "short framing digest": index(objects=(ix.ObjectEntry("a", 1000, None, b""),)),
    "format 0": index(format=0),
}


@pytest.mark.parametrize("wrong", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_an_index_that_contradicts_itself_is_corrupt(wrong):
    with pytest.raises(CheckpointCorruptError):
        ix.decode(indexes.encode(wrong))


@pytest.mark.parametrize("more", [0, 1])
def test_a_tensor_has_at_most_64_dimensions_and_lies_at_most_1000_deep(more):
    ones = (1,) * 64
    wide = tensor(shape=ones, chunks=[indexes.Chunk((0,) * 64, ones, item(payload_length=4))])
    deep = {"w": ("w",) * (1000 + more)}
    body = indexes.encode(index(tensors={"w": wide}, blobs={}, flatten_mapping=deep))
    if more:
        with pytest.raises(CheckpointCorruptError, match="1001 deep"):
            ix.decode(body)
    else:
        assert ix.decode(body).flatten_mapping == deep


def test_an_index_of_format_2_is_what_it_was():
    """As checkpoints have it on the store, column by column."""
    body = [
        2,
        [["__0_0.abc.distcp", 1000, '"e"', DIGEST]],
        [["w", [3, 4], "float32", "strided", False, "contiguous_format", False, 1, None]],
        ["step"],
        [bytes(2), b"\0\xc8", b"@\0", b"00", b"X\0", bytes(2), bytes(2), b"\3\4", 2 * DIGEST],
        {"w": ["w"], "step": ["opt", 0, "step"]},
        [None, None, []],
    ]
    assert msgspec.msgpack.decode(indexes.encode(index())) == [*body, {}]
    assert ix.decode(msgspec.msgpack.encode(body)).keys == {"w", "step"}  # without the last field
    body[2][0].pop()  # nor whether a tensor was sharded
    assert ix.decode(msgspec.msgpack.encode(body)).tensors["w"].is_sharded is None


def test_a_newer_index_asks_for_an_upgrade_even_if_its_fields_are_unknown():
    newer = [ix.FORMAT + 1, {"everything": "else"}]
    with pytest.raises(UnsupportedError, match="upgrade"):
        ix.decode(msgspec.msgpack.encode(newer))
    with pytest.raises(UnsupportedError, match="upgrade"):
        ix.decode(indexes.encode(index(format=ix.FORMAT + 1)))


def test_an_unknown_dtype_is_kept_for_the_key_that_has_it():
    other = tensor(chunks=(replaced(tensor().chunks[0], offset=400, payload_offset=464),))
    decoded = ix.decode(indexes.encode(index(tensors={"w": tensor(dtype="float3"), "v": other})))
    assert [one.dtype for one in decoded.tensors.values()] == ["float3", "float32"]
    with pytest.raises(CheckpointCorruptError):  # its place is checked all the same
        ix.decode(indexes.encode(index(tensors={"w": tensor(dtype="float3", shape=(3, 5))})))


def test_the_bad_item_is_named():
    second = tensor(chunks=(halves()[0], replaced(halves()[1], offset=2**40)))
    moved = tensor(chunks=(replaced(tensor().chunks[0], offset=300, payload_offset=364),))
    with pytest.raises(CheckpointCorruptError) as caught:
        ix.decode(indexes.encode(index(tensors={"w": moved, "v": second})))
    assert caught.value.key == "v"


NOTHING = ["w", [0], "float32", "strided", False, "contiguous_format", False, 0]


@pytest.mark.parametrize(
    ("more", "keys"), [([NOTHING], ["a", "b"]), ([], ["w", "b"]), ([], ["b", "b"])]
)
def test_a_key_that_is_listed_twice_is_corrupt(more, keys):
    values = {
        name: item(offset=at, payload_offset=at + 64) for name, at in (("a", 200), ("b", 400))
    }
    plain = msgspec.msgpack.decode(indexes.encode(index(blobs=values, flatten_mapping=None)))
    plain[2] += more
    plain[3] = keys
    with pytest.raises(CheckpointCorruptError, match="twice"):
        ix.decode(msgspec.msgpack.encode(plain))


def test_a_count_of_chunks_allocates_nothing_that_the_index_does_not_hold():
    plain = msgspec.msgpack.decode(indexes.encode(index()))
    for count in (-1, 0, 2, 2**31, 2**62, 2**63):
        plain[2][0][-1] = count
        with pytest.raises(CheckpointCorruptError):
            ix.decode(msgspec.msgpack.encode(plain))
    # Negative ones even if the sum is right.
    other = tensor(chunks=(replaced(tensor().chunks[0], offset=400, payload_offset=464),))
    plain = msgspec.msgpack.decode(indexes.encode(index(tensors={"w": tensor(), "v": other})))
    ix.decode(msgspec.msgpack.encode(plain))
    plain[2][0][-1], plain[2][1][-1] = 3, -1
    with pytest.raises(CheckpointCorruptError):
        ix.decode(msgspec.msgpack.encode(plain))


def test_a_column_of_another_length_is_corrupt():
    for number, length in product(range(9), [0, 1, 3, 5, 6, 15, 17, 48]):  # there are two rows
        plain = msgspec.msgpack.decode(indexes.encode(index()))
        plain[4][number] = bytes(length)
        with pytest.raises(CheckpointCorruptError):
            ix.decode(msgspec.msgpack.encode(plain))


def test_a_chunk_is_found_by_its_offset_with_and_without_a_hint(monkeypatch):
    decoded = ix.decode(indexes.encode(index(tensors={"w": tensor(chunks=halves())})))
    for hint in (None, 0, 1, 2, -1):
        assert decoded.find("w", (1, 0), hint) == 1
        assert decoded.find("w", (2, 0), hint) is None
    assert decoded.find("step", None) == 2
    assert decoded.find("w", None) is None
    assert decoded.find("step", (0,)) is None
    assert decoded.find("w", (0,)) is None
    assert decoded.find("w", (-1, 0)) is None
    assert decoded.find("absent", None) is None
    monkeypatch.delattr(ix.Index, "boxes")  # with the right hint, no other chunk is looked at
    assert [decoded.find("w", offsets, hint) for hint, offsets in enumerate([(0, 0), (1, 0)])] == [
        0,
        1,
    ]


@pytest.mark.parametrize("number", [0, 2**8 - 1, 2**8, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**61])
def test_numbers_of_every_width_survive(number):
    place = item(offset=number, length=number, payload_offset=number, payload_length=0, digests=b"")
    one = indexes.Chunk((0,), (number,), place)
    made = index(
        objects=(ix.ObjectEntry("a", 2 * number, None, DIGEST),),
        tensors={"w": tensor(shape=(number,), dtype="float3", chunks=(one,))},
        blobs={},
    )
    body = indexes.encode(made)
    decoded = ix.decode(body)
    assert ix.encode(decoded) == body
    assert decoded.item(0) == (0, number, number, number, 0, False, b"")
    assert decoded.boxes("w")[1].tolist() == [[number]]


def test_the_elements_of_every_dtype_that_can_be_saved_have_their_size_in_torch():
    others = ("quint8", "qint8", "qint32", "float8_e8m0fnu", "float4_e2m1fn_x2")
    names = {str(dtype).removeprefix("torch.") for dtype in ALL_DTYPES}.union(others)
    assert names == ix.ITEM_SIZE_BYTES.keys()
    for name in names:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        for payload in (12 * dtype.itemsize, 12 * dtype.itemsize - 1):
            place = item(payload_length=payload, length=300)
            one = tensor(dtype=name, chunks=(indexes.Chunk((0, 0), (3, 4), place),))
            body = indexes.encode(index(tensors={"w": one}, blobs={}))
            if payload % dtype.itemsize or payload < 12:
                with pytest.raises(CheckpointCorruptError, match="payload"):
                    ix.decode(body)
            else:
                ix.decode(body)


def spread() -> indexes.Index:
    """Tensors of several numbers of dimensions in two objects, one of them of no elements."""
    entries = [ix.ObjectEntry(f"__{rank}_0.abc.distcp", 2**40, None, DIGEST) for rank in (0, 1)]
    block = BLOCK_SIZE_BYTES

    def place(number: int, offset: int, length: int) -> indexes.Item:
        blocks = -(-length // block)
        digests = b"".join(bytes([offset % 251 + n]) * 16 for n in range(blocks))
        return indexes.Item(number, offset, length, offset, length, digests)

    size = 2 * block + 4
    tensors = {
        "row": tensor(
            shape=(size // 4 + 2,),
            chunks=(
                indexes.Chunk((0,), (2,), place(1, 0, 8)),
                indexes.Chunk((2,), (size // 4,), place(0, 3, size)),
            ),
        ),
        "none": tensor(shape=(0, 2), chunks=()),
        "scalar": tensor(shape=(), chunks=(indexes.Chunk((), (), place(1, 8, 4)),)),
        "square": tensor(
            shape=(2, 4),
            chunks=(
                indexes.Chunk((0, 0), (2, 1), place(1, 20, 8)),
                indexes.Chunk((0, 1), (2, 3), place(1, 40, 24)),
            ),
        ),
        "line": tensor(shape=(3,), chunks=(indexes.Chunk((0,), (3,), place(1, 64, 12)),)),
        "void": tensor(shape=(0,), chunks=()),
    }
    return indexes.Index(tuple(entries), tensors)


def test_each_tensor_has_its_rows_its_boxes_and_its_digests():
    made = spread()
    found = ix.decode(indexes.encode(made))
    first = 0
    for key, wanted in made.tensors.items():
        chunks, rows = wanted.chunks, range(first, first + len(wanted.chunks))
        assert found.rows(key) == rows
        offsets, sizes = found.boxes(key)
        assert offsets.tolist() == [list(chunk.offsets) for chunk in chunks]
        assert sizes.tolist() == [list(chunk.sizes) for chunk in chunks]
        for number, chunk in enumerate(chunks):
            assert found.box(key, number) == (list(chunk.offsets), list(chunk.sizes))
            assert found.find(key, chunk.offsets) == rows[number]
            stored, digests = found.item(rows[number]), chunk.item.digests
            assert (stored.offset, stored.digests) == (chunk.item.offset, digests)
        assert found.digests(key) == b"".join(chunk.item.digests for chunk in chunks)
        first += len(chunks)
    every = [chunk.item for wanted in made.tensors.values() for chunk in wanted.chunks]
    assert found.payload_bytes == sum(one.payload_length for one in every)
    assert found.find("none", (0, 0)) is None


def test_chunks_are_grouped_by_their_number_of_dimensions():
    found = ix.decode(indexes.encode(spread()))
    groups = {len(group.tensors[0].shape): group for group in found.groups()}
    keys = {ndim: [one.key for one in group.tensors] for ndim, group in groups.items()}
    assert keys == {0: ["scalar"], 1: ["row", "line", "void"], 2: ["none", "square"]}
    for group in groups.values():
        wanted = [
            (owner, number, row, *found.box(one.key, number))
            for owner, one in enumerate(group.tensors)
            for number, row in enumerate(found.rows(one.key))
        ]
        assert list(zip(*(column.tolist() for column in group[1:]), strict=True)) == wanted
        of_owner = [[row for row in wanted if row[0] == n] for n in range(len(group.tensors))]
        assert [wanted[first:after] for first, after in group.bounds()] == of_owner


LIMITS = {
    "a grid": grid(0, 1, 2, 3),
    "an object of the largest size": index(
        objects=(ix.ObjectEntry("__0_0.abc.distcp", 2**63 - 1, None, DIGEST),)
    ),
    "an object of no bytes": index(
        objects=(
            ix.ObjectEntry("__0_0.abc.distcp", 1000, None, DIGEST),
            ix.ObjectEntry("__1_0.abc.distcp", 0, None, DIGEST),
        )
    ),
    "items up to the end of their object": index(
        objects=(ix.ObjectEntry("__0_0.abc.distcp", 248, None, DIGEST),)
    ),
    "the largest tensor": index(tensors={"w": tensor(shape=(2**63 - 1, 0, 1), chunks=())}),
    "an item of no bytes where another begins": index(
        blobs={
            "a": item(offset=200, length=48, payload_offset=200),
            "b": item(offset=200, length=0, payload_offset=200, payload_length=0, digests=b""),
        }
    ),
    "two objects with the same places": index(
        objects=tuple(ix.ObjectEntry(key, 1000, None, DIGEST) for key in ("a", "b")),
        blobs={"a": item(object_number=1), "b": item(offset=200, length=200, payload_offset=264)},
    ),
    "what DCP notes of a save": index(storage=ix.StorageInfo("s3://b/c", "n", ("m", "o"))),
    "a pickled tensor of any size": index(
        tensors={
            "w": tensor(chunks=(indexes.Chunk((0, 0), (3, 4), item(payload_length=7), pickled=1),))
        }
    ),
}


@pytest.mark.parametrize("right", LIMITS.values(), ids=LIMITS.keys())
def test_an_index_may_go_up_to_its_limits(right):
    decoded = ix.decode(indexes.encode(right))
    assert ix.encode(decoded) == indexes.encode(right)


NOT_AN_INDEX = {
    **{
        f"{plain!r:.40}": msgspec.msgpack.encode(plain)
        for plain in (
            {"format": ix.FORMAT + 1},
            [],
            [str(ix.FORMAT + 1)],
            [True],
            [ix.FORMAT + 0.5],
            [ix.FORMAT],
            [ix.FORMAT - 1, {}],
        )
    },
    "nested": b"\x91" * 100_000 + b"\xc0",
    "nested, as if newer": b"\x92\x03" + b"\x91" * 100_000 + b"\xc0",
    "a key that is not text": b"\x81\xa1\xff\x01",
    "a key that is a list": b"\x81\xd4\x00\x00\x00",
    "a key of the mapping that is not text": indexes.encode(
        index(flatten_mapping={"marked-key": ("w",)})
    ).replace(b"marked-key", b"\xff" * 10),
}


@pytest.mark.parametrize("body", NOT_AN_INDEX.values(), ids=NOT_AN_INDEX.keys())
def test_what_the_decoder_cannot_take_is_corrupt(body):
    with pytest.raises(CheckpointCorruptError, match="cannot be read"):
        ix.decode(body)


@given(st.binary(max_size=300))
@example(b"\x81\xd4\x00\x00\x00")
def test_arbitrary_bytes_are_no_index(body):
    with pytest.raises(DcpObjstoreError):
        ix.decode(body)
