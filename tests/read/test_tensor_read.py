"""From read items to blocks, and from blocks into tensors: which bytes, and whose memory."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import CheckpointCorruptError, StateMismatchError, UnsupportedError
from dcp_objstore.read import tensor_read as module
from dcp_objstore.read.item_read import ItemRead
from dcp_objstore.read.items import ItemLocation
from dcp_objstore.read.plan import blocks_at
from dcp_objstore.read.stored_checkpoint import open_rooted
from dcp_objstore.read.tensor_read import (
    Block,
    TensorRead,
    check_destination,
    consume,
    location_of,
    memory_for,
    plan_spans,
    warn_if_lossy,
)
from dcp_objstore.state.device import Inbound
from dcp_objstore.stores import StoreSpec
from dcp_objstore.transfer.digests import block_digest
from dcp_objstore.transfer.ranges import RangeRequest, Span
from tests.support.checkpoints import memory_url
from tests.support.lanes import LateLane

BLOCK, GAP = 64, 16  # bytes, in place of 4 MiB and 256 KiB
AT = 5000  # where the payload lies in object 3


def item(
    offsets: Sequence[int], sizes: Sequence[int], kind: LoadItemType = LoadItemType.TENSOR
) -> ReadItem:
    place, zeros = MetadataIndex("t", offsets), torch.Size([0] * len(sizes))
    return ReadItem(kind, place, zeros, place, torch.Size(offsets), torch.Size(sizes))


def read_of(
    offsets: Sequence[int],
    sizes: Sequence[int],
    of: Sequence[int],
    dtype: str = "uint8",
    *,
    digests: bytes | None = None,
) -> TensorRead:
    """A read of a part of a chunk of this shape."""
    size_bytes = int(np.prod(of)) * getattr(torch, dtype).itemsize
    return TensorRead(
        item(offsets, sizes), ItemLocation(3, AT, size_bytes, tuple(of), dtype, digests)
    )


# --- which bytes ----------------------------------------------------------------------------------

DIGESTS = bytes(range(16 * 8))  # of 8 blocks
BLOCKS = [(at, at + 64) for at in range(0, 384, 64)]
ALL = [*BLOCKS, (384, 400)]
LONG = [(64, 128), (128, 192), (256, 320), (320, 384), (448, 512), (512, 576)]
Pieces = list[tuple[int, int]]
# What is wanted (offsets, sizes) of a chunk; and the pieces of its payload that are read with
# digests; without; and without, if other ranks may need the block.
PIECES: dict[str, tuple[Any, Pieces, Pieces, Pieces]] = {
    "all": (((0, 0), (10, 40), (10, 40)), ALL, ALL, ALL),
    "rows": (((2, 0), (3, 40), (10, 40)), BLOCKS[1:4], ROWS := [(80, 144), (144, 200)], ROWS),
    "columns near": (
        *(((0, 4), (10, 30), (10, 40)), ALL),
        *([(at, at + 64) for at in range(4, 388, 64)] + [(388, 394)], ALL),
    ),
    "columns far": (
        *(((1, 0), (3, 20), (10, 40)), BLOCKS[:3], [(40, 60), (80, 100), (120, 140)], BLOCKS[:3]),
    ),
    "columns of long rows": (
        *(((0, 100), (3, 50), (3, 200)), LONG, [(100, 150), (300, 350), (500, 550)], LONG),
    ),
    "nothing": (((0, 0), (0, 40), (10, 40)), [], [], []),
    "small": (((0,), (4,), (16,)), [(0, 16)], [(0, 4)], [(0, 16)]),
    "a bit larger": (((1,), (2,), (17,)), [(0, 17)], [(1, 3)], [(1, 3)]),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_SIZE_BYTES", BLOCK)
    monkeypatch.setattr(module, "DEFAULT_GAP_BYTES", GAP)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("wanted", PIECES)
def test_what_is_verified_is_read_in_whole_blocks_and_else_only_what_is_needed(wanted):
    part, verified, needed, shared = PIECES[wanted]
    for digests, verify, whole_blocks, pieces in (
        (DIGESTS, True, False, verified),
        (DIGESTS, True, True, verified),
        (DIGESTS, False, False, needed),
        (None, True, False, needed),
        (DIGESTS, False, True, shared),
        (None, True, True, shared),
    ):
        read, again = (read_of(*part, digests=digests) for _ in range(2))
        spans = plan_spans([read, again], verify=verify, whole_blocks=whole_blocks)
        assert [(s.object_number, s.start - AT, s.end - AT) for s in spans] == [
            (3, *piece) for piece in pieces
        ]
        for span in spans:
            at = span.tag.position
            assert (at, span.tag.key, span.tag.reads) == (span.start - AT, "t", [read, again])
            digest = DIGESTS[at // 4 : at // 4 + 16] if verify and digests else None
            assert span.tag.digest == digest


@pytest.mark.usefixtures("small_blocks")
def test_an_item_that_only_torch_decodes_is_read_whole():
    read = ItemRead(item((), ()), ItemLocation(3, AT, 150, None, None, None))
    for whole_blocks in (True, False):
        spans = plan_spans([read], verify=True, whole_blocks=whole_blocks)
        places = [(span.start - AT, span.end - AT) for span in spans]
        assert places == [(0, 64), (64, 128), (128, 150)]


def test_each_block_of_each_item_is_found_by_its_place(tmp_path):
    """A rank reads it for others, and verifies it."""
    url = memory_url()
    values = {"a": torch.arange(3.0), "big": torch.arange(9 * MIB // 4), "none": torch.ones(0)}
    state = {**values, "step": 7, "z": torch.ones(5, dtype=torch.uint8), "words": ["x", "y"]}
    config = dos.TransferConfig(part_size_bytes=5 * MIB, max_object_size_bytes=5 * MIB)
    dos.save(state, url, progress=False, config=config)
    store = StoreSpec(url).open()
    opened = open_rooted(store)
    places: dict[tuple[int, int, int], tuple[str, int]] = {}
    for key in opened.items.keys:
        offset = None if opened.items.tensor(key) is None else (0,)
        location = opened.item(key, offset)
        for at in range(0, location.payload_length, 4 * MIB):
            start = location.payload_offset + at
            end = location.payload_offset + min(at + 4 * MIB, location.payload_length)
            places[location.object_number, start, end] = key, at
    assert len(places) > len(state)
    assert len(opened.object_keys) > 1
    for chosen in ([*places], [*reversed(places)], [*places][1::2], []):
        spans = blocks_at(opened, chosen)
        assert [*spans] == chosen
        for place, span in spans.items():
            number, start, end = place
            assert (span.object_number, span.start, span.end) == place
            assert (span.tag.key, span.tag.position, span.tag.reads) == (*places[place], [])
            body, _ = store.get(opened.object_keys[number], max_size_bytes=64 * MIB)
            assert span.tag.digest == block_digest(body[start:end])


def test_a_tensor_is_no_value_and_a_value_no_tensor():
    dos.save({"t": torch.ones(2), "v": 3}, url := memory_url(), progress=False)
    opened = open_rooted(StoreSpec(url).open())
    tensor, value = MetadataIndex("t", (0,), 0), MetadataIndex("v")
    for kind, right, wrong, text in (
        (LoadItemType.BYTE_IO, value, tensor, "asks for a v"),
        (LoadItemType.TENSOR, tensor, value, "for a t"),
    ):
        wanted: Any = SimpleNamespace(type=kind, storage_index=right, dest_index=MetadataIndex("x"))
        assert location_of(opened, wanted).payload_length
        wanted.storage_index = wrong
        with pytest.raises(StateMismatchError, match=text) as told:
            location_of(opened, wanted)
        assert told.value.key == "x"


# --- into tensors ---------------------------------------------------------------------------------


def test_a_part_that_the_chunk_does_not_have_is_refused():
    read_of((2, 0), (3, 8), (5, 8))
    for offsets, sizes in (((3, 0), (3, 8)), ((0, 1), (5, 8)), ((0,), (5,))):
        with pytest.raises(StateMismatchError, match="requested from a chunk") as told:
            read_of(offsets, sizes, (5, 8))
        assert told.value.key == "t"


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_bytes_are_received_in_the_tensors_memory_only_where_they_belong(dtype):
    destination = torch.zeros(3, 8, dtype=getattr(torch, dtype))
    row = 8 * destination.itemsize
    read = read_of((2, 0), (3, 8), (6, 8), dtype)
    assert read.memory_at(2 * row, row) is None, "it has no destination yet"
    read.bind(destination)
    for position, size_bytes, fits in (
        (2 * row, 3 * row, True),
        (2 * row, row, True),
        (4 * row, row, True),
        (2 * row - 1, row, False),
        (0, 2 * row, False),
        (4 * row, row + 1, False),
        (2 * row, 3 * row + 1, False),
    ):
        memory = read.memory_at(position, size_bytes)
        assert (memory is not None) == fits
        if memory is not None:
            destination.zero_()
            memory[:] = b"\1" * size_bytes
            whole = destination.view(torch.uint8).flatten()
            at = position - 2 * row
            assert whole.nonzero().flatten().tolist() == [*range(at, at + size_bytes)]
    for other in (
        torch.zeros(8, 3, dtype=destination.dtype).t(),
        torch.zeros(3, 8, dtype=torch.float64),
    ):
        read = read_of((2, 0), (3, 8), (6, 8), dtype)
        read.bind(other)
        assert read.memory_at(2 * row, row) is None


def accept(read: TensorRead, body: bytes, low: int, high: int, *, packed: bool) -> None:
    """Pass a stretch of the payload to a read, whole or packed as another rank sends it."""
    if not packed:
        return read.accept(low, body[low:high])
    into = np.empty(read.selection.count_bytes(low, high), np.uint8)
    read.selection.pack(np.frombuffer(body[low:high], np.uint8), low, into)
    return read.accept_packed(low, high - low, into)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_of_inference_mode_are_filled_like_any_others(packed, device, dtype):
    values = torch.arange(48.0).view(6, 8)
    with torch.inference_mode():
        destinations = torch.zeros(3, 5, dtype=dtype), torch.zeros(5, 3, dtype=dtype).t()
    for destination in destinations:
        read = read_of((2, 1), (3, 5), (6, 8), "float32")
        read.bind(destination)
        with Inbound({destination.device: LateLane()}, 2, 4096) as inbound:
            if device:
                read.send_through(inbound)
            accept(read, values.numpy().tobytes(), 0, 192, packed=packed)
            assert destination.any() != device, "a device gets it in its own time"
        assert torch.equal(destination, values[2:5, 1:6].to(dtype))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("cuts", [(0, 192), (0, 72, 76, 132, 192), (64, 160), (0, 70, 77, 192)])
def test_rows_are_filled_from_blocks_that_begin_and_end_anywhere(packed, device, cuts):
    """Each has some of them; what is packed begins and ends with an element."""
    values, destination = torch.arange(48.0).view(6, 8), torch.zeros(3, 8)
    read = read_of((2, 0), (3, 8), (6, 8), "float32")
    read.bind(destination)
    with Inbound({destination.device: LateLane()}, 2, 4096) as inbound:
        if device:
            read.send_through(inbound)
        for low, high in itertools.pairwise(cuts):
            is_packed = packed and low % 4 == high % 4 == 0
            accept(read, values.numpy().tobytes(), low, high, packed=is_packed)
    assert torch.equal(destination, values[2:5])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
def test_only_floats_become_quantized_elements_and_float4_is_never_converted():
    plain = torch.zeros(4)
    quantized = torch.quantize_per_tensor(plain, 0.5, 0, torch.qint8)
    for stored, destination in (("float32", quantized), ("int8", plain)):
        read_of((0,), (4,), (4,), stored).bind(destination)
    float4 = "float4_e2m1fn_x2"
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    read_of((0,), (4,), (4,), float4).bind(packed)
    for stored, destination in (
        *(("int8", quantized), ("qint8", plain)),
        *((float4, plain), ("float32", packed)),
    ):
        with pytest.raises(StateMismatchError, match=f"saved as {stored}") as caught:
            read_of((0,), (4,), (4,), stored).bind(destination)
        assert caught.value.key == "t"


@pytest.mark.parametrize("shift", range(4))
def test_torch_is_given_elements_that_are_aligned_wherever_a_body_begins(monkeypatch, shift):
    """Though many processors read others, too."""
    shifts: list[int] = []

    def frombuffer(buffer: Any, *, dtype: torch.dtype) -> torch.Tensor:
        shifts.append(np.frombuffer(buffer, np.uint8).ctypes.data % dtype.itemsize)
        return really(buffer, dtype=dtype)

    really = torch.frombuffer
    values, destination = torch.arange(12.0), torch.zeros(12, dtype=torch.float64)
    memory = np.zeros(12 * 4 + 4, dtype=np.uint8)
    memory[shift : shift + 48] = values.numpy().view(np.uint8)
    read = read_of((0,), (12,), (12,), "float32")
    read.bind(destination)
    monkeypatch.setattr(torch, "frombuffer", frombuffer)
    read.accept(0, memory.data[shift : shift + 48])
    assert shifts == [0]
    assert torch.equal(destination, values.double())


def spans_of(*pieces: tuple[int, int], read: Any = None, digest: bytes | None = None) -> Any:
    reads = [] if read is None else [read]
    return [Span(3, AT + low, AT + high, Block("t", low, digest, [*reads])) for low, high in pieces]


def test_a_request_is_received_in_a_tensor_if_all_of_it_is_for_that_alone():
    read, other = read_of((0,), (100,), (100,)), read_of((0,), (100,), (100,))
    destination = torch.zeros(100, dtype=torch.uint8)
    for one in (read, other):
        one.bind(destination)

    def memory(*spans: Span[Block]) -> int | None:
        """Where it is."""
        request = RangeRequest(3, spans[0].start, max(s.end for s in spans), [*spans])
        found = memory_for(request)
        if found is None:
            return None
        assert found.nbytes == request.end - request.start
        return np.frombuffer(found, np.uint8).ctypes.data - destination.data_ptr()

    whole = spans_of((20, 30), (30, 60), read=read)
    assert memory(*whole) == 20
    assert memory(*whole[1:]) == 30
    assert memory(*spans_of((20, 30), (31, 60), read=read)) is None, "a gap"
    assert memory(*spans_of((20, 30), (29, 60), read=read)) is None, "twice"
    assert memory(*spans_of((20, 30), read=read, digest=b"x")) is None, "it is to be checked"
    assert memory(whole[0], *spans_of((30, 60), read=read, digest=b"x")) is None
    assert memory(whole[0], *spans_of((30, 60), read=other)) is None, "of two destinations"
    assert memory(*spans_of((20, 30))) is None, "nobody's"
    whole[0].tag.reads.append(other)
    assert memory(whole[0]) is None, "two need it"
    value = ItemRead(item((), ()), ItemLocation(3, AT, 100, None, None, None))
    assert memory(*spans_of((0, 100), read=value)) is None


def test_no_byte_of_a_body_is_passed_on_if_one_of_its_blocks_is_wrong():
    read = read_of((0,), (128,), (128,))
    read.bind(destination := torch.zeros(128, dtype=torch.uint8))
    body = bytes(range(1, 129))
    position = 5 * 4 * MIB
    spans = [
        Span(3, AT, AT + 64, Block("t", 0, block_digest(body[:64]), [read])),
        Span(3, AT + 64, AT + 128, Block("u", position, block_digest(body[64:]), [])),
    ]
    request = RangeRequest(3, AT, AT + 128, spans)
    with pytest.raises(CheckpointCorruptError, match="block 5 of the item") as told:
        consume(request, body[:127] + b"x")
    assert told.value.key == "u"
    assert f"[{AT + 64}, {AT + 128})" in str(told.value)
    assert not destination.any()
    consume(request, body)
    assert destination.tolist() == [*body[:64], *bytes(64)]
    spans[0].tag.digest = None
    consume(request, bytes(64) + body[64:])
    assert not destination.any()


# --- which tensors --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
def test_a_destination_has_memory_of_its_own_and_the_shape_that_is_asked_for():
    wanted = item((0, 0), (2, 3))
    transposed, column, freed = torch.zeros(3, 2).t(), torch.zeros(1), torch.zeros(2, 3)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.zeros(2, 3)
    for fine in (torch.zeros(2, 3), transposed, torch.zeros(2, 6)[:, ::2]):
        check_destination(wanted, fine)
    check_destination(item((0, 0), (0, 3)), torch.zeros(0, 3))  # it has no address
    check_destination(item((0, 0), (1, 1)), column.expand(1, 1))
    for refused, text in (
        (torch.zeros(2, 3, device="meta"), "meta"),
        (fake, "fake"),
        (torch.zeros(2, 3).to_sparse(), "layout sparse_coo"),
        (freed, "freed"),
        (column.expand(2, 3), "expanded"),
        (torch.zeros(2, 1).expand(2, 3), "expanded"),
        (torch.zeros(1, 3).expand(2, 3), "expanded"),
    ):
        with pytest.raises(UnsupportedError, match=text) as told:
            check_destination(wanted, refused)
        assert told.value.key == "t"
    for shape in ((3, 2), (2,), (2, 3, 1)):
        with pytest.raises(StateMismatchError) as caught:
            check_destination(wanted, torch.zeros(shape))
        assert caught.value.key == "t"


@pytest.mark.parametrize(
    ("stored", "wanted", "is_lossy"),
    [
        *(
            ("float32", "float32", False),
            ("float32", "float64", False),
            ("int32", "float32", False),
        ),
        *(("float64", "float32", True), ("bfloat16", "float16", True), ("int64", "bool", True)),
        *(("float8_e4m3fn", "float8_e4m3fn", False), ("float8_e4m3fn", "float16", False)),
        *(("float8_e4m3fn", "float8_e5m2", True), ("float8_e4m3fn", "int32", True)),
        ("float16", "float8_e5m2", True),
    ],
)
def test_a_dtype_that_cannot_hold_every_stored_value_is_warned_of(stored, wanted, is_lossy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        destination = torch.zeros(2, dtype=getattr(torch, wanted))
        assert warn_if_lossy(item((0,), (2,)), stored, destination) == is_lossy
    assert len(caught) == is_lossy
    if caught:
        assert f"t: saved as {stored}, converted to {wanted}" in str(caught[0].message)
