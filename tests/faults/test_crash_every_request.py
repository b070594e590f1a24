"""A process may die at any request: nothing is torn, nothing false, nothing is left for ever.

Each operation is cut off before and after the effect of each of its requests. What is left is
listed, loaded (by stock torch, too), swept, saved again and swept again. By default it is cut once
where several cuts leave the same. `python -m tests.crash` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.crash import scenes
from tests.crash.jobs import in_memory
from tests.crash.judging import Verdict, cuts, quiet, verdicts
from tests.crash.process import Cut, KilledError, Process
from tests.crash.scenes import OLD, OURS, ROOT, STOCK, Scene, Shape
from tests.support import campaign
from tests.support.campaign import cases
from tests.support.memory_store import Bucket

SMALL = [one for one in scenes.scenes() if one.writer == OURS]
LARGE = [one for one in scenes.large_scenes() if one.writer == OURS]
# Two ranks, parts of an upload, all that an overwrite, a sweep and a deletion go through.
_DEFAULT = {
    ("save", 2),
    ("sweep what was replaced", 1),
    ("delete now", 1),
}
DEFAULT = [one for one in SMALL if (one.name, one.ranks) in _DEFAULT]


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    with in_memory(), quiet():
        yield


def harm(scene: Scene) -> dict[str, Verdict]:
    """The cuts after which anything was wrong."""
    found = list(verdicts(scene, every=not campaign.is_left_out))
    # Every change, and each rank that makes any.
    assert len(found) >= 3
    return {str(where): verdict for where, verdict in found if verdict != Verdict()}


@pytest.mark.parametrize(
    "scene", cases(SMALL + LARGE, default=DEFAULT), ids=lambda one: f"{one.name}-{one.ranks}"
)
def test_crash_at_any_request_leaves_the_old_or_the_new_and_no_rest(scene):
    assert harm(scene) == {}


def test_saves_are_cut_between_the_parts_of_an_upload():
    scene = next(one for one in SMALL if one.shape.large_rank == 0)
    verbs = [where.verb for where in cuts(scene, scene.begin())]
    assert verbs.count("part") == 4  # two parts, each cut before and after
    assert {"begin", "complete"} <= set(verbs)


@pytest.mark.campaign
def test_stock_writer_is_torn_in_the_same_harness():
    """Or the harness could not see it in ours."""
    overwriting = [one for one in scenes.scenes() if one.writer == STOCK and one.before == OLD]
    found = [verdict for scene in overwriting for verdict in harm(scene).values()]
    assert [verdict for verdict in found if verdict.torn]
    assert [verdict for verdict in found if verdict.unreadable]
    assert [verdict for verdict in found if verdict.orphans]


def test_killed_process_reaches_nothing_any_more():
    bucket = Bucket()
    shape = Shape(1, large_rank=0)
    scene = replace(SMALL[0], shape=shape)
    process = Process(Cut(2, "after"))  # the second request puts the beacon
    scene.run(bucket, [process])
    assert process.killed
    assert len(process.requests) == 2
    with pytest.raises(KilledError):
        process.request("put", "x", lambda: bucket.put("x", b""))
    assert [key.rpartition("/")[2][:6] for key in bucket.keys(ROOT)] == [".save-"]
