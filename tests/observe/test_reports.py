"""What `print(report)` shows."""

from __future__ import annotations

import torch

import dcp_objstore as dos
from dcp_objstore.reports import CopyReport, ExportReport, LoadReport, SaveReport

MIB = 1024**2


def test_a_saved_checkpoint_is_one_line():
    report = SaveReport(url="s3://b/run", total_bytes=3 * MIB, seconds=1.5, objects=1, parts=2)
    assert str(report) == "saved s3://b/run: 3.00 MiB in 1.50 s (2.00 MiB/s), 1 object, 2 parts"
    copied = SaveReport(
        url="s3://b/run", total_bytes=3, seconds=0, objects=1, parts=1, copied_bytes=2
    )
    assert str(copied).endswith(", 1 part, 2 B of them copied by the store")


def test_a_loaded_checkpoint_says_where_its_bytes_came_from_and_what_was_left():
    report = LoadReport(
        url="s3://b/run",
        total_bytes=3 * MIB,
        needed_bytes=4 * MIB,
        seconds=1,
        objects=2,
        requests=3,
        received_bytes=MIB,
        local_bytes=2 * MIB,
        slow_ranges=1,
        unverified=True,
        missing=("a",),
        unexpected=tuple(f"layer.{number}" for number in range(41)),
    )
    assert str(report).splitlines() == [
        "loaded s3://b/run: 3.00 MiB in 1.00 s (3.00 MiB/s), 2 objects, 3 requests, 1 slow range"
        " asked for again, unverified",
        "  1.00 MiB from the store, 2.00 MiB from copies on this node, 1.00 MiB from other ranks",
        "  the checkpoint does not have 1 key: a",
        "  the state does not ask for 41 keys: layer.0, layer.1, layer.2 and 38 more",
    ]


def test_exports_and_copies_name_what_they_wrote():
    export = ExportReport(
        url="s3://b/run", files=("a", "b"), tensors=1, left_out=("x", "y"), total_bytes=5, seconds=1
    )
    assert str(export).splitlines() == [
        "exported 1 tensor, 5 B, in 1.0 s to",
        "  a",
        "  b",
        "left out 2 values that safetensors cannot hold, such as x",
    ]
    copy = CopyReport(
        source="s3://b/run",
        url="s3://c/run",
        commit_id="id",
        objects=1,
        total_bytes=5,
        sent_bytes=3,
        copied_bytes=2,
        seconds=1,
    )
    assert str(copy).splitlines() == [
        "copied 5 B in 1.0 s to s3://c/run",
        "commit id",
        "sent 3 B; an interrupted copy had sent the rest",
        "the store copied 2 B by itself, without a check here",
    ]


def test_a_name_of_a_store_does_not_act_on_the_terminal():
    state = {"w": torch.ones(2), "\x1b[2J": torch.ones(2)}
    dos.save(state, "memory://reports/run", progress=False)
    shown = str(dos.load({"w": torch.zeros(2)}, "memory://reports/run", progress=False))
    assert "\x1b" not in shown
    assert r"\x1b[2J" in shown
