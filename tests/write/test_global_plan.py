"""The plan of all ranks: that of DCP's planner, made in columns, and kept while nothing changes."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.write import planner
from dcp_objstore.write.api import run_save
from dcp_objstore.write.global_plan import GlobalPlan, LocalPlan, _may_overlap, plan_globally
from dcp_objstore.write.layout import item_bytes
from dcp_objstore.write.planner import AgreeingSavePlanner
from tests.support.campaign import cases
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks

Items = list[WriteItem]


def shard(
    key: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    kind: WriteItemType = WriteItemType.SHARD,
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), kind, tensor_data=data)


def plain(key: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> WriteItem:
    return shard(key, shape, [0] * len(shape), shape, dtype, WriteItemType.TENSOR)


def value(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


def planned(ranks: Sequence[Items]) -> GlobalPlan:
    return plan_globally([LocalPlan.of(items, {}) for items in ranks])


def random_ranks(draw: random.Random) -> list[Items]:
    """The items of up to 6 ranks: cut along a grid with replicas, whole, values, on some ranks."""
    ranks: list[Items] = [[] for _ in range(draw.randint(1, 6))]
    for number in range(draw.randint(0, 12)):
        key, dtype = f"k{number}", draw.choice([torch.float32, torch.bfloat16, torch.int64])
        shape = [draw.choice([0, 1, 3, 8, 2000]) for _ in range(draw.randint(0, 3))]
        having = draw.sample(range(len(ranks)), draw.randint(1, len(ranks)))
        match draw.choice(["value", "plain", "grid", "grid"]):
            case "value":
                for rank in having:
                    ranks[rank].append(value(key))
            case "plain":
                for rank in having:
                    ranks[rank].append(plain(key, shape, dtype))
            case "grid":
                cuts = [
                    sorted({0, size, *(draw.randint(0, size) for _ in range(2))}) for size in shape
                ]
                boxes: list[tuple[list[int], list[int]]] = [([], [])]
                for cut, size in zip(cuts, shape, strict=True):
                    pairs = list(itertools.pairwise(cut)) or [(size, size)]
                    boxes = [([*o, a], [*s, b - a]) for o, s in boxes for a, b in pairs]
                for offsets, sizes in boxes:
                    copies = draw.randint(1, len(ranks))
                    for rank in draw.sample(range(len(ranks)), copies):
                        ranks[rank].append(shard(key, shape, offsets, sizes, dtype))
    for items in ranks:
        draw.shuffle(items)
    return ranks


@pytest.mark.parametrize("seed", range(60))
def test_the_plan_in_columns_is_that_of_dcps_planner(seed):
    ranks = random_ranks(random.Random(seed))
    stock = DefaultSavePlanner(flatten_state_dict=False)
    _, metadata = stock.create_global_plan([SavePlan(list(items)) for items in ranks])
    plan = planned(ranks)
    tensors = {
        key: found
        for key, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    assert plan.planned.tensors.keys() == tensors.keys()
    assert set(plan.planned.blobs) == metadata.state_dict_metadata.keys() - tensors.keys()
    place = 0
    for key, tensor in plan.planned.tensors.items():
        assert tensor.shape == tuple(tensors[key].size)
        assert f"torch.{tensor.dtype}" == str(tensors[key].properties.dtype)
        dims, chunks = len(tensor.shape), []
        for _ in range(tensor.chunk_count):
            chunks.append(
                tuple(
                    tuple(column[place : place + dims].tolist())
                    for column in (plan.planned.chunk_offsets, plan.planned.chunk_sizes)
                )
            )
            place += dims
        assert chunks == sorted((tuple(c.offsets), tuple(c.sizes)) for c in tensors[key].chunks)
    # Each row of the index is written once, by a rank that has it: the tensors', then the values'.
    written = {
        row: items[at]
        for items, kept, rows in zip(ranks, plan.own, plan.planned.rows, strict=True)
        for at, row in zip(kept.tolist(), rows.tolist(), strict=True)
    }
    assert len(written) == sum(map(len, plan.own))
    of_rows = [written[row].index for row in range(len(written))]
    every = {item.index for items in ranks for item in items}
    order = {key: number for number, key in enumerate([*plan.planned.tensors, *plan.planned.blobs])}
    assert of_rows == sorted(every, key=lambda index: (order[index.fqn], index.offset or ()))


def test_what_several_ranks_have_is_shared_out_evenly_and_tiny_values_stay_together():
    items = [plain(f"w{n}", [5000]) for n in range(9)] + [plain(f"step{n}", []) for n in range(9)]
    kept = planned([items, items, [*items, value("v")]]).own
    assert kept[0].tolist()[-9:] == list(range(9, 18))
    sizes = [sum(item_bytes([*items, value("v")][at]) for at in of.tolist()) for of in kept]
    assert [size // 20_000 for size in sizes] == [3, 3, 3]


def test_what_lies_on_one_rank_counts_before_what_several_have_is_shared_out():
    both = [shard(f"w{n}", [size], [0], [size]) for n, size in enumerate([7000, 2, 2])]
    for own, kept in ((plain("own", [5000]), [[0, 2, 3], [0]]), (value("own"), [[0, 1], [1, 2]])):
        assert [of.tolist() for of in planned([[own, *both], both]).own] == kept


def test_the_largest_is_shared_out_first():
    items = [plain(f"w{n}", [size]) for n, size in enumerate([2000, 2000, 2000, 6000])]
    kept = planned([items, items]).own
    assert sorted(of.tolist() for of in kept) == [[0, 1, 2], [3]]


@pytest.mark.parametrize(
    ("size", "kind", "own"),
    [
        (4096, WriteItemType.TENSOR, [[0, 1], []]),
        (4097, WriteItemType.TENSOR, [[0], [1]]),
        (1, WriteItemType.SHARD, [[0], [1]]),
    ],
)
def test_of_what_several_ranks_have_tiny_tensors_alone_stay_on_the_first(size, kind, own):
    items = [shard(f"w{n}", [size], [0], [size], torch.uint8, kind) for n in range(2)]
    assert [kept.tolist() for kept in planned([items, items]).own] == own


def test_what_ranks_know_of_one_key_is_what_the_first_of_them_says():
    """Of its place in the nested state and of what does not matter for its bytes."""
    data = plain("w", [3]).tensor_data
    assert data is not None
    properties = TensorProperties(dtype=torch.float32, requires_grad=True)
    grad = replace(plain("w", [3]), tensor_data=replace(data, properties=properties))
    plans = [
        LocalPlan.of([value("v")], {"v": ("v",)}),
        LocalPlan.of([plain("u", [3]), grad, plain("w2", [3])], {"v": ("no",), "w": ("w", 0)}),
        LocalPlan.of([plain("w", [3])], {"w": ("no",), "x": ("x",)}),
    ]
    found = plan_globally(plans).planned
    assert found.flatten_mapping == {"v": ("v",), "w": ("w", 0), "x": ("x",)}
    kinds = [(one.key, one.requires_grad) for one in found.tensors.values()]
    assert kinds == [("u", False), ("w", True), ("w2", False)]


@pytest.mark.parametrize("kind", ["offsets", "sizes"])
def test_a_planner_that_cuts_a_tensor_in_other_dimensions_is_refused(kind):
    boxes = {"offsets": [0, 0], "sizes": [2, 2], kind: [2]}
    with pytest.raises(dos.errors.UnsupportedError, match="other dimensions") as caught:
        LocalPlan.of([shard("w", [2, 2], **boxes)], {})
    assert caught.value.key == "w"


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([[shard("w", [8], [0], [4])]], "only 4 of this tensor's 8 elements"),
        ([[plain("w", [3])], [plain("w", [4])]], r"rank 0 has a float32 tensor of shape \(3,\)"),
        ([[plain("w", [3])], [plain("w", [3], torch.int64)]], "int64"),
        ([[value("w")], [plain("w", [3])]], "rank 0 has a value that is no tensor, rank 1"),
        ([[plain("w", [3])], [value("w")]], "rank 1 a value that is no tensor"),
        (
            [[shard("w", [4], [0], [4])], [shard("w", [4], [2], [2])]],
            r"rank 0 has \[4\] at \[0\] of this tensor, and rank 1 \[2\] at \[2\], which overlap",
        ),
        (
            [[shard("w", [4], [0], [3])], [shard("w", [4], [0], [4])]],
            r"rank 0 has \[3\] at \[0\] .* rank 1 \[4\] at \[0\](?s:.*) the same sharding",
        ),
        (
            [[shard("w", [4], [2], [4])], [shard("w", [4], [0], [2])]],
            r"rank 0 has \[4\] at \[2\], which is outside of a float32 tensor of shape \(4,\)",
        ),
        ([[shard("w", [4], [0], [4]), shard("w", [4], [-1], [2])]], "outside"),
        ([[shard("w", [4], [0], [4]), shard("w", [4], [2], [-1])]], "outside"),
        (
            [[shard("w", [4], [0], [4])], [shard("w", [4], [1], [1]), shard("w", [4], [3], [1])]],
            r"rank 0 has \[4\] at \[0\] of this tensor, and rank 1 \[1\] at \[1\], which overlap",
        ),
        (
            [[shard("w", [9], [0], [2])], [shard("w", [9], [2], [6])], [shard("w", [9], [7], [2])]],
            r"rank 1 has \[6\] at \[2\] of this tensor, and rank 2 \[2\] at \[7\], which overlap",
        ),
        (
            [
                [shard("w", [6, 4], [0, 0], [3, 4]), shard("w", [6, 4], [5, 0], [1, 4])],
                [shard("w", [6, 4], [3, 0], [1, 2]), shard("w", [6, 4], [3, 2], [2, 2])],
                [shard("w", [6, 4], [4, 0], [2, 2])],
            ],
            r"rank 2 has \[2, 2\] at \[4, 0\] of this tensor, and rank 0 \[1, 4\] at \[5, 0\]",
        ),
        (
            [
                [shard("w", [4, 4], [0, 0], [2, 4])],
                [shard("w", [4, 4], [2, 0], [2, 2]), shard("w", [4, 4], [1, 2], [3, 2])],
            ],
            "which overlap",
        ),
        (
            [
                [shard("w", [4, 4], [0, 0], [4, 2]), shard("w", [4, 4], [0, 2], [2, 2])],
                [shard("w", [4, 4], [2, 0], [2, 2])],
            ],
            "which overlap",
        ),
    ],
)
def test_ranks_whose_parts_do_not_fit_together_are_refused(ranks, says):
    others = [plain("cube", [1, 1, 1]), shard("m", [4], [0], [1]), shard("m", [4], [1], [3])]
    with pytest.raises(dos.errors.StateMismatchError, match=says) as caught:
        planned([[value("x"), *others, *items] for items in ranks])
    assert caught.value.key == "w"


@pytest.mark.parametrize(
    "bricks",
    [
        [([0, 0], [2, 3]), ([0, 3], [2, 1]), ([2, 0], [2, 1]), ([2, 1], [2, 3])],
        [([0, 0], [1, 2]), ([0, 2], [4, 2]), ([1, 0], [3, 2])],
        [([0, 0], [4, 2]), ([0, 2], [1, 2]), ([1, 2], [3, 2]), ([1, 1], [0, 2])],
    ],
)
def test_boxes_that_are_no_grid_are_no_overlap(bricks):
    ranks = [[shard("w", [4, 4], *box)] for box in bricks]
    assert planned(ranks).planned.tensors["w"].chunk_count == len(bricks)


def test_boxes_of_a_grid_are_not_compared_one_by_one():
    offsets = np.array([[0, 0], [0, 2], [2, 0], [2, 2]])
    assert _may_overlap(np.zeros(4, int), offsets, np.full((4, 2), 2)) == set()


def test_an_empty_shard_at_the_place_of_another_is_left_out():
    ranks = [[shard("w", [4], [0], [0])], [shard("b", [9], [0], [9]), shard("w", [4], [0], [4])]]
    assert [kept.tolist() for kept in planned(ranks).own] == [[], [0, 1]]


def test_an_error_in_the_plan_of_all_ranks_has_the_url():
    def plan_all(*items: WriteItem, ranks: int = 2, url: str = "memory://x/1") -> None:
        plans = [LocalPlan.of([item], {}) for item in items]
        urls = ["memory://x/1", url]
        offers = [planner._Offer(at, plan) for at, plan in zip(urls, plans, strict=False)]
        coordinator = AgreeingSavePlanner("memory://x/1", {}, ranks)
        coordinator.create_global_plan([SavePlan([], storage_data=offer) for offer in offers])

    with pytest.raises(dos.errors.StateMismatchError) as caught:
        plan_all(plain("w", [3]), plain("w", [4]))
    assert (caught.value.url, caught.value.key) == ("memory://x/1", "w")
    with pytest.raises(dos.errors.InputError) as lost:
        plan_all(plain("w", [3]))
    assert lost.value.url == "memory://x/1"
    with pytest.raises(dos.errors.InvalidUrlError, match="memory://x/2"):
        plan_all(value("v"), value("v"), url="memory://x/2")


# --- an unchanged layout ---


class Net(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)


def sharded(world: int, mesh: DeviceMesh, *, rows: int = 4, **kinds: Any) -> DTensor:
    full = torch.arange(float(rows * world)).reshape(rows * world, 1)
    return distribute_tensor(full.to(**kinds), mesh, [Shard(0)])


def is_planned(make: Callable[..., object], *args: Any) -> bool:
    """Make a save; return whether this rank has sent a plan."""
    sent: list[LocalPlan | None] = []
    create = AgreeingSavePlanner.create_local_plan

    def noted(own: AgreeingSavePlanner) -> SavePlan:
        plan = create(own)
        sent.append(plan.storage_data.plan)
        return plan

    with patch.object(AgreeingSavePlanner, "create_local_plan", noted):
        make(*args)
    (plan,) = sent
    return plan is not None


def changes(rank: int, world: int, root: str, way: str) -> dict[str, list[bool]]:
    """Change one thing on the last rank alone, where that is possible; save it twice."""
    mesh = DeviceMesh("cpu", list(range(world)))
    turned = DeviceMesh("cpu", [1, 0])
    last = rank == world - 1
    weight = torch.ones(3)
    net = Net()

    def state(**more: Any) -> dict[str, Any]:
        base = {"w": sharded(world, mesh), "p": {"q": weight}, "n": 1, f"own{rank}": torch.ones(2)}
        return {**base, **more}

    leaf = torch.ones(2, requires_grad=True)
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "nothing": state,
        "values": lambda: state(n=[2] * 500, p={"q": torch.zeros(3)}),
        "new key": lambda: state(**({"more": 1} if last else {})),
        "removed key": lambda: {k: v for k, v in state().items() if not (last and k == "own1")},
        "shape": lambda: state(**({"own1": torch.ones(3)} if last else {})),
        "dtype": lambda: state(**({"own1": torch.ones(2).double()} if last else {})),
        "place in the state": lambda: state(**({"p": {}, "p.q": weight} if last else {})),
        "value for tensor": lambda: state(**({"own1": 5} if last else {})),
        "order": lambda: dict(reversed(state().items())) if last else state(),
        "mesh coordinate": lambda: state(w=sharded(world, turned)),
        "placement": lambda: state(w=distribute_tensor(torch.ones(4, 1), mesh, [Replicate()])),
        "module": lambda: state(net=net),
        "requires_grad": lambda: state(**({f"own{rank}": leaf} if last else {})),
    }
    found = {}
    for name, make in kinds.items():
        urls = [f"{root}/{name}-{n}" for n in range(2)]
        found[name] = [is_planned(save, way, make(), url) for url in urls]
        if name in ("values", "order", "mesh coordinate", "placement"):
            check(make(), urls[1])
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(way: str, state: dict[str, Any], url: str) -> None:
    if way == "save":
        dos.save(state, url, progress=False)
    else:
        dos.async_save(state, url).result()


def check(state: dict[str, Any], url: str) -> None:
    """Compare the tensors of a state with what is stored."""
    tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
    into = {key: torch.zeros_like(one) for key, one in tensors.items()}
    dos.load(into, url, progress=False)
    for key, tensor in tensors.items():
        assert torch.equal(local(into[key]), local(tensor)), (key, url)


@pytest.mark.parametrize("way", cases(["save", "async"], default=["save"]))
def test_a_layout_that_changes_on_one_rank_is_planned_on_all_and_a_known_one_on_none(tmp_path, way):
    of_ranks = run_ranks(2, changes, tmp_path.as_uri(), way)
    assert of_ranks[0] == of_ranks[1]
    for case, found in of_ranks[0].items():
        assert found == [case != "values", False], case


def fails_once(rank: int, world: int, url: str) -> list[bool]:
    state: dict[str, Any] = {"w": torch.ones(2), f"own{rank}": torch.ones(2)}
    planned = [is_planned(save, "save", state, f"{url}/1")]
    for bad in (torch.empty(1, dtype=torch.int4) if rank else 1, torch.ones(1 + rank)):
        with pytest.raises(dos.errors.DcpObjstoreError):
            dos.save({**state, "bad": bad}, f"{url}/bad", progress=False)
    with pytest.raises(dos.errors.CheckpointExistsError):
        dos.save(state, f"{url}/1", progress=False)
    planned.append(is_planned(save, "save", state, f"{url}/2"))
    return planned


def test_a_save_that_failed_leaves_what_is_known_of_the_layout(tmp_path):
    assert run_ranks(2, fails_once, tmp_path.as_uri()) == [[True, False]] * 2
    assert not (tmp_path / "bad/_COMMIT").exists()


class PlainResults(dos.ObjectStoreWriter):
    """A writer that returns a plain list, as DCP asks for."""

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        found: Any = super().write_data(plan, planner)
        future: Any = torch.futures.Future()
        future.set_result(list(found.wait()))
        return future


def test_a_writer_may_return_a_plain_list_of_results(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "n": [1]}
    url = tmp_path.as_uri()
    run_save(PlainResults(url, progress=False), state, None)
    assert torch.equal(dos.read_state_dict(url)["w"], state["w"])


class Outer:
    """Its state is another object that has a state."""

    def __init__(self) -> None:
        self.net = Net()

    def state_dict(self) -> Any:
        return self.net

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: the state is the object itself, which is filled."""


