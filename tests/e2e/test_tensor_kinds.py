"""Every kind of tensor comes back as `torch.save` gives it back, or is refused at the save by key.

The oracle is `torch.save` and `torch.load`: what they make of a tensor, bit for bit, is what a load
has to give, whichever way the tensor was saved and whichever tensor it is loaded into.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import HashStore
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import ITEM_SIZE_BYTES
from dcp_objstore.errors import StateMismatchError, UnsupportedError, UntrustedPickleError
from dcp_objstore.stores import open_store
from tests.support.campaign import cases
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks
from tests.support.wrappers import (
    CLASSES,
    Boxed,
    Codes,
    Copying,
    Counting,
    Frozen,
    Opaque,
    Pair,
    Tagged,
    bits,
    by_torch,
    inner,
    is_same,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what is experimental


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits, so NaN and infinity too."""
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return memory.view(dtype).view(shape)


def codes(*shape: int, kind: type[Codes] = Codes, bias: float = 0.0) -> Codes:
    scale = torch.rand(shape[0] if shape else 1)
    return kind(torch.randint(-127, 128, shape, dtype=torch.int8), scale, bias)


RAW = [name for name in ITEM_SIZE_BYTES if not name.startswith(("quint", "qint"))]
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    **{name: lambda name=name: numbers(3, 4, dtype=getattr(torch, name)) for name in RAW},
    "large": lambda: numbers(600_000),
    "scalar": numbers,
    "empty": lambda: numbers(0, 3),
    "transposed": lambda: numbers(3, 4).t(),
    "strided": lambda: numbers(9, 4)[1::3, ::2],
    "expanded": lambda: numbers(1, 4).expand(3, 4),
    "conjugated": lambda: numbers(3, 4, dtype=torch.complex64).conj(),
    "negated": lambda: numbers(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: torch.nn.Parameter(numbers(3)),
    "result": lambda: torch.nn.Parameter(torch.ones(3)) * 2,
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 3, torch.qint8),
    "by channel": lambda: torch.quantize_per_channel(
        torch.rand(3, 4), torch.rand(3), torch.zeros(3), 0, torch.quint8
    ),
    "tagged": lambda: numbers(3, 4).as_subclass(Tagged),
    "counting": lambda: numbers(3, 4).as_subclass(Counting),
    "boxed": lambda: Boxed(numbers(3, 4)),
    "boxed scalar": lambda: Boxed(numbers()),
    "boxed and empty": lambda: Boxed(numbers(0, 2)),
    "boxed and transposed": lambda: Boxed(numbers(3, 4).t()),
    "boxed and conjugated": lambda: Boxed(numbers(3, dtype=torch.complex64).conj()),
    "boxed parameter": lambda: torch.nn.Parameter(Boxed(numbers(3))),
    "boxed float4": lambda: Boxed(numbers(4, dtype=torch.float4_e2m1fn_x2)),
    "codes": lambda: codes(3, 4),
    "codes with a context": lambda: codes(3, bias=1.5),
    "large codes": lambda: codes(600, 1000),
    "frozen codes": lambda: codes(3, 4, kind=Frozen),
    "wrapped twice": lambda: Pair(codes(3, 4), Boxed(torch.rand(3, 4))),
    "a collective's": lambda: all_reduce(torch.rand(3, 4), "sum", dist.group.WORLD),
}
PLACED = ["float32", "float4_e2m1fn_x2", "scalar", "boxed", "codes", "a collective's", "tagged"]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with torch.serialization.safe_globals([*CLASSES]):
        yield
    dist.destroy_process_group()


