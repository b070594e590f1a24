"""One rank's items in objects: each in its place, readable by stock torch, within the limits."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import DcpObjstoreError, RankFailedError, UnsupportedError
from dcp_objstore.state.device import Outbound
from dcp_objstore.transfer.digests import block_digests
from dcp_objstore.transfer.parts import PartPlan
from dcp_objstore.write.layout import ChangedSlice, Layout, SizedItem, check_item, item_bytes
from tests.support.states import seeded

UNLIMITED = 1 << 40


class Laid(NamedTuple):
    """An object: where its items lie, and the buffers that were handed on."""

    layout: Layout
    buffers: list[Any]

    @property
    def body(self) -> bytes:
        return b"".join(map(bytes, self.buffers))

    @property
    def keys(self) -> list[str]:
        return [placed.item.index.fqn for placed in self.layout.placed]


def hashed(piece: Any) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_result(block_digests(piece))
    return future


def items_of(state: Mapping[str, Any]) -> list[WriteItem]:
    return create_default_local_save_plan(dict(state), True).items


def lay(
    state: Mapping[str, Any],
    *,
    limit: int = UNLIMITED,
    slice_size: int = 16 * MIB,
    resolve: Callable[[WriteItem], Any] | None = None,
    values: Callable[[str, bytes], None] = lambda *_: None,
    known: Mapping[tuple[int, int], bytes] | None = None,
) -> list[Laid]:
    """Lay a state out; check the digests, the alignment and the framing of each object."""

    def own(item: WriteItem) -> Any:
        value = state[item.index.fqn]
        if item.type != WriteItemType.BYTE_IO:
            return value
        torch.save(value, body := io.BytesIO())
        return body

    plan = PartPlan(slice_size, slice_size, limit, 1)
    pending = deque(SizedItem(item, item_bytes(item)) for item in items_of(state))
    objects = []
    while pending:
        layout = Layout(
            pending=pending,
            resolve=resolve or own,
            plan=plan,
            hash_slice=hashed,
            on_value=values,
            outbound=Outbound(plan, dos.TransferConfig(), lambda: None),
            known_digests=known or {},
        )
        laid = Laid(layout, list(layout.buffers()))
        check(laid)
        objects.append(laid)
    return objects


def check(laid: Laid) -> None:
    body = laid.body
    framing, at = xxhash.xxh3_128(), 0
    for placed in laid.layout.placed:
        assert at <= placed.offset < at + 64
        assert placed.payload_offset % 64 == 0
        end = placed.payload_offset + placed.payload_length
        framing.update(body[at : placed.payload_offset])
        at = placed.offset + placed.length
        framing.update(body[end:at])
        payload = body[placed.payload_offset : end]
        digests = placed.digests
        if not isinstance(digests, bytes):
            digests = b"".join(future.result() for future in digests)
        assert digests == block_digests(payload), placed.item.index.fqn
    assert at == len(body)
    assert laid.layout.framing_digest == framing.digest()


def loaded(laid: Laid) -> dict[str, Any]:
    """As a stock reader finds it."""
    body = laid.body
    return {
        placed.item.index.fqn: torch.load(
            io.BytesIO(body[placed.offset : placed.offset + placed.length])
        )
        for placed in laid.layout.placed
    }


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that quantized tensors will go
def test_every_kind_of_item_is_where_it_is_said_to_be_and_read_by_torch():
    quantized = torch.quantize_per_tensor(torch.linspace(-1, 1, 64), 0.1, 3, torch.qint8)
    state = {
        "value": {"a": [1, 2]},
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "small": seeded("small", (1000,), torch.int32),
        "large": seeded("large", (3 * MIB,), torch.int32),
        "turned": torch.arange(600_000.0).view(600, 1000).t(),
        "quantized": quantized,
        "last": torch.ones(3, dtype=torch.bfloat16),
    }
    told: list[Any] = []
    (laid,) = lay(state, slice_size=4 * MIB, values=lambda *value: told.append(value))
    assert laid.keys == list(state)
    found = loaded(laid)
    assert found.pop("value") == state.pop("value")
    assert torch.equal(found.pop("quantized").int_repr(), quantized.int_repr())
    state.pop("quantized")
    for key, value in state.items():
        assert torch.equal(found[key], value), key
        assert found[key].dtype == value.dtype
    by_key = {placed.item.index.fqn: placed for placed in laid.layout.placed}
    kinds = {key: (placed.pickled, placed.dtype) for key, placed in by_key.items()}
    assert kinds["value"] == (False, None)
    assert kinds["quantized"] == (True, "qint8")
    assert kinds["last"] == (False, "bfloat16")
    ((key, body),) = told
    assert (key, torch.load(io.BytesIO(body))) == ("value", {"a": [1, 2]})


def test_a_large_value_is_handed_on_in_slices():
    value = {"text": "x" * (9 * MIB)}
    (laid,) = lay({"a": torch.ones(1), "value": value}, slice_size=4 * MIB)
    assert max(len(buffer) for buffer in laid.buffers) == 4 * MIB
    assert loaded(laid)["value"] == value


@pytest.mark.parametrize(("on_cpu", "most"), [(True, MIB), (False, 64 * 1024)])
def test_a_tensor_of_more_than_a_mib_is_handed_on_as_its_own_memory(on_cpu, most, monkeypatch):
    """Each one of a GPU is copied from there by itself, so fewer are gathered."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    state = {
        "gathered": torch.zeros(most, dtype=torch.uint8),
        "own": torch.zeros(most + 1, dtype=torch.uint8),
        "long": torch.zeros(9 * MIB, dtype=torch.uint8),
    }
    (laid,) = lay(state, slice_size=4 * MIB)
    memory = {
        key: [
            buffer.nbytes
            for buffer in laid.buffers
            if np.shares_memory(np.asarray(buffer), tensor.numpy())
        ]
        for key, tensor in state.items()
    }
    assert memory == {"gathered": [], "own": [most + 1], "long": [4 * MIB, 4 * MIB, MIB]}