@pytest.mark.parametrize("way", ["save", "async"])
def test_a_state_whose_state_is_stateful_comes_back(tmp_path, way):
    saved, loaded = Outer(), Outer()
    save(way, {"a": saved}, tmp_path.as_uri())
    dos.load({"a": loaded}, tmp_path.as_uri(), progress=False)
    assert torch.equal(saved.net.linear.weight, loaded.net.linear.weight)


def interrupted(rank: int, world: int, root: str, where: str) -> list[str]:
    def ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    found = []
    outer = Outer()
    broken: dict[str, tuple[Any, str]] = {
        "the planner": (planner, "create_default_local_save_plan"),
        "a state of a state": (outer.net, "state_dict"),
    }
    with contextlib.ExitStack() as stack:
        if rank:
            stack.enter_context(patch.object(*broken[where], ctrl_c))
        try:
            dos.save({"w": torch.ones(2), "a": outer}, f"{root}/1", progress=False)
        except (dos.errors.DcpObjstoreError, KeyboardInterrupt) as error:
            found.append(type(error).__name__)
    dos.save({"w": torch.ones(2)}, f"{root}/2", progress=False)
    return found


@pytest.mark.parametrize("where", ["the planner", "a state of a state"])
def test_ctrl_c_while_a_rank_plans_ends_the_save_on_all_and_the_next_one_works(tmp_path, where):
    found = run_ranks(2, interrupted, tmp_path.as_uri(), where)
    assert found == [["RankFailedError"], ["KeyboardInterrupt"]]
    assert not (tmp_path / "1/_COMMIT").exists()


