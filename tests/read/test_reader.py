"""`ObjectStoreReader`, call by call, as DCP makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
from typing import Any
from unittest.mock import Mock
from weakref import finalize

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    RankFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.observe.events import Failed, Loaded, Opened, Planned
from dcp_objstore.read import reader as module
from dcp_objstore.read.peers.exchange import PeerFailedError, Share
from dcp_objstore.read.peers.meeting import Offer, group_digest
from dcp_objstore.read.peers.plan import NEED, ExchangePlan
from tests.support.checkpoints import memory_url, without_collector
from tests.support.listening import Heard, of


@pytest.fixture
def url() -> str:
    url = memory_url()
    dos.save({"t": torch.arange(5.0), "v": "value"}, url, progress=False)
    return url


def blank() -> dict[str, Any]:
    return {"t": torch.zeros(5), "v": ""}


class Load:
    """One rank's load, up to the plan."""

    def __init__(
        self,
        reader: dos.ObjectStoreReader,
        planner: DefaultLoadPlanner | None = None,
        rank: int = 0,
    ) -> None:
        self.reader, self.planner = reader, planner or DefaultLoadPlanner()
        self.state = blank()
        reader.reset()
        metadata = reader.read_metadata()
        self.planner.set_up_planner(self.state, metadata, True)
        reader.set_up_storage_reader(metadata, True, rank=rank)
        self.plan = reader.prepare_local_plan(self.planner.create_local_plan())

    def read(self) -> None:
        (plan,) = self.reader.prepare_global_plan([self.plan])
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()


def reader_of(url: str, **settings: Any) -> dos.ObjectStoreReader:
    return dos.ObjectStoreReader(url, progress=False, **settings)


def ranks_are(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    """This process passes for the first of these ranks."""
    monkeypatch.setattr(module, "current_rank", lambda: ranks[0])
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda _: ranks)


