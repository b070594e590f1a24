"""torchrun: restarts after SIGKILL in a save, and machines that come and go."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.support import elastic
from tests.support.elastic import (
    EXAMPLES,
    Program,
    assert_only_whole_steps,
    assert_quotes,
    environment,
    newest_of,
)

EXAMPLE = EXAMPLES / "torchrun_elastic.py"
# What another process prints may end in a number right before it.
GO_ON = r"([12] ranks start from step \d+)"


def torchrun(*options: str, url: str, steps: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*command, "-m", "tests.support.elastic", str(EXAMPLE), url, str(steps)]


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("copies", [False, True])
def test_each_restart_goes_on_after_the_newest_step_and_so_does_another_world_size(
    bucket, tmp_path, copies
):
    """With copies on the node it fetches nothing, and a step that was not committed leaves none."""
    url, env, node = bucket.at("run"), environment(bucket), tmp_path / "node"
    node.mkdir()
    # Each dies when its data of that step is on the store: rank 0 would commit it, rank 1 not.
    kills = {elastic.KILLS: f"{tmp_path} 1:20 0:30 1:50"}
    kills |= {elastic.LOCAL: str(node)} if copies else {}
    command = torchrun("--nproc-per-node", "2", "--max-restarts", "3", url=url, steps=60)
    with Program(command, tmp_path, env | kills) as job:
        job.end()
        starts = [f"2 ranks start from step {step}" for step in (0, 10, 20, 40)]
        assert job.found(GO_ON) == starts
        fetched = job.found(r"fetched (\d+) of [1-9]\d* bytes of step (\d+)")
    expected = [("0", step) for step in ("10", "20", "40") for _ in range(2)]
    assert sorted(fetched) == (expected if copies else [])
    assert len(list(node.glob("*/*/step-*/*"))) == 4 * copies
    assert assert_only_whole_steps(bucket, url, tmp_path) == [40, 50, 60]
    with Program(torchrun("--nproc-per-node", "1", url=url, steps=70), tmp_path, env) as job:
        job.end()
        assert job.found(GO_ON) == ["1 ranks start from step 60"]
    assert assert_only_whole_steps(bucket, url, tmp_path)[-1] == 70


@pytest.mark.campaign
@pytest.mark.backends("seaweed")
@pytest.mark.timeout(600)
def test_a_joining_machine_costs_no_step_and_a_lost_one_the_unsaved_steps(bucket, tmp_path):
    url, go = bucket.at("run"), tmp_path / "go"
    env = environment(bucket) | {elastic.PAUSE_SECONDS: "0.05", elastic.GO: str(go)}
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    soon = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"

    def machine(is_host: int) -> list[str]:
        return torchrun(
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "run"),
            *("--rdzv-conf", f"is_host={is_host},{soon}", "--monitor-interval", "0.2"),
            *("--local-addr", "127.0.0.1"),
            url=url,
            steps=10**6,
        )

    def wait_for_a_step_after(step: int) -> int:
        first.wait_until(lambda: newest_of(bucket, url) > step)
        return newest_of(bucket, url)

    with Program(machine(1), tmp_path, env) as first:
        assert first.wait_for(r"1 ranks start from step (\d+)") == "0"
        before = wait_for_a_step_after(0)
        with Program(machine(0), tmp_path, env) as second:
            started = int(first.wait_for(r"2 ranks start from step (\d+)", other=second))
            assert started >= before
            # torchrun stopped the rank with SIGTERM, and the manager saved that step.
            assert first.found(r"must end; step (\d+) is its last one") == [str(started)]
            before = wait_for_a_step_after(started)
            second.kill()
        alone = int(first.wait_for(r"1 ranks start from step (\d+)", count=2))
        assert alone >= before
        go.touch()
        first.end()
    assert assert_only_whole_steps(bucket, url, tmp_path)[-1] > alone


def test_the_page_quotes_the_example():
    assert_quotes("frameworks/torchrun.md", "torchrun_elastic.py")