def test_what_is_gathered_is_handed_on_at_8_mib_or_when_a_slice_is_full():
    state = {f"{n}": torch.zeros(MIB - 4096, dtype=torch.uint8) for n in range(20)}
    (laid,) = lay(state)
    sizes = [len(buffer) for buffer in laid.buffers]
    assert len(sizes) == 3
    assert all(8 * MIB <= size < 9 * MIB for size in sizes[:-1])
    (laid,) = lay(state, slice_size=4 * MIB)
    sizes = [len(buffer) for buffer in laid.buffers]
    assert len(sizes) == 7
    assert all(2 * MIB <= size < 3 * MIB for size in sizes[:-1])


def test_the_digests_that_staging_knows_are_taken_as_they_are():
    tensor = seeded("t", (5 * MIB // 4,), torch.int32)
    digests = block_digests(tensor.view(torch.uint8).numpy())
    known = {(tensor.data_ptr(), tensor.nbytes): digests}
    (laid,) = lay({"t": tensor}, known=known)
    assert laid.layout.placed[0].digests is digests
    assert torch.equal(loaded(laid)["t"], tensor)


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 2 * MIB])
def test_an_object_takes_what_just_fits_and_leaves_what_does_not_to_the_next(size):
    state = {f"{n}": seeded(f"{n}", (size,), torch.uint8) for n in range(4)}
    (whole,) = lay(state)
    second = whole.layout.placed[2]
    ends_at = whole.layout.placed[1].offset + whole.layout.placed[1].length
    assert [laid.keys for laid in lay(state, limit=ends_at + size)] == [["0", "1", "2"], ["3"]]
    assert [laid.keys for laid in lay(state, limit=ends_at + size - 1)] == [["0", "1"], ["2", "3"]]
    assert second.payload_offset > ends_at
    objects = lay(state, limit=1)
    assert [laid.keys for laid in objects] == [["0"], ["1"], ["2"], ["3"]]
    for laid in objects:
        assert all(torch.equal(found, state[key]) for key, found in loaded(laid).items())


def test_what_a_planner_makes_larger_is_left_to_the_next_object_if_it_does_not_fit():
    state = {f"{n}": torch.full((1000,), float(n), dtype=torch.float16) for n in range(3)}
    made: list[str] = []

    def resolve(item: WriteItem) -> torch.Tensor:
        made.append(item.index.fqn)
        return state[item.index.fqn].double()

    objects = lay(state, limit=12_500, resolve=resolve)
    assert [laid.keys for laid in objects] == [["0"], ["1"], ["2"]]
    assert made == ["0", "1", "1", "2", "2"]
    for laid in objects:
        ((key, found),) = loaded(laid).items()
        assert found.dtype == torch.float64
        assert torch.equal(found, state[key].double())
    (laid,) = lay(state, resolve=resolve)
    assert laid.keys == list(state)


# Refusals -----------------------------------------------------------------------------------------