def on_mesh(tensor: torch.Tensor, placement: Any) -> DTensor:
    """This tensor itself, as the part of a DTensor that this rank has."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    made = DTensor.from_local(plain, init_device_mesh("cpu", (1,)), [placement], run_check=False)
    return torch_private.dtensor(tensor, torch_private.spec_of(made))


def replicated_or_sharded(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    sharded = [("sharded", on_mesh(tensor, Shard(0)))] if tensor.dim() else []
    return [("replicated", on_mesh(tensor, Replicate())), *sharded]


def all_kinds() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    kinds = {name: make() for name, make in KINDS.items()}
    for name in PLACED:
        kinds |= {f"{name}, {how}": t for how, t in replicated_or_sharded(KINDS[name]())}
    return kinds


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor


def spoil(tensor: torch.Tensor) -> None:
    """Change every bit of what a tensor is made of, in place."""
    for part in inner(local(tensor)):
        memory = torch.empty(0, dtype=torch.uint8).set_(part.detach().untyped_storage())
        memory.bitwise_xor_(1 if part.dtype == torch.bool else 255)


SAVES: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "save": lambda state, url: dos.save(state, url, progress=False),
    "async_save": dos.async_save,
    "dcp.save": lambda state, url: dcp.save(state, storage_writer=dos.ObjectStoreWriter(url)),
    "dcp.async_save": lambda state, url: dcp.async_save(
        state, storage_writer=dos.ObjectStoreWriter(url)
    ),
}
LOADS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "load": lambda state, url: dos.load(state, url, progress=False),
    "dcp.load": lambda state, url: dcp.load(state, storage_reader=dos.ObjectStoreReader(url)),
}


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind and value, with memory of its own."""
    if isinstance(tensor, DTensor):
        return on_mesh(like(tensor._local_tensor), tensor.placements[0])
    loaded = by_torch(local(tensor))
    return loaded.contiguous() if 0 in loaded.stride() and loaded.numel() else loaded


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, in a plain one."""
    held = local(tensor)
    values = torch.empty(held.shape, dtype=held.dtype)
    with torch.no_grad():
        return values.copy_(held)


@pytest.mark.parametrize("save", cases(SAVES, default=["async_save", "dcp.save"]))
def test_every_kind_of_tensor_comes_back_bit_for_bit(save):
    state = all_kinds()
    expected = {key: by_torch(local(tensor)) for key, tensor in state.items()}
    values = {k: plain(tensor) for k, tensor in state.items() if not local(tensor).is_quantized}
    targets = {key: like(tensor) for key, tensor in state.items()}
    url = memory_url()
    begun = SAVES[save](dict(state), url)
    if "async" in save:
        for tensor in state.values():
            spoil(tensor)
        begun.result()
    wrong = []
    for how, load in LOADS.items():
        for into, change in (("fresh", spoil), ("equal", lambda _: None)):
            for tensor in targets.values():
                change(tensor)
            load(targets, url)
            for key, tensor in targets.items():
                if not is_same(local(tensor).detach(), expected[key].detach().contiguous()) and (
                    not is_same(local(tensor), expected[key])
                ):
                    wrong.append((how, into, key))
        into_plain = {key: torch.zeros_like(value) for key, value in values.items()}
        load(into_plain, url)
        wrong += [(how, "plain", k) for k, v in values.items() if bits(into_plain[k]) != bits(v)]
    assert not wrong


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "lazy": torch.nn.UninitializedParameter,
    "lazy buffer": torch.nn.UninitializedBuffer,
    "masked": lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "opaque": lambda: Opaque(torch.ones(3)),
    "meta": lambda: torch.ones(3, device="meta"),
    "partial": lambda: on_mesh(torch.ones(3), Partial()),
    "partial codes": lambda: on_mesh(codes(3, 4), Partial()),
    "sparse shard": lambda: on_mesh(torch.eye(3).to_sparse(), Replicate()),
    "opaque shard": lambda: on_mesh(Opaque(torch.ones(3)), Replicate()),
}
# DCP's own planner fails on these, before a writer learns of their keys.
BY_TORCH = {
    *("nested", "mkldnn", "lazy", "lazy buffer", "masked", "partial", "partial codes"),
    "sparse shard",
}


ADVICE = {
    **dict.fromkeys(("lazy", "lazy buffer"), "module has run"),
    **dict.fromkeys(("masked", "opaque", "opaque shard"), "__tensor_flatten__"),
    **dict.fromkeys(("partial", "partial codes"), "redistribute"),
    "meta": "meta",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "save"),
    cases(
        itertools.product(REFUSED, SAVES),
        # Each kind at one save, and what we and what DCP's planner refuses at each.
        default=[
            *itertools.product(REFUSED, ["save"]),
            *itertools.product(["opaque", "partial"], ["dcp.save", "dcp.async_save"]),
        ],
    ),
)
def test_what_could_not_be_loaded_is_refused_at_the_save_by_its_key(kind, save):
    url = memory_url()
    state = {"fine": torch.ones(2), "deep": {"odd": REFUSED[kind]()}}
    with pytest.raises((UnsupportedError, CheckpointException)) as caught:
        begun = SAVES[save](state, url)
        begun.result()
    error: Any = caught.value
    if isinstance(error, CheckpointException):
        (error,) = error.failures[0][:1]
    if save != "dcp.save" or kind not in BY_TORCH:
        assert isinstance(error, UnsupportedError), error
        assert error.key == "deep.odd"
    if save in ("save", "async_save"):
        assert re.search(ADVICE.get(kind, "to_dense"), str(error)), error
    stored = [meta.key for meta in open_store(url).list()]
    assert not any(key.endswith("_COMMIT") for key in stored)
    if kind != "meta" and save != "dcp.save":
        assert not any(key.endswith(".distcp") for key in stored), "refused when it was planned"


@pytest.mark.parametrize("kind", ["nested", "jagged", "lazy", "opaque", "partial", "partial codes"])
def test_what_cannot_be_filled_is_refused_at_the_load_by_its_key(kind):
    url = memory_url()
    dos.save({"fine": torch.ones(2), "odd": torch.ones(3)}, url, progress=False)
    state = {"fine": torch.zeros(2), "odd": REFUSED[kind]()}
    with pytest.raises(UnsupportedError) as caught:
        dos.load(state, url, progress=False)
    assert caught.value.key == "odd"
    assert state["fine"].tolist() == [0, 0]


def test_plain_values_load_into_a_wrapper_whose_class_takes_them():
    url = memory_url()
    values = torch.randn(3, 4)
    saved = {"boxed": values, "codes": values, "shard": values, "other": Boxed(values)}
    dos.save(saved, url, progress=False)
    expected = codes(3, 4).copy_(values)
    state = {
        "boxed": Boxed(torch.zeros(3, 4)),
        "codes": codes(3, 4),
        "shard": on_mesh(codes(3, 4), Shard(0)),
        "other": codes(3, 4),
    }
    dos.load(state, url, progress=False)
    assert bits(state["boxed"].inner) == bits(values)
    for key in ("codes", "shard", "other"):
        assert is_same(local(state[key]), expected)


def test_a_wrapper_that_takes_no_plain_values_is_refused_before_a_tensor_is_filled():
    url = memory_url()
    dos.save({"a": torch.ones(2), "odd": torch.ones(3, 4)}, url, progress=False)
    state = {"a": torch.zeros(2), "odd": codes(3, 4, kind=Frozen)}
    before = by_torch(state["odd"])
    with pytest.raises(StateMismatchError, match="Frozen") as caught:
        dos.load(state, url, progress=False)
    assert caught.value.key == "odd"
    assert state["a"].tolist() == [0, 0]
    assert is_same(state["odd"], before)


def test_a_wrapper_loads_into_another_class_or_settings_by_its_values():
    url = memory_url()
    saved = codes(3, 4, bias=1.0)
    dos.save({"other": saved, "settings": saved}, url, progress=False)
    state = {"other": Boxed(torch.zeros(3, 4)), "settings": codes(3, 4)}
    dos.load(state, url, progress=False)
    assert torch.equal(state["other"].inner, saved.plain())
    assert is_same(state["settings"], codes(3, 4).copy_(saved.plain()))
    frozen = {"other": codes(3, 4, kind=Frozen)}
    with pytest.raises(StateMismatchError, match="Frozen") as caught:
        dos.load(frozen, url, progress=False)
    assert caught.value.key == "other"


def test_a_part_of_a_wrapper_is_read_as_plain_values():
    url = memory_url()
    saved = codes(3, 4)
    dos.save({"x": saved}, url, progress=False)
    assert torch.equal(dos.open(url)["x"][1:, 2:], saved.plain()[1:, 2:])


def test_wrappers_with_common_parts_are_loaded_as_if_one_by_one():
    url = memory_url()
    scale = torch.rand(3)
    tied = Codes(torch.ones(3, 4, dtype=torch.int8), scale)
    near = Codes(torch.zeros(3, 4, dtype=torch.int8), scale)
    state = {"a": tied, "b": tied, "near": near, "row": tied.codes[1]}
    expected = {key: by_torch(tensor) for key, tensor in state.items()}
    dos.async_save(dict(state), url).result()
    for tensor in (tied, near):
        spoil(tensor)
    dos.load(state, url, progress=False)
    assert all(is_same(state[key], expected[key]) for key in state)


def shown(tensor: torch.Tensor) -> str:
    return str([str(part) for part in tensor.unbind()] if tensor.is_nested else tensor)


class Holder:
    """A value with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*CLASSES, "sparse", "jagged", "masked", "quantized"])
