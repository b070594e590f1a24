"""What `print(report)` shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import CheckpointCorruptError
from dcp_objstore.reports import (
    CheckpointSweep,
    CopyReport,
    Damage,
    DeleteReport,
    DiffReport,
    ExportReport,
    LoadReport,
    RepairReport,
    ResumeReport,
    SaveReport,
    SkippedStep,
    SweepReport,
    VerifyReport,
)

MIB = 1024**2


def test_a_saved_checkpoint_is_one_line():
    report = SaveReport(url="s3://b/run", total_bytes=3 * MIB, seconds=1.5, objects=1, parts=2)
    assert str(report) == "saved s3://b/run: 3.00 MiB in 1.50 s (2.00 MiB/s), 1 object, 2 parts"
    assert (report.commit_id, report.uploaded_bytes) == (None, 3 * MIB)
    assert report.gib_per_second == 2 / 1024
    copied = SaveReport(
        url="s3://b/run", total_bytes=3, seconds=0, objects=2, parts=1, copied_bytes=2
    )
    assert str(copied) == (
        "saved s3://b/run: 3 B in 0.00 s (2.79 GiB/s), 2 objects, 1 part, 2 B of them copied by the"
        " store"
    )
    assert (copied.uploaded_bytes, copied.gib_per_second) == (1, 3 / 1024**3 / 1e-9)


FIRST_LINE = "loaded s3://b/run: 3.00 MiB in 1.00 s (3.00 MiB/s), 2 objects, 3 requests"


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, []),
        ({"slow_ranges": 1}, [", 1 slow range asked for again"]),
        ({"unverified": True}, [", unverified"]),
        (
            {"local_bytes": 3 * MIB},
            ["", "  3.00 MiB from copies on this node"],
        ),
        (
            {"received_bytes": MIB},
            ["", "  3.00 MiB from the store, 1.00 MiB from other ranks"],
        ),
        (
            {"received_bytes": MIB, "local_bytes": 2 * MIB, "missing": ("a", "b", "c")},
            [
                "",
                "  1.00 MiB from the store, 2.00 MiB from copies on this node, 1.00 MiB from other"
                " ranks",
                "  the checkpoint does not have 3 keys: a, b, c",
            ],
        ),
        (
            {"missing": ("a",), "unexpected": tuple(f"layer.{number}" for number in range(41))},
            [
                "",
                "  the checkpoint does not have 1 key: a",
                "  the state does not ask for 41 keys: layer.0, layer.1, layer.2 and 38 more",
            ],
        ),
    ],
)
def test_a_loaded_checkpoint_says_where_its_bytes_came_from_and_what_was_left(settings, more):
    usual: Any = {"needed_bytes": 4 * MIB, "seconds": 1, "objects": 2, "requests": 3}
    report = LoadReport(url="s3://b/run", total_bytes=3 * MIB, **usual, **settings)
    end, *lines = more or [""]
    assert str(report).splitlines() == [f"{FIRST_LINE}{end}", *lines]
    assert report.gib_per_second == 3 / 1024


def test_what_a_report_does_not_say_is_nothing():
    """The defaults of fields."""
    load = LoadReport(
        url="s3://b/run", total_bytes=1, needed_bytes=1, seconds=0, objects=1, requests=1
    )
    figures = (load.received_bytes, load.slow_ranges, load.local_bytes, load.unverified)
    assert figures == (0, 0, 0, False)
    assert (load.missing, load.unexpected, load.retries, load.commit_id) == ((), (), None, None)
    assert load.gib_per_second == 1 / 1024**3 / 1e-9
    damage = Damage("_COMMIT", "unreadable")
    assert damage == Damage("_COMMIT", "unreadable", key="", block=-1, elements=(), text="")


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
    assert str(replace(copy, sent_bytes=5, copied_bytes=0)).splitlines() == [
        "copied 5 B in 1.0 s to s3://c/run",
        "commit id",
    ]
    assert str(replace(export, left_out=())).splitlines()[3:] == []


def test_a_verification_names_the_first_damages_and_counts_the_others():
    damages = tuple(Damage(f"object-{number}", "missing", text=f"{number}") for number in range(22))
    settings: Any = {"url": "s3://b/run", "commit_id": "id", "objects": 2, "blocks": 3}
    settings |= {"total_bytes": MIB, "quick": False, "deep": False}
    whole = VerifyReport(**settings, damaged=())
    assert str(whole).splitlines() == ["whole: s3://b/run", "  2 objects, 3 blocks, 1.00 MiB read"]
    quick = VerifyReport(**settings | {"quick": True}, damaged=())
    assert str(quick) == "complete: s3://b/run\n  2 objects looked at, nothing read"
    first, _, *shown, more = str(VerifyReport(**settings, damaged=damages)).splitlines()
    assert first == "DAMAGED: s3://b/run"
    assert shown == [f"  {number}" for number in range(20)]
    assert more == "  and 2 more; `damaged` and --json have all"


def test_what_upkeep_does_is_said_and_what_it_would_do_is_told_from_it():
    for is_dry, deleted, removed in (
        (False, "deleted", "were removed"),
        (True, "would delete", "would be removed"),
    ):
        settings: Any = {"url": "s3://b/run", "commit_id": "id", "dry_run": is_dry}
        delete = DeleteReport(
            **settings,
            objects=2,
            total_bytes=MIB,
            removed_objects=3,
            finished=False,
            superseded=True,
            index_damaged=False,
        )
        first, *lines = str(delete).splitlines()
        assert first == f"{deleted} s3://b/run (2 data objects, 1.00 MiB)"
        assert ("removed 3 objects" in lines[0]) is not is_dry
        assert "a new save has been committed here" in lines[1]
        repair = RepairReport(
            **settings, state="deleted", finished_delete=True, dot_metadata="removed"
        )
        done = "would be" if is_dry else "was"
        assert f"(deleted): its deletion, begun before, {done} finished; .metadata" in str(repair)
        steps = (
            CheckpointSweep(url="s3://b/run/step-1", outcome="clean"),
            CheckpointSweep(
                url="s3://b/run/step-2",
                outcome="swept",
                deleted=1,
                deleted_bytes=5,
                dry_run=is_dry,
            ),
            CheckpointSweep(
                url="s3://b/run/step-3", outcome="damaged", reason="torn", unknown=("notes",)
            ),
        )
        sweep = SweepReport(url="s3://b/run", checkpoints=steps, dry_run=is_dry)
        assert str(sweep).splitlines() == [
            "s3://b/run",
            f"  step-2: 1 object, 5 B, {'would be ' if is_dry else ''}removed",
            "  step-3: cannot be read: torn",
            "3 checkpoints looked at, nothing to do at 1",
            f"1 object (5 B) {removed}",
            f"0 unfinished uploads (0 B) {removed}",
            "1 object with unknown names left alone, for example step-3/notes",
        ]


def test_a_comparison_and_a_resume_say_what_they_found():
    settings: Any = {"url": "s3://b/1", "other_url": "s3://b/2", "tensors": (), "values": ()}
    diff = DiffReport(**settings, added=("a", "b"), removed=("c",), equal=4, read_bytes=0)
    assert str(diff).splitlines() == [
        "from  s3://b/1",
        "to    s3://b/2",
        "removed: c",
        "added: a, b",
        "3 differences, 4 equal (no tensor read)",
    ]
    load = LoadReport(
        url="s3://b/run", total_bytes=1, needed_bytes=1, seconds=1, objects=1, requests=1
    )
    skipped = (SkippedStep(9, CheckpointCorruptError("torn\nhere")),)
    first, second, third = str(ResumeReport(8, load, skipped)).splitlines()
    assert (first, second) == ("step 8", "step 9 was skipped: torn; here")
    assert third == str(load)
    assert str(ResumeReport(None)) == "there is no committed step"


def test_a_report_that_is_taken_for_the_state_says_where_the_state_is():
    report = LoadReport(
        url="s3://b/run", total_bytes=1, needed_bytes=1, seconds=1, objects=1, requests=1
    )
    with pytest.raises(TypeError, match=r"state\['t'\] after dcp_objstore\.load"):
        report["t"]
    with pytest.raises(TypeError):
        dict(report)  # type: ignore[call-overload]


def test_a_name_of_a_store_does_not_act_on_the_terminal():
    state = {"w": torch.ones(2), "\x1b[2J": torch.ones(2)}
    dos.save(state, "memory://reports/run", progress=False)
    shown = str(dos.load({"w": torch.zeros(2)}, "memory://reports/run", progress=False))
    assert "\x1b" not in shown
    assert r"\x1b[2J" in shown
