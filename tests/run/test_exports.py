"""Exports of a run: of the step that is meant, which stays until they have ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import dcp_objstore as dos
from dcp_objstore.convert import export
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    ConfigError,
    InputError,
    StoreUnavailableError,
)
from dcp_objstore.run import housekeeping
from tests.support.ranks import run_ranks


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step)), "step": step}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "run").as_uri()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "model"


def exported(out: Path) -> int:
    """Of which step the weights are."""
    (path,) = out.iterdir()
    (value,) = set(load_file(path)["w"].tolist())
    return int(value)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Exports wait before their first byte: set when one does, and to be set for it to go on."""
    reached, go_on = threading.Event(), threading.Event()
    write = export._Export._write

    def wait(self: Any, file: Any) -> int:
        reached.set()
        assert go_on.wait(120)
        return write(self, file)

    monkeypatch.setattr(export._Export, "_write", wait)
    yield reached, go_on
    go_on.set()


def test_a_step_is_exported_or_the_last_one_which_is_saved_first(url: str, tmp_path: Path) -> None:
    with dos.CheckpointManager(url, save_every=2) as run:
        for step in range(1, 6):
            run.step(step, state(step))
        assert run.export(2, tmp_path / "2", "w").url == f"{url}/step-2"
        assert 5 not in run.steps()
        run.export(None, tmp_path / "last", "w")
        assert run.steps() == (2, 4, 5)
        run.export(None, tmp_path / "again", "w", rename=[("^w", "v.w")])
    assert (exported(tmp_path / "2"), exported(tmp_path / "last")) == (2, 5)
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == {"v.w"}
    # One that only looks, one that has resumed, and one whose last step is not to be saved.
    with dos.CheckpointManager(url, claim_run=False) as run:
        run.export(None, tmp_path / "looked", "w")
    with dos.CheckpointManager(url, save_last=False) as run:
        run.load(state(0), 4)
        run.step(5, state(6))
        run.export(None, tmp_path / "resumed", "w")
    with dos.CheckpointManager(url) as run:
        run.load(state(0), 4)
        assert run.step(4, state(9)) is False
        run.export(None, tmp_path / "known", "w")
    assert [exported(tmp_path / name) for name in ("looked", "resumed", "known")] == [5, 4, 4]
    assert dos.CheckpointManager(url, claim_run=False).steps() == (2, 4, 5)


def test_what_cannot_be_exported_is_refused(url: str, out: Path) -> None:
    with dos.CheckpointManager(url) as run:
        with pytest.raises(CheckpointNotFoundError, match="no step"):
            run.export(None, out)
        with pytest.raises(ConfigError, match="whole number"):
            run.export(-1, out)
        with pytest.raises(CheckpointNotFoundError):
            run.export(7, out)
        run.save(1, state(1))
        for export in (run.export, run.async_export):
            for name, advice in (("storage_options", "out_storage_options"), ("process_group", "")):
                with pytest.raises(ConfigError, match=f"no {name}=.*{advice}"):
                    export(1, out, **{name: None})
    assert not out.exists()


def test_a_step_is_not_deleted_while_it_is_exported(
    url: str, out: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held
    keep: dict[str, Any] = {"keep": dos.KeepLatest(1), "remove_objects": True}
    with dos.CheckpointManager(url, **keep) as run:
        run.save(1, state(1))
        pending = run.async_export(1, out, "w")
        assert reached.wait(120)
        for step in (2, 3):
            run.save(step, state(step))
        run._saves.end()  # type: ignore[union-attr]  # deletions, too
        assert run.steps() == (1, 3)
        assert not pending.done()
        go_on.set()
        assert pending.result(120).tensors == 1
        run.save(4, state(4))
    assert exported(out) == 1
    assert dos.CheckpointManager(url, claim_run=False).steps() == (4,)


def test_an_export_of_a_step_that_is_being_deleted_waits_and_finds_none(
    url: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, delete = threading.Event(), threading.Event(), housekeeping.delete_step

    def later(*args: Any, **settings: Any) -> Any:
        began.set()
        assert go_on.wait(120)
        return delete(*args, **settings)

    monkeypatch.setattr(housekeeping, "delete_step", later)
    with dos.CheckpointManager(url, keep=dos.KeepLatest(1)) as run:
        run.save(1, state(1))
        run.save(2, state(2))
        assert began.wait(120)
        threading.Timer(0.1, go_on.set).start()
        with pytest.raises(CheckpointNotFoundError):
            run.export(1, out, "w")
    assert not out.exists()


def test_the_end_waits_for_an_export_of_the_last_step_in_the_background(
    url: str, out: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held
    with dos.CheckpointManager(url) as run:
        run.step(1, state(1))
        pending = run.async_export(None, out, "w")
        threading.Thread(target=lambda: (reached.wait(120), go_on.set())).start()
        assert not pending.cancel()
    assert pending.done()
    assert exported(out) == 1


def test_a_failed_export_is_raised_at_the_end_but_not_over_the_error_of_the_body(
    url: str, out: Path
) -> None:
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(InputError, match="exists"), dos.CheckpointManager(url) as run:
        run.save(1, state(1))
        run.async_export(1, out, "w")
        run.step(2, state(2))
    with (
        pytest.raises(InputError, match="exists"),
        dos.CheckpointManager(url, claim_run=False) as run,
    ):
        run.async_export(1, out, "w")
        run.async_export(2, f"{out}-2", "w")
    assert not Path(f"{out}-2").exists()
    with pytest.raises(ZeroDivisionError) as caught, dos.CheckpointManager(url) as run:
        run.async_export(1, out, "w")
        raise ZeroDivisionError
    assert "exists" in caught.value.__notes__[0]
    assert (out / "model.safetensors").read_bytes() == b"mine"
    assert dos.CheckpointManager(url, claim_run=False).steps() == (1, 2)


def test_a_step_whose_save_fails_is_not_exported(
    url: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("gone")

    with (
        pytest.raises(StoreUnavailableError) as caught,
        dos.CheckpointManager(url) as run,
    ):
        run.step(1, state(1))
        with monkeypatch.context() as patched:
            patched.setattr("dcp_objstore.write.async_save.run_save", fail)
            pending = run.async_export(None, out, "w")
            assert "not saved" in str(pending.exception(120))
    assert "not saved" in caught.value.__notes__[0]
    assert not out.exists()


def train_and_export(rank: int, world: int, url: str, root: str) -> Any:
    with dos.CheckpointManager(url, save_every=2) as run:
        pending = None
        for step in range(1, 8):
            dist.all_reduce(torch.ones(1))
            run.step(step, state(step))
            if step in (3, 6):
                pending = run.async_export(None, f"{root}/{step}", "w", max_shard_size_bytes=1)
        assert pending is not None
        report = run.export(4, f"{root}/4", "w")
    return pending.result().files, report.files


def test_ranks_export_in_the_background_while_they_train_and_save(tmp_path: Path) -> None:
    url = (tmp_path / "run").as_uri()
    first, second = run_ranks(2, train_and_export, url, str(tmp_path))
    assert first == second
    assert first[0] == (f"{tmp_path}/6/model.safetensors",)
    assert (exported(tmp_path / "3"), exported(tmp_path / "6")) == (3, 6)