def test_tensors_within_values_are_copied_as_a_save_would_write_them(kind):
    """A tuple or an object is pickled as one, so what is in it needs no place in a grid."""
    makes = {**REFUSED, **KINDS, Codes: KINDS["codes"], Frozen: KINDS["frozen codes"]}
    makes |= {Boxed: KINDS["boxed"], Pair: KINDS["wrapped twice"]}
    makes |= {Tagged: KINDS["tagged"], Counting: KINDS["counting"]}
    tensor = makes[kind]()
    state = {"tuple": (1, tensor), "object": Holder(tensor)}
    expected = by_torch(tensor)
    url = memory_url()
    handle = dos.async_save(state, url)
    if kind not in ("sparse", "jagged", "masked"):
        spoil(tensor)
    handle.result()
    loaded: dict[str, Any] = {"tuple": None, "object": None}
    dos.load(loaded, url, progress=False, trust_pickle=True)
    for found in (loaded["tuple"][1], loaded["object"].tensor):
        assert type(found) is type(expected)
        if kind in ("sparse", "jagged", "masked"):
            assert shown(found) == shown(expected)
        else:
            assert is_same(found, expected)


class Undeclared(Boxed):
    """A class that `torch.load` does not know to be safe."""


def test_a_class_that_was_not_declared_needs_trust_and_the_save_says_so_once():
    url = memory_url()
    saved = Undeclared(torch.rand(3))
    state = {"x": saved, "y": Undeclared(torch.rand(3)), "z": torch.nn.Parameter(torch.ones(1))}
    with pytest.warns(UserWarning, match="Undeclared.*add_safe_globals") as warned:
        dos.save(state, url, progress=False)
    assert len([w for w in warned if "Undeclared" in str(w.message)]) == 1
    fresh = {"x": Undeclared(torch.zeros(3))}
    with pytest.raises(
        UntrustedPickleError, match=r"add_safe_globals.*trust_pickle=True"
    ) as caught:
        dos.load(fresh, url, progress=False)
    assert caught.value.key == "x"
    dos.load(fresh, url, progress=False, trust_pickle=True)
    assert is_same(fresh["x"], saved)


