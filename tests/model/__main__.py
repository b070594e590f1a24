"""Search the model, or show what breaks in a mutant."""

from __future__ import annotations

import argparse

from tests.model.configs import CONFIGS, MUTANTS, catch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what the default tests search")
    parser.add_argument("--mutant", choices=MUTANTS, help="a rule to weaken")
    arguments = parser.parse_args()
    if arguments.mutant:
        return show(arguments.mutant)
    states, seconds, wrong = 0, 0.0, 0
    for config in CONFIGS:
        if arguments.quick and not config.quick:
            continue
        result = config.search()
        states, seconds, wrong = (
            states + result.states,
            seconds + result.seconds,
            wrong + bool(result.wrong),
        )
        verdict = result.wrong or "no violation"
        print(f"{config.name:45} {result.states:>10,} {result.seconds:6.1f} s  {verdict}")
        for event in result.trace:
            print(f"    {event}")
    print(f"{'all':45} {states:>10,} {seconds:6.1f} s")
    for mutant in MUTANTS:
        caught = catch(mutant)
        how = f"{len(caught[1].trace):2} steps: {caught[1].wrong}" if caught else "NOT CAUGHT"
        print(f"mutant: {mutant:37} {how}")
        wrong += caught is None
    return 1 if wrong else 0


def show(mutant: str) -> int:
    caught = catch(mutant)
    if caught is None:
        print(f"{mutant}: nothing breaks")
        return 1
    config, result = caught
    print(f"{mutant} ({config.name}): {len(result.trace)} steps lead to")
    print(f"  {result.wrong}\n")
    for number, event in enumerate(result.trace, 1):
        print(f"  {number:2}  {event}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
