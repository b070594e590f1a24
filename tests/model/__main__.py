"""Search the models, or show what breaks in a mutant."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from tests.model import claim, claim_configs, claim_sweeper, configs
from tests.model.checker import Result

SKETCH = "the first sketch of the claim"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what the default tests search")
    parser.add_argument("--mutant", choices=list(mutants()), help="a rule to weaken")
    arguments = parser.parse_args()
    if arguments.mutant:
        return show(arguments.mutant)
    failures = 0
    states, seconds = 0, 0.0
    for name, search in searches(quick=arguments.quick):
        result = search()
        states, seconds = states + result.states, seconds + result.seconds
        verdict = result.wrong or "no violation"
        print(f"{name:50} {result.states:>10,} {result.seconds:6.1f} s  {verdict}", flush=True)
        for event in result.trace:
            print(f"    {event}")
        failures += bool(result.wrong)
    print(f"{'all':50} {states:>10,} {seconds:6.1f} s\n")
    for mutant, catch in mutants().items():
        caught = catch()
        how = f"{len(caught[1].trace):2} steps: {caught[1].wrong}" if caught else "NOT CAUGHT"
        today = ", as the code is today" if mutant in configs.CODE_LACKS else ""
        print(f"mutant: {mutant:48} {how}{today}", flush=True)
        failures += caught is None
    return 1 if failures else 0


def searches(*, quick: bool) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Every configuration of both models."""
    for config in configs.CONFIGS:
        if config.quick or not quick:
            yield config.name, config.search
    for name, jobs, is_quick in claim_configs.CONFIGS:
        if is_quick or not quick:
            yield name, lambda jobs=jobs: claim_configs.search(jobs(frozenset()))
    for name, jobs in claim_sweeper.CONFIGS:
        yield name, lambda jobs=jobs: claim_configs.search(jobs(frozenset()))


def mutants() -> dict[str, Callable[[], tuple[str, Result] | None]]:
    """What catches each mutant of both models."""
    found = {name: lambda name=name: configs.catch(name) for name in configs.MUTANTS} | {
        name: lambda name=name: claim_configs.catch(frozenset({name})) for name in claim.MUTANTS
    }
    found |= {name: lambda name=name: claim_sweeper.catch(name) for name in claim_sweeper.MUTANTS}
    return found | {SKETCH: lambda: claim_configs.catch(claim.SKETCH)}


def show(mutant: str) -> int:
    caught = mutants()[mutant]()
    if caught is None:
        print(f"{mutant}: nothing breaks")
        return 1
    name, result = caught
    print(f"{mutant} ({name}): {len(result.trace)} steps lead to")
    print(f"  {result.wrong}\n")
    for number, event in enumerate(result.trace, 1):
        print(f"  {number:2}  {event}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
