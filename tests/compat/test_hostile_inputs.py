"""Hostile checkpoints through the public doors: nothing runs or changes, memory stays bounded,
and the error is typed. The inputs are in `support/hostile_cases.py`, by name.

    pytest tests/compat/test_hostile_inputs.py -m 'campaign or not campaign'     # all of them, 40 s
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import hostile, hostile_cases  # noqa: F401 - registers the cases

# What reading any of these may take beyond twice the input: parsing takes up to 100 times a hostile
# `.metadata` (some 20 times a real one), of which the largest here has 200 KB; the rest is small.
CONSTANT_BYTES = 48 * 1024**2
WORKERS = 2
TIMEOUT_SECONDS = 60  # of a case, on a busy machine; most take a twentieth of a second


class Worker:
    """A process that loads cases; replaced when one of them ends it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hostile_worker"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def is_ready(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.readline() == "ready\n"

    def run(self, case_id: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case_id) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], TIMEOUT_SECONDS)[0]:
            self.stop()
            return {"ended": f"no answer within {TIMEOUT_SECONDS} s"}
        line = self.process.stdout.readline()
        if not line:
            return {"ended": f"it ended the process: exit status {self.process.wait()}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What became of every case that was selected; each ran once, in one of the workers."""
    selected = [
        item.callspec.params["case_id"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_it_is_refused_and_nothing_else_happens.__name__
    ]
    waiting = list(reversed(selected))
    done: dict[str, dict[str, Any]] = {}

    def work() -> None:
        worker = Worker()
        if not worker.is_ready():
            worker.stop()
            return
        while waiting:
            case_id = waiting.pop()
            done[case_id] = worker.run(case_id)
            if "ended" in done[case_id]:
                worker = Worker()
                if not worker.is_ready():
                    break
        worker.stop()

    threads = [threading.Thread(target=work) for _ in range(min(WORKERS, len(selected)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if request.config.option.verbose > 0 and done:
        beyond = {
            found["resident_bytes"] - 2 * found["input_bytes"]: case_id
            for case_id, found in done.items()
            if "ended" not in found
        }
        print(f"\nmost memory beyond twice the input: {max(beyond)} bytes, {beyond[max(beyond)]}")
    return done


def by_turns(every: int) -> list[Any]:
    """All cases; of each family the first one, and one in so many, are in the default tests."""
    seen: Counter[str] = Counter()
    params = []
    for case_id, case in hostile.CASES.items():
        marks = [] if seen[case.family] % every == 0 else [pytest.mark.campaign]
        seen[case.family] += 1
        params.append(pytest.param(case_id, marks=marks))
    return params


@pytest.mark.parametrize("case_id", by_turns(6))
def test_it_is_refused_and_nothing_else_happens(
    case_id: str, results: dict[str, dict[str, Any]]
) -> None:
    case, result = hostile.CASES[case_id], results[case_id]
    assert "ended" not in result, result["ended"]
    assert (result["fired"], result["events"]) == (0, [])
    assert result["changed"] == []
    outcomes = result["outcomes"]
    wrong = {door: found for door, found in outcomes.items() if found.startswith("!")}
    assert not wrong
    # Where it opens, the hostile part is found by those that read it.
    reading = ("read", "load", "dcp.load") if outcomes["open"] == "value" else ("open", "load")
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
