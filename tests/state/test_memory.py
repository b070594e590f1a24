"""Keys that share memory, and elements that are copied as they are or not at all."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from dcp_objstore.errors import StateMismatchError
from dcp_objstore.state import memory
from dcp_objstore.state.memory import byte_memory, copy_elements, device_bytes, same_memory


def negative() -> torch.Tensor:
    return torch.tensor([1 + 2j]).conj().imag


def test_the_bytes_of_a_tensor_are_its_memory_and_keep_it_alive():
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    for found in (byte_memory(tensor), device_bytes(tensor)):
        assert found is not None
        found[2:4] += 1
        assert found.tolist()[:6] == [0, 0, *tensor.flatten().view(torch.uint8).tolist()[2:6]]
    assert tensor.tolist() == [[0, 1 + 2 * 0x0101, 2], [3, 4, 5]]
    tensor.untyped_storage().resize_(24)
    last = byte_memory(torch.full((1000,), 7, dtype=torch.uint8))
    gc.collect()
    assert last is not None
    assert set(last.tolist()) == {7}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0)[::2],
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([1 + 2j]).conj(),
        negative(),
    ],
    ids=["steps", "a subclass", "conjugated", "negated"],
)
def test_memory_that_is_not_the_values_one_after_the_other_is_left_to_torch(tensor):
    assert byte_memory(tensor) is None
    assert device_bytes(tensor) is None


def test_memory_of_another_device_has_no_address_here():
    assert byte_memory(torch.empty(2, device="meta")) is None
    assert device_bytes(torch.empty(2, device="meta")).shape == (8,)


def test_tied_tensors_are_told_by_the_same_elements():
    base = torch.zeros(4, 4)
    same = same_memory(base)
    assert same == same_memory(base[:]) == same_memory(torch.nn.Parameter(base))
    others = [
        torch.zeros(4, 4),
        base[:2],
        base[2:],
        base.t(),
        base.view(16),
        base.view(torch.int32),
    ]
    assert len({same, *map(same_memory, others)}) == 1 + len(others)
    for value in (1.0, base.to_sparse(), base.numpy()):
        assert same_memory(value) is None


class Sharded:
    """What a DTensor is to the rank that has a part of it."""

    def __init__(self, part: torch.Tensor) -> None:
        self._local_tensor = part


def test_parts_of_sharded_tensors_are_told_by_the_elements_of_this_rank(monkeypatch):
    monkeypatch.setattr(memory.torch_private, "DTensor", Sharded)
    base = torch.zeros(4)
    assert same_memory(Sharded(base)) == same_memory(base)
    assert same_memory(Sharded(base[:2])) != same_memory(Sharded(base[2:]))
    # Ranks without elements ask, too.
    assert same_memory(Sharded(base[:0])) == same_memory(Sharded(base[:0]))
    assert same_memory(Sharded(torch.zeros(0))) != same_memory(Sharded(base[:0]))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (torch.arange(6.0), torch.zeros(6)),
        (torch.arange(6.0)[::2], torch.zeros(3)),
        (torch.arange(3.0), torch.zeros(6)[::2]),
        (torch.arange(6.0), torch.zeros(6, dtype=torch.float64)),
        (torch.arange(6, dtype=torch.int32), torch.zeros(6)),  # of as many bytes
        (torch.arange(6.0), torch.nn.Parameter(torch.zeros(6))),
        (torch.arange(0.0), torch.zeros(0)),
        (torch.tensor([1 + 2j]).conj(), torch.zeros(1, dtype=torch.complex64)),
    ],
)
def test_elements_are_copied_by_value_and_autograd_is_told(source, destination):
    before = destination._version
    copy_elements(source, destination)
    assert torch.equal(destination, source.to(destination.dtype))
    assert destination._version > before


def test_tensors_of_inference_mode_are_filled_where_it_is_off():
    with torch.inference_mode():
        destinations = [torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]]
    for destination in destinations:
        copy_elements(torch.arange(4.0), destination)
        assert destination.tolist() == [0, 1, 2, 3]


def by_channel(scale: float = 1.0, zero: int = 0, axis: int = 0, dtype: Any = torch.qint8) -> Any:
    scales, zeros = torch.full((2,), scale), torch.full((2,), zero, dtype=torch.int64)
    return torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, axis, dtype)


def by_tensor(scale: float = 1.0, zero: int = 0, dtype: Any = torch.qint8) -> Any:
    return torch.quantize_per_tensor(torch.ones(2, 2), scale, zero, dtype)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these will go
@pytest.mark.parametrize("make", [by_channel, by_tensor])
def test_integers_are_copied_only_where_they_mean_the_same(make):
    destination = make()
    destination.copy_(torch.zeros(2, 2))
    copy_elements(make(), destination)
    assert torch.equal(destination.int_repr(), make().int_repr())
    others = [
        *(make(scale=0.5), make(zero=1), make(dtype=torch.quint8), torch.ones(2, 2)),
        by_channel() if make is by_tensor else by_tensor(),
        *([by_channel(axis=1)] if make is by_channel else []),
    ]
    if make is by_channel:
        # Of equal numbers, but the zero points are floats.
        ones, scales = torch.ones(2, 2), torch.ones(2)
        floats = torch.quantize_per_channel(ones, scales, torch.zeros(2), 0, torch.quint8)
        with pytest.raises(StateMismatchError):
            copy_elements(floats, make(dtype=torch.quint8))
    for other in others:
        for pair in ((other, make()), (make(), other)):
            dtypes = f"{pair[0].dtype}, the state has {pair[1].dtype}"
            with pytest.raises(StateMismatchError, match=dtypes):
                copy_elements(*pair)
