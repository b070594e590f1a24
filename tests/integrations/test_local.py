"""`local=` reaches the saves and loads of each integration: with copies, a run needs no objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.errors import ConfigError
from dcp_objstore.integrations.hf import _TrainerRun
from dcp_objstore.integrations.lightning import _ObjectStore
from dcp_objstore.run.housekeeping import Deletions
from tests.support.left_copies import lose_objects

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
TRAINER = SimpleNamespace(args=SimpleNamespace(save_total_limit=None))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "node").mkdir()
    yield tmp_path / "node"
    dos.uninstall()


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300,), value)}


def test_install_hands_it_to_writer_and_reader(tmp_path, node):
    dos.install(schemes=("file",), local=node)
    url, found = f"file://{tmp_path}/run/step-1", _state(0)
    dcp.save(_state(1), checkpoint_id=url)
    lose_objects(tmp_path / "run")
    dcp.load(found, checkpoint_id=url)
    assert torch.equal(found["w"], _state(1)["w"])
    with pytest.raises(ConfigError, match="local"):
        dos.install(local="s3://bucket/run")


@pytest.mark.parametrize("background", [False, True])
def test_lightning_saves_and_loads_with_it(tmp_path, node, background):
    store = _ObjectStore(
        background=background,
        deletions=Deletions(0),
        sweep=False,
        trust_pickle=False,
        access={"storage_options": None, "config": None},
        on_event=None,
        local=dos.Local(str(node)),
    )
    url, found = f"file://{tmp_path}/run/last.ckpt", _state(0)
    store.save(url, _state(1), {"epoch": 3})
    store.finish_pending()
    lose_objects(tmp_path / "run")
    assert store.load(url, found, strict=True, weights_only=None) == {"epoch": 3}
    assert torch.equal(found["w"], _state(1)["w"])


def test_a_trainer_of_hugging_face_loads_with_it(tmp_path, node):
    url, found = f"file://{tmp_path}/run", _state(0)
    run = _TrainerRun(TRAINER, url, False, {"local": node})
    with run.manager as manager:
        manager.save(1, _state(1))
        lose_objects(tmp_path / "run")
        assert manager.load(_state(0)) == 1
    run._load(found, f"{url}/step-1")
    assert torch.equal(found["w"], _state(1)["w"])


def test_a_trainer_without_a_preemption_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match="preemption"):
        _TrainerRun(TRAINER, f"file://{tmp_path}/run", False, {"preemption": None})
