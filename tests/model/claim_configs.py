"""What is searched of the run's claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.model.checker import Result, Search
from tests.model.claim import Claim, Job, Lister, Run, Step, Weak, wrong_with_run

FIRST = Run(
    Claim(1, 1),
    (Step("old/0", 1), None, None, None),
    frozenset({"old/0"}),
    frozenset({"old/0"}),
)

# Name, who is there, and whether it belongs to the default test run.
CONFIGS: list[tuple[str, Callable[[Weak], list[Job]], bool]] = [
    (
        "run: a zombie, a successor, a lister",
        lambda weak: [Job("zombie", 1, weak=weak), Job("next", weak=weak), Lister(weak=weak)],
        True,
    ),
    (
        "run: a zombie, two successors",
        lambda weak: [Job("zombie", 1, weak=weak), Job("next", weak=weak), Job("other", weak=weak)],
        True,
    ),
    (
        "run: a zombie that deletes, a successor, a lister",
        lambda weak: [
            Job("zombie", 1, deletes=0, weak=weak),
            Job("next", saves=2, weak=weak),
            Lister(weak=weak),
        ],
        True,
    ),
    (
        "run: a job that goes back, a successor, a lister",
        lambda weak: [
            Job("job", 1, saves=2, goes_back=0, weak=weak),
            Job("next", weak=weak),
            Lister(weak=weak),
        ],
        True,
    ),
    (
        "run: a zombie, a successor that goes back, another",
        lambda weak: [
            Job("zombie", 1, weak=weak),
            Job("next", saves=2, goes_back=0, weak=weak),
            Job("other", weak=weak),
        ],
        True,
    ),
    (
        "run: two jobs that go back, a lister",
        lambda weak: [
            Job("zombie", 1, saves=2, goes_back=0, weak=weak),
            Job("next", saves=3, goes_back=1, weak=weak),
            Lister(weak=weak),
        ],
        False,
    ),
    (
        "run: a zombie, two successors, a lister",
        lambda weak: [
            Job("zombie", 1, saves=2, weak=weak),
            Job("next", weak=weak),
            Job("other", weak=weak),
            Lister(weak=weak),
        ],
        False,
    ),
]


def search(jobs: Sequence[Job]) -> Result:
    return Search(jobs, FIRST, wrong_with_run, lambda _: None).run()


def catch(weak: Weak) -> tuple[str, Result] | None:
    """The first of the quick configurations in which a weakened protocol breaks a promise."""
    for name, jobs, quick in CONFIGS:
        if quick:
            result = search(jobs(weak))
            if result.wrong:
                return name, result
    return None
