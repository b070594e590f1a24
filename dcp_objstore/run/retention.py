"""Which steps of a run are kept: policies without side effects, and what no policy ever gives up.

    keep = [KeepLatest(3), KeepEvery(5000), KeepBest("loss", 2)]     # what any of them keeps
    keep = KeepAll(KeepEvery(1000), KeepLatest(50))                  # what all of them keep

A policy says what to keep and never what to delete, so that two of them cannot disagree.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dcp_objstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What policies know of a committed step.

    Attributes:
        step: its number.
        metrics: as given when it was saved; what is not a finite number counts as not given.
        pinned: somebody protects it.
    """

    step: int
    metrics: Mapping[str, object] = field(default_factory=dict)
    pinned: bool = False

    def metric(self, name: str) -> float | None:
        """The value of a metric; None: the step has none that can be compared."""
        value = self.metrics.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None


class RetentionPolicy(ABC):
    """Says which steps to keep. Pure: equal arguments give equal answers, in any order."""

    @abstractmethod
    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """The numbers of those of `steps` that this policy wants kept."""


@dataclass(frozen=True)
class KeepLatest(RetentionPolicy):
    """The `n` steps with the highest numbers.

    Raises:
        ConfigError: `n` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        """Check the number."""
        _check_count("KeepLatest", self.n)

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """See `RetentionPolicy`."""
        return frozenset(heapq.nlargest(self.n, {one.step for one in steps}))


@dataclass(frozen=True)
class KeepEvery(RetentionPolicy):
    """Steps whose number is divisible by `n`.

    Raises:
        ConfigError: `n` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        """Check the number."""
        _check_count("KeepEvery", self.n)

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """See `RetentionPolicy`."""
        return frozenset(one.step for one in steps if one.step % self.n == 0)


@dataclass(frozen=True)
class KeepBest(RetentionPolicy):
    """The `n` steps with the best value of a metric; of equal ones the later.

    Steps that were saved without that metric, or with a value that is not a finite number, are not
    among the best.

    Args:
        metric: its name in `metrics` as saved.
        n: how many. Default 1.
        mode: "min" (default): the smallest values are the best, as of a loss; "max": the largest.

    Raises:
        ConfigError: a wrong argument.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check_count("KeepBest", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"KeepBest needs the name of a metric, got {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"the mode of KeepBest must be 'min' or 'max', got {self.mode!r}")

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """See `RetentionPolicy`."""
        sign = 1.0 if self.mode == "max" else -1.0
        ranked = [
            (sign * value, one.step)
            for one in steps
            if (value := one.metric(self.metric)) is not None
        ]
        return frozenset(step for _, step in heapq.nlargest(self.n, ranked))


class KeepAny(RetentionPolicy):
    """What at least one of the policies keeps.

    Raises:
        ConfigError: no policy was given, or something else.
    """

    def __init__(self, *policies: RetentionPolicy) -> None:
        self.policies = _checked("KeepAny", policies)

    def __repr__(self) -> str:
        return f"KeepAny{self.policies!r}"

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """See `RetentionPolicy`."""
        return frozenset().union(*(policy.keeps(steps) for policy in self.policies))


class KeepAll(RetentionPolicy):
    """What every one of the policies keeps.

    Raises:
        ConfigError: no policy was given, or something else.
    """

    def __init__(self, *policies: RetentionPolicy) -> None:
        self.policies = _checked("KeepAll", policies)

    def __repr__(self) -> str:
        return f"KeepAll{self.policies!r}"

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """See `RetentionPolicy`."""
        first, *others = (policy.keeps(steps) for policy in self.policies)
        return first.intersection(*others)


def as_policy(keep: RetentionPolicy | Iterable[RetentionPolicy] | None) -> RetentionPolicy | None:
    """One policy from what a user may write: one, several (any of them), or None: keep all.

    Raises:
        ConfigError: something else, or an empty list.
    """
    if keep is None or isinstance(keep, RetentionPolicy):
        return keep
    if not isinstance(keep, Iterable):
        raise ConfigError(f"keep must be a policy or a list of them, got {type(keep).__name__}")
    return KeepAny(*keep)


def plan_deletions(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy | None,
    *,
    in_use: Collection[int] = (),
) -> tuple[int, ...]:
    """The steps that may be deleted, oldest first. Pure.

    Never the newest step, a pinned one, or one that is in use, whatever the policy says.

    Args:
        steps: all committed steps of the run.
        policy: what to keep; None: everything.
        in_use: numbers of steps that this job needs: the one that it resumed from, and the last
            that it committed.
    """
    known = tuple(steps)
    if policy is None or not known:
        return ()
    kept = policy.keeps(known) | {max(one.step for one in known)} | set(in_use)
    kept |= {one.step for one in known if one.pinned}
    return tuple(sorted({one.step for one in known} - kept))


def _check_count(name: str, n: object) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"{name} needs a whole number of at least 1, got {n!r}")


def _checked(name: str, policies: tuple[object, ...]) -> tuple[RetentionPolicy, ...]:
    if not policies:
        raise ConfigError(f"{name} needs at least one policy")
    found = []
    for policy in policies:
        if not isinstance(policy, RetentionPolicy):
            raise ConfigError(f"{name} takes retention policies, got {policy!r}")
        found.append(policy)
    return tuple(found)
