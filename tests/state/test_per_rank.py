"""`PerRank`: each rank has its own value back, also in another number of ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import dcp_objstore as dos
from tests.support.ranks import run_ranks


class Loader:
    """What a data loader is to a checkpoint."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": torch.full((3,), self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["buffer"].tolist() == [state["position"]] * 3
        self.position = state["position"]


def make(rank: int, choice: Any = "own") -> dict[str, Any]:
    return {
        "model": nn.Linear(2, 2),
        "rng": dos.PerRank(torch.get_rng_state(), choice=choice),
        "nested": [{"data": dos.PerRank(Loader(100 + rank), choice=choice)}],
        "python": dos.PerRank(random.getstate(), choice=choice),
        "step": rank,
    }


def save(rank: int, world_size: int, url: str, how: str) -> list[float]:
    torch.manual_seed(rank)
    random.seed(rank)
    state = make(rank)
    if how == "async":
        handle = dos.async_save(state, url)
        state["rng"].value.zero_()
        state["nested"][0]["data"].value.position = -1
        handle.result(60)
    else:
        dos.save(state, url, progress=False)
    torch.manual_seed(rank)
    torch.set_rng_state(make(rank)["rng"].value)
    random.seed(rank)
    return [torch.rand(()).item(), random.random()]


def load(rank: int, world_size: int, url: str, choice: str) -> Any:
    torch.manual_seed(1000)
    random.seed(1000)
    state = make(50, choice)
    report = dos.load(state, url, progress=False)
    rng, data, python = state["rng"], state["nested"][0]["data"], state["python"]
    assert rng.restored == data.restored == python.restored
    found = (rng.restored, data.value.position, report.missing, report.unexpected)
    if choice == "list":
        drawn = []
        for one, other in zip(rng.values, python.values, strict=True):
            torch.set_rng_state(one)
            random.setstate(other)
            drawn.append([torch.rand(()).item(), random.random()])
        return *found, [one["position"] for one in data.values], drawn
    torch.set_rng_state(rng.value)
    random.setstate(python.value)
    return *found, [torch.rand(()).item(), random.random()]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_each_rank_has_its_own_back_new_ones_keep_theirs_or_all_are_handed_over(tmp_path, how):
    url = (tmp_path / "step-1").as_uri()
    drawn = run_ranks(3, save, url, how)
    assert len({tuple(one) for one in drawn}) == 3
    found = run_ranks(4, load, url, "own")
    for rank in range(3):
        assert found[rank] == (True, 100 + rank, (), (), drawn[rank])
    restored, position, missing, unexpected, own = found[3]
    assert (restored, position, missing, unexpected) == (False, 150, (), ())
    assert own not in drawn
    for restored, position, _, _, positions, all_drawn in run_ranks(2, load, url, "list"):
        assert (restored, position, positions) == (True, 150, [100, 101, 102])
        assert all_drawn == drawn


def test_values_are_in_the_order_of_the_ranks_and_those_not_saved_are_left_out():
    with pytest.raises(dos.errors.ConfigError):
        dos.PerRank(1, choice="any")  # type: ignore[arg-type]
    value = dos.PerRank(5, choice="list")
    assert (value.values, value.restored) == (None, False)
    value.fill({"10": ("ten",), "9": (None,), "2": ("two",), "0": ()})
    assert (value.values, value.restored, value.value) == (["two", None, "ten"], True, 5)
    value.fill({"0": ()})
    assert (value.values, value.restored, value.value) == (None, False, 5)


@pytest.mark.parametrize("own", [(6,), (None,), ()])
def test_the_value_of_this_rank_takes_the_place_of_the_one_before(own):
    value = dos.PerRank(5)
    value.fill({"1": (7,), "0": own})
    assert (value.value, value.restored) == ((own or (5,))[0], bool(own))
    assert value.values is None


def test_what_has_a_state_dict_is_saved_by_it_and_restored_in_place():
    loader = Loader(3)
    value = dos.PerRank(loader)
    assert value.to_save()["0"][0]["position"] == 3
    assert dos.PerRank(3).to_save() == {"0": (3,)}
    value.fill({"0": (Loader(8).state_dict(),)})
    assert value.value is loader
    assert loader.position == 8
    value.fill({"1": (Loader(9).state_dict(),)})
    assert (loader.position, value.restored) == (8, False)


def test_a_value_that_was_not_saved_is_told_of_and_the_others_are_restored(tmp_path):
    url = (tmp_path / "step-1").as_uri()
    dos.save({"a": 1, "seed": dos.PerRank(7)}, url, progress=False)
    state = {"a": 0, "added": dos.PerRank(5), "seed": dos.PerRank(5, choice="list")}
    with pytest.raises(dos.errors.StateMismatchError, match=r"added\.0"):
        dos.load(state, url, progress=False)
    report = dos.load(state, url, progress=False, strict=False)
    assert report.missing == ("added.0",)
    assert (state["a"], state["added"].value, state["added"].restored) == (1, 5, False)
    assert state["seed"].values == [7]


def test_only_numbers_below_the_place_of_a_value_are_values_of_ranks(tmp_path):
    url = (tmp_path / "step-1").as_uri()
    dos.save({"seed": {"best": 3}, "7": 4}, url, progress=False)
    with pytest.raises(dos.errors.StateMismatchError, match=r"seed\.0"):
        dos.load({"seed": dos.PerRank(5)}, url, progress=False)
    report = dos.load({"seed": dos.PerRank(5), "7": 0}, url, progress=False, strict=False)
    assert (report.missing, report.unexpected) == (("seed.0",), ("seed.best",))


def test_a_stateful_data_loader_goes_on_with_the_next_batch(tmp_path):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    url = (tmp_path / "step-1").as_uri()

    def loader() -> Any:
        return loaders.StatefulDataLoader(list(range(100)), batch_size=4, shuffle=False)

    first = loader()
    batches = iter(first)
    seen = [next(batches) for _ in range(3)][-1]
    dos.save({"data": dos.PerRank(first)}, url, progress=False)
    wanted = next(batches)
    second = loader()
    dos.load({"data": dos.PerRank(second)}, url, progress=False)
    found = next(iter(second))
    assert torch.equal(found, wanted)
    assert not torch.equal(found, seen)