@pytest.mark.parametrize(
    ("state", "is_empty"), [({}, True), ({"n": 1}, False), ({"w": torch.ones(2)}, False)]
)
def test_only_a_state_without_tensors_and_values_is_called_empty(state, is_empty, caplog):
    dos.save(state, memory_url(), progress=False)
    assert ("the state is empty" in caplog.text) == is_empty


def new_states(count: int) -> list[dict[str, Any]]:
    """States whose layouts no test has saved before."""
    return [{secrets.token_hex(6): torch.ones(3)} for _ in range(count)]


def test_a_layout_is_known_only_to_the_group_that_has_planned_it(tmp_path):
    urls = [f"{tmp_path.as_uri()}/{n}" for n in range(4)]
    (state,) = new_states(1)
    found = [is_planned(save, "save", state, urls[0])]
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        found += [is_planned(save, "save", state, url) for url in urls[1:3]]
    finally:
        dist.destroy_process_group()
    found.append(is_planned(save, "save", state, urls[3]))
    assert found == [True, True, False, False]


def test_states_that_are_saved_in_turn_are_planned_once_and_few_are_kept(tmp_path):
    states = new_states(5)
    order = [0, 1, 0, 1, 2, 3, 0, 4, 0, 1]
    urls = [f"{tmp_path.as_uri()}/{n}" for n in range(len(order))]
    found = [is_planned(save, "save", states[at], url) for at, url in zip(order, urls, strict=True)]
    assert found == [True, True, False, False, True, True, False, True, False, True]
    check(states[1], urls[-1])


