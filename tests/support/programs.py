"""Run programs of ranks as a reader does: by `torchrun`, or in forks that have imported torch."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

from torch.distributed import TCPStore

from tests.support.ranks import start_workers
from tests.support.servers import Bucket


def run_in_processes(
    words: list[str], cwd: Path, env: dict[str, str], succeeds: bool | None
) -> str:
    """Run a command; what it printed. With `succeeds=None` its exit status does not matter."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert succeeds in (None, done.returncode == 0), done.stderr
    return done.stdout


def run_example(example: Path, ranks: int, *arguments: str, bucket: Bucket, cwd: Path) -> str:
    """Start an example by `torchrun` on this machine, as its page does; what it printed."""
    from tests.support.command_line import environment  # which the forks below do not need

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*torchrun, f"--nproc-per-node={ranks}", str(example), *arguments]
    path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    env = {**environment(bucket.storage_options), "PYTHONPATH": path}
    return run_in_processes(words, cwd, env, succeeds=True)


def run_in_forks(words: list[str], cwd: Path, env: dict[str, str], succeeds: bool | None) -> str:
    """What `torchrun` and `python` do, in processes that have imported torch already.

    That takes longest.
    """
    program, *script = words
    ranks, run = 1, run_alone
    if program == "torchrun":
        option, count, *script = script
        assert option == "--nproc-per-node"
        ranks, run = int(count), run_script
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with start_workers() as crew:
        ended = crew.start(ranks, run, script, cwd, env, grouped=False).end()
    assert succeeds in (None, not any(one.failed for one in ended)), ended
    return "".join(one.value for one in ended if not one.failed)


def run_script(rank: int, world_size: int, words: list[str], cwd: Path, env: dict[str, str]) -> str:
    """In a process of its own: run it as its main program, one of the ranks; what it printed."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    env |= {name: str(value) for name, value in ranks.items()}
    return run_alone(rank, world_size, words, cwd, env)


def run_alone(rank: int, world_size: int, words: list[str], cwd: Path, env: dict[str, str]) -> str:
    """In a process of its own: run it as its main program; what it printed."""
    os.environ |= env
    os.chdir(cwd)
    sys.argv = words
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()
