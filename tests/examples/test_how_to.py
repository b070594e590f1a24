"""docs/how-to/: each program does what its page says, by the page's commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.campaign import cases
from tests.support.command_line import environment
from tests.support.programs import run_in_forks

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
SAYS = {
    "ddp-checkpoint-to-s3": ["saved step 10", "saved step 20"],
    "fsdp2-on-fewer-gpus": ["the weights sum up to", "fetched"],
    "async-checkpoint-to-s3": ["committed s3://bucket/background/step-20"],
    "last-checkpoint-is-missing": ["saved [10, 15]"],
}


def test_each_page_with_a_program_is_tested():
    programs = {page.stem for page in PAGES.glob("*.md") if "sys.argv" in page.read_text()}
    assert programs == set(SAYS)


@pytest.mark.parametrize(
    "page", cases(SAYS, default=["ddp-checkpoint-to-s3", "last-checkpoint-is-missing"])
)
def test_the_program_of_a_page_does_what_the_page_says(page, seaweed, tmp_path):
    text = (PAGES / f"{page}.md").read_text()
    program, commands = (
        re.search(rf"^```{language}\n(.*?)^```", text, re.M | re.S) for language in ("python", "sh")
    )
    assert program and commands
    (name,) = re.findall(r"Save this as `(\w+\.py)`", text)
    (tmp_path / name).write_text(program[1])
    seaweed.create_bucket("bucket")
    env = environment(seaweed.storage_options) | {"OMP_NUM_THREADS": "1"}
    printed = [
        run_in_forks(shlex.split(line), tmp_path, env, True) for line in commands[1].splitlines()
    ]
    for output, says in zip(printed, SAYS[page], strict=True):
        assert says in output
    if page == "fsdp2-on-fewer-gpus":
        totals = re.findall(r"sum up to (\S+)", "".join(printed))
        assert len(totals) == 6 and len(set(totals)) == 1
