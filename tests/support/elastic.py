"""Jobs that lose ranks and machines: programs in sessions of their own, and what they leave.

    with Program([...], cwd, environment(bucket)) as job:
        job.wait_for("2 ranks start from step (\\d+)")
        job.kill()

As a program it runs a script whose ranks die in the middle of a save:

    python -m tests.support.elastic SCRIPT ARGUMENT...   # the environment says who dies, and when
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore.write.writer import ObjectStoreWriter
from tests.support.command_line import environment as access_of
from tests.support.servers import Bucket

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
KILLS = "DCP_OBJSTORE_TEST_KILLS"
PAUSE_SECONDS = "DCP_OBJSTORE_TEST_PAUSE_SECONDS"
GO = "DCP_OBJSTORE_TEST_GO"
LOCAL = "DCP_OBJSTORE_TEST_LOCAL"


def environment(bucket: Bucket) -> dict[str, str]:
    """The environment of a job that saves to the bucket, on this machine alone."""
    return (
        os.environ
        | access_of(bucket.storage_options)
        | {
            "AWS_REGION": "us-east-1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
    )


class Program:
    """A program whose output can be waited for. Leaving the block kills all its processes.

    Args:
        command: the program and its arguments.
        cwd: its working directory, where its output goes, too.
        env: its environment.
    """

    _number = 0

    def __init__(self, command: Iterable[str], cwd: Path, env: Mapping[str, str]) -> None:
        Program._number += 1
        self._log = cwd / f"output-{Program._number}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command), cwd=cwd, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def found(self, pattern: str) -> list[str]:
        """The groups of what it has printed that matches, in order."""
        return re.findall(pattern, self.output)

    def wait_for(self, pattern: str, *, count: int = 1, other: Program | None = None) -> str:
        """Wait until it, or the other, has printed so many matches; the group of the last."""
        found: list[str] = []

        def printed() -> bool:
            found[:] = self.found(pattern) + (other.found(pattern) if other else [])
            return len(found) >= count

        self.wait_until(printed)
        return found[count - 1]

    def wait_until(self, holds: Callable[[], bool], timeout_seconds: float = 240) -> None:
        """Wait until it has brought something about; fail if it ends before."""
        deadline = time.monotonic() + timeout_seconds
        while not holds():
            ended = self._process.poll()
            assert ended is None, f"ended with {ended}:\n{self.output}"
            assert time.monotonic() < deadline, f"too late:\n{self.output}"
            time.sleep(0.1)

    def end(self, timeout_seconds: float = 240) -> None:
        """Wait until it ends by itself, without an error."""
        assert self._process.wait(timeout_seconds) == 0, self.output

    def kill(self) -> None:
        """SIGKILL to all its processes at once; those of torchrun have sessions of their own."""
        children = [self._process.pid, *descendants(self._process.pid)]
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for child in children for one in (child, *descendants(child))]


def numbers_of(bucket: Bucket, url: str) -> list[int]:
    """The numbers of the steps of a run that count."""
    steps = dos.steps(url, storage_options=bucket.storage_options)
    return [int(step.name.removeprefix("step-")) for step in steps]


def newest_of(bucket: Bucket, url: str) -> int:
    """The number of the newest step of a run; 0 if there is none."""
    return max(numbers_of(bucket, url), default=0)


def assert_only_whole_steps(bucket: Bucket, url: str, cwd: Path) -> list[int]:
    """All that counts in the run is whole, and nothing else is left; the numbers of its steps."""
    steps = dos.steps(url, storage_options=bucket.storage_options)
    for step in steps:
        checkpoint = dos.open(step.url, storage_options=bucket.storage_options)
        assert checkpoint.verify(deep=True).ok
    assert bucket.uploads() == []
    assert not list(cwd.glob("s3:*"))
    return numbers_of(bucket, url)


def assert_quotes(page: str, example: str) -> None:
    """The ```py blocks of a page of docs/ are in an example, but for indentation."""

    def lines(text: str) -> str:
        return "\n".join(line.strip() for line in text.splitlines())

    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    assert all(lines(block) in lines((EXAMPLES / example).read_text()) for block in blocks)


def die_in_saves() -> None:
    """Let this rank be killed in the middle of saves, if the environment says so.

    `KILLS` has a folder and words "rank:step": that rank dies, once, when the data of its part of
    that step is on the store, so before any commit.
    """
    folder, *words = os.environ.get(KILLS, os.devnull).split()
    kills = [tuple(word.split(":")) for word in words]
    write_data = ObjectStoreWriter.write_data

    def write_and_die(writer: ObjectStoreWriter, *args: Any, **keywords: Any) -> Any:
        written = write_data(writer, *args, **keywords)
        step = str(writer.checkpoint_id).rpartition("/step-")[2]
        done = Path(folder, f"killed-{dist.get_rank()}-{step}")
        if (str(dist.get_rank()), step) in kills and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    ObjectStoreWriter.write_data = write_and_die  # type: ignore[method-assign]


def train_slowly() -> None:
    """Pause at each step; where there is one rank and the file `GO`, training ends."""
    pause_seconds = float(os.environ.get(PAUSE_SECONDS, "0"))
    step, preempted = dos.CheckpointManager.step, dos.CheckpointManager.preempted
    go = Path(os.environ.get(GO, os.devnull))

    def slow_step(*args: Any, **keywords: Any) -> bool:
        time.sleep(pause_seconds)
        return step(*args, **keywords)

    def over(run: dos.CheckpointManager) -> bool:
        return preempted(run) or (os.environ["WORLD_SIZE"] == "1" and go.is_file())

    dos.CheckpointManager.step = slow_step  # type: ignore[method-assign]
    dos.CheckpointManager.preempted = over  # type: ignore[method-assign]


def keep_copies() -> None:
    """Keep copies on the node, if the environment names a folder; print what is fetched anyway."""
    folder = os.environ.get(LOCAL)
    if folder is None:
        return
    make = dos.CheckpointManager.__init__

    def make_with_copies(run: dos.CheckpointManager, *args: Any, **keywords: Any) -> None:
        make(run, *args, local=folder, **keywords)

    dos.CheckpointManager.__init__ = make_with_copies  # type: ignore[method-assign]
    tell_what_is_fetched()


def tell_what_is_fetched() -> None:
    """Print how much each rank fetches from the bucket when it resumes."""
    load = dos.CheckpointManager.load

    def load_and_tell(run: dos.CheckpointManager, *args: Any, **keywords: Any) -> int | None:
        step = load(run, *args, **keywords)
        if run.last_resume is not None and (report := run.last_resume.load) is not None:
            line = f"fetched {report.fetched_bytes} of {report.total_bytes} bytes of step {step}"
            print(line, flush=True)
        return step

    dos.CheckpointManager.load = load_and_tell  # type: ignore[method-assign]


if __name__ == "__main__":
    die_in_saves()
    keep_copies()
    train_slowly()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
