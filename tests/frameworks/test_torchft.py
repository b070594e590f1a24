"""torchft: a killed replica group heals from another; when all are lost, from the bucket."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.support.elastic import (
    EXAMPLES,
    Program,
    assert_only_whole_steps,
    assert_quotes,
    environment,
    newest_of,
)

pytest.importorskip("torchft")

IN_QUORUM_OF_TWO = r"(participants: \[QuorumMember [^]]*QuorumMember)"
GO_ON = r"starts from step (\d+)"


@pytest.mark.backends("seaweed")
@pytest.mark.timeout(600)
def test_a_killed_replica_group_is_healed_and_the_bucket_outlives_all_of_them(bucket, tmp_path):
    url = bucket.at("run")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = environment(bucket) | {"TORCHFT_LIGHTHOUSE": f"http://{address}"}

    def group(number: int, steps: int = 10**6) -> Program:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
        example = [str(EXAMPLES / "torchft_train.py"), f"group-{number}", url, str(steps)]
        return Program([*command, *example], tmp_path, env)

    def wait_for_step(number: int, job: Program) -> int:
        job.wait_until(lambda: newest_of(bucket, url) >= number)
        return newest_of(bucket, url)

    lighthouse = shutil.which("torchft_lighthouse", path=Path(sys.executable).parent)
    assert lighthouse is not None
    options = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--bind", address]
    with Program([lighthouse, *options], tmp_path, env):
        with group(0) as first, group(1) as second:
            for job in (first, second):
                job.wait_for(IN_QUORUM_OF_TWO)
            # One of the groups saves a step. When either is killed, the other saves the next ones.
            first.kill()
            before = wait_for_step(newest_of(bucket, url) + 30, second)
            with group(0) as again:
                assert int(again.wait_for(GO_ON)) >= before
                again.wait_for("was (healed) by another")  # as of a later step
                second.kill()
                wait_for_step(newest_of(bucket, url) + 20, again)
        kept = newest_of(bucket, url)
        with group(1, steps=kept + 20) as last:
            assert last.wait_for(GO_ON) == str(kept)
            last.end()
    assert assert_only_whole_steps(bucket, url, tmp_path)[-1] == kept + 20


def test_the_page_quotes_the_example():
    assert_quotes("frameworks/torchft.md", "torchft_train.py")
