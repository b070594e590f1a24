"""The private API of torch: each name does what we take it for."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.nn.functional import all_reduce as all_reduce_with_grad
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from dcp_objstore import torch_private
from tests.support.wrappers import Boxed, Codes, Counting, Frozen, Opaque, Pair, Tagged

_HOUR = datetime.timedelta(hours=1)


class _EmptyProtocol(Protocol): ...


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(_HOUR)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store, timeout=_HOUR)
    group = dist.group.WORLD
    assert group is not None
    yield group
    if dist.is_initialized():
        dist.destroy_process_group()


def test_functions_that_keep_the_default_group_get_none_in_its_place(world, monkeypatch):
    op = dist.ReduceOp.SUM
    monkeypatch.setattr(all_reduce_with_grad, "__defaults__", (op, world))
    torch_private.unbind_default_group()
    assert all_reduce_with_grad.__defaults__ == (op, None)


def test_all_parameters_have_the_names_of_their_state_dict():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    compiled = torch.compile(model, backend="eager")
    names = dict(torch_private.all_parameters(compiled))
    assert names.keys() == get_model_state_dict(compiled).keys() == model.state_dict().keys()
    assert names["a.weight"] is names["b.weight"]


def test_the_default_store_is_that_of_the_default_group(world):
    store: Any = torch_private.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.timeout == _HOUR


def test_a_group_is_registered_until_it_is_destroyed(world):
    before = torch_private.count_groups()
    made = dist.new_group([0], backend="gloo")
    assert torch_private.count_groups() == before + 1
    assert torch_private.is_registered(made)
    dist.destroy_process_group(made)
    assert not torch_private.is_registered(made)
    dist.destroy_process_group()
    assert not torch_private.is_registered(world)


def test_groups_are_named_from_a_number_and_then_counted_on(world):
    with torch_private.groups_named_from(2**61):
        assert dist.new_group(backend="gloo").group_name == str(2**61)
    assert dist.new_group(backend="gloo").group_name == "1"


@pytest.mark.parametrize(("backend", "has_cpu"), [("gloo", True), ("cuda:gloo", False)])
def test_whether_a_group_has_a_cpu_backend(world, backend, has_cpu):
    assert torch_private.has_cpu_backend(dist.new_group([0], backend=backend)) is has_cpu


def test_the_timeout_of_a_group_can_be_changed(world):
    torch_private.set_group_timeout(world, 2 * _HOUR)
    options: Any = world._get_backend(torch.device("cpu")).options
    assert options._timeout == 2 * _HOUR


def test_fake_tensors_are_told_apart():
    with FakeTensorMode():
        assert torch_private.is_fake(torch.empty(2))
    assert not torch_private.is_fake(torch.empty(2, device="meta"))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_dtensor_is_taken_apart_and_made_again(world, placement):
    whole = torch.arange(6.0).reshape(3, 2)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [placement])
    local = torch_private.local_tensor(tensor)
    assert type(local) is torch.Tensor
    assert local.data_ptr() == tensor.to_local().data_ptr()
    spec = torch_private.spec_of(tensor)
    assert spec is torch_private.spec_of(tensor)  # compared by identity from save to save
    made = torch_private.dtensor(local + 1, spec)
    assert made.placements == tensor.placements
    assert made.stride() == tensor.stride()
    assert not made.requires_grad
    assert torch.equal(made.full_tensor(), whole + 1)


def test_the_shards_of_a_sharded_tensor_are_copied_with_their_places(world):
    local = torch.arange(6.0).view(3, 2)
    place = ShardMetadata([0, 0], [3, 2], "rank:0/cpu")
    value = sharded_tensor.init_from_local_shards([sharded_tensor.Shard(local, place)], 3, 2)
    copied = torch_private.copied_to_host(value)
    local.zero_()
    (shard,) = copied.local_shards()
    assert shard.tensor.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert (shard.metadata, copied.size()) == (place, value.size())


def test_all_that_dcp_asks_a_tensor_how_it_is_sharded_is_kept():
    tensor: Any = torch.ones(2)
    fields = getattr(getattr(dcp, "CheckpointableTensor", None), "__annotations__", {})
    methods = [name for name, value in vars(_Checkpointable).items() if callable(value)]
    asked = {*fields, *(name for name in methods if name not in vars(_EmptyProtocol))}
    assert len(asked) == (7 if fields else 3)
    for name in asked:
        setattr(tensor, name, name)
    tensor.other = None
    assert torch_private.own_sharding(tensor) == {name: name for name in asked}
    assert torch_private.own_sharding(torch.ones(2)) == {}


def test_the_size_in_a_checkpoint_is_that_of_the_whole():
    tensor: Any = torch.ones(2, 3)
    assert torch_private.size_in_checkpoint(tensor) == (2, 3)
    tensor.global_shape = (4, 3)
    tensor.global_offsets = tensor.local_offsets = ((0, 0),)
    assert torch_private.size_in_checkpoint(tensor) == (2, 3)
    tensor.local_sizes = ((2, 3),)
    known = hasattr(dcp, "CheckpointableTensor")
    assert torch_private.size_in_checkpoint(tensor) == ((4, 3) if known else (2, 3))


def test_a_collective_that_is_under_way_is_waited_for(world, monkeypatch):
    waited = []
    wait = AsyncCollectiveTensor.wait

    def noted(tensor: AsyncCollectiveTensor) -> torch.Tensor:
        waited.append(tensor)
        return wait(tensor)

    monkeypatch.setattr(AsyncCollectiveTensor, "wait", noted)
    pending = all_reduce(torch.ones(2), "sum", world)
    assert isinstance(pending, AsyncCollectiveTensor)
    assert type(torch_private.waited(pending)) is torch.Tensor
    torch_private.waited(torch.ones(2))
    assert len(waited) == 1


def test_a_wrapper_tells_its_parts_and_is_rebuilt_of_others(world):
    codes, scale, plain = torch.ones(2, 3, dtype=torch.int8), torch.ones(2), torch.ones(2, 3)
    pair = Pair(Codes(codes, scale, 2.0), Boxed(plain))
    mesh = init_device_mesh("cpu", (1,))
    spec = torch_private.spec_of(distribute_tensor(plain, mesh, [Shard(0)]))
    sharded = torch_private.dtensor(pair, spec)
    for value in (pair, sharded):
        assert [id(part) for part in torch_private.parts(value)] == list(
            map(id, (codes, scale, plain))
        )
        made: Any = torch_private.rebuilt(value, iter([codes + 1, scale * 3, plain * 5]))
        local = torch_private.local_tensor(made)
        assert type(local) is Pair and local.first.context() == 2.0
        assert torch.equal(local.plain(), torch.full((2, 3), 2.0 * 3 + 2 + 5))
    assert (
        torch_private.spec_of(torch_private.rebuilt(sharded, iter([codes, scale, plain]))) is spec
    )
    for value in ("text", plain, plain.as_subclass(Tagged)):
        assert not torch_private.is_wrapper(value)
        assert torch_private.parts(value)[0] is value
        assert torch_private.rebuilt(value, iter([7])) == 7
    pending = all_reduce(torch.ones(2), "sum", world)
    assert [type(part) for part in torch_private.parts(pending)] == [torch.Tensor]
    jagged = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    assert not torch_private.is_wrapper(jagged)


def test_wrappers_are_alike_if_only_their_parts_can_differ():
    def codes(*shape: int, bias: Any = 0.0, dtype: torch.dtype = torch.int8) -> Codes:
        return Codes(torch.ones(shape, dtype=dtype), torch.rand(shape[0]), bias)

    assert torch_private.are_alike(codes(2, 3), codes(2, 3))
    many = torch.ones(2)
    others = [codes(3, 2), codes(2, 3, bias=1.0), codes(2, 3, dtype=torch.uint8), torch.ones(2, 3)]
    others += [codes(2, 3, bias=many), Frozen(*torch_private.parts(codes(2, 3)))]
    for other in others:
        assert not torch_private.are_alike(codes(2, 3), other)
    # Tensors cannot be compared in one word.
    assert not torch_private.are_alike(codes(2, 3, bias=many), codes(2, 3, bias=many + 1))


def test_classes_that_run_code_in_place_of_operators_are_told_apart():
    with FakeTensorMode():
        fake = torch.ones(2)
    counting, opaque = torch.ones(2).as_subclass(Counting), Opaque(torch.ones(2))
    dispatched = [Boxed(torch.ones(2)), counting, opaque, fake]
    assert all(map(torch_private.is_dispatched, dispatched))
    assert not any(
        map(torch_private.is_dispatched, (torch.ones(2), torch.ones(2).as_subclass(Tagged)))
    )
    assert [torch_private.is_opaque(tensor) for tensor in dispatched] == [False, False, True, False]
    assert not torch_private.is_opaque(Opaque(torch.ones(0)))


def test_a_stager_takes_the_copies_that_it_is_given():
    special, plain = torch.ones(2), torch.zeros(2)
    instead = torch.full((2,), 9.0)
    stager = torch_private.HostStager(lambda tensor: instead if tensor is special else None)
    within = [special, {"a": (special, plain)}]
    copied: Any = stager.stage(within)
    stager.close()
    assert copied[0] is instead
    assert copied[1]["a"][0] is instead
    assert copied[1]["a"][1] is not plain
    assert copied[1]["a"][1].tolist() == [0, 0]


def test_dcp_takes_it_for_a_stager():
    class Stager(torch_private.StagesAtOnce):
        def stage(self, state_dict: Any) -> Any: ...
        def synchronize_staging(self) -> None: ...
        def close(self) -> None: ...

    assert isinstance(Stager(), AsyncStager)
    assert not Stager().should_synchronize_after_execute


def test_what_pickles_hold():
    info = torch_private.StorageInfo("path", 1, 2, ["zstd"])
    assert info.__getstate__() == {
        "relative_path": "path",
        "offset": 1,
        "length": 2,
        "transform_descriptors": ["zstd"],
    }
    assert torch_private.StorageInfo.__qualname__ == "_StorageInfo"
    assert torch_private.MemoryFormatEncoding.__qualname__ == "_MEM_FORMAT_ENCODING"
    assert torch_private.MemoryFormatEncoding.TORCH_CONTIGUOUS_FORMAT.value == 0
    assert torch_private.layout_by_name("torch.strided") is torch.strided


def test_legacy_classes():
    assert torch_private.storage_classes()[torch.float32] == "FloatStorage"
    assert {torch.FloatTensor, torch.FloatStorage, torch.UntypedStorage} <= set(
        torch_private.legacy_classes()
    )


def test_every_name_is_described():
    for name, described in vars(torch_private).items():
        if getattr(described, "__module__", "") == torch_private.__name__ and name[0] != "_":
            assert "torch 2.9 to" in described.__doc__
