"""What the soak calls growth, and two minutes of it."""

from __future__ import annotations

import json
import math
import random

import pytest

from benchmarks.soak import Pairs, trend
from tests.support.command_line import printed_by_benchmark


def _measured(slope_per_hour: float, level: float = 0.0, began: float = 0.0) -> Pairs:
    """An hour of noise around a line, one sample a minute."""
    noise = random.Random(f"{slope_per_hour} {level} {began}")
    hours = [began + minute / 60 for minute in range(60)]
    return [(hour, level + slope_per_hour * hour + noise.gauss(0, 5)) for hour in hours]


def test_a_slope_that_is_significant_and_matters_is_growth():
    found = trend([_measured(50, 300), _measured(50, 900, began=1.0)], matters=24)
    assert found is not None
    assert found["grows"]
    assert abs(found["slope_per_hour"] - 50) < 4 * found["error_per_hour"] < 20


@pytest.mark.parametrize(
    ("series", "matters"),
    [
        pytest.param([_measured(0)], 0.0, id="noise"),
        pytest.param([_measured(20)], 24.0, id="too little to matter"),
        pytest.param([_measured(-50)], 24.0, id="less and less"),
        pytest.param([_measured(0), _measured(0, 500, began=1.0)], 24.0, id="another job's level"),
        pytest.param([[(hour / 60, 7.0) for hour in range(60)]], 0.0, id="always the same"),
        pytest.param(
            [[(t / 60, 50 * math.sin(t / 25)) for t in range(60)]], 24.0, id="a slow wave"
        ),
    ],
)
def test_what_is_no_growth(series, matters):
    found = trend(series, matters)
    assert found is not None
    assert not found["grows"]


def test_too_few_samples_say_nothing():
    assert trend([[(0.0, 1.0), (0.1, 2.0)]], 0.0) is None


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_nothing_that_can_be_counted_grows_in_two_minutes_of_faults():
    """A rank is killed in the middle of a save, and another number of ranks resumes."""
    sizes = ["--minutes", "2", "--state-mib", "32", "--cycle-seconds", "1"]
    result = json.loads(printed_by_benchmark("soak", *sizes, "--json"))
    assert result["problems"] == {}
    assert result["done"]["killed"] == 1
    assert result["done"]["saved"] > 30
    assert min(result["faults"].values()) > 0
    stored = [one["figures"] for one in result["samples"] if one["rank"] == 0]
    # Of four ranks a step has 7 objects. Three are kept, and the one that was resumed from; one is
    # being deleted, one was saved by children, and some saves have failed in the last minute.
    assert max(one["objects"] for one in stored) < 12 * 7
    assert max(one["uploads"] for one in stored) < 12
