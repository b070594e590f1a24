"""One mutant, one process: a fork of this one, which has torch and the other libraries imported.

The fork runs in a copy of the tree that has the slip, so that every program that a test starts has
it, too. The package and its tests are imported there and never here.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.reach import ROOT

PRELOAD = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.distributed.checkpoint"),
    *("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.optim"),
    *("torch.distributed.tensor", "torch.distributed.tensor.parallel", "torch.nn.parallel"),
    *("boto3", "botocore.session", "obstore", "msgspec", "xxhash", "tqdm", "hypothesis", "psutil"),
    *("_pytest.assertion.rewrite", "xdist", "pytest_timeout", "requests", "fsspec", "typer"),
)
COPIED = ("dcp_objstore", "tests", "benchmarks", "examples", "docs", ".ci", "*.toml", "*.md")
MEMORY_BYTES = 10 << 30
_HANGS_SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended.

    Attributes:
        killed_by: the test that failed, or what else ended the run; None if all passed.
        tests: how many were run.
        seconds: how long it took.
        log: what pytest printed.
    """

    killed_by: str | None
    tests: int
    seconds: float
    log: str


def preload() -> None:
    """Import what the tests need and what has no part in the slips."""
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def tree_copies(number: int) -> Iterator[list[Path]]:
    """Copies of the tree, one for each mutant that is run at the same time."""
    # No TemporaryDirectory: a fork would remove it at its end.
    folder = Path(tempfile.mkdtemp(prefix="dcp-objstore-mutants-"))
    try:
        places = [folder / str(place) for place in range(number)]
        for place in places:
            place.mkdir()
            for path in itertools.chain.from_iterable(ROOT.glob(pattern) for pattern in COPIED):
                if path.is_dir():
                    shutil.copytree(path, place / path.name, symlinks=True)
                else:
                    shutil.copy2(path, place / path.name)
        yield places
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Run:
    """Tests under way in a copy of the tree, with one module changed.

    Args:
        place: the copy.
        file: the module, relative to it; None: nothing is changed.
        text: what the module says.
        tests: the seconds that each test takes where nothing else runs.
    """

    _moments = itertools.count(int(time.time()))

    def __init__(
        self, place: Path, file: str | None, text: str, tests: Mapping[str, float]
    ) -> None:
        self._log = log = place.with_suffix(".log")
        self._file = file
        self._report = log.with_suffix(".json")
        self._report.unlink(missing_ok=True)
        if file is not None:
            self._original = place / file
            self._kept = self._original.read_bytes(), self._original.stat()
            self._original.write_text(text)
            # A compiled module is known by the second and the size of its source.
            moment = next(self._moments)
            os.utime(self._original, (moment, moment))
        self._begun = time.monotonic()
        self.limit_seconds = 2 * _HANGS_SECONDS + 5 * sum(tests.values())
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _run_tests(place, tests, log, self._report)

    def ended(self) -> Outcome | None:
        """What came of it, or None while it runs."""
        seconds = time.monotonic() - self._begun
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and seconds < self.limit_seconds:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
        if self._file is not None:
            data, stat = self._kept
            self._original.write_bytes(data)
            os.utime(self._original, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        failed, count, idle_seconds = None, 0, seconds
        if self._report.exists():
            failed, count = json.loads(self._report.read_text())
            idle_seconds = time.time() - self._report.stat().st_mtime
        # A busy machine may not get through all tests: only one that hangs notices the slip.
        if failed is None and not pid and idle_seconds > _HANGS_SECONDS:
            failed = "a test hangs"
        if failed is None and status:
            failed = f"status {os.waitstatus_to_exitcode(status)}"
        return Outcome(failed, count, seconds, self._log.read_text(errors="replace"))


def _run_tests(place: Path, tests: Mapping[str, float], log: Path, report: Path) -> None:
    """Never returns."""
    status = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        os.chdir(place)
        os.environ["PYTHONPATH"] = str(place)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        # A rank's process imports the program that started it.
        sys.modules["__main__"] = types.ModuleType("__main__")
        others = (path for path in sys.path if Path(path or ".").resolve() != ROOT)
        sys.path[:] = [str(place), *others]
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        options = [
            "-n",
            "0",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout",
            str(_HANGS_SECONDS),
            "-m",
            "",
        ]
        chosen = _Chosen(list(tests), report)
        status = pytest.main([*options, *(file for file in files if Path(file).exists())], [chosen])
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            status = 0
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            atexit._run_exitfuncs()  # servers and ranks
        os._exit(int(status))


class _Chosen:
    """A plugin: only these tests, in this order; the first failure is noted."""

    def __init__(self, tests: Sequence[str], report: Path) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self._report = report
        self._run = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        places = {item: self._place(item.nodeid) for item in items}
        items[:] = [item for item in items if places[item] is not None]
        items.sort(key=lambda item: places[item] or 0)

    def _place(self, test: str) -> int | None:
        """Also of a test that was named without its parameters, or by its file."""
        names = (test, test.partition("[")[0], test.partition("::")[0])
        return next((self._places[name] for name in names if name in self._places), None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._run += report.when == "call"
        failed = report.nodeid if report.failed else None
        if failed or report.when == "call":
            self._report.write_text(json.dumps([failed, self._run]))
        if failed:
            os._exit(1)  # what the rest of the session would clean up ends with this process
