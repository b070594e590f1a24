"""What is searched of the run's claim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.model.checker import Config
from tests.model.claim import Claim, Job, Lister, Run, Step, wrong_with_run
from tests.model.claim_sweeper import RunSweeper

FIRST = Run(
    Claim(1, 1), (Step("old/0", 1), None, None, None), frozenset({"old/0"}), frozenset({"old/0"})
)


def _config(name: str, *jobs: Callable[..., Job]) -> Config:
    return Config(f"run: {name}", FIRST, jobs, wrong_with_run)


_zombie, _next = partial(partial, Job, "zombie", 1), partial(partial, Job, "next")
_other = partial(Job, "other")

SWEEPS = [
    _config(
        f"a zombie, a successor, a sweep of step {step}",
        *(_zombie(), _next(), partial(RunSweeper, step)),
    )
    for step in (0, 1)
]
# Those that the default tests search.
QUICK = [
    _config("a zombie, a successor, a lister", _zombie(), _next(), Lister),
    _config("a zombie, two successors", _zombie(), _next(), _other),
    _config(
        "a zombie that deletes, a successor, a lister",
        *(_zombie(deletes=0), _next(saves=2), Lister),
    ),
    _config(
        "a job that goes back, a successor, a lister",
        *(partial(Job, "job", 1, saves=2, goes_back=0), _next(), Lister),
    ),
    _config(
        "a job that goes back and saves the next step, a successor, a lister",
        *(partial(Job, "job", 1, saves=2, goes_back=0, again=3), _next(), Lister),
    ),
    _config(
        "a zombie, a successor that goes back, another",
        *(_zombie(), _next(saves=2, goes_back=0), _other),
    ),
]
LARGE = [
    _config(
        "a job that goes back, a successor, a sweep of step 2",
        *(partial(Job, "job", 1, saves=2, goes_back=0), _next(), partial(RunSweeper, 2)),
    ),
    _config(
        "a job that goes back and deletes what it saved, a successor, a lister",
        *(partial(Job, "job", 1, saves=2, goes_back=0, deletes=1), _next(), Lister),
    ),
    _config(
        "two jobs that go back, a lister",
        *(_zombie(saves=2, goes_back=0), _next(saves=3, goes_back=1), Lister),
    ),
    _config("a zombie, two successors, a lister", _zombie(saves=2), _next(), _other, Lister),
]
