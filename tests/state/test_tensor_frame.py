"""The bytes of a tensor as torch reads them, and which tensors have none."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.serialization import config as serialization_config

from dcp_objstore.errors import UnsupportedError
from dcp_objstore.state import tensor_frame
from dcp_objstore.state.tensor_frame import (
    check_layout,
    frame,
    framing,
    padding_before,
    payload_slices,
    pickled_blob,
    raw_payload,
    save_options,
    small_payload,
)
from tests.support.states import ALL_DTYPES, same_bits, seeded


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_stock_torch_loads_what_stands_in_a_frame(dtype):
    for shape in ((), (3,), (2, 3), (0,), (2, 0)):
        tensor = seeded("framed", shape, dtype)
        around = frame(dtype, shape, save_options())
        payload = b"".join(map(bytes, payload_slices(tensor, 4)))
        assert len(payload) == math.prod(shape) * dtype.itemsize
        body = io.BytesIO(around.header + payload + around.trailer)
        assert same_bits(torch.load(body, weights_only=True), tensor)


def test_what_torch_is_told_of_its_files_is_part_of_a_frame():
    before = frame(torch.float32, (3,), save_options())
    assert len(before.header) % 4096
    with serialization_config.patch("save.storage_alignment", 4096):
        assert len(frame(torch.float32, (3,), save_options()).header) % 4096 == 0
    kept, computed = save_options(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(not computed)
    try:
        assert save_options() != kept
    finally:
        torch.serialization.set_crc32_options(computed)
    assert frame(torch.float32, (3,), save_options()) == before


def test_storages_have_their_places_between_what_torch_writes():
    one, other = torch.full((5,), 7, dtype=torch.uint8), torch.full((3,), 8, dtype=torch.uint8)
    before, between, after = framing({"a": one, "b": other, "none": torch.empty(0)})
    body = before + bytes(one) + between + bytes(other) + after
    loaded = torch.load(io.BytesIO(body), weights_only=True)
    assert torch.equal(loaded["a"], one)
    assert torch.equal(loaded["b"], other)


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.quint4x2, "dequantize"), (torch.bits8, "uint8")]
)
def test_a_dtype_that_could_not_be_loaded_again_is_refused(dtype, advice):
    with pytest.raises(UnsupportedError, match=advice):
        frame(dtype, (2,), save_options())


@pytest.mark.parametrize(
    ("position", "header", "padding"),
    [(0, 64, 0), (0, 65, 63), (1, 63, 0), (63, 0, 1), (64, 1, 63)],
)
def test_a_payload_begins_at_a_multiple_of_64(position, header, padding):
    assert padding_before(position, header) == padding


class Subclass(torch.Tensor):
    pass


def test_the_memory_of_a_tensor_is_its_payload_where_that_is_possible():
    plain = torch.arange(6.0).view(2, 3)
    kept = [plain, plain[1:], torch.nn.Parameter(plain), torch.empty(0, 3)]
    for tensor in kept:
        payload = raw_payload(tensor)
        assert payload is not None
        assert type(payload) is torch.Tensor
        assert not payload.requires_grad
        assert payload.data_ptr() == tensor.data_ptr()
    complex_ = torch.tensor([1 + 2j, 3 + 4j])
    for tensor in (plain.t(), complex_.conj(), complex_[:1].conj().imag, complex_.requires_grad_()):
        payload = raw_payload(tensor)
        assert payload is not None
        assert payload.is_contiguous()
        assert not (payload.is_conj() or payload.is_neg() or payload.requires_grad)
        assert torch.equal(payload, tensor.detach())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).as_subclass(Subclass),
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    ],
    ids=["a subclass", "quantized"],
)
def test_what_only_torch_can_write_is_pickled_whole(make):
    assert raw_payload(make()) is None
    loaded = torch.load(io.BytesIO(bytes(pickled_blob(make()))), weights_only=False)
    assert type(loaded) is type(make())


def test_a_pickled_tensor_has_no_gradient():
    blob = pickled_blob(torch.nn.Parameter(torch.ones(2)) * 1)
    assert blob.dtype == np.uint8
    assert not torch.load(io.BytesIO(bytes(blob)), weights_only=True).requires_grad


def freed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(2, device="meta"), "meta"),
        (freed, "freed"),
        (lambda: torch.eye(2).to_sparse(), "(?s)sparse_coo .*to_dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
    ],
    ids=["meta", "freed", "sparse", "csr"],
)
def test_a_tensor_without_elements_in_memory_is_refused(make, why):
    with pytest.raises(UnsupportedError, match=why):
        raw_payload(make())


def test_only_the_strided_layout_is_accepted():
    check_layout(torch.strided)
    for layout in (torch.jagged, torch.sparse_coo, torch.sparse_csr):
        with pytest.raises(UnsupportedError):
            check_layout(layout)


def test_the_memory_of_small_tensors_is_copied_and_that_of_others_is_not():
    tensor = torch.arange(2**14 + 1, dtype=torch.int32).to(torch.uint8)
    small, large = small_payload(tensor, 2**14), small_payload(tensor, 2**14 + 1)
    assert isinstance(small, bytes)
    assert isinstance(large, np.ndarray)
    assert small == tensor.numpy()[:-1].tobytes()
    assert np.shares_memory(large, tensor.numpy())
    assert large.nbytes == 2**14 + 1


def test_slices_are_views_of_the_memory_up_to_a_size_or_copies_by_torch(monkeypatch):
    tensor = torch.arange(7, dtype=torch.int16)
    for on_the_host in (True, False):
        slices = list(payload_slices(tensor, 4))
        assert [piece.nbytes for piece in slices] == [4, 4, 4, 2]
        assert b"".join(map(bytes, slices)) == tensor.numpy().tobytes()
        assert all(np.shares_memory(piece, tensor.numpy()) for piece in slices) or not on_the_host
        monkeypatch.setattr(tensor_frame, "byte_memory", lambda _: None)  # as of another device


class FilledBytes(TorchFunctionMode):
    """Counts what `use_deterministic_algorithms` would fill: the memory of `torch.empty`."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += result.nbytes if func is torch.empty else 0
        return result


def test_a_frame_needs_no_memory_that_torch_would_fill():
    with FilledBytes() as filled:
        frame.__wrapped__(torch.uint8, (1 << 28,), save_options())
    assert filled.count == 0
