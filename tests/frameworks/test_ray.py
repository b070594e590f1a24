"""Ray Train: a worker that is killed in a save, and another number of workers."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support import elastic
from tests.support.elastic import (
    EXAMPLES,
    Program,
    assert_only_whole_steps,
    assert_quotes,
    environment,
)

pytest.importorskip("ray.train.torch")

# Two runs of the example in one Ray: with as many workers as there are, then with one.
DRIVER = """
import runpy, sys, ray
example, folder, url = sys.argv[1:]
ray.init(
    num_cpus=2,
    include_dashboard=False,
    object_store_memory=100 * 2**20,
    _temp_dir=folder,
    runtime_env={"worker_process_setup_hook": "tests.support.elastic.die_in_saves"},
)
try:
    for steps, fewest, most in (("40", "1", "2"), ("50", "1", "1")):
        sys.argv = [example, url, steps, fewest, most]
        runpy.run_path(example, run_name="__main__")
finally:
    ray.shutdown()
"""


@pytest.mark.backends("seaweed")
@pytest.mark.timeout(600)
def test_workers_go_on_after_the_newest_step_when_one_is_killed_or_gone(
    bucket, tmp_path, tmp_path_factory
):
    url = bucket.at("run")
    env = environment(bucket) | {
        elastic.KILLS: f"{tmp_path} 1:30",
        "HOME": str(tmp_path),  # where Ray puts its results
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    short = tmp_path_factory.mktemp("r")  # sockets have short paths
    command = [sys.executable, "-c", DRIVER, str(EXAMPLES / "ray_train.py"), str(short), url]
    with Program(command, tmp_path, env) as job:
        job.end(500)
        output = job.output
    starts = re.findall(r"(\d workers start from step \d+)", output)
    assert list(dict.fromkeys(starts)) == [
        "2 workers start from step 0",
        "2 workers start from step 20",
        "1 workers start from step 40",
    ]
    assert f"trained to {url}/step-50" in output
    assert assert_only_whole_steps(bucket, url, tmp_path) == [30, 40, 50]


def test_the_page_quotes_the_example():
    assert_quotes("frameworks/ray.md", "ray_train.py")
