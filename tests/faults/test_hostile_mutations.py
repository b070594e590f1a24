"""Valid checkpoints, mutated at random: what still decodes is within bounds, all else is ours.

150 examples of each kind by default; `pytest -m campaign` takes many more.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import pickletools
import random
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import dcp_objstore as dos
from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.marker import Marker, decode_marker
from dcp_objstore.compat.foreign import decode_metadata
from dcp_objstore.compat.transforms import check_archive
from dcp_objstore.compat.values import check_safe
from dcp_objstore.read.stored_checkpoint import StoredCheckpoint, open_rooted
from tests.support import hostile, pickles as p
from tests.support.memory_store import MemoryStore
from tests.support.stock_checkpoints import check_promises

quick = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
thorough = settings(quick, max_examples=20_000)

METADATA = p.metadata(
    p.mapped({p.text("w"): p.tensor(), p.text("s"): p.made(p.METADATA, "BytesStorageMetadata")}),
    p.mapped({p.index(): p.info(), p.index(p.text("s"), p.NONE): p.info(offset=p.number(24))}),
    meta=p.made(p.METADATA, "StorageMeta", checkpoint_id=p.text("x")),
)
OURS = hostile.ours()
WEIGHTS = safetensors.torch.save(
    {"a": torch.ones(2, 3), "b": torch.ones(4).half(), "c": torch.tensor(1), "d": torch.ones(0, 2)},
    {"format": "pt"},
)
HEADER = WEIGHTS[8 : 8 + int.from_bytes(WEIGHTS[:8], "little")]
VALUES = [
    hostile.saved(value)
    for value in (
        *(7, {"lr": 1e-3, "betas": (0.9, 0.95)}, torch.zeros(3), b"bytes", {1, 2}, "x" * 99),
        *(io.BytesIO(b"bytes"), [np.ones(3), np.float32(1)], datetime.now(UTC), Path("/x")),
        *(deque([1, 2], 3), [range(3)]),
    )
]
NUMBERS = [0, 1, -1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
LEAVES: list[Any] = [
    *NUMBERS,
    None,
    True,
    1.5,
    float("inf"),
    "",
    "../x",
    "\0",
    b"",
    b"x" * 16,
    [],
    {},
]


def spliced(body: bytes, chance: random.Random) -> bytes:
    """Some bytes flipped, cut, doubled, or taken from elsewhere in it."""
    made = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        if not made:
            break
        at, length = chance.randrange(len(made)), chance.randint(1, 12)
        other = chance.randrange(len(made))
        new = chance.choice([
            bytes([made[at] ^ (1 << chance.randrange(8))]), chance.randbytes(length), b"",
            bytes(made[other : other + length]), bytes(made[at : at + length]) * 2,
            b"\xff" * length, chance.choice(LEAVES_PACKED),
        ])  # fmt: skip
        made[at : at + chance.choice([1, 0, length])] = new
    return bytes(made)


LEAVES_PACKED = [msgspec.msgpack.encode(leaf) for leaf in LEAVES]


def other_opcodes(body: bytes, chance: random.Random) -> bytes:
    """Opcodes of a pickle left out, doubled, swapped, or others put in."""
    ends = [place for _, _, place in pickletools.genops(body) if place is not None]
    pieces = [body[a:b] for a, b in zip(ends, [*ends[1:], len(body)], strict=True)]
    extra = [b"b", b"R", b"\x81", b"0", b"2", b"(", b"t", b"\x85", b"}", b"]", b"u", b"s", b"N",
             b"Q",
             b"h\0", b"h\7", b"q\0", b"\x93", b"cos\nsystem\n", b"ccollections\nOrderedDict\n",
             b"ctorch\nSize\n", p.number(2**62), p.number(-1), p.text("../x"), b"\x8f"]  # fmt: skip
    for _ in range(chance.randint(1, 4)):
        at, other = chance.randrange(1, len(pieces)), chance.randrange(len(pieces))
        match chance.randrange(5):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, chance.choice(extra))
            case 2:
                pieces[at] = chance.choice(extra)
            case 3:
                pieces.insert(at, pieces[other])
            case _:
                pieces[at], pieces[other] = pieces[other], pieces[at]
        if len(pieces) < 2:
            break
    return b"".join(pieces)


def restructured(plain: Any, chance: random.Random, depth: int = 0) -> Any:
    """A value of msgpack or JSON with a leaf, an entry or an order changed somewhere."""
    if not isinstance(plain, list | dict) or not plain or chance.random() < 0.15 * (depth > 1):
        return chance.choice(LEAVES)
    keys = list(range(len(plain))) if isinstance(plain, list) else list(plain)
    key = chance.choice(keys)
    made = plain.copy()
    match chance.randrange(8):
        case 0:
            del made[key]
        case 1:
            made[key] = plain[chance.choice(keys)]
        case 2 if isinstance(made, list):
            made.append(plain[key])
        case _:
            made[key] = restructured(plain[key], chance, depth + 1)
    return made


def checked(read: Callable[[], object]) -> object:
    """Return what it gives, or None if it raised one of our errors for its input."""
    try:
        return read()
    except dos.errors.DcpObjstoreError as error:
        assert not isinstance(error, dos.errors.RankFailedError)
        return None


def index_within_bounds(index: ix.Index) -> None:
    for key, tensor in index.tensors.items():
        offsets, sizes = (rows.tolist() for rows in index.boxes(key))
        for offset, size in zip(offsets, sizes, strict=True):
            ends = [a + b for a, b in zip(offset, size, strict=True)]
            assert all(end <= n for end, n in zip(ends, tensor.shape, strict=True)), key
        assert sum(map(math.prod, sizes)) == math.prod(tensor.shape)
        assert len(set(map(tuple, offsets))) == len(index.rows(key))
    taken = [(0, 0, 0)]
    for row in range(len(index.columns.offset)):
        item = index.item(row)
        end = item.offset + item.length
        assert 0 <= item.offset <= item.payload_offset
        assert item.payload_offset <= item.payload_offset + item.payload_length <= end
        assert end <= index.objects[item.object_number].size_bytes
        assert len(item.digests) == 16 * -(-item.payload_length // (4 << 20))
        taken.append((item.object_number, item.offset, end))
    for before, after in itertools.pairwise(sorted(taken)):
        assert before[0] < after[0] or before[2] <= after[1]
    for entry in index.objects:
        assert not {"", ".", ".."} & set(entry.key.split("/"))
        assert "://" not in entry.key and "\\" not in entry.key


def try_index(seed: int) -> None:
    chance = random.Random(seed)
    good = OURS[hostile.INDEX_KEY]
    if chance.random() < 0.5:
        plain = msgspec.msgpack.decode(good)
        for _ in range(chance.randint(1, 2)):
            plain = restructured(plain, chance)
        body = msgspec.msgpack.encode(plain)
    else:
        body = spliced(good, chance)
    found = checked(lambda: ix.decode(body))
    if found is not None:
        assert isinstance(found, ix.Index)
        index_within_bounds(found)
        store = MemoryStore()
        for key, content in hostile.sealed(body, {hostile.DATA_KEY: hostile.DATA}).items():
            store.put(key, content)
        checked(lambda: open_rooted(store))


def try_marker(seed: int) -> None:
    chance = random.Random(seed)
    good = OURS["_COMMIT"]
    body = good[: good.rindex(b',"digest"')] + b"}"
    if chance.random() < 0.5:
        plain = restructured(msgspec.json.decode(body), chance)
        plain = {"x": plain} if not isinstance(plain, dict) else plain
        with contextlib.suppress(TypeError):
            body = msgspec.json.encode({k: v for k, v in plain.items() if not isinstance(v, bytes)})
    else:
        body = spliced(body, chance)
    found = checked(lambda: decode_marker(hostile.signed(body)))
    if found is not None:
        assert isinstance(found, Marker)
        assert found.index is not None or found.state == "deleted"
        if found.index is not None:
            assert not {"", ".", ".."} & set(found.index.key.split("/"))
            assert 0 <= found.index.size_bytes <= 2**31


def try_metadata(seed: int) -> None:
    chance = random.Random(seed)
    body = (other_opcodes if chance.random() < 0.7 else spliced)(METADATA, chance)
    found: Any = checked(lambda: decode_metadata(body))
    if found is not None:
        check_promises(found)


def try_value(seed: int) -> None:
    chance = random.Random(seed)
    body = chance.choice(VALUES)
    if chance.random() < 0.6:
        start = body.index(b"\x80\x02")
        end = next(place for op, _, place in pickletools.genops(body[start:]) if op.name == "STOP")
        assert end is not None
        pickled = other_opcodes(body[start : start + end + 1], chance)
        body = hostile.archive(pickled, {"data/0": bytes(12)}, packed=chance.random() < 0.2)
    else:
        body = spliced(body, chance)

    def load() -> None:
        check_archive(io.BytesIO(body), "key", len(body))
        check_safe(body, "key", trust_pickle=False)

    checked(load)


def try_safetensors(seed: int) -> None:
    chance = random.Random(seed)
    body = spliced(WEIGHTS, chance)
    if chance.random() < 0.7:
        plain = json.loads(HEADER)
        for _ in range(chance.randint(1, 2)):
            plain = restructured(plain, chance)
        with contextlib.suppress(TypeError):  # of bytes, which JSON has not
            header = json.dumps(plain).encode()
            body = len(header).to_bytes(8, "little") + header + WEIGHTS[8 + len(HEADER) :]
    store = MemoryStore()
    store.put("model.safetensors", body)
    found = checked(lambda: open_rooted(store))
    if found is None:
        return
    assert isinstance(found, StoredCheckpoint)
    taken = [(0, 0)]
    for key in found.items.keys:
        tensor = found.items.tensor(key)
        assert tensor is not None
        place = found.items.find(key, (0,) * len(tensor.shape), 0)
        assert place is not None
        if tensor.dtype in ix.ITEM_SIZE_BYTES:
            size_bytes = math.prod(tensor.shape) * ix.ITEM_SIZE_BYTES[tensor.dtype]
            assert place.payload_length == size_bytes
        if place.payload_length:
            taken.append((place.payload_offset, place.payload_offset + place.payload_length))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(taken)))
    assert max(taken)[1] <= len(body)


KINDS = {
    "index": try_index,
    "marker": try_marker,
    "metadata": try_metadata,
    "value": try_value,
    "safetensors": try_safetensors,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "some", [quick, pytest.param(thorough, marks=pytest.mark.campaign)], ids=["quick", "thorough"]
)
@pytest.mark.filterwarnings("ignore")
def test_a_mutation_is_within_bounds_or_a_typed_error(kind, some):
    hostile.fired.clear()
    some(given(seed=st.integers(0, 2**64))(KINDS[kind]))()
    assert hostile.fired == []