def test_what_a_planner_must_not_make_of_an_item_is_refused_by_its_key():
    state = {"a": torch.ones(2, 3), "t": torch.ones(2, 3), "v": [1]}
    bad: list[tuple[str, Any, type[DcpObjstoreError], str]] = [
        ("t", io.BytesIO(b"x"), UnsupportedError, "tensor item to BytesIO"),
        ("t", [1], UnsupportedError, "tensor item to list"),
        ("v", torch.ones(1), UnsupportedError, "BYTE_IO item to Tensor"),
        ("v", b"x", UnsupportedError, "BYTE_IO item to bytes"),
        ("t", torch.ones(3, 2), UnsupportedError, r"shape \(3, 2\) for a part of shape \(2, 3\)"),
        ("t", torch.ones(2, 3, device="meta"), UnsupportedError, "meta"),
        ("t", torch.ones(2, 3).to(torch.bfloat16).view(torch.bits16), UnsupportedError, "bits16"),
    ]
    for key, value, kind, says in bad:

        def resolve(item: WriteItem) -> Any:
            found = state[item.index.fqn]
            if item.index.fqn == key:  # noqa: B023
                return value  # noqa: B023
            return found if isinstance(found, torch.Tensor) else io.BytesIO(b"x")

        with pytest.raises(kind, match=says) as caught:
            lay(state, resolve=resolve)
        assert caught.value.key == key


def test_an_error_of_the_planner_keeps_its_type_in_the_text_and_its_place():
    def resolve(item: WriteItem) -> Any:
        raise ZeroDivisionError("of mine")

    with pytest.raises(UnsupportedError, match="ZeroDivisionError: of mine") as caught:
        lay({"t": torch.ones(1)}, resolve=resolve)
    assert caught.value.key == "t"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (pickle.PicklingError("a lambda"), UnsupportedError),
        (AttributeError("Can't pickle local object"), UnsupportedError),
        (TypeError("cannot pickle a lock"), UnsupportedError),
        (MemoryError("all"), RankFailedError),
        (OSError("too many open files"), RankFailedError),
        (RuntimeError("of a GPU"), RankFailedError),
    ],
)
def test_a_value_that_cannot_be_pickled_is_the_users_error_full_memory_is_not(error, kind):
    def resolve(item: WriteItem) -> Any:
        raise error

    with pytest.raises(kind, match=str(error)) as caught:
        lay({"v": [1]}, resolve=resolve)
    assert caught.value.key == "v"
    assert ("state_dict" in caught.value.message) is (kind is UnsupportedError)


def test_a_key_that_no_index_can_hold_is_refused():
    (item,) = items_of({"v": 1})
    for fine in ("", "ключ", "k" * 1000, "\x00"):
        check_item(dataclasses.replace(item, index=MetadataIndex(fine)))
    for bad in ("file-\udcff", "\ud800.weight", 5, None, b"v"):
        with pytest.raises(UnsupportedError, match="UTF-8"):
            check_item(dataclasses.replace(item, index=MetadataIndex(bad)))  # type: ignore[arg-type]


def test_an_item_that_cannot_be_saved_is_refused_by_its_key_before_it_is_made():
    check_item(items_of({"v": [1]})[0])
    for bad in (torch.zeros(1).expand(2**41), torch.ones(2).view(torch.bits8)):
        (item,) = items_of({"t": bad})
        with pytest.raises(UnsupportedError) as caught:
            check_item(item)
        assert caught.value.key == "t"


# Changes ------------------------------------------------------------------------------------------


def changed_at(place: slice) -> tuple[Laid, list[ChangedSlice]]:
    """Lay out a tensor of 6 MiB after one that stays, and change it before its slices end."""
    tensor, still = (torch.zeros(mib * MIB, dtype=torch.uint8) for mib in (6, 2))
    (laid,) = lay({"still": still, "t": tensor}, slice_size=4 * MIB)
    tensor[place] = 1
    assert laid.layout.changed == []
    laid.buffers.clear()
    return laid, laid.layout.changed


@pytest.mark.parametrize("start", [0, 1, 8, 64 * 1024, 2 * MIB - 64 * 1024])
def test_any_change_of_64_kib_is_noted_with_its_place_after_the_upload_of_its_slice(start):
    start += 4 * MIB
    laid, (change,) = changed_at(slice(start, start + 64 * 1024))
    placed = laid.layout.placed[1]
    assert (change.key, change.size_bytes) == ("t", 2 * MIB)
    assert change.offset == placed.payload_offset + 4 * MIB
    assert change.digests.result() == block_digests(bytes(2 * MIB))
