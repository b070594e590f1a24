"""`verify_run` and quick verification: all steps, the newest whole one, which elements are lost."""

from __future__ import annotations

import math
import secrets
import shutil
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.checkpoint.read import open_committed
from dcp_objstore.config import MIB
from dcp_objstore.errors import CheckpointNotFoundError, ConfigError
from dcp_objstore.inspect import verify as verify_module
from dcp_objstore.inspect.verify import _elements
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url
from tests.support.servers import Bucket
from tests.support.states import seeded


def save_steps(bucket: Bucket, *steps: int) -> None:
    for step in steps:
        state = {"w": seeded("w", (3000, 700)), "step": step}
        url = bucket.at(f"run/step-{step}")
        dos.save(state, url, storage_options=bucket.storage_options, progress=False)


def object_of(bucket: Bucket, step: int) -> str:
    (name,) = (key for key in bucket.keys(f"run/step-{step}") if key.endswith(".distcp"))
    return f"run/step-{step}/{name}"


@pytest.mark.backends("seaweed", "file")
def test_every_damaged_step_is_reported_and_the_first_whole_one_is_the_newest(bucket, requests):
    save_steps(bucket, 8, 9, 10, 11, 12, 13)
    url, options = bucket.at("run"), bucket.storage_options
    bucket.put("run/step-13/_COMMIT", b"{}")
    (index,) = (key for key in bucket.keys("run/step-12") if key.startswith("index."))
    bucket.flip_byte(f"run/step-12/{index}", 30)
    body = bucket.get(object_of(bucket, 11))
    row = seeded("w", (3000, 700)).numpy()[2000].tobytes()
    bucket.flip_byte(object_of(bucket, 11), body.index(row))
    bucket.delete(object_of(bucket, 9))

    reports = {
        one.url.rpartition("/")[2]: one
        for one in dos.verify_run(url, storage_options=options, progress=False)
    }
    assert list(reports) == [f"step-{n}" for n in (13, 12, 11, 10, 9, 8)]
    damaged = {
        name: [(one.what, one.key, one.block, one.elements) for one in report.damaged]
        for name, report in reports.items()
        if not report.ok
    }
    assert damaged == {
        "step-13": [("unreadable", "", -1, ())],
        "step-12": [("unreadable", "", -1, ())],
        "step-11": [("block", "w", 1, ("w[1497:2996, 0:700]",))],
        "step-9": [("missing", "", -1, ("w[0:3000, 0:700]", "step"))],
    }
    assert reports["step-13"].damaged[0].object_key == MARKER_KEY
    assert reports["step-12"].damaged[0].object_key == index
    assert all(reports[name].blocks == 4 for name in ("step-11", "step-10", "step-8"))

    one_by_one = dos.verify_run(url, storage_options=options, progress=False)
    requests.clear()
    (newest,) = islice((one for one in one_by_one if one.ok), 1)
    assert newest.url == bucket.at("run/step-10")
    names = {request.key.rpartition("/")[2] for request in requests if request.verb == "open_range"}
    # Older steps were not read.
    assert names == {object_of(bucket, step).rpartition("/")[2] for step in (11, 10)}


@pytest.mark.backends("seaweed")
def test_a_quick_verification_reads_no_tensor_and_finds_what_is_missing_or_cut(bucket, requests):
    save_steps(bucket, 1, 2, 3, 4)
    bucket.delete(object_of(bucket, 2))
    whole = bucket.get(object_of(bucket, 3))
    bucket.put(object_of(bucket, 3), whole[: 5 * MIB])
    bucket.flip_byte(object_of(bucket, 4), 2 * MIB)  # a size does not show that
    requests.clear()
    url, options = bucket.at("run"), bucket.storage_options
    reports = list(dos.verify_run(url, quick=True, storage_options=options))
    assert "open_range" not in {request.verb for request in requests}
    found = [[(one.what, one.elements) for one in report.damaged] for report in reports]
    assert found == [
        [],
        [("block", ("w[1497:2996, 0:700]",)), ("block", ("w[2995:3000, 0:700]",)), ("size", ())],
        [("missing", ("w[0:3000, 0:700]", "step"))],
        [],
    ]
    ckpt = dos.open(bucket.at("run/step-1"), storage_options=options)
    report = ckpt.verify(quick=True)
    assert (report.ok, report.quick, report.blocks, report.total_bytes) == (True, True, 0, 0)


def test_each_step_is_verified_with_the_settings_of_the_call(tmp_path, monkeypatch):
    url, config = (tmp_path / "run").as_uri(), dos.TransferConfig(request_size_bytes=8 * MIB)
    dos.save({"w": torch.ones(3)}, f"{url}/step-1", progress=False)
    calls = []
    monkeypatch.setattr(verify_module, "verify_at", lambda *args, **how: calls.append((args, how)))
    for how in ({"quick": True, "deep": False}, {"quick": False, "deep": True}):
        settings: dict[str, Any] = {"on_event": print, "trace": "trace.json", "progress": False}
        next(dos.verify_run(url, config=config, **how, **settings))
        ((spec, events), settings_of_step) = calls.pop()
        assert (spec.url, spec.config) == (f"{url}/step-1", config)
        assert (events.on_event, str(events.trace)) == (print, "trace.json")
        assert settings_of_step == {**how, "progress": False}
    next(dos.verify_run(url))
    assert calls.pop()[1] == {"quick": False, "deep": False, "progress": True}


def test_wrong_calls_say_what_is_wrong(tmp_path):
    url = (tmp_path / "run").as_uri()
    dos.save({"w": torch.ones(3)}, f"{url}/step-1", progress=False)
    for verify in (dos.open(f"{url}/step-1").verify, lambda **how: dos.verify_run(url, **how)):
        with pytest.raises(ConfigError, match="either quick or deep"):
            verify(quick=True, deep=True)
    with pytest.raises(CheckpointNotFoundError, match="no committed step"):
        dos.verify_run(f"{url}/step-1")


def test_a_step_that_is_deleted_meanwhile_is_left_out(tmp_path):
    url = (tmp_path / "run").as_uri()
    for step in (1, 2, 3, 4):
        dos.save({"w": torch.ones(3)}, f"{url}/step-{step}", progress=False)
    reports = dos.verify_run(url)
    assert next(reports).url == f"{url}/step-4"
    dos.delete(f"{url}/step-3")
    shutil.rmtree(tmp_path / "run" / "step-2")
    assert [one.url for one in reports] == [f"{url}/step-1"]


@pytest.mark.parametrize("shape", [(3_000_001,), (3000, 1001), (3, 700, 1500), (2, 1, 3, 500_001)])
def test_the_named_elements_are_the_smallest_box_around_a_block(shape):
    url = f"memory://verify/{secrets.token_hex(4)}"
    dos.save({"w": torch.zeros(shape, dtype=torch.int16)}, url, progress=False)
    index = ix.decode(open_committed(open_store(url))[1])
    places = np.arange(math.prod(shape))
    for block in range(-(-2 * len(places) // (4 * MIB))):
        held = np.unravel_index(places[block * 2 * MIB : (block + 1) * 2 * MIB], shape)
        box = ", ".join(f"{at.min()}:{at.max() + 1}" for at in held)
        assert _elements(index, "w", 0, block) == f"w[{box}]"


def test_of_a_scalar_the_key_alone_is_named():
    dos.save({"w": torch.tensor(1.0)}, url := memory_url(), progress=False)
    assert _elements(ix.decode(open_committed(open_store(url))[1]), "w", 0) == "w"
