"""Write items that are kept from save to save are those that DCP would make again."""

from __future__ import annotations

import gc
import secrets
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.write import planner
from dcp_objstore.write.planner import WriteItems


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the items that were made, in their order."""
    keys: list[str] = []

    def telling(state: dict[str, Any], is_coordinator: bool) -> Any:
        keys.extend(state)
        return create_default_local_save_plan(state, is_coordinator)

    monkeypatch.setattr(planner, "create_default_local_save_plan", telling)
    return keys


def state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,))
    return {
        "plain": torch.ones(3, 4),
        "scalar": torch.tensor(1.0),
        "sharded": DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]),
        "replicated": DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()]),
        "value": 5,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def planned(value: dict[str, Any]) -> list[Any]:
    return create_default_local_save_plan(value, True).items


def test_items_are_those_that_dcp_makes_and_are_made_once(world, made):
    items, value = WriteItems(), state()
    assert items.of(value, is_coordinator=True) == planned(value)
    assert made == list(value)
    made.clear()
    assert items.of(value, is_coordinator=True) == planned(value)
    assert made == ["value", "parameter"]


@pytest.mark.parametrize("key", ["plain", "scalar", "sharded", "replicated"])
@pytest.mark.parametrize("change", ["shape", "dtype", "requires_grad", "gone"])
def test_items_of_what_has_changed_are_made_anew(world, made, key, change):
    items, value = WriteItems(), state()
    items.of(value, is_coordinator=True)
    made.clear()
    before = value[key]
    if change == "shape":
        value[key] = torch.ones(7, 7)
    elif change == "dtype":
        value[key] = before.to(torch.float64)
    elif change == "requires_grad":
        value[key] = before.detach().requires_grad_()
    else:
        del value[key]
        items.of(value, is_coordinator=True)
        made.clear()
        value[key] = before
    assert items.of(value, is_coordinator=True) == planned(value)
    assert key in made


def test_a_tensor_in_an_equal_mesh_of_another_job_has_items_of_its_own(world, made):
    # Where this process was another rank, the same mesh gave it another part of the tensor.
    items, value = WriteItems(), state()
    items.of(value, is_coordinator=True)
    made.clear()
    items.of(state(), is_coordinator=True)
    assert made == ["sharded", "replicated", "value", "parameter"]


class Own(torch.Tensor):
    """Its class may say which items it has."""


@pytest.mark.parametrize("within", [False, True, "of a class of its own"])
def test_items_of_a_tensor_that_says_itself_how_it_is_sharded_are_made_each_time(
    world, made, within
):
    items, value = WriteItems(), state()
    tensor = value["sharded"]._local_tensor if within else value["sharded"]
    if isinstance(within, str):
        value["sharded"]._local_tensor = tensor.as_subclass(Own)
    else:
        tensor.__create_chunk_list__ = list
    items.of(value, is_coordinator=True)
    made.clear()
    items.of(value, is_coordinator=True)
    assert made == ["sharded", "value", "parameter"]


def test_a_sharding_whose_items_are_kept_is_kept_too(world):
    """Another one at its address would pass for it."""
    items, value = WriteItems(), state()
    items.of(value, is_coordinator=True)
    kept = weakref.ref(torch_private.spec_of(value["sharded"]))
    del value
    gc.collect()
    assert kept() is not None
    items.of({}, is_coordinator=True)
    gc.collect()
    assert kept() is None


def test_a_second_async_save_makes_no_items_of_its_tensors(made):
    value = {"model": {f"{n}": torch.ones(n + 1) for n in range(5)}}
    url = f"memory://write-items/{secrets.token_hex(4)}"
    dos.async_save(value, f"{url}/1").result()
    assert len(made) == 5
    made.clear()
    dos.async_save(value, f"{url}/2").result()
    assert made == []
    loaded = {"model": {f"{n}": torch.zeros(n + 1) for n in range(5)}}
    dos.load(loaded, f"{url}/2")
    assert all(torch.equal(loaded["model"][k], t) for k, t in value["model"].items())


def test_one_rank_exchanges_no_plans(world, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("an object was pickled for a rank that there is not")

    for name in ("gather_object", "scatter_object_list"):
        monkeypatch.setattr(dist, name, refused)
    url = f"memory://write-items/{secrets.token_hex(4)}"
    value = {"t": torch.arange(5.0)}
    dos.save(value, f"{url}/1")
    dos.async_save(value, f"{url}/2").result()
    for step in (1, 2):
        loaded = {"t": torch.zeros(5)}
        dos.load(loaded, f"{url}/{step}")
        assert torch.equal(loaded["t"], value["t"])


class Awkward:
    """A value that does not say what it is made of."""

    error: Exception = ZeroDivisionError("of its class")

    def __create_write_items__(self, key: str, value: object) -> list[Any]:
        raise self.error


@pytest.mark.parametrize("save", [dos.save, lambda *args: dos.async_save(*args).result()])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ZeroDivisionError("of its class"), dos.errors.UnsupportedError),
        (MemoryError("all"), dos.errors.RankFailedError),
        (dos.errors.ConfigError("refused"), dos.errors.ConfigError),
    ],
)
def test_what_torch_cannot_plan_is_refused_by_its_key(monkeypatch, save, error, kind):
    monkeypatch.setattr(Awkward, "error", error)
    state = {"w": torch.ones(2), "deep": {"awkward": Awkward()}, "z": 1}
    with pytest.raises(kind, match=error.args[0]) as caught:
        save(state, f"memory://{secrets.token_hex(6)}/1")
    assert caught.value.key == "deep.awkward"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("cannot pickle it"), dos.errors.UnsupportedError),
        (MemoryError("all"), dos.errors.RankFailedError),
    ],
)
def test_what_cannot_be_copied_in_the_background_is_refused_by_its_key(error, kind):
    class Uncopied:
        def __deepcopy__(self, _: object) -> None:
            raise error

    state = {"w": torch.ones(2), "deep": {"list": [{"a": (1,)}, {"b": Uncopied()}]}}
    with pytest.raises(kind, match=error.args[0]) as caught:
        dos.async_save(state, f"memory://{secrets.token_hex(6)}/1").result()
    assert caught.value.key == "deep.list.1.b"  # type: ignore[attr-defined]
