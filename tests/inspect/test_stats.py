"""`TensorEntry.stats`: the figures of the numbers, in one read of that tensor alone."""

from __future__ import annotations

import math
import secrets

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.inspect import slabs, stats

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(stats, "_PIECE_ELEMENTS", 500)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def stats_of(tensor: torch.Tensor) -> dos.reports.TensorStats:
    url = f"memory://stats/{secrets.token_hex(4)}"
    dos.save({"w": tensor}, url, progress=False)
    entry = dos.open(url)["w"]
    assert isinstance(entry, dos.reports.TensorEntry)
    return entry.stats()


def growing() -> torch.Tensor:
    """Each slab has a larger range than all before, so that bins are merged."""
    return normal(40, 100) * torch.logspace(-6, 9, 40)[:, None]


CASES = {
    "float32": lambda: normal(60, 70),
    "growing": growing,
    "shrinking": lambda: growing().flip(0),
    "far-from-zero": lambda: 1e9 + normal(50, 60).double(),
    "bfloat16": lambda: normal(60, 70).bfloat16(),
    "float8": lambda: normal(60, 70).to(torch.float8_e4m3fn),
    "int": lambda: torch.arange(-1500, 2500, dtype=torch.int16),
    "bool": lambda: torch.arange(3000) % 3 == 0,
    "constant": lambda: torch.full((3000,), 0.1),
    "zeros": lambda: torch.zeros(3000),
    "scalar": lambda: torch.tensor(-7.25),
    "huge": lambda: torch.tensor([1.7e308, -1.7e308, 3.0, 5e-324], dtype=torch.float64),
    "complex": lambda: torch.complex(normal(30, 40), normal(30, 40)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_figures_are_those_of_all_numbers(name):
    tensor = CASES[name]()
    found = stats_of(tensor)
    wide = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64).reshape(-1)
    assert (found.elements, found.nans, found.infs) == (tensor.numel(), 0, 0)
    assert (found.minimum, found.maximum) == (float(wide.min()), float(wide.max()))
    assert found.mean is not None
    assert found.std is not None
    if name != "huge":  # the squares are infinite
        scale = float(wide.abs().max())
        assert found.mean == pytest.approx(float(wide.mean()), abs=1e-12 * scale)
        assert found.std == pytest.approx(float(wide.std(correction=0)), rel=1e-6, abs=1e-12)
    assert 1 <= len(found.histogram) <= 16
    widths = {high - low for low, high, _ in found.histogram} - {math.inf}
    assert len(widths) == 1
    assert math.frexp(widths.pop())[0] == 0.5  # a power of two
    for low, high, count in found.histogram:
        assert count == int(((wide >= low) & (wide < high)).sum())
    assert sum(count for *_, count in found.histogram) == tensor.numel()


def test_nan_and_inf_are_counted_and_left_out():
    found = stats_of(torch.tensor([NAN, 1.0, -INF, INF, 3.0, NAN] * 500))
    assert (found.elements, found.nans, found.infs) == (3000, 1000, 1000)
    assert (found.minimum, found.maximum, found.mean) == (1.0, 3.0, 2.0)
    assert found.std == pytest.approx(1)
    assert sum(count for *_, count in found.histogram) == 1000
    nothing = stats_of(torch.full((4,), NAN))
    assert (nothing.nans, nothing.minimum, nothing.std, nothing.histogram) == (4, None, None, ())
    assert stats_of(torch.zeros(0, 3)).elements == 0


@pytest.mark.backends("seaweed")
def test_only_that_tensor_is_read_and_each_byte_once(bucket, requests):
    url, options = bucket.at("step-1"), bucket.storage_options
    state = {"before": normal(3000, 700), "w": normal(3000, 1024), "step": 1}
    dos.save(state, url, storage_options=options, progress=False)
    requests.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slabs, "WINDOW_BYTES", 4 * 1024**2)  # whole blocks
        entry = dos.open(url, storage_options=options)["w"]
        assert isinstance(entry, dos.reports.TensorEntry)
        found = entry.stats()
    assert found.maximum == float(state["w"].max())
    ranges = [(r.start, r.end) for r in requests if r.verb == "open_range"]
    assert sum(end - start for start, end in ranges) == 3000 * 1024 * 4  # type: ignore[operator]
    assert len(set(ranges)) == len(ranges) >= 3


def test_what_is_no_number_is_refused():
    with pytest.raises(UnsupportedError) as caught:
        stats_of(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert caught.value.key == "w"
