"""Put slips into the package, one at a time, and see which the tests notice.

    python -m tests.mutants --gather              which test reaches which line
    python -m tests.mutants --gather tests/run    the same of these tests only
    python -m tests.mutants --sample 300 --seed 1
    python -m tests.mutants --sample 300 --seed 1 --open    only those that were open
    python -m tests.mutants --show NAME           a mutant as a diff, and what its tests print
    python -m tests.mutants --slip FILE OLD NEW   one slip by hand: OLD stands once in FILE

A mutant is killed when a test fails that reaches its line; the tests that take least, and those of
the same room, are run first, within `--seconds`. Mutants that nothing can notice stand in
`equivalent.toml`, with a line why. What is left is open.

Not by mutmut: it puts all mutants of a function behind a call that chooses one, which changes what
torch sees of a function (its signature, how it pickles) and when threads switch; it forks a process
that has run tests, with the threads of obstore and gloo; it learns which tests reach a function
from one process, without ranks; and it leaves code outside of functions alone.
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutants.mutations import Mutant, mutants_of
from tests.mutants.reach import FOLDER, ROOT, Reach, sources
from tests.mutants.running import Outcome, Run, preload, tree_copies

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dcp-objstore-mutants"
BAR = 0.95
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gather", nargs=argparse.REMAINDER, help="run tests under a tracer; pytest's arguments"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--only", default="", metavar="TEXT", help="of places that have this text")
    parser.add_argument("--open", action="store_true", help="those that were open the last time")
    parser.add_argument("--show", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--slip", nargs=3, metavar=("FILE", "OLD", "NEW"), help="a slip by hand")
    parser.add_argument("--tests", nargs="+", help="run these tests, not those that reach it")
    parser.add_argument("--seconds", type=float, default=25, help="of tests for each mutant")
    parser.add_argument("--processes", type=int, default=2, help="mutants at the same time")
    arguments = parser.parse_args()
    if arguments.gather is not None:
        return gather(arguments.gather)
    if arguments.slip:
        return show([slip(*arguments.slip)], arguments)
    mutants = every_mutant()
    if arguments.show:
        return show([one for one in mutants if one.name in arguments.show], arguments)
    if not arguments.sample:
        parser.error("--gather, --sample, --show or --slip")
    for place, line, change in sorted(equivalent().keys() - {identity(one) for one in mutants}):
        print(f"equivalent.toml: no longer there: {place}: {line}: {change}")
    mutants = [mutant for mutant in mutants if arguments.only in mutant.place]
    return campaign(draw(mutants, arguments.sample, arguments.seed), arguments)


def show(mutants: Sequence[Mutant], arguments: argparse.Namespace) -> int:
    """Each mutant as a diff, and what the tests say of it."""
    for mutant in mutants:
        print(as_diff(mutant))
    left = 0
    for mutant, verdict, outcome in judge(mutants, arguments):
        if outcome is not None:
            print(outcome.log)
        print(_row(mutant, verdict, outcome), flush=True)
        left += verdict == "open"
    return left


def campaign(mutants: Sequence[Mutant], arguments: argparse.Namespace) -> int:
    """A row for each mutant, and how many the tests notice."""
    name = f"results-{arguments.seed}-{arguments.sample}{arguments.only}.json"
    results = CACHE / name.replace("/", "-")
    verdicts: dict[str, str] = {}
    if arguments.open and results.exists():
        verdicts = json.loads(results.read_text())
    again = [one for one in mutants if verdicts.get(one.name, "open") == "open"]
    for mutant, verdict, outcome in judge(again, arguments):
        print(_row(mutant, verdict, outcome), flush=True)
        verdicts[mutant.name] = verdict
        results.write_text(json.dumps(verdicts))
    shares = collections.Counter(verdicts.get(mutant.name, "open") for mutant in mutants)
    closed = shares["killed"] + shares["equivalent"]
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(shares.items())))
    print(f"{closed / max(1, len(mutants)):.1%} of {len(mutants)} are killed or equivalent")
    return 0 if closed >= BAR * len(mutants) else 1


def _row(mutant: Mutant, verdict: str, outcome: Outcome | None) -> str:
    row = f"{verdict:10} {mutant.name} {mutant.place}: {mutant.kind}: {mutant.change}"
    if outcome is not None:
        row += f"  [{outcome.tests} tests, {outcome.seconds:.0f} s"
        row += f", {outcome.killed_by}]" if outcome.killed_by else "]"
    return f"{row}\n{'':10} line: {mutant.line}" if verdict == "open" else row


def every_mutant() -> list[Mutant]:
    found = []
    for file in sources():
        found += mutants_of(str(file), (ROOT / file).read_text())
    return found


def draw(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """A sample in which rare kinds (a lock left out) are not lost among frequent ones."""
    kinds = collections.Counter(mutant.kind for mutant in mutants)
    keys: dict[str, float] = {}
    for mutant in mutants:  # of weight w it has the place of u ** (1 / w)
        # By its name, so that a sample stays what it was where the code does.
        chance = random.Random(f"{seed} {mutant.name}").random()
        keys[mutant.name] = chance ** math.sqrt(kinds[mutant.kind])
    by_name = {mutant.name: mutant for mutant in mutants}
    order = sorted(by_name.values(), key=lambda one: keys[one.name], reverse=True)
    return list(itertools.islice(filter(_compiles, order), number))


Identity = tuple[str, str, str]


def identity(mutant: Mutant) -> Identity:
    """By what `equivalent.toml` knows a mutant, wherever its line stands."""
    return mutant.place, mutant.line, mutant.change


def equivalent() -> dict[Identity, str]:
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", ())
    return {(one["at"], one["line"], one["change"]): one["why"] for one in entries}


def slip(file: str, old: str, new: str) -> Mutant:
    text = (ROOT / file).read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{file} has {old!r} {text.count(old)} times, not once")
    start = text.index(old)
    first = text.count("\n", 0, start) + 1
    lines = tuple(range(first, first + old.count("\n") + 1))
    data = text[:start].encode()
    change = f"{' '.join(old.split())} -> {' '.join(new.split())}"
    return Mutant(
        file,
        "",
        text.splitlines()[first - 1].strip(),
        "slip",
        change,
        lines,
        (1, 1),
        (),
        False,
        len(data),
        len(data) + len(old.encode()),
        new,
    )


def as_diff(mutant: Mutant) -> str:
    text = (ROOT / mutant.file).read_text()
    lines = difflib.unified_diff(
        text.splitlines(), mutant.apply(text).splitlines(), mutant.file, mutant.name, "", "", 3, ""
    )
    return "\n".join(lines)


def judge(
    mutants: Sequence[Mutant], arguments: argparse.Namespace
) -> Iterator[tuple[Mutant, str, Outcome | None]]:
    """Run each mutant's tests; its verdict."""
    waiting, known = [], equivalent()
    for mutant in mutants:
        if identity(mutant) in known:
            yield mutant, "equivalent", None
        else:
            waiting.append(mutant)
    if not waiting:
        return
    preload()
    reach = Reach(CACHE / "lines")
    with tree_copies(min(arguments.processes, len(waiting))) as places:
        runs: dict[Path, tuple[Mutant, Run]] = {}
        while waiting or runs:
            for place in places:
                if place in runs or not waiting:
                    continue
                mutant = waiting.pop(0)
                if arguments.tests:
                    tests = dict.fromkeys(arguments.tests, 30.0)
                else:
                    tests = reach.choose(mutant, arguments.seconds)
                if not tests:
                    yield mutant, "open", None
                    continue
                # Of the copy: the module itself may have been edited meanwhile.
                text = mutant.apply((place / mutant.file).read_text())
                runs[place] = mutant, Run(place, mutant.file, text, tests)
            for place, (mutant, run) in [*runs.items()]:
                outcome = run.ended()
                if outcome is not None:
                    del runs[place]
                    yield mutant, "killed" if outcome.killed_by else "open", outcome
            time.sleep(0.05)


def _compiles(mutant: Mutant) -> bool:
    """Whether it is Python, and other Python than before."""
    text = (ROOT / mutant.file).read_text()
    try:
        return ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def gather(tests: Sequence[str]) -> int:
    """Run tests under the tracer; what they reach takes the place of what they reached before."""
    folder = CACHE / "lines"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.reach", *tests]
    return subprocess.call(command, cwd=ROOT, env={**os.environ, FOLDER: str(folder)})


if __name__ == "__main__":
    sys.exit(main())
