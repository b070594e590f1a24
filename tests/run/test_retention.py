"""Retention policies are pure, and none of them gives up what a job may still need."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from dcp_objstore.errors import ConfigError
from dcp_objstore.run.retention import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    StepFacts,
    as_policy,
    plan_deletions,
)

VALUES = st.one_of(st.floats(), st.integers(), st.sampled_from([True, None, "nan"]))
FACTS = st.builds(
    StepFacts,
    step=st.integers(0, 10**6),
    metrics=st.one_of(st.just({}), st.builds(lambda value: {"loss": value}, VALUES)),
    pinned=st.booleans(),
)
RUNS = st.lists(FACTS, min_size=1, max_size=12, unique_by=lambda facts: facts.step)
COUNTS = st.integers(1, 12)
SIMPLE = st.one_of(
    st.builds(KeepLatest, COUNTS),
    st.builds(KeepEvery, COUNTS),
    st.builds(KeepBest, st.just("loss"), COUNTS, st.sampled_from(["min", "max"])),
)
POLICIES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(
        lambda some: st.just(as_policy(some))
    ),
    max_leaves=6,
)

# The machine may be busy: how long it takes to draw examples says nothing of the policies.
CALM = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# The newest step is what no policy wants, nobody pins and no job uses.
@example([StepFacts(step=2), StepFacts(step=1)], KeepEvery(5), set(), random.Random(0))
@CALM
@given(RUNS, POLICIES, st.sets(st.integers(0, 10**6), max_size=3), st.randoms())
def test_what_a_job_needs_is_never_deleted_whatever_the_policy(run, policy, in_use, chance):
    in_use |= {run[len(run) // 2].step}
    deleted = plan_deletions(run, policy, in_use=in_use)
    assert list(deleted) == sorted(set(deleted))
    numbers = {facts.step for facts in run}
    assert set(deleted) <= numbers
    assert not set(deleted) & in_use
    assert not set(deleted) & policy.keeps(run)
    assert max(numbers) not in deleted
    shuffled = list(run)
    chance.shuffle(shuffled)
    assert plan_deletions(shuffled, policy, in_use=in_use) == deleted
    # All policies are monotone: with fewer steps, none that was kept is given up.
    left = [facts for facts in run if facts.step not in deleted]
    assert plan_deletions(left, policy, in_use=in_use) == ()


@CALM
@given(RUNS, st.lists(POLICIES, min_size=1, max_size=4))
def test_a_list_keeps_what_any_of_its_policies_keeps(run, policies):
    kept = [policy.keeps(run) for policy in policies]
    assert as_policy(policies).keeps(run) == frozenset().union(*kept)  # type: ignore[union-attr]


@CALM
@given(RUNS, COUNTS)
def test_latest_and_every_by_number(run, n):
    numbers = sorted(facts.step for facts in run)
    assert KeepLatest(n).keeps(run) == set(numbers[-n:])
    assert KeepEvery(n).keeps(run) == {number for number in numbers if number % n == 0}


@CALM
@given(RUNS, COUNTS, st.sampled_from(["min", "max"]))
def test_best_are_better_than_the_rest_and_always_numbers(run, n, mode):
    kept = KeepBest("loss", n, mode).keeps(run)  # type: ignore[arg-type]
    usable = {facts.step: facts.metric("loss") for facts in run if facts.metric("loss") is not None}
    assert kept <= set(usable)
    assert len(kept) == min(n, len(usable))
    best = [usable[step] for step in kept]
    rest = [value for step, value in usable.items() if step not in kept]
    assert all(math.isfinite(value) for value in best)
    if best and rest:
        assert max(best) <= min(rest) if mode == "min" else min(best) >= max(rest)


@pytest.mark.parametrize("value", [True, False, "0.1", None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_step_whose_metric_is_no_finite_number_is_not_the_best(value, mode):
    run = [
        StepFacts(step=step, metrics={"loss": loss}) for step, loss in enumerate([0.5, value, 1])
    ]
    assert KeepBest("loss", 3, mode).keeps(run) == {0, 2}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLatest(0),
        lambda: KeepEvery(0),
        lambda: KeepLatest(True),
        lambda: KeepBest("loss", 0),
        lambda: KeepBest(3),  # type: ignore[arg-type]
        lambda: KeepBest("loss", 1, "least"),  # type: ignore[arg-type]
        lambda: KeepBest(""),
        lambda: as_policy([3]),  # type: ignore[list-item]
        lambda: as_policy([]),
        lambda: as_policy(3),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused_at_once(make):
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