def test_each_item_is_committed_to_the_planner_once_it_is_filled(url):
    committed: dict[str, list[float]] = {}

    class Planner(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            committed[read_item.dest_index.fqn] = tensor.tolist()

    load = Load(reader_of(url), Planner())
    load.read()
    assert committed == {"t": [0.0, 1.0, 2.0, 3.0, 4.0]}
    assert load.state["t"].tolist() == committed["t"]
    assert load.state["v"] == "value"


def test_a_planner_may_change_what_is_read_after_it_was_planned(url, monkeypatch):
    """And only then it is planned once more."""
    plan = Mock(wraps=module.plan_load)
    monkeypatch.setattr(module, "plan_load", plan)
    Load(reader_of(url)).read()
    assert plan.call_count == 1
    load = Load(reader_of(url))
    load.plan = dataclasses.replace(
        load.plan, items=[item for item in load.plan.items if item.dest_index.fqn == "v"]
    )
    load.read()
    assert plan.call_count == 3
    assert load.state["v"] == "value"
    assert not load.state["t"].any()


def test_events_and_report_say_what_was_read(url):
    heard = Heard()
    reader = reader_of(url, on_event=heard)
    assert reader.last_load is None
    Load(reader).read()
    report = reader.last_load
    assert report is not None
    value_bytes = report.needed_bytes - 20
    assert value_bytes > 0
    # They lie in one object, with less between them than is worth a request of its own.
    assert (report.objects, report.requests, report.received_bytes) == (1, 1, 0)
    assert report.needed_bytes < report.total_bytes < report.needed_bytes + MIB
    assert not report.unverified
    (opened,) = of(Opened, heard)
    (planned,) = of(Planned, heard)
    (loaded,) = of(Loaded, heard)
    assert opened.commit_id == report.commit_id == dos.open(url).commit_id
    assert (planned.items, planned.objects, planned.requests) == (2, 1, 1)
    assert planned.size_bytes == report.total_bytes
    assert (report.slow_ranges, report.local_bytes) == (0, 0)
    assert (loaded.report, loaded.seconds) == (report, report.seconds)
    reader = reader_of(url, verify=False)
    Load(reader).read()
    assert reader.last_load is not None and reader.last_load.unverified


def test_copies_of_this_node_are_read_only_where_digests_say_that_they_are_right(tmp_path):
    (tmp_path / "copies").mkdir()
    state = {"t": torch.arange(5.0), "v": "value"}
    dos.save(state, url := (tmp_path / "run/step-1").as_uri(), local=str(tmp_path / "copies"))
    for verify in (True, False):
        reader = reader_of(url, local=str(tmp_path / "copies"), verify=verify)
        load = Load(reader)
        load.read()
        assert load.state["t"].tolist() == [0, 1, 2, 3, 4]
        assert reader.last_load is not None
        assert (reader.last_load.local_bytes > 0) == verify


@pytest.mark.parametrize("how", ["replaced", "retargeted"])
def test_ranks_that_opened_different_checkpoints_are_refused(url, how):
    load = Load(reader_of(url))
    offer = load.plan.storage_data
    assert isinstance(offer, Offer)
    other: Any = {"commit_id": "other"} if how == "replaced" else {"url": memory_url()}
    plans = [load.plan, LoadPlan([], storage_data=dataclasses.replace(offer, **other))]
    with pytest.raises(CheckpointGoneError, match="different checkpoints") as caught:
        load.reader.prepare_global_plan(plans)
    assert caught.value.url == url
    # Also if some plans are a planner's own.
    with pytest.raises(CheckpointGoneError):
        load.reader.prepare_global_plan([LoadPlan([]), *plans])


def test_plans_that_a_planner_has_replaced_are_left_as_they_are(url):
    load = Load(reader_of(url))
    plans = [load.plan, LoadPlan([])]
    assert load.reader.prepare_global_plan(plans) is plans


def of_group(load: Load, rank: int) -> LoadPlan:
    """The plan of a rank that needs the whole of an object, as the other one does."""
    needs = np.array([(0, 0, MIB, 0, MIB, 0, -1)], dtype=NEED)
    offer = dataclasses.replace(
        load.plan.storage_data,
        rank=rank,
        group=group_digest(range(2)),
        needs=needs,
        memory_budget_bytes=64 * MIB,
        request_size_bytes=8 * MIB,
        verify=True,
    )
    return LoadPlan(load.plan.items, storage_data=offer)


def test_each_rank_gets_its_own_share_with_its_plan(url):
    load = Load(reader_of(url))
    plans = [of_group(load, rank) for rank in range(2)]
    first, second = load.reader.prepare_global_plan(plans)
    assert len(list(first.storage_data.plan.fetched_by(0))) == 1
    assert list(second.storage_data.plan.fetched_by(1)) == []
    assert first.items == load.plan.items
    plans[1] = LoadPlan([], storage_data=dataclasses.replace(plans[1].storage_data, verify=False))
    with pytest.raises(ConfigError) as caught:
        load.reader.prepare_global_plan(plans)
    assert (caught.value.rank, caught.value.url) == (0, url)


def test_a_plan_of_ranks_is_read_once(url, monkeypatch):
    """The others would not come to a second reading."""
    asked: list[tuple[str, int]] = []

    def arrived(meeting: str, ranks: int, *_: object) -> bool:
        asked.append((meeting, ranks))
        return False

    monkeypatch.setattr(module, "all_arrived", arrived)
    ranks_are(monkeypatch, 0, 1, 2)
    load = Load(reader_of(url))
    share = Share(ExchangePlan([]), {}, "meeting")
    plan = load.planner.finish_plan(dataclasses.replace(load.plan, storage_data=share))
    load.reader.read_data(plan, load.planner).wait()
    assert load.state["t"].tolist() == [0, 1, 2, 3, 4]
    assert asked == [("meeting", 3)]
    with pytest.raises(UnsupportedError, match="read once"):
        load.reader.read_data(plan, load.planner)
    assert asked == [("meeting", 3)]


def test_the_failure_of_another_rank_is_reported_and_left_to_that_rank(url, monkeypatch):
    heard, failure = Heard(), PeerFailedError(RankFailedError("of another", rank=7))
    monkeypatch.setattr(module, "run_load", Mock(side_effect=failure))
    load = Load(reader_of(url, on_event=heard))
    load.read()
    (failed,) = of(Failed, heard)
    assert failed.failed_rank == 7
    assert load.reader.last_load is None


def test_an_error_of_the_opening_is_raised_by_the_next_call_with_its_rank():
    reader = reader_of(url := memory_url(), on_event=(heard := Heard()))
    metadata = reader.read_metadata()
    assert metadata.state_dict_metadata == {}
    with pytest.raises(CheckpointNotFoundError) as caught:
        reader.set_up_storage_reader(metadata, False, rank=3)
    assert (caught.value.rank, caught.value.url) == (3, url)
    assert len(of(Failed, heard)) == 1
    reader.set_up_storage_reader(metadata, False, rank=3)  # it is raised once
    # A rank that goes on all the same has nothing to offer.
    plan = reader.prepare_local_plan(LoadPlan([]))
    assert plan.storage_data == Offer(url, None)


def test_whatever_goes_wrong_while_opening_is_an_error_of_ours(url, monkeypatch):
    failing = Mock(side_effect=ZeroDivisionError("a bug"))
    monkeypatch.setattr(module, "open_stored_checkpoint", failing)
    reader = reader_of(url)
    metadata = reader.read_metadata()
    with pytest.raises(RankFailedError, match="ZeroDivisionError: a bug") as caught:
        reader.set_up_storage_reader(metadata, False, rank=3)
    assert (caught.value.rank, caught.value.url) == (3, url)


def test_a_reader_is_aimed_at_other_checkpoints_one_after_the_other(url):
    reader, other = reader_of(url), memory_url()
    Load(reader).read()
    dos.save({"t": torch.ones(5), "v": "other"}, other, progress=False)
    reader.reset(other)
    assert reader.checkpoint_id == other
    load = Load(reader)
    load.read()
    assert load.state["v"] == "other"
    reader.reset()
    assert reader.checkpoint_id == other


def test_a_rank_whose_group_cannot_pass_bytes_offers_to_load_by_itself(url, monkeypatch):
    ranks_are(monkeypatch, 0, 1)
    monkeypatch.setattr(module, "exchange_group", Mock(side_effect=UnsupportedError("no gloo")))
    load = Load(reader_of(url, process_group=object()))
    assert load.plan.storage_data == Offer(url, dos.open(url).commit_id)
    load.read()
    assert load.state["v"] == "value"


@pytest.mark.parametrize("read_once", [True, False])
def test_a_rank_offers_to_load_with_those_of_its_group_if_each_byte_is_read_once(
    url, monkeypatch, read_once
):
    ranks_are(monkeypatch, 0, 1)
    offer = Load(reader_of(url, read_once=read_once)).plan.storage_data
    assert offer.group == (group_digest((0, 1)) if read_once else None)
    assert (offer.needs is not None) == read_once


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_the_lowest_rank_names_the_next_step(monkeypatch, rank):
    """It is the one that all ranks raise; so the others need not ask for it."""
    root = memory_url().rpartition("/")[0]
    with dos.CheckpointManager(root, sweep=False) as run:
        for step in (1, 2):
            run.save(step, {"t": torch.ones(5), "v": "x"})
    load = Load(reader_of(f"{root}/step-1"), rank=rank)
    gone = CheckpointGoneError("it was deleted")
    monkeypatch.setattr(module, "run_load", Mock(side_effect=gone))
    with pytest.raises(CheckpointGoneError) as caught:
        load.read()
    assert ("next step of the run is step-2" in str(caught.value)) == (rank == 0)
    assert caught.value.rank == rank


def test_errors_of_planners_are_ours_with_rank_and_url(url):
    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            raise ValueError("no such tensor")

    load = Load(reader_of(url), Planner())
    with pytest.raises(RankFailedError, match="no such tensor") as caught:
        load.read()
    assert (caught.value.rank, caught.value.url) == (0, url)


def test_a_pickled_reader_has_its_settings_and_no_load(url, tmp_path):
    settings = {"verify": False, "rename": [("^t$", "u")], "local": str(tmp_path)}
    reader = reader_of(url, process_group=threading.Lock(), **settings)  # which is not pickled
    metadata = reader.read_metadata()
    assert reader.load_id is not None
    reader.last_load = object()  # type: ignore[assignment]
    copy = pickle.loads(pickle.dumps(reader))
    assert (copy.last_load, copy.load_id) == (None, None)
    assert repr(copy) == repr(reader) == f"ObjectStoreReader({url!r})"
    assert copy.read_metadata().state_dict_metadata == metadata.state_dict_metadata
    state = {"u": torch.zeros(5)}
    dcp.load(state, storage_reader=copy, no_dist=True)
    assert copy.last_load is not None and copy.last_load.unverified


def test_an_error_of_the_opening_is_let_go_once_it_was_raised():
    class Kept:
        pass

    def fail(*_: object, **__: object) -> Any:
        error = StoreUnavailableError("down")
        error.kept = Kept()  # type: ignore[attr-defined]
        finalize(error.kept, gone.append, True)  # type: ignore[attr-defined]
        try:
            raise error
        finally:
            del error

    gone: list[bool] = []
    reader = reader_of(memory_url())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_stored_checkpoint", fail)
        metadata = reader.read_metadata()
    with without_collector():
        with contextlib.suppress(StoreUnavailableError):
            reader.set_up_storage_reader(metadata, False, rank=3)
        assert gone


@pytest.mark.parametrize(
    "settings", [{"verify": 1}, {"verify": None}, {"on_dtype": "convert"}, {"rename": "ab"}]
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        dos.ObjectStoreReader("memory://bucket/step", **settings)


def test_a_limit_is_named_in_full():
    with pytest.raises(ConfigError, match="at least 4194304,"):
        dos.TransferConfig(request_size_bytes=1)
