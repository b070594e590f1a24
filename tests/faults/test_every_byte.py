"""Damage anywhere: no flipped byte and no truncation loads a wrong value, and verify finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import DcpObjstoreError
from tests.support.campaign import cases
from tests.support.states import same_bits


def saved() -> dict[str, Any]:
    return {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) + 0.5,
        "mask": torch.tensor([True, False, True]),
        "half": torch.tensor(2.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0),
        "step": 1234,
        "names": ["adam", {"lr": 0.125}],
    }


def blank() -> dict[str, Any]:
    state = saved()
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    return {**state, "step": 0, "names": ["", {"lr": 0.0}]}


def equal(left: Any, right: Any) -> bool:
    return same_bits(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few kilobytes: three tensors, an empty one and two values."""
    place = tmp_path_factory.mktemp("run") / "step-1"
    dos.save(saved(), place.as_uri(), progress=False)
    return place


def flips(body: bytes, stride: int) -> Iterator[tuple[str, bytes]]:
    for at in range(0, len(body), stride):
        yield f"byte {at} flipped", body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]


def truncations(body: bytes, stride: int) -> Iterator[tuple[str, bytes]]:
    for length in range(0, len(body), stride):
        yield f"cut to {length} bytes", body[:length]


Damages = Callable[[bytes, int], Iterator[tuple[str, bytes]]]


def check_every(checkpoint: Path, damages: Damages, stride: int) -> dict[str, tuple[int, int]]:
    """Load with each damage; returns per object how many loads were refused, of how many."""
    counts = {}
    for path in sorted(checkpoint.iterdir()):
        if path.name == ".metadata":
            continue  # this library does not read it where there is a marker
        body = path.read_bytes()
        refused = tried = 0
        try:
            for what, damaged in damages(body, stride):
                path.write_bytes(damaged)
                state = blank()
                tried += 1
                if path.suffix == ".distcp":
                    opened = dos.open(checkpoint.as_uri())
                    assert not opened.verify(deep=True, progress=False).ok, what
                try:
                    dos.load(state, checkpoint.as_uri(), progress=False)
                except DcpObjstoreError:
                    refused += 1
                    continue
                for key, value in saved().items():
                    assert equal(state[key], value), f"{path.name}, {what}: {key} is wrong"
        finally:
            path.write_bytes(body)
        counts[path.name.partition(".")[0]] = (refused, tried)
    return counts


# The strides have no common factor with the powers of two in which things are laid out.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("damages", [flips, truncations])
@pytest.mark.parametrize("stride", cases([211, 1], default=[211]))
def test_no_damage_loads_a_wrong_value(checkpoint, damages, stride):
    counts = check_every(checkpoint, damages, stride)
    # Marker and index carry digests of all their bytes.
    for name in ("_COMMIT", "index"):
        refused, tried = counts[name]
        assert refused == tried > 2
    assert counts["__0_0"][0] > 0
