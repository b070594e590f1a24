"""Search the models, or show what breaks in a mutant."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from tests.model import claim, claim_configs, configs
from tests.model.checker import Config, Result, catch
from tests.model.claim_sweeper import SWEEPS_BY_NUMBER

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
    for config in searches(quick=arguments.quick):
        result = config.search()
        states, seconds = states + result.states, seconds + result.seconds
        verdict = result.wrong or "no violation"
        print(
            f"{config.name:50} {result.states:>10,} {result.seconds:6.1f} s  {verdict}", flush=True
        )
        for event in result.trace:
            print(f"    {event}")
        failures += bool(result.wrong)
    print(f"{'all':50} {states:>10,} {seconds:6.1f} s\n")
    for mutant, look_for in mutants().items():
        caught = look_for()
        how = f"{len(caught[1].trace):2} steps: {caught[1].wrong}" if caught else "NOT CAUGHT"
        print(f"mutant: {mutant:48} {how}", flush=True)
        failures += caught is None
    return 1 if failures else 0


def searches(*, quick: bool) -> list[Config]:
    """Every configuration of both models."""
    found = [*configs.QUICK, *claim_configs.QUICK, *claim_configs.SWEEPS]
    return found if quick else [*found, *configs.LARGE, *claim_configs.LARGE]


def mutants() -> dict[str, Callable[[], tuple[str, Result] | None]]:
    """What catches each mutant of both models."""
    by_name = {config.name: config for config in (*configs.QUICK, *configs.LARGE)}
    where = {mutant: [by_name[name]] for mutant, name in configs.MUTANTS.items()}
    where |= dict.fromkeys(claim.MUTANTS, claim_configs.QUICK)
    where[SWEEPS_BY_NUMBER] = claim_configs.SWEEPS
    found = {name: partial(catch, at, frozenset({name})) for name, at in where.items()}
    return {**found, SKETCH: partial(catch, claim_configs.QUICK, claim.SKETCH)}


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
