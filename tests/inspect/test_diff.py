"""`diff`: every difference is found, and nothing is read that digests can tell."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.errors import StateMismatchError, UnsupportedError, UntrustedPickleError
from dcp_objstore.inspect import compare, slabs
from dcp_objstore.observe.bar import Bar
from tests.support.ranks import run_ranks
from tests.support.states import seeded


class Opaque:
    """A value that only trusted pickles hold."""

    def __init__(self, number: int) -> None:
        self.number = number


def state() -> dict[str, Any]:
    return {
        "model": {"w": seeded("w", (600, 50)), "b": seeded("b", (50,)), "none": torch.zeros(0, 3)},
        "optim": {"lr": 0.25, "betas": [0.9, float("nan")], "steps": {"a": 1, "b": 2}},
        "step": 7,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str, dict[str, Any]], str]:
    def save(name: str, what: dict[str, Any]) -> str:
        url = (tmp_path / name).as_uri()
        dos.save(what, url, progress=False)
        return url

    return save


@pytest.mark.backends("seaweed")
def test_by_digests_only_markers_and_indices_are_fetched(bucket, requests):
    one, other, options = bucket.at("step-1"), bucket.at("step-2"), bucket.storage_options
    dos.save(state(), one, storage_options=options, progress=False)
    changed = state()
    changed["model"]["w"][599, 49] += 1
    dos.save(changed, other, storage_options=options, progress=False)
    requests.clear()
    report = dos.diff(one, other, storage_options=options)
    fetched = sorted((request.verb, request.key.partition(".")[0]) for request in requests)
    assert fetched == [("get", "_COMMIT"), ("get", "_COMMIT"), ("get", "index"), ("get", "index")]
    (tensor,) = report.tensors
    assert (tensor.key, tensor.what) == ("model.w", "changed")
    assert (report.equal, report.read_bytes, report.same) == (7, 0, False)
    assert not (report.added or report.removed or report.values)
    report = dos.diff(one, one, storage_options=options)
    assert report.same
    for what in ("added", "removed", "tensors", "values"):
        assert not dataclasses.replace(report, **{what: (None,)}).same


def save_rows(rank: int, world: int, url: str, options: Mapping[str, object]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = {"w": distribute_tensor(seeded("w", (600, 50)), mesh, [Shard(1)])}
    dos.save({**state(), "model": {**state()["model"], **model}}, url, storage_options=options)


def test_what_is_cut_otherwise_is_read(tmp_path, saved, monkeypatch):
    monkeypatch.setattr(slabs, "WINDOW_BYTES", 4096)
    sharded = (tmp_path / "sharded").as_uri()
    run_ranks(2, save_rows, sharded, {})
    report = dos.diff(saved("whole", state()), sharded)
    assert report.same
    assert report.read_bytes == 2 * 600 * 50 * 4  # the bias has the same cut, and is not read
    changed = state()
    changed["model"]["w"][3, 4] = float("nan")
    (tensor,) = dos.diff(sharded, saved("changed", changed)).tensors
    assert (tensor.key, tensor.what) == ("model.w", "changed")


def test_keys_shapes_and_dtypes(saved):
    other = state()
    other["model"]["w"] = other["model"]["w"].reshape(300, 100).bfloat16()
    other["model"]["b"] = other["model"]["b"].half()
    other["model"]["none"] = 3  # was a tensor
    other["optim"]["new"] = other["optim"].pop("lr")
    other["step"] = 8
    other["optim"]["steps"] = {"a": 1, "b": 3}
    one, two = saved("one", state()), saved("two", other)
    report = dos.diff(one, two)
    assert report.added == ("model.none", "optim.new")
    assert report.removed == ("model.none", "optim.lr")
    assert [(t.key, t.what, t.other_shape, t.dtype, t.other_dtype) for t in report.tensors] == [
        ("model.w", "reshaped", (300, 100), "float32", "bfloat16"),
        ("model.b", "retyped", (50,), "float32", "float16"),
    ]
    assert {v.key: (v.is_known, v.value, v.other_value) for v in report.values} == {
        "step": (True, 7, 8),
        "optim.steps.b": (True, 2, 3),
    }
    only = dos.diff(one, two, "optim.*")
    assert (only.added, only.removed, only.tensors) == (("optim.new",), ("optim.lr",), ())
    with pytest.raises(StateMismatchError, match="nothing"):
        dos.diff(one, two, "nothing.*")


NAN = float("nan")
ROWS: dict[torch.dtype, list[list[complex]]] = {
    torch.float32: [[NAN, 2, float("inf"), -0.0], [NAN, 2, float("inf"), 0.0]],
    torch.float64: [[NAN, 1], [NAN, NAN]],
    torch.bfloat16: [[1, 2, 3], [1, 2, 300]],
    torch.float8_e4m3fn: [[1, 2, 3], [1, 2.5, 3]],
    torch.uint32: [[1, 5, 7], [2, 5, 7]],
    torch.bool: [[0, 1, 1], [0, 1, 0]],
    torch.complex64: [[1 + 1j, 2], [1 - 1j, 2]],
}


@pytest.mark.parametrize("dtype", ROWS, ids=str)
def test_tensors_that_have_to_be_read_are_compared_bit_for_bit(dtype, tmp_path, saved):
    wide = torch.complex128 if dtype.is_complex else torch.float64
    a, b = ({"w": torch.tensor(row, dtype=wide).to(dtype)} for row in ROWS[dtype])
    dcp.save(a, checkpoint_id=tmp_path / "stock")
    stock = (tmp_path / "stock").as_uri()
    assert dos.diff(stock, saved("a", a)).same
    assert [tensor.key for tensor in dos.diff(stock, saved("b", b)).tensors] == ["w"]


def test_a_checkpoint_of_stock_torch_is_read_once_and_compared(
    tmp_path, saved, requests, monkeypatch
):
    monkeypatch.setattr(slabs, "WINDOW_BYTES", 4096)
    dcp.save(state(), checkpoint_id=tmp_path / "stock")
    ours, stock = saved("ours", state()), (tmp_path / "stock").as_uri()
    requests.clear()
    assert dos.diff(ours, stock).same
    fetched = sum(r.end - r.start for r in requests if r.verb == "open_range")
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.distcp")]
    assert fetched <= sum(sizes)
    other = state()
    other["model"]["w"][0, 0], other["step"] = 0, 9
    report = dos.diff(stock, saved("other", other))
    assert [tensor.key for tensor in report.tensors] == ["model.w"]
    assert [(value.value, value.other_value) for value in report.values] == [(7, 9)]


def test_a_bar_counts_the_bytes_of_both_on_a_terminal_alone(tmp_path, saved, monkeypatch):
    dcp.save(state(), checkpoint_id=tmp_path / "stock")
    urls = saved("ours", state()), (tmp_path / "stock").as_uri()
    bytes_of_both = 2 * (600 + 1) * 50 * 4
    for is_seen, progress in ((True, True), (True, False), (False, True)):
        sums: Counter[str] = Counter()
        monkeypatch.setattr(Bar, "is_seen", staticmethod(lambda seen=is_seen: seen))
        monkeypatch.setattr(Bar, "begin", lambda _, number, sums=sums: sums.update(begin=number))
        monkeypatch.setattr(Bar, "advance", lambda _, number, sums=sums: sums.update(seen=number))
        monkeypatch.setattr(Bar, "flush", lambda _, sums=sums: sums.update(flush=1))
        dos.diff(*urls, **({} if progress else {"progress": False}))
        assert sums["begin"] == (bytes_of_both if is_seen and progress else 0)
        assert (sums["seen"], sums["flush"]) == (bytes_of_both, 1)


@pytest.mark.filterwarnings("ignore:.*trust_pickle")
def test_a_value_that_is_not_trusted_differs_by_its_digest_alone(tmp_path, saved, monkeypatch):
    one, two = (saved(str(n), {"a": n, "opaque": Opaque(n)}) for n in (1, 2))
    known, unknown = dos.diff(one, two).values
    assert (known.key, known.value, known.other_value) == ("a", 1, 2)
    assert (unknown.key, unknown.is_known) == ("opaque", False)
    assert dos.diff(one, one).same
    for other in (1, Opaque(3)):
        (unknown,) = dos.diff(one, saved(f"of {other}", {"a": 1, "opaque": other})).values
        assert (unknown.key, unknown.is_known) == ("opaque", False)
    dcp.save({"a": 1, "opaque": Opaque(1)}, checkpoint_id=tmp_path / "stock")
    with pytest.raises(UntrustedPickleError):
        dos.diff(one, (tmp_path / "stock").as_uri())
    assert dos.diff(one, (tmp_path / "stock").as_uri(), trust_pickle=True).same
    (_, value) = dos.diff(two, (tmp_path / "stock").as_uri(), trust_pickle=True).values
    assert value.is_known

    def closed(*_: object) -> None:
        raise TypeError("it does not say what is in it")

    monkeypatch.setattr(Opaque, "__reduce_ex__", closed)
    with pytest.raises(UnsupportedError, match="TypeError") as caught:
        dos.diff(two, (tmp_path / "stock").as_uri(), trust_pickle=True)
    assert caught.value.key == "opaque"
    assert type(caught.value.__cause__) is TypeError


# No two of them are the same, although `==` says so of many.
VALUES: list[Any] = [
    *(0, 1, True, 1.0, 0.0, -0.0, NAN, "1", b"1", bytearray(b"1"), 10**5000),
    *((1,), (True,), [1], {1}, {True}, {1: 2}, {True: 2}, {NAN: 2}, torch.Size([1])),
    *(np.array([1, 2], kind) for kind in ("i4", "i8", "f4", "f8", ">f8")),
    *(np.zeros(3), -np.zeros(3), np.zeros((1, 3)), np.array([NAN]), np.array([{"a": NAN}], object)),
    *(np.float32(1), np.float64(1), np.zeros((0, 5), "f4"), np.zeros(0, "f4")),
    *(torch.zeros(3), -torch.zeros(3), torch.zeros(1, 3), torch.tensor([NAN]), torch.tensor(0.0)),
    *(torch.ones(1).half(), torch.ones(1).bfloat16(), torch.ones(2)[::2].to_sparse()),
    *(deque([torch.ones(3)]), deque([torch.zeros(3)]), deque([torch.ones(3)], 5), deque([NAN, 1])),
    *(OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), {"a": 1, "b": 2}, Counter(a=1, b=2)),
    *(torch.nn.Parameter(torch.zeros(3)), torch.ones(2, dtype=torch.complex64) * 1j, None, 1j),
    *(torch.zeros(3).untyped_storage(), torch.zeros(4).untyped_storage(), len, seeded, ...),
    *(print, torch.float32, torch.float64),
    *(defaultdict(int, a=1), defaultdict(list, a=1), Opaque(1), Opaque(True), Opaque, io.BytesIO()),
]


def test_values_are_compared_bit_for_bit_with_their_types():
    digests = []
    for one in (*VALUES, *copy.deepcopy(VALUES)):
        digests.append(next(n for n, other in enumerate(VALUES) if compare.same(one, other)))
    assert digests == [*range(len(VALUES))] * 2
    assert compare.same({"a": 1, "b": {3, "x"}}, {"b": {"x", 3}, "a": 1})
    viewed = torch.tensor([1 - 1j]).conj()
    assert compare.same(viewed, torch.tensor([1 + 1j]))
    assert compare.same(viewed.imag, torch.tensor([1.0]))
    assert compare.same(torch.ones(3, 2).t(), torch.ones(2, 3))
    assert compare.same(torch.zeros(2, requires_grad=True), torch.zeros(2))


def test_what_repeats_or_contains_itself_is_compared_in_proportion_to_its_size():
    itself: list[Any] = []
    itself.append(itself)
    assert compare.same(itself, copy.deepcopy(itself))
    assert not compare.same(itself, [[]])
    repeated, deep = [1], [1]
    for _ in range(200):
        repeated = [repeated, repeated]  # 2**200 parts
    for _ in range(5_000):
        deep = [deep]
    assert compare.same(repeated, copy.deepcopy(repeated))
    with pytest.raises(UnsupportedError, match="deep"):
        compare.same(deep, deep)
