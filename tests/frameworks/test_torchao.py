"""Quantized tensors of torchao: the state of its optimizers, and weights, are saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcp_objstore as dos
from dcp_objstore import torch_private
from tests.support.checkpoints import memory_url
from tests.support.ranks import run_ranks

pytest.importorskip("torchao")
pytestmark = pytest.mark.timeout(600)

MOMENTS = ["exp_avg", "exp_avg_sq"]
OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
WEIGHTS = [
    "Int8WeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
]
SAVES = {
    "save": lambda state, url: dos.save(state, url, progress=False),
    "async_save": lambda state, url: dos.async_save(state, url).result(),
    "dcp.save": lambda state, url: dcp.save(state, storage_writer=dos.ObjectStoreWriter(url)),
    "dcp.async_save": lambda state, url: dcp.async_save(
        state, storage_writer=dos.ObjectStoreWriter(url)
    ).result(),
}


def made(optimizer: str, *, sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torchao import optim

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, getattr(optim, optimizer)(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    torch.compiler.set_stance("force_eager")  # torch's cache mixes the classes up
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).pow(2).mean().backward()
        optimizer.step()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The bytes of all tensors, those that tensors are made of, too, and the kinds of tensors."""
    tensors = dict(model.state_dict())
    for number, state in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{n}": v for n, v in state.items() if isinstance(v, torch.Tensor)}
    return {key: held(tensor) for key, tensor in tensors.items()}


def held(tensor: torch.Tensor) -> tuple[str, list[bytes]]:
    local = torch_private.local_tensor(tensor)
    return type(local).__name__, [
        part.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for part in torch_private.parts(local)
    ]


@pytest.mark.parametrize("save", ["save", "async_save"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_quantized_optimizer_goes_on_as_if_it_had_not_been_saved(optimizer, save):
    url = memory_url()
    training = made(optimizer)
    train(*training, seed=1)
    SAVES[save](dict(zip("mo", training, strict=True)), url)
    train(*training, seed=2)
    resumed = made(optimizer)
    dos.load(dict(zip("mo", resumed, strict=True)), url, progress=False)
    train(*resumed, seed=2)
    expected = contents(*training)
    assert any(kind.startswith("OptimState") for kind, _ in expected.values())
    assert contents(*resumed) == expected


def _resume_sharded(rank: int, world: int, url: str, optimizer: str) -> bool:
    training = made(optimizer, sharded=True)
    train(*training, seed=1)
    dos.async_save(dict(zip("mo", training, strict=True)), url).result()
    train(*training, seed=2)
    resumed = made(optimizer, sharded=True)
    dos.load(dict(zip("mo", resumed, strict=True)), url, progress=False)
    train(*resumed, seed=2)
    return contents(*resumed) == contents(*training)


def _parts_after(rank: int, world: int, url: str, optimizer: str) -> list[bytes]:
    """What this rank has of the state after a load; without the tables that all ranks have."""
    training = made(optimizer, sharded=world > 1)
    if world == 1:  # it needs a tensor of both ranks' parts, which only the optimizer can make
        with pytest.raises(dos.errors.StateMismatchError, match="step the optimizer once"):
            dos.load(dict(zip("mo", training, strict=True)), url, progress=False)
        train(*training, seed=3)
    dos.load(dict(zip("mo", training, strict=True)), url, progress=False)
    states = training[1].state.values()
    return [part for s in states for name in MOMENTS for part in held(s[name])[1][:2]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_quantized_optimizer_goes_on_under_fsdp2_and_with_fewer_ranks(optimizer, tmp_path):
    url = (tmp_path / "run" / "step-1").as_uri()
    assert run_ranks(2, _resume_sharded, url, optimizer) == [True, True]
    (one,) = run_ranks(1, _parts_after, url, optimizer)
    two = run_ranks(2, _parts_after, url, optimizer)
    assert one == [first + second for first, second in zip(*two, strict=True)]


def _weights(config: str) -> nn.Module:
    from torchao import quantization

    model = nn.Sequential(nn.Linear(64, 128)).to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)())
    return model


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("config", WEIGHTS)
def test_quantized_weights_load_into_others_and_into_plain_ones(config, save):
    url = memory_url()
    saved, other = _weights(config).state_dict(), _weights(config).state_dict()
    SAVES[save](dict(saved), url)
    dos.load(other, url, progress=False)
    assert {key: held(t) for key, t in other.items()} == {key: held(t) for key, t in saved.items()}
    plain = {"0.weight": torch.zeros(128, 64, dtype=torch.bfloat16)}
    dos.load(plain, url, progress=False)
    assert torch.equal(plain["0.weight"], saved["0.weight"].dequantize())


@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_plain_state_loads_into_quantized_state_and_back(kind):
    import torchao.optim.subclass_4bit as four
    import torchao.optim.subclass_8bit as eight
    import torchao.optim.subclass_fp8 as fp8

    classes: dict[str, Any] = {**vars(four), **vars(eight), **vars(fp8)}
    quantized = classes[kind].zeros((64, 128))
    values, url, back = torch.randn(64, 128), memory_url(), memory_url()
    dos.save({"s": values}, url, progress=False)
    dos.load({"s": quantized}, url, progress=False)
    expected = classes[kind].zeros((64, 128)).copy_(values)
    assert held(quantized) == held(expected)
    dos.save({"s": quantized}, back, progress=False)
    dos.load({"s": values}, back, progress=False)
    assert torch.equal(values, quantized.dequantize())