def _rows(rank: int, world: int) -> Codes:
    """Rows of one tensor that all ranks have together, two a rank of two."""
    torch.manual_seed(0)
    whole, count = codes(6, 4), 6 // world
    return Codes(*(part[rank * count : (rank + 1) * count].clone() for part in inner(whole)))


def _sharded(rows: Codes, placement: Any, world: int) -> DTensor:
    mesh = init_device_mesh("cpu", (world,))
    plain = DTensor.from_local(torch.empty(rows.shape), mesh, [placement])
    return torch_private.dtensor(rows, torch_private.spec_of(plain))


def _save_rows(rank: int, world: int, url: str) -> None:
    torch.serialization.add_safe_globals([Codes])
    dos.save({"x": _sharded(_rows(rank, world), Shard(0), world)}, url, progress=False)


def _load_rows(rank: int, world: int, url: str) -> bool:
    torch.serialization.add_safe_globals([Codes])
    expected, state = _rows(rank, world), _rows(rank, world)
    spoil(state)
    dos.load({"x": _sharded(state, Shard(0), world)}, url, progress=False)
    return is_same(state, expected)


def _load_columns(rank: int, world: int, url: str) -> None:
    """Load columns of a wrapper of which only rows can be cut: by their values."""
    torch.serialization.add_safe_globals([Codes])
    expected = _rows(0, 1).plain().chunk(world, 1)[rank]
    plain, own = torch.zeros(6, 4 // world), codes(6, 4 // world)
    state = {"x": _sharded(own, Shard(1), world)}
    dos.load({"x": DTensor.from_local(plain, state["x"].device_mesh, [Shard(1)])}, url)
    assert torch.equal(plain, expected)
    dos.load(state, url, progress=False)
    assert is_same(own, codes(6, 4 // world).copy_(expected))


def _save_columns(rank: int, world: int, url: str) -> None:
    torch.serialization.add_safe_globals([Codes])
    dos.save({"x": _sharded(codes(6, 2), Shard(1), world)}, url, progress=False)


def _cut_what_cannot_be_cut(
    rank: int, world: int, url: str, kind: type[Codes], why: str
) -> str | None:
    torch.serialization.add_safe_globals([Codes])
    with pytest.raises(StateMismatchError, match=f"{kind.__name__}.*{why}") as caught:
        dos.load({"x": codes(6, 4, kind=kind)}, url, progress=False)
    return caught.value.key


def test_rows_of_wrappers_load_on_another_number_of_ranks_bit_for_bit(tmp_path):
    url = (tmp_path / "run" / "step-1").as_uri()
    run_ranks(2, _save_rows, url)
    for world in (1, 2, 3):
        assert run_ranks(world, _load_rows, url) == [True] * world
    run_ranks(2, _load_columns, url)


def test_part_of_a_wrapper_is_filled_only_if_its_class_gives_a_view(tmp_path):
    columns, rows = ((tmp_path / "run" / name).as_uri() for name in ("columns", "rows"))
    run_ranks(2, _save_columns, columns)
    assert run_ranks(1, _cut_what_cannot_be_cut, columns, Codes, "only rows") == ["x"]
    run_ranks(2, _save_rows, rows)
    assert run_ranks(1, _cut_what_cannot_be_cut, rows, Copying, "a copy") == ["x"]
