"""The table: `python -m tests.support.optimizers --help`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator

from tests.support.optimizers.cases import LIBRARIES, cases_of
from tests.support.optimizers.rows import NOT_RUN, WRONG, Row, row
from tests.support.optimizers.scenes import SCENES, random_scene


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.optimizers")
    parser.add_argument(
        "--library", choices=[*LIBRARIES, "all"], nargs="+", default=["torch", "kinds"]
    )
    parser.add_argument("--match", default="", help="part of the optimizers' names")
    parser.add_argument("--scene", default="", help="part of the scenes' names, or random:SEED")
    parser.add_argument("--random", type=int, default=0, help="so many random scenes, not all")
    parser.add_argument("--seed", type=int, default=0, help="the first random scene")
    parser.add_argument("--device", default="cpu", help="of the model; not with --ranks")
    parser.add_argument("--ranks", action="store_true", help="the rows of two ranks")
    parser.add_argument("--wrong", action="store_true", help="show only rows that are wrong")
    parser.add_argument("--all", action="store_true", help="show rows that cannot be run, too")
    return parser.parse_args()


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    libraries = options.library
    if "all" in libraries:
        libraries = [library for library in LIBRARIES if library != "distributed"]
    if options.random:
        scenes = [random_scene(options.seed + number) for number in range(options.random)]
    else:
        scenes = [scene for name, scene in SCENES.items() if options.scene in name]
    scenes = [dataclasses.replace(scene, device=options.device) for scene in scenes]
    for library in libraries:
        for case in cases_of(library):
            if options.match in case.name:
                if options.ranks:
                    from tests.support.optimizers.ranks import rows_of

                    yield from rows_of(case, options.scene)
                else:
                    yield from (row(case, scene) for scene in scenes)


def main() -> int:
    options = _arguments()
    counts: Counter[str] = Counter()
    for found in _rows(options):
        counts[found.outcome] += 1
        shown = found.outcome != NOT_RUN or options.all
        if found.outcome == WRONG or (shown and not options.wrong):
            print(found, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return int(counts[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(main())
