"""docs/how-to/: each program does what its page says, by the page's commands, on `serve`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.campaign import cases
from tests.support.programs import run_in_forks

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
SAYS = {
    "ddp-checkpoint-to-s3": ["saved step 10", "saved step 20"],
    "fsdp2-on-fewer-gpus": ["the weights sum up to", "fetched"],
    "async-checkpoint-to-s3": ["committed s3://bucket/background/step-20"],
    "last-checkpoint-is-missing": ["saved [10, 15]"],
}


@pytest.fixture(scope="module")
def exports():
    """What `dcp-objstore serve` tells a reader to export, while it runs."""
    words = [sys.executable, "-m", "dcp_objstore", "serve"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        server.stdout.readline()  # says what it is
        lines = [server.stdout.readline().split()[1] for _ in range(3)]
        yield dict(line.split("=", 1) for line in lines)
        server.terminate()


def test_each_page_with_a_program_is_tested():
    programs = {page.stem for page in PAGES.glob("*.md") if "sys.argv" in page.read_text()}
    assert programs == set(SAYS)


@pytest.mark.parametrize(
    "page", cases(SAYS, default=["ddp-checkpoint-to-s3", "last-checkpoint-is-missing"])
)
def test_the_program_of_a_page_does_what_the_page_says(page, exports, tmp_path):
    text = (PAGES / f"{page}.md").read_text()
    program, commands = (
        re.search(rf"^```{language}\n(.*?)^```", text, re.M | re.S) for language in ("python", "sh")
    )
    assert program and commands
    (name,) = re.findall(r"Save this as `(\w+\.py)`", text)
    (tmp_path / name).write_text(program[1])
    env = {**exports, "OMP_NUM_THREADS": "1"}
    printed = [
        run_in_forks(shlex.split(line), tmp_path, env, True) for line in commands[1].splitlines()
    ]
    for output, says in zip(printed, SAYS[page], strict=True):
        assert says in output
    if page == "fsdp2-on-fewer-gpus":
        totals = re.findall(r"sum up to (\S+)", "".join(printed))
        assert len(totals) == 6 and len(set(totals)) == 1
