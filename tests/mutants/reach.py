"""Which test reaches which line: a pytest plugin that writes it down, and what is read from that.

    pytest -p tests.mutants.reach        with DCP_MUTANTS_REACH=<folder> in the environment

The threads of pytest's processes are seen, and the calls of ranks (`support/launcher.py`);
programs that a test starts otherwise are not. Each process writes files of its own into the
folder.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import os
import pickle
import pkgutil
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.mutants.mutations import Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dcp_objstore"
FOLDER = "DCP_MUTANTS_REACH"
_TEST = "PYTEST_CURRENT_TEST"
# The tests of these want environments with packages of their own (`tests/frameworks`).
_FRAMEWORKS = {
    PACKAGE / "integrations" / f"{name}.py"
    for name in ("hf", "lightning", "megatron", "peft", "torchtitan")
}
# Modules of which nearly all runs in a program of its own, which the tracer does not see.
_UNSEEN = {
    f"dcp_objstore/{module}.py": "tests/compat/test_hostile_inputs.py"
    for module in ("read/item_read", "read/stored_checkpoint", "checkpoint/index")
}
# Tests that look at what a module has once it is imported, and reach none of its lines.
_READ_AFTER_IMPORT = (
    "tests/test_public_names.py::test_a_change_of_the_public_api",
    "tests/test_docs.py::test_the_tables_of_options",
)


def sources() -> list[Path]:
    """The modules of the package, relative to the tree, without those of frameworks."""
    files = sorted({*PACKAGE.rglob("*.py")} - _FRAMEWORKS)
    return [file.relative_to(ROOT) for file in files]


def keys_of(file: str, text: str) -> list[str]:
    """A name for each line, which stays where others change; lines count from 1.

    It is made of the line's text and the function around it.
    """
    functions = [""] * (text.count("\n") + 2)

    def name(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = outer
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{outer}.{child.name}"
                last = child.end_lineno or child.lineno
                functions[child.lineno : last + 1] = [inner] * (last + 1 - child.lineno)
            name(child, inner)

    name(ast.parse(text), "")
    lines = ["", *text.splitlines(), ""]
    return [
        hashlib.sha256(f"{file}\n{function}\n{line.strip()}".encode()).hexdigest()[:12]
        for function, line in zip(functions, lines, strict=False)
    ]


class _Tracer:
    """coverage's tracer in this process, which may change the test that it writes down."""

    def __init__(self, test: str | None) -> None:
        from coverage import Coverage

        self.coverage = Coverage(
            data_file=None,
            config_file=False,
            include=[str(PACKAGE / "*")],
            context=test,
            messages=False,
        )
        self.coverage.start()

    def end(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        reached: dict[str, list[str]] = {}
        for file in data.measured_files():
            keys = keys_of(str(Path(file).relative_to(ROOT)), Path(file).read_text())
            for number, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    reached.setdefault(test, []).append(keys[number])
        _write("lines", reached)


def _write(kind: str, content: object) -> None:
    name = f"{kind}-{os.getpid()}-{secrets.token_hex(4)}.json"
    Path(os.environ[FOLDER], name).write_text(json.dumps(content))


_tracer: _Tracer | None = None
_seconds: dict[str, float] = {}


def pytest_configure(config: pytest.Config) -> None:
    global _tracer
    if FOLDER not in os.environ or getattr(config.option, "numprocesses", None):
        return  # what distributes the tests runs none
    _tracer = _Tracer(None)
    from tests.support.launcher import Ranks

    start = Ranks.start

    def start_traced(
        ranks: Ranks,
        world_size: int,
        function: Callable[..., Any] | str,
        *args: Any,
        **options: Any,
    ) -> Any:
        test = os.environ.get(_TEST, "").rpartition(" ")[0]
        pickled = pickle.dumps((function, args))
        place = os.environ[FOLDER]
        return start(ranks, world_size, run_traced, place, test, pickled, **options)

    Ranks.start = start_traced  # type: ignore[method-assign,assignment]


def run_traced(rank: int, world_size: int, place: str, test: str, pickled: bytes) -> Any:
    """In a rank: the call, traced."""
    os.environ[FOLDER] = place
    function, args = pickle.loads(pickled)
    if isinstance(function, str):
        function = pkgutil.resolve_name(function)
    tracer = _Tracer(test)
    try:
        return function(rank, world_size, *args)
    finally:
        tracer.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _tracer is None:
        return (yield)
    _tracer.coverage.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _tracer.coverage.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _seconds[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    if _tracer is not None:
        _tracer.end()
        _write("seconds", _seconds)


class Reach:
    """Which tests reach a line, as far as it was ever written down.

    Args:
        folder: where the tracers have written.
    """

    def __init__(self, folder: Path) -> None:
        whole = folder / "reach.pickle"
        self._seconds: dict[str, float] = {}
        self._tests: dict[str, set[str]] = {}
        if whole.exists():
            self._seconds, self._tests = pickle.loads(whole.read_bytes())
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files:
            content = json.loads(file.read_text())
            if file.name.startswith("seconds-"):
                self._seconds |= content
                continue
            for test, keys in content.items():
                for key in keys:
                    self._tests.setdefault(key, set()).add(test)
        if not self._seconds:
            raise SystemExit("nothing is known of the tests: `python -m tests.mutants --gather`")
        if files:
            whole.write_bytes(pickle.dumps((self._seconds, self._tests)))
            for file in files:
                file.unlink()

    def reaching(self, mutant: Mutant) -> set[str]:
        """The tests that reach a mutant, of which the time is known."""
        found: set[str] = set()
        if mutant.mentions:
            # It is run while its module is imported: what matters is who looks at its name.
            name = re.compile("|".join(rf"\b{name}\b" for name in mutant.mentions))
            for file in sources():
                for key, line in zip(_keys(str(file)), _lines(file), strict=False):
                    if name.search(line):
                        found |= self._tests.get(key, set())
            if not found & self._seconds.keys():  # a default of an argument, or a field's limit
                found = set().union(*(self._tests.get(key, ()) for key in _keys(mutant.file)))
                noun = f"/test_{Path(mutant.file).stem}.py"
                found = {test for test in found if noun in test} or found
        else:
            keys = _keys(mutant.file)
            for number in mutant.lines:
                found |= self._tests.get(keys[number], set())
        unseen = _READ_AFTER_IMPORT if mutant.mentions or mutant.in_signature else ()
        if mutant.file in _UNSEEN:
            unseen = (*unseen, _UNSEEN[mutant.file])
        found.update(test for test in self._seconds if test.startswith(unseen))
        found &= self._seconds.keys()
        # A line that only programs reach, such as a command's: the tests of its room.
        return found or {test for test in self._seconds if test.startswith(_near(mutant.file))}

    def _way(self, test: str, mutant: Mutant) -> frozenset[str]:
        """The lines that a test reaches of the function with a mutant."""
        keys, (first, last) = _keys(mutant.file), mutant.around
        return frozenset(key for key in keys[first : last + 1] if test in self._tests.get(key, ()))

    def choose(self, mutant: Mutant, seconds: float) -> dict[str, float]:
        """The tests to run, and the time that each takes.

        Args:
            mutant: where the slip is.
            seconds: of tests at most; at least one is chosen.
        """
        module = Path(mutant.file).relative_to("dcp_objstore")
        room, noun = module.parts[0], module.stem

        def cost(test: str) -> float:
            file = test.partition("::")[0]
            near = 0.15 if f"test_{noun}" in file else 0.4 if f"tests/{room}/" in file else 1
            near = 0.01 if test.startswith(_READ_AFTER_IMPORT) else near
            return (self._seconds[test] + 0.03) * near

        # Of those that take the same way through the function, one after the other: first those on
        # ways that few take.
        ways: dict[frozenset[str], list[str]] = {}
        for test in sorted(self.reaching(mutant), key=cost):
            ways.setdefault(self._way(test, mutant), []).append(test)
        rare_first = sorted(ways.values(), key=len)
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*rare_first))
        chosen: dict[str, float] = {}
        for test in filter(None, in_turn):
            if sum(chosen.values()) + self._seconds[test] <= seconds:
                chosen[test] = self._seconds[test]
        if not chosen and ways:
            test = min(itertools.chain.from_iterable(ways.values()), key=cost)
            chosen[test] = self._seconds[test]
        # Those of a file together, because they share servers and ranks; slow ones later.
        rank = {test: place for place, test in enumerate(chosen)}
        first: dict[tuple[bool, str], int] = {}
        groups = {test: (cost(test) > 0.3, test.partition("::")[0]) for test in chosen}
        for test in chosen:
            first.setdefault(groups[test], rank[test])
        order = sorted(chosen, key=lambda one: (groups[one][0], first[groups[one]], rank[one]))
        return {test: chosen[test] for test in order}


def _near(file: str) -> str:
    """What the names of the tests of a module's room begin with."""
    module = Path(file).relative_to("dcp_objstore")
    return f"tests/{module.parts[0]}/" if len(module.parts) > 1 else f"tests/test_{module.stem}"


@functools.cache
def _keys(file: str) -> list[str]:
    return keys_of(file, (ROOT / file).read_text())


@functools.cache
def _lines(file: Path) -> list[str]:
    return ["", *(ROOT / file).read_text().splitlines()]
