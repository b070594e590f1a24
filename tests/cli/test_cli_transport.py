"""`dcp-objstore --transport boto3 …`: an option before the command holds for what it opens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import boto3
import pytest
import torch
from moto import mock_aws
from typer.testing import CliRunner

import dcp_objstore as dos
from dcp_objstore.cli.app import app
from dcp_objstore.cli.options import chosen


@pytest.fixture
def step() -> Iterator[str]:
    """A checkpoint where only boto3 sees it."""
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="mocked-cli")
        url = "s3://mocked-cli/run/step-1"
        options = {"transport": "boto3"}
        dos.save({"w": torch.ones(2)}, url, storage_options=options, progress=False)
        yield url


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_command_uses_the_transport_that_was_chosen(step):
    told = json.loads(run("--transport", "boto3", "ls", step, "--json"))
    assert told["state"] == "committed"
    assert json.loads(run("--transport", "boto3", "pin", step, "paper", "--json"))["pins"]
    assert not json.loads(run("--transport", "boto3", "unpin", step, "paper", "--json"))["pins"]
    run("--transport", "boto3", "repair", step)
    told = run("--transport", "boto3", "rm", step, "--allow-newest")
    assert f"dcp-objstore --transport boto3 rm {step} --allow-newest --yes" in told
    run("--transport", "boto3", "rm", step, "--allow-newest", "--yes")
    assert json.loads(run("--transport", "boto3", "sweep", step, "--json"))["dry_run"]


def test_an_unknown_transport_is_an_error_of_the_command_line(step):
    done = CliRunner().invoke(app, ["--transport", "boto", "ls", step])
    assert done.exit_code != 0
    assert "native, boto3, fsspec" in done.output


def test_nothing_is_left_for_the_next_command(step):
    run("--transport", "boto3", "ls", step)
    CliRunner().invoke(app, ["repair", "memory://nowhere"])
    assert chosen() == {}
