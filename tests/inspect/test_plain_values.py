"""Plain values are shown without torch, and nothing else is made of what a checkpoint holds."""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.inspect.plain_values import _decoded
from tests.support.command_line import run_here

PLAIN = {"lr": 1e-3, "betas": (0.9, 0.999), "name": "run", "none": None, "on": True, "n": 2**70}
OTHERS = {"path": Path("a"), "large": "x" * 20_000, "buffer": io.BytesIO(b"x")}


@pytest.mark.filterwarnings("ignore:.*weights_only")
def test_plain_values_are_read_and_others_left_out(tmp_path):
    url = f"file://{tmp_path}/step-1"
    dos.save({**PLAIN, **OTHERS, "w": torch.ones(3)}, url)
    opened = dos.open(url)
    assert opened.plain_values([*PLAIN, *OTHERS]) == PLAIN


def test_inspect_shows_plain_values_and_metadata(tmp_path):
    url = f"file://{tmp_path}/step-1"
    dos.save({"opt": {"lr": 0.25}, "w": torch.ones(3)}, url, user_metadata={"note": "of a test"})
    shown = run_here("inspect", url).stdout
    assert "lr = 0.25" in shown
    assert "of a test" in shown


def test_a_damaged_value_is_not_shown(tmp_path):
    url = f"file://{tmp_path}/step-1"
    dos.save({"lr": 0.25, "n": 7}, url)
    (data,) = tmp_path.glob("step-1/*.distcp")
    body = data.read_bytes()
    number = pickle.dumps(0.25, 2)[2:-1]
    assert body.count(number) == 1
    data.write_bytes(body.replace(number, pickle.dumps(0.5, 2)[2:-1]))
    assert dos.open(url).plain_values(["lr", "n"]) == {"n": 7}


def archive(pickled: bytes) -> bytes:
    torch.save(1, saved := io.BytesIO())
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(made := io.BytesIO(), "w") as target:
        for name in source.namelist():
            is_value = name.endswith("data.pkl")
            target.writestr(name, pickled if is_value else source.read(name))
    return made.getvalue()


@pytest.mark.parametrize(
    ("pickled", "value"),
    [
        (pickle.dumps({"a": [1, 2.5]}, 2), {"a": [1, 2.5]}),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", None),
        (b"\x80\x02" + b"]" * 7000 + b"a" * 6999 + b".", None),  # repr would not come to an end
        (b"\x80\x02]q\x00h\x00a.", None),  # a list that contains itself
        (b"\x80\x02)" + b"\x85" * 7000 + b".", None),
        (b"\x80\x02K\x01", None),
    ],
    ids=["plain", "a call", "deep", "cycle", "tuples", "cut off"],
)
def test_hostile_values_are_left_out(pickled, value):
    assert _decoded("k", archive(pickled)) == ({} if value is None else {"k": value})


def test_a_packed_value_is_left_out_and_not_unpacked():
    """A few KiB may unpack to any size."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive(b"\x80\x02(" + b"N" * (16 << 20) + b"t."))) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target,
    ):
        for name in plain.namelist():
            target.writestr(name, plain.read(name))
    body = packed.getvalue()
    assert len(body) < 32 << 10
    tracemalloc.start()
    try:
        assert _decoded("k", body) == {}
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
