"""Consoles, and other tools, make an empty object `run/` of a folder: a listing leaves it out."""

from __future__ import annotations

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.stores import open_store


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_a_run_in_a_folder_that_a_console_has_made_is_like_any_other(bucket, transport):
    options = {**bucket.storage_options, "transport": transport}
    url = bucket.at("run")
    bucket.put("run/", b"")
    store = open_store(url, options)
    assert list(store.list()) == []
    with dos.CheckpointManager(url, storage_options=options) as run:
        assert run.load({"w": torch.zeros(2)}) is None
        run.save(1, {"w": torch.ones(2)})
    bucket.put("run/step-1/", b"")
    assert [step.name for step in dos.steps(url, storage_options=options)] == ["step-1"]
    assert all(meta.key.startswith("step-1/") for meta in store.list("step-1/"))
    dos.sweep(url, storage_options=options)
    assert {"run/", "run/step-1/"} <= {*bucket.keys()}
