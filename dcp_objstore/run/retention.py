"""Retention: which steps of a run are kept. Policies are pure functions of the committed steps.

    keep = [KeepLatest(3), KeepEvery(5000), KeepBest("loss", 2)]  # what any of them keeps

A policy says what to keep and never what to delete, so that two of them cannot disagree.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dcp_objstore.config import check_number
from dcp_objstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts about a committed step that policies know.

        dos.KeepLatest(1).keeps([dos.StepFacts(step=1), dos.StepFacts(step=2)])

    Attributes:
        step: number of the step.
        metrics: the metrics that were passed when it was saved. A value that is not a finite number
            counts as missing.
        pinned: whether a pin protects the step.
    """

    step: int
    metrics: Mapping[str, object] = field(default_factory=dict)
    pinned: bool = False

    def metric(self, name: str) -> float | None:
        """Return the value of a metric, or None if the step has no value that can be compared."""
        value = self.metrics.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None


class RetentionPolicy(ABC):
    """Decides which steps to keep.

        class KeepFirst(dos.RetentionPolicy):
            def keeps(self, steps):
                return frozenset({min(step.step for step in steps)})

    Pure: the answer depends on the set of steps alone.
    """

    @abstractmethod
    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """Return the numbers of the steps to keep, out of `steps`."""


@dataclass(frozen=True)
class KeepLatest(RetentionPolicy):
    """Keeps the `n` steps with the highest numbers.

        run = dos.CheckpointManager("s3://bucket/run", keep=dos.KeepLatest(3))

    Raises:
        ConfigError: `n` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_number("n of KeepLatest", self.n, 1)

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """Return the `n` highest step numbers."""
        return frozenset(heapq.nlargest(self.n, {step.step for step in steps}))


@dataclass(frozen=True)
class KeepEvery(RetentionPolicy):
    """Keeps the steps whose number is divisible by `n`.

        keep = [dos.KeepLatest(3), dos.KeepEvery(5000)]
        run = dos.CheckpointManager("s3://bucket/run", keep=keep)

    Raises:
        ConfigError: `n` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_number("n of KeepEvery", self.n, 1)

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """Return the step numbers that `n` divides."""
        return frozenset(step.step for step in steps if step.step % self.n == 0)


@dataclass(frozen=True)
class KeepBest(RetentionPolicy):
    """Keeps the `n` steps with the best value of a metric, the later of two with equal values.

        with dos.CheckpointManager("s3://bucket/run", keep=dos.KeepBest("loss", 2)) as run:
            run.step(3000, state, metrics={"loss": 0.25})

    Steps that were saved without that metric, or with a value that is not a finite number, are not
    among the best.

    Args:
        metric: name of the metric in the `metrics` of a save.
        n: the number of steps to keep. Default 1.
        mode: "min" if small values are the best, as for a loss; "max" if large ones are. Default
            "min".

    Raises:
        ConfigError: an argument is wrong.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_number("n of KeepBest", self.n, 1)
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"KeepBest needs the name of a metric, got {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"the mode of KeepBest must be 'min' or 'max', got {self.mode!r}")

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """Return the steps with the best values of the metric."""
        sign = 1.0 if self.mode == "max" else -1.0
        ranked = [
            (sign * value, facts.step)
            for facts in steps
            if (value := facts.metric(self.metric)) is not None
        ]
        return frozenset(step for _, step in heapq.nlargest(self.n, ranked))


class _KeepAny(RetentionPolicy):
    """Keeps the steps that at least one of the policies keeps."""

    def __init__(self, policies: Iterable[RetentionPolicy]) -> None:
        self.policies = tuple(policies)
        if not self.policies:
            raise ConfigError("keep= needs at least one policy, or None to keep all steps")
        for policy in self.policies:
            if not isinstance(policy, RetentionPolicy):
                raise ConfigError(f"keep= takes retention policies, got {policy!r}")

    def keeps(self, steps: Sequence[StepFacts]) -> frozenset[int]:
        """Return the steps that any of the policies keeps."""
        return frozenset().union(*(policy.keeps(steps) for policy in self.policies))


def as_policy(keep: RetentionPolicy | Iterable[RetentionPolicy] | None) -> RetentionPolicy | None:
    """Return one policy for a policy, for several (what any of them keeps), or None (keep all).

    Raises:
        ConfigError: `keep` is something else, or an empty list.
    """
    if keep is None or isinstance(keep, RetentionPolicy):
        return keep
    if not isinstance(keep, Iterable):
        raise ConfigError(f"keep must be a policy or a list of them, got {type(keep).__name__}")
    return _KeepAny(keep)


def plan_deletions(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy,
    *,
    in_use: Collection[int | None] = (),
) -> tuple[int, ...]:
    """Return the numbers of the steps that need not be kept, the oldest first. Pure.

    The newest step and those in use (the one that this job resumed from, and the last one that it
    committed) are kept, whatever the policy says. So are pinned steps, but that is for the deletion
    to see: a pin may have come or gone since. None in `in_use` stands for no step.
    """
    known = tuple(steps)
    if not known:
        return ()
    kept = policy.keeps(known) | {max(step.step for step in known)} | set(in_use)
    return tuple(sorted({step.step for step in known} - kept))
