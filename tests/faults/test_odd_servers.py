"""Each verb over each transport on each odd server.

What is asked for happens, no upload is left, and what was saved before is as it was.

`pytest tests/faults/test_odd_servers.py -m 'campaign or not campaign'` runs the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import dcp_objstore as dos
from tests.support.campaign import cases
from tests.support.odd_servers import BEHAVIOURS, BUCKET, OddServer

TRANSPORTS = ("native", "boto3", "fsspec")
CONFIG = dos.TransferConfig(
    part_size_bytes=5 << 20, request_size_bytes=4 << 20, max_retries=2, stall_timeout_seconds=60
)
RUN = f"s3://{BUCKET}/run"
WEIGHT = torch.arange(3 << 20, dtype=torch.int32)  # three parts, and three requests


@pytest.fixture
def server() -> Iterator[OddServer]:
    with OddServer() as server:
        dos.save({"w": WEIGHT}, f"{RUN}/step-1", storage_options=server.options(), **QUIET)
        server.objects["weights/model.safetensors"] = save({"w": WEIGHT})
        yield server


QUIET = {"config": CONFIG, "progress": False}


def load(options: dict[str, object], step: int = 1) -> None:
    state = {"w": torch.zeros_like(WEIGHT)}
    dos.load(state, f"{RUN}/step-{step}", storage_options=options, **QUIET)
    assert torch.equal(state["w"], WEIGHT)


def do_save(server: OddServer, options: dict[str, object], _: Path) -> None:
    dos.save({"w": WEIGHT}, f"{RUN}/step-2", storage_options=options, **QUIET)
    load(server.options(), 2)


def do_load(_server: OddServer, options: dict[str, object], _: Path) -> None:
    load(options)


def do_weights(_server: OddServer, options: dict[str, object], _: Path) -> None:
    state = dos.read_state_dict(f"s3://{BUCKET}/weights", storage_options=options, config=CONFIG)
    assert torch.equal(state["w"], WEIGHT)


def do_list(_server: OddServer, options: dict[str, object], _: Path) -> None:
    found = dos.steps(RUN, storage_options=options)
    assert [one.name for one in found] == ["step-1"]


def do_resume(_server: OddServer, options: dict[str, object], _: Path) -> None:
    state = {"w": torch.zeros_like(WEIGHT)}
    with dos.CheckpointManager(RUN, save_every=100, storage_options=options, config=CONFIG) as run:
        assert run.load(state) == 1
    assert torch.equal(state["w"], WEIGHT)


def do_delete(server: OddServer, options: dict[str, object], _: Path) -> None:
    dos.save({"n": torch.ones(3)}, f"{RUN}/step-2", storage_options=server.options(), **QUIET)
    dos.delete(f"{RUN}/step-2", grace_seconds=0, allow_newest=True, storage_options=options)
    assert not [key for key in server.objects if key.startswith("run/step-2/__")]


def do_export(_server: OddServer, options: dict[str, object], folder: Path) -> None:
    dos.export_checkpoint(f"{RUN}/step-1", folder / "out", storage_options=options, **QUIET)
    assert torch.equal(load_file(folder / "out" / "model.safetensors")["w"], WEIGHT)


def do_export_there(server: OddServer, options: dict[str, object], _: Path) -> None:
    out = f"s3://{BUCKET}/exported"
    dos.export_checkpoint(
        f"{RUN}/step-1", out, storage_options=options, out_storage_options=options, **QUIET
    )
    state = dos.read_state_dict(out, storage_options=server.options(), config=CONFIG)
    assert torch.equal(state["w"], WEIGHT)


VERBS: dict[str, Callable[[OddServer, dict[str, object], Path], None]] = {
    "save": do_save,
    "load": do_load,
    "load weights": do_weights,
    "list": do_list,
    "resume": do_resume,
    "delete": do_delete,
    "export": do_export,
    "export there": do_export_there,
}
TABLE = [(b, t, v) for b in BEHAVIOURS for t in TRANSPORTS for v in VERBS]
DEFAULT = [
    ("weak ETags", "native", "delete"),
    ("chunked answers", "fsspec", "resume"),
    ("answers without a length", "native", "export"),
    ("a lost Complete", "native", "save"),
]


@pytest.mark.parametrize(("behaviour", "transport", "verb"), cases(TABLE, default=DEFAULT))
def test_a_verb_does_what_is_asked_for_on_an_odd_server(
    server, tmp_path, behaviour, transport, verb
):
    server.behaviour = BEHAVIOURS[behaviour]
    VERBS[verb](server, server.options(transport), tmp_path)
    assert not server.uploads
    server.behaviour = BEHAVIOURS["as S3"]
    load(server.options())