def random_saves(rank: int, world: int, root: str, seed: int) -> tuple[int, int]:
    """Save a state that changes now and then, on all ranks or on one; return how often planned."""
    together, alone = random.Random(seed), random.Random(seed * 1000 + rank)
    mesh = DeviceMesh("cpu", list(range(world)))
    kinds = ["plain", "value", *["sharded"] * 3]
    shapes: dict[str, tuple[str, list[int], torch.dtype]] = {}
    own: dict[str, int] = {}
    planned = 0
    for step in range(60):
        if together.random() < 0.3:
            key, dims = f"k{together.randrange(6)}", together.randint(1, 3)
            shape = [together.choice([1, 2, 3, 7, 40]) for _ in range(dims)]
            dtype = together.choice([torch.float32, torch.bfloat16, torch.int32])
            shapes[key] = (together.choice(kinds), shape, dtype)
        if alone.random() < 0.1:
            own[f"own{rank}.{alone.randrange(3)}"] = alone.randint(1, 9)
        state: dict[str, Any] = {key: torch.full((size,), step) for key, size in own.items()}
        for key, (kind, shape, dtype) in shapes.items():
            torch.manual_seed(1000 * seed + step)
            full = (torch.randn(shape) * 100).to(dtype)
            state[key] = {
                "plain": full,
                "value": step,
                "sharded": distribute_tensor(full, mesh, [Shard(step % 7 % full.dim())]),
            }[kind]
        url, way = f"{root}/{step}", together.choice(["save", "async"])
        planned += is_planned(save, way, state, url)
        check(state, url)
    return planned, step + 1


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_values_are_right_while_the_layout_changes_now_and_then(tmp_path, seed):
    for planned, of in run_ranks(3, random_saves, tmp_path.as_uri(), seed, timeout_seconds=280):
        assert 5 < planned < of
