"""The writer's own edges: its settings, its checks before a save, and calls in the wrong place."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.errors import (
    ConfigError,
    DcpObjstoreError,
    InputError,
    InvalidUrlError,
    UnsupportedError,
)
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.events import Failed, NotCopied
from dcp_objstore.write import writer as writer_module
from dcp_objstore.write.api import run_save
from tests.support.checkpoints import cause, memory_url
from tests.support.listening import Heard, of
from tests.support.ranks import run_ranks

Writer = dos.ObjectStoreWriter


def save(writer: Writer, url: str | None = None) -> Any:
    state = {"t": torch.ones(3)}
    return dcp.save(state, storage_writer=writer, checkpoint_id=url, no_dist=True)


# Settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy])
def test_a_copied_writer_has_every_setting_and_has_not_saved_yet(again, tmp_path):
    url = (tmp_path / "run/step-1").as_uri()
    settings: dict[str, Any] = {
        "overwrite": True,
        "progress": False,
        "allow_unfenced": True,
        "user_metadata": {"loss": 0.5},
        "stock_metadata": False,
        "claim": dos.claim_run((tmp_path / "run").as_uri()),
        "base": "latest",
        "on_busy": "raise",
        "local": str(tmp_path / "local"),
        "config": dos.TransferConfig(part_size_bytes=6 * 2**20),
    }
    writer = Writer(url, **settings)
    save(writer)
    assert writer.last_save is not None
    assert writer.save_id is not None
    made = again(writer)
    assert (made.last_save, made.save_id, made.checkpoint_id) == (None, None, url)
    assert vars(made).keys() == vars(writer).keys()
    assert pickle.dumps(again(made)) == pickle.dumps(again(again(Writer(url, **settings))))
    save(made)
    assert dos.open(url).user_metadata == {"loss": 0.5}
    assert not (tmp_path / "run/step-1/.metadata").exists()


def test_a_new_writer_has_saved_nothing_and_each_save_has_an_id_of_its_own():
    writer = Writer(progress=False)
    assert (writer.last_save, writer.save_id, writer.checkpoint_id) == (None, None, None)
    ids = []
    for url in (memory_url(), memory_url()):
        meta = save(writer, url).storage_meta
        assert (meta.checkpoint_id, meta.save_id) == (url, writer.save_id)
        assert writer.last_save is not None
        assert writer.last_save.url == writer.checkpoint_id == url
        ids.append(writer.save_id)
    assert len({*ids, None}) == 3


@pytest.mark.parametrize(
    ("checkpoint_id", "fits"),
    [("s3://bucket/run", True), ("memory://x/y", True), ("/tmp/x", False), (Path("/tmp"), False)],
)
def test_a_writer_says_which_checkpoints_it_can_save_to(checkpoint_id, fits):
    assert Writer.validate_checkpoint_id(checkpoint_id) is fits


def test_the_marker_has_the_users_metadata_and_the_dict_stays_as_it_was():
    class Partly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("mask", torch.ones(5), persistent=False)

    given = {"step": 7}
    for state in ({"t": torch.ones(2)}, {"model": Partly()}):
        dos.save(state, url := memory_url(), user_metadata=given, progress=False)
        assert given == {"step": 7}
        assert dos.open(url).user_metadata["step"] == 7


# Checks before a save -----------------------------------------------------------------------------


def test_what_cannot_be_for_the_url_is_refused_when_the_url_is_known(tmp_path):
    claim = dos.claim_run(tmp_path.as_uri())
    elsewhere = memory_url()
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"claim": claim}, InputError),
        ({"base": "gs://b/x"}, ConfigError),
    ]
    for settings, kind in refused:
        with pytest.raises(kind):
            Writer(elsewhere, **settings)
        late = Writer(progress=False, **settings)
        with pytest.raises(dcp.api.CheckpointException) as caught:
            save(late, elsewhere)
        assert isinstance(cause(caught.value), kind)
        with pytest.raises(dos.errors.CheckpointNotFoundError):
            dos.open(elsewhere)
    with pytest.raises(InvalidUrlError):
        Writer(elsewhere, base="newest")


def test_a_save_in_which_each_rank_would_write_its_own_checkpoint_is_refused():
    writer = Writer(url := memory_url())
    with pytest.raises(UnsupportedError, match="use_collectives") as caught:
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    assert (caught.value.url, caught.value.rank) == (url, 0)


@pytest.mark.parametrize("coordinates", [False, True])
def test_every_rank_opens_the_store_as_a_save_begins_and_one_shows_it(
    coordinates, through, monkeypatch
):
    opened: list[Any] = []
    shown: list[dict[str, Any]] = []
    through(lambda store: opened.append(store) or store)  # type: ignore[func-returns-value]
    monkeypatch.setattr(Channel, "show", lambda self, **what: shown.append(what))
    for progress in (True, False):
        opened.clear()
        writer = Writer(memory_url(), progress=progress)
        writer.set_up_storage_writer(coordinates, rank=int(not coordinates))
        assert opened, "wrong credentials are known before anything is planned"
    assert shown == [
        {"bar": coordinates, "summary": coordinates},
        {"bar": False, "summary": coordinates},
    ]


def test_an_error_has_the_rank_and_the_url_of_the_save_that_it_ends():
    writer = Writer(url := memory_url())
    plan = SavePlan(create_default_local_save_plan({"t": torch.ones(2).to_sparse()}, True).items)
    begin = writer.set_up_storage_writer
    for begun, rank in ((None, None), ({"rank": 3}, 3), ({}, 0)):
        if begun is not None:
            begin(True, **begun)
        with pytest.raises(UnsupportedError, match="sparse") as caught:
            writer.prepare_local_plan(plan)
        assert (caught.value.rank, caught.value.url, caught.value.key) == (rank, url, "t")


def test_calls_of_a_save_that_this_thread_has_not_begun_are_refused_with_the_url():
    writer = Writer(url := memory_url())
    planner, metadata = SimpleNamespace(), SimpleNamespace()
    calls: list[Callable[[], Any]] = [
        lambda: writer.prepare_global_plan([]),
        lambda: writer.write_data(SavePlan([]), planner),  # type: ignore[arg-type]
        lambda: writer.finish(metadata, []),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="no save was begun") as caught:
            call()
        assert caught.value.url == url
    begun = threading.Thread(target=writer.set_up_storage_writer, args=(True,))
    begun.start()
    begun.join(30)
    with pytest.raises(UnsupportedError, match="in this thread"):
        calls[0]()


# Failures -----------------------------------------------------------------------------------------


class NoState:
    def state_dict(self) -> Any:
        raise ValueError("no state")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("where", ["its state", "its plan", "its upload"])
def test_a_save_that_fails_before_or_after_it_was_begun_is_told_of_once(where, monkeypatch):
    events = Heard()
    url = memory_url()
    state: dict[str, Any] = {"t": torch.ones(1)}
    if where == "its upload":
        monkeypatch.setattr(writer_module, "upload_items", None)
    elif where == "its plan":
        state["sparse"] = torch.ones(1).to_sparse()
    else:
        state["a"] = NoState()
    with pytest.raises(DcpObjstoreError) as caught:
        dos.save(state, url, on_event=events, progress=False)
    (failed,) = of(Failed, events)
    error = type(caught.value).__name__
    assert (failed.operation, failed.url, failed.error) == ("save", url, error)
    assert events[-1] is failed
    store = dos.stores.open_store(url)
    assert list(store.list()) == [], "no beacon either"


# A base -------------------------------------------------------------------------------------------


def test_each_save_of_a_writer_looks_for_the_latest_base_itself(tmp_path):
    root = tmp_path.as_uri()
    state = {"t": torch.arange(2.0**21)}
    writer = Writer(f"{root}/step-1", base="latest", progress=False)
    run_save(writer, dict(state), None)
    state["t"] = state["t"] + 1
    copied = []
    for step in (2, 3):
        dcp.save(state, storage_writer=writer, checkpoint_id=f"{root}/step-{step}", no_dist=True)
        assert writer.last_save is not None
        copied.append(writer.last_save.copied_bytes > 2**23)
    assert copied == [False, True]


def test_the_base_is_read_once_and_for_all_ranks_before_their_save_begins(tmp_path, monkeypatch):
    steps: list[str] = []
    really_open, begin = writer_module.open_base, Writer.set_up_storage_writer

    def opening(base: str, spec: Any) -> Any:
        steps.append(base)
        return really_open(base, spec)

    def beginning(writer: Writer, *args: Any, **settings: Any) -> None:
        steps.append("begun")
        begin(writer, *args, **settings)

    monkeypatch.setattr(writer_module, "open_base", opening)
    monkeypatch.setattr(Writer, "set_up_storage_writer", beginning)
    dos.save({"t": torch.ones(3)}, (tmp_path / "step-1").as_uri(), base="latest", progress=False)
    assert steps == ["latest", "begun"]


def saves_without_a_base(rank: int, world: int, url: str) -> list[str]:
    heard = Heard()
    dos.save({"t": torch.ones(1)}, url, base=f"{url}-0", on_event=heard, progress=False)
    return [one.reason for one in of(NotCopied, heard) if not one.not_copied_bytes]


def test_only_the_coordinator_tells_why_there_is_no_base(tmp_path):
    (why,), others = run_ranks(2, saves_without_a_base, tmp_path.as_uri())
    assert "cannot be read" in why
    assert others == []


# dcp.async_save -----------------------------------------------------------------------------------


def async_saves_in_groups(rank: int, world: int, root: str) -> list[int]:
    """How many warnings each way of calling it gives."""
    own, counts = dist.new_group(backend="gloo"), []
    torchs_own = inspect.unwrap(dcp.async_save)  # an earlier test may have called `install` here
    given: list[dict[str, Any]] = [{}, {"process_group": own}, {"no_dist": True}]
    for number, settings in enumerate(given):
        place = f"{root}/{number}-{rank * ('no_dist' in settings)}"
        writer = Writer(place, progress=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saving: Any = torchs_own({"w": torch.ones(3)}, storage_writer=writer, **settings)
            saving.result()
        counts.append(sum("process_group=" in str(one.message) for one in caught))
        dist.barrier()
    return counts


def test_an_async_save_in_the_default_group_is_warned_of_and_no_other(tmp_path):
    assert run_ranks(2, async_saves_in_groups, tmp_path.as_uri()) == [[1, 0, 0]] * 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*process_group=")
        writer = Writer(memory_url(), progress=False)
        saving: Any = dcp.async_save({"w": torch.ones(3)}, storage_writer=writer)
        saving.result()


def test_making_a_writer_leaves_torch_as_it_is():
    torchs = torch_private.ThreadExecutor, state_dict_saver
    before = [dict(vars(one)) for one in torchs]
    Writer(memory_url())
    assert [dict(vars(one)) for one in torchs] == before
