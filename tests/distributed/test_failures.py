"""Failures of ranks: what they leave in memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import dcp_objstore as dos
from tests.support.ranks import run_ranks


def kept_by_failed_calls(rank: int, world: int, folder: str) -> list[str]:
    """The calls that failed and after which a tensor is still in memory."""
    dos.save({"w": torch.ones(2)}, f"file://{folder}/whole", progress=False)
    calls = {
        "load of nothing": lambda state: dos.load(state, f"file://{folder}/none", progress=False),
        "load of others": lambda state: dos.load(state, f"file://{folder}/whole", progress=False),
        "save": lambda state: dos.save(state, f"file://{folder}/whole", progress=False),
    }
    kept = []
    for name, call in calls.items():
        for _ in range(2):  # the first one may import modules, which leave garbage
            state = {"w": torch.ones(3, 3)}
            tensor = weakref.ref(state["w"])
            gc.collect()
            gc.disable()
            try:
                with contextlib.suppress(
                    dos.errors.DcpObjstoreError
                ):  # pytest.raises keeps the error
                    call(state)
                    kept.append(f"{name} did not fail")
                del state
            finally:
                gc.enable()
        if tensor() is not None:
            kept.append(name)
    return kept


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="DCP of torch 2.9 keeps its own errors"
)
def test_a_failed_call_keeps_no_tensor_in_memory(tmp_path: Path) -> None:
    """On a GPU a state that waits for the cyclic garbage collector may not fit in twice."""
    assert run_ranks(2, kept_by_failed_calls, str(tmp_path / "ranks")) == [[], []]


def test_the_error_that_the_program_was_handling_keeps_its_variables(tmp_path: Path) -> None:
    """A debugger may want to show them, after a save in an `except` block that fails, too."""

    def train() -> None:
        batch = "cat"
        raise FloatingPointError(batch)

    with pytest.raises(FloatingPointError) as caught:
        try:
            train()
        except FloatingPointError:
            with contextlib.suppress(dos.errors.CheckpointNotFoundError):
                dos.load({"w": torch.ones(2)}, f"file://{tmp_path}/none", progress=False)
            raise
    assert caught.traceback[-1].frame.f_locals == {"batch": "cat"}


def save_here_load_there(rank: int, world: int, url: str, saving: int) -> str:
    state = {"w": torch.ones(2)}
    dos.save(state, url, progress=False)
    call = dos.save if rank == saving else dos.load
    with pytest.raises(dos.errors.RankFailedError) as caught:
        call(state, url, progress=False)
    return str(caught.value)


@pytest.mark.parametrize("saving", [0, 1])
def test_ranks_that_make_different_calls_are_told_before_anything_moves(
    tmp_path: Path, saving: int
) -> None:
    for text in run_ranks(2, save_here_load_there, (tmp_path / "run").as_uri(), saving):
        assert "rank 1 makes another call than rank 0" in text
