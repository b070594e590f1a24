"""Hostile checkpoints through the public doors: nothing runs or changes, memory stays bounded,
and the error is typed. The inputs are in `support/hostile_cases.py`, by name.

    pytest tests/compat/test_hostile_inputs.py -m 'campaign or not campaign'     # all, 1 min
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import hostile, hostile_cases  # noqa: F401 - registers the cases

# What reading any of these may take beyond twice the input: parsing takes up to 100 times a hostile
# `.metadata` (some 20 times a real one), of which the largest here has 200 KB; the rest is small.
CONSTANT_BYTES = 48 * 1024**2
TIMEOUT_SECONDS = 60  # of a case, on a busy machine; most take a twentieth of a second


class Worker:
    """A process that loads cases; another takes its place when a case has ended it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, case_id: str) -> dict[str, Any]:
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(case_id) + "\n")
        process.stdin.flush()
        answered = select.select([process.stdout], [], [], TIMEOUT_SECONDS)[0]
        line = process.stdout.readline() if answered else ""
        if not line:
            self.stop()
            pytest.fail(f"{process.returncode=}" if answered else "no answer in time")
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hostile_worker"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.stop()


def by_turns(every: int) -> list[Any]:
    """All cases; of each family the first one, and one in so many, are in the default tests."""
    seen: Counter[str] = Counter()
    params = []
    for case_id, case in hostile.CASES.items():
        marks = [] if seen[case.family] % every == 0 else [pytest.mark.campaign]
        seen[case.family] += 1
        params.append(pytest.param(case_id, marks=marks))
    return params


@pytest.mark.parametrize("case_id", by_turns(12))
def test_it_is_refused_and_nothing_else_happens(case_id: str, worker: Worker) -> None:
    case, result = hostile.CASES[case_id], worker.run(case_id)
    assert (result["fired"], result["events"]) == (0, [])
    assert result["changed"] == []
    outcomes = result["outcomes"]
    wrong = {door: found for door, found in outcomes.items() if found.startswith("!")}
    assert not wrong
    # Where it opens, the hostile part is found by those that read it.
    reading = ["read", "load", "dcp.load"] if outcomes["open"] == "value" else ["open", "load"]
    if case.expect != hostile.HARMLESS and "takes memory" in case.family:
        reading += ["import .pt"] * ("import .pt" in outcomes)
    for door in reading:
        # A state that does not fit is found before anything is read.
        if outcomes.get(door, "StateMismatchError") != "StateMismatchError" or door == "read":
            assert outcomes[door] in case.expect, outcomes
    allowed = 2 * result["input_bytes"] + CONSTANT_BYTES
    assert result["resident_bytes"] <= allowed


def test_there_are_more_than_two_hundred_and_all_differ() -> None:
    bodies = {
        tuple(sorted(case.build().items()))
        for case in hostile.CASES.values()
        if "takes memory" not in case.family  # they take a while to build
    }
    same = sum("takes memory" not in case.family for case in hostile.CASES.values())
    assert len(bodies) > 200
    assert same - len(bodies) <= 12, "a few of the decoder's own cases are listed twice"
