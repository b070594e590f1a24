"""Every kind of tensor comes back as `torch.save` gives it back, or is refused at the save by key.

The oracle is `torch.save` and `torch.load`: what they make of a tensor, bit for bit, is what a load
has to give, whichever way the tensor was saved and whichever tensor it is loaded into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.checkpoint.index import ITEM_SIZE_BYTES
from dcp_objstore.errors import DcpObjstoreError, StateMismatchError, UnsupportedError
from dcp_objstore.stores import open_store
from tests.support.checkpoints import memory_url
from tests.support.wrappers import (
    CLASSES,
    Boxed,
    Codes,
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
    "scalar": lambda: numbers(),
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


def in_background(state: dict[str, Any], url: str) -> None:
    handle = dos.async_save(state, url)
    for tensor in state.values():
        spoil(tensor)
    handle.result()


def in_background_by_dcp(state: dict[str, Any], url: str) -> None:
    saved = dcp.async_save(state, storage_writer=dos.ObjectStoreWriter(url))
    for tensor in state.values():
        spoil(tensor)
    saved.result()


SAVES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "save": lambda state, url: dos.save(state, url, progress=False),
    "async_save": in_background,
    "dcp.save": lambda state, url: dcp.save(state, storage_writer=dos.ObjectStoreWriter(url)),
    "dcp.async_save": in_background_by_dcp,
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


@pytest.mark.parametrize("save", SAVES)
def test_every_kind_of_tensor_comes_back_bit_for_bit(save: str) -> None:
    state = all_kinds()
    expected = {key: by_torch(local(tensor)) for key, tensor in state.items()}
    values = {k: plain(tensor) for k, tensor in state.items() if not local(tensor).is_quantized}
    targets = {key: like(tensor) for key, tensor in state.items()}
    url = memory_url()
    SAVES[save](dict(state), url)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_not_be_loaded_is_refused_at_the_save_by_its_key(kind: str, save: str) -> None:
    url = memory_url()
    state = {"fine": torch.ones(2), "deep": {"odd": REFUSED[kind]()}}
    call = {**SAVES, "async_save": _unspoilt, "dcp.async_save": _unspoilt_by_dcp}[save]
    with pytest.raises((UnsupportedError, CheckpointException)) as caught:
        call(state, url)
    error: Any = caught.value
    if isinstance(error, CheckpointException):
        (error,) = error.failures[0][:1]
    if save != "dcp.save" or kind not in BY_TORCH:
        assert isinstance(error, UnsupportedError), error
        assert error.key == "deep.odd"
    assert not any(meta.key.endswith("_COMMIT") for meta in open_store(url).list())


def _unspoilt(state: dict[str, Any], url: str) -> None:
    dos.async_save(state, url).result()


def _unspoilt_by_dcp(state: dict[str, Any], url: str) -> None:
    dcp.async_save(state, storage_writer=dos.ObjectStoreWriter(url)).result()
