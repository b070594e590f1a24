"""The values of a step in its marker, and the numbers of a run's steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import ConfigError
from dcp_objstore.run.steps import described_by, step_number, step_numbers, step_url
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import memory_url


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.5, 0.5),
        (3, 3),
        ("good", "good"),
        (torch.tensor(0.25), 0.25),
        (np.float32(0.25), 0.25),
        (float("nan"), "nan"),
        (torch.tensor(float("-inf")), "-inf"),
    ],
)
def test_a_metric_is_stored_as_json_has_it(value, stored):
    assert described_by(7, {}, None, {"loss": value}) == {"step": 7, "metrics": {"loss": stored}}


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ([("loss", 1)], "mapping"),
        ({"loss": torch.ones(2)}, "'loss' is not a single number"),
        ({"loss": np.ones(2)}, "'loss' is not a single number"),
        ({"loss": object()}, "JSON"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, why):
    with pytest.raises(ConfigError, match=why):
        described_by(7, {}, None, metrics)


def test_the_values_of_a_step_come_before_those_of_the_run():
    described = described_by(7, {"model": "tiny", "lr": 1}, {"lr": 2}, None)
    assert described == {"step": 7, "model": "tiny", "lr": 2}


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_a_step_may_be_a_number_of_numpy_or_torch(step):
    with dos.CheckpointManager(url := memory_url(), save_every=1, claim_run=False) as run:
        assert run.step(step, {"w": torch.ones(1)})
    assert step_numbers(StoreSpec(url)) == (3,)
    with dos.CheckpointManager(url, claim_run=False) as run:
        assert run.load({"w": torch.zeros(1)}, step) == 3
        for wrong in (np.float64(4), np.ones(2), True):
            with pytest.raises(ConfigError, match="whole number"):
                run.save(wrong, {"w": torch.ones(1)})  # type: ignore[arg-type]


def test_names_of_steps_have_one_form():
    names = ["step-0", "step-10", "step-01", "step-", "step--1", "xstep-1", "step-1x"]
    assert [step_number(name) for name in names] == [0, 10, *[None] * 5]
    assert step_url("s3://bucket/run/", 7) == step_url("s3://bucket/run", 7)


def test_the_newest_numbers_are_found_among_other_names():
    run = memory_url()
    for name in ("step-9", "step-10", "a", "zz-1", "zz-2"):
        dos.save({"w": torch.ones(1)}, f"{run}/{name}", progress=False)
    for newest, found in ((None, (9, 10)), (1, (10,)), (2, (9, 10)), (5, (9, 10)), (9, (9, 10))):
        assert step_numbers(StoreSpec(run), newest) == found
