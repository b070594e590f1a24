"""How each optimizer is built: data, by library."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tests.support.wrappers import Codes

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """An optimizer.

    Attributes:
        make: builds it from parameter groups and the model.
        model: "net", or "matrices" (without biases), or "embedding" (with sparse gradients).
        step: how it is stepped: "plain", "closure", "sam" (gradients and a closure), "graph"
            (gradients of which gradients are taken), "fused" (backward and step are one).
        grouped: whether `make` uses the groups that it is given.
    """

    library: str
    name: str
    make: Callable[[Groups, nn.Module], Any]
    model: str = "net"
    step: str = "plain"
    lr: float = 0.01
    grouped: bool = True


def _of(kind: Callable[..., Any], **options: Any) -> Callable[[Groups, nn.Module], Any]:
    return lambda groups, _model: kind(groups, **options)


# --- torch ---------------------------------------------------------------------------------------

# Each setting that makes another entry of the state or another kind of it.
_TORCH: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 1, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adafactor": {},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {"weight_decay": 0.1},
    "LBFGS": {"max_iter": 3, "history_size": 2},
    "Muon": {},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {"weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "SparseAdam": {},
}
_TORCH_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam(fused)": ("Adam", {"fused": True}),
    "Adam(capturable)": ("Adam", {"capturable": True}),  # steps on a GPU alone
    "AdamW(amsgrad, foreach)": ("AdamW", {"amsgrad": True, "foreach": True}),
    "AdamW(eps=0)": ("AdamW", {"eps": 0.0}),
    "SGD(plain)": ("SGD", {}),
    "SGD(fused)": ("SGD", {"fused": True, "momentum": 0.9}),
    "SGD(nesterov)": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSprop(plain)": ("RMSprop", {}),
    "LBFGS(wolfe)": ("LBFGS", {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
    "Adagrad(fused)": ("Adagrad", {"fused": True}),
}
_TORCH_MODELS = {"Muon": "matrices", "SparseAdam": "embedding"}


def _torch_cases() -> list[Case]:
    kinds = {
        name: (name, _TORCH.get(name, {}))
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    return [
        Case(
            "torch",
            name,
            _of(getattr(torch.optim, kind), **options),
            model=_TORCH_MODELS.get(kind, "net"),
            step="closure" if kind == "LBFGS" else "plain",
            lr=0.1 if kind == "LBFGS" else 0.01,
        )
        for name, (kind, options) in (kinds | _TORCH_MORE).items()
    ]


# --- kinds of optimizers that no library has alone -----------------------------------------------


class Slow(torch.optim.SGD):
    """An entry of the state that is first made at the third step, as Lookahead does it."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if group["count"] % 3 == 0:
                for parameter in group["params"]:
                    slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                    slow.lerp_(parameter.detach(), 0.5)
                    parameter.data.copy_(slow)
        return loss


class Counting(torch.optim.SGD):
    """Entries of the state that belong to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", 0) + 1
        mean = self.state.setdefault("mean", {"value": torch.zeros(2), "steps": torch.tensor(0)})
        mean["value"] += 0.5
        mean["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + self.state["k"] / 100 + float(mean["value"][0]))
        return super().step(closure)


class Beside(torch.optim.SGD):
    """Entries of the state dict beside `state` and `param_groups`."""

    steps = 0
    sums: Any = None

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.sums = torch.ones(3) if self.sums is None else self.sums * 1.5
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(float(self.sums[0]) + self.steps)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": self.steps, "more": {"sums": self.sums}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.steps = state_dict.pop("steps")
        sums = state_dict.pop("more")["sums"]
        self.sums = None if sums is None else sums.clone()
        super().load_state_dict(state_dict)


class Growing(torch.optim.SGD):
    """Lists that grow, nested dicts, numbers and nothing in the state of a parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("history", []).append(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                past = state.setdefault("past", [])
                past.append(parameter.grad.clone())
                pair = state.setdefault("pair", {"left": [], "right": {0: None}})
                pair["left"].append(torch.ones(len(past)))
                pair["right"][len(past)] = float(len(past))
                state["empty"], state["none"], state["flag"] = [], None, len(past) % 2 == 0
                state["shape"] = tuple(parameter.shape)
                state["mask"] = parameter.grad > 0
                parameter.grad.add_(
                    past[0] * 0.1 + sum(float(v or 0) for v in pair["right"].values())
                )
        return super().step(closure)


class Norms(torch.optim.SGD):
    """Numbers and sums computed from a gradient, and plain ones; dicts without entries beside.

    Of a sharded gradient, some are sharded, some are on all ranks, and some are plain tensors.
    """

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                sums = {"norm": _on_all_ranks(gradient.norm())}
                if gradient.ndim == 2:
                    sums["rows"] = gradient.square().sum(1)
                    sums["columns"] = _on_all_ranks(gradient.sum(0))
                for name, value in sums.items():
                    state.setdefault(name, torch.zeros_like(value)).mul_(0.9).add_(value)
                state.setdefault("count", torch.zeros(())).add_(1)
                state.setdefault("window", torch.zeros(4)).add_(state["count"])
                state.setdefault("own", torch.zeros(parameter.shape)).add_(state["count"])
                gradient.mul_(1 + state["norm"] / 100)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"caches": [{}, {"a": torch.ones(2)}, {}], "last": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        caches, last = state_dict.pop("caches"), state_dict.pop("last")
        assert (len(caches), caches[0], caches[2], last) == (3, {}, {}, {})
        super().load_state_dict(state_dict)


def _on_all_ranks(value: torch.Tensor) -> torch.Tensor:
    return value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value


class Windowed(torch.optim.SGD):
    """An entry whose shape grows with each step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["past"] = torch.cat([state.get("past", torch.zeros(0)), torch.ones(1)])
        return super().step(closure)


class Quantized(torch.optim.SGD):
    """An entry of a class of its own, as optimizers of torchao have it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                codes = (parameter.detach() * 100).to(torch.int8)
                self.state[parameter]["mean"] = Codes(codes, torch.full((len(codes),), 0.5))
        return super().step(closure)


class NeedsClosure(torch.optim.SGD):
    """An optimizer that refuses to step without a closure."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("a closure is needed")
        return super().step(closure)


class OwnRate(torch.optim.Optimizer):
    """Its learning rate has another name, so no trial step can be told to change nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 0.1, "decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.1)
                    parameter.mul_(1 - group["rate"] * group["decay"]).sub_(mean * group["rate"])


class Never(torch.optim.SGD):
    """An optimizer that has entries of the state from the start."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["start"] = parameter.detach().clone()

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.lerp_(self.state[parameter]["start"], 0.1)
        return loss


def _kinds() -> list[Case]:
    momentum = {"momentum": 0.9}
    return [
        Case("kinds", "Slow", _of(Slow, **momentum)),
        Case("kinds", "Counting", _of(Counting, **momentum)),
        Case("kinds", "Beside", _of(Beside, **momentum)),
        Case("kinds", "Growing", _of(Growing, **momentum)),
        Case("kinds", "Norms", _of(Norms, **momentum)),
        Case("kinds", "Windowed", _of(Windowed, **momentum)),
        Case("kinds", "Quantized", _of(Quantized, **momentum)),
        Case("kinds", "NeedsClosure", _of(NeedsClosure), step="closure"),
        Case("kinds", "NeedsClosure(momentum)", _of(NeedsClosure, **momentum), step="closure"),
        Case("kinds", "OwnRate", _of(OwnRate)),
        Case("kinds", "Never", _of(Never, **momentum)),
    ]


# --- other libraries -----------------------------------------------------------------------------


def _optimizers(module: Any, *, leave: Sequence[str] = ()) -> dict[str, Any]:
    return {
        name: kind
        for name, kind in sorted(vars(module).items())
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and name not in leave
    }


def _pytorch_optimizer_cases() -> list[Case]:
    library = importlib.import_module("pytorch_optimizer")
    # They need several GPUs, `einops`, or a model with heads.
    leave = ("CPUOffloadOptimizer", "DistributedMuon", "DeMo", "BaseOptimizer")
    kinds = _optimizers(library, leave=leave)
    adam, momentum = torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)
    closure, graph = ("AliG", "LBFGS", "BSAM"), ("AdaHessian", "SophiaH")
    special: dict[str, Callable[[Groups, nn.Module], Any]] = {
        "BSAM": lambda groups, _: kinds["BSAM"](groups, num_data=10),
        "Ranger21": lambda groups, _: kinds["Ranger21"](groups, num_iterations=50),
        "AdaLOMO": lambda _, model: kinds["AdaLOMO"](model),
        "LOMO": lambda _, model: kinds["LOMO"](model),
        "AdamMini": lambda _, model: kinds["AdamMini"](model),
        "WSAM": lambda groups, model: kinds["WSAM"](model, groups, base_optimizer=adam, lr=0.01),
        "GSAM": lambda groups, model: kinds["GSAM"](
            groups,
            base_optimizer=adam(groups),
            model=model,
            rho_scheduler=library.ProportionScheduler(
                torch.optim.lr_scheduler.StepLR(adam(groups), 2), max_lr=0.01
            ),
        ),
    }
    for name in ("SAM", "LookSAM", "FriendlySAM"):
        special[name] = functools.partial(_with_base, kinds.get(name), adam)
    for name in (
        "Lookahead",
        "OrthoGrad",
        "TRAC",
        "ScheduleFreeWrapper",
        "Magma",
        "SafeFP16Optimizer",
    ):
        special[name] = functools.partial(_around, getattr(library, name, None), momentum)
    for name in ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"):
        special[name] = functools.partial(_with_muon, kinds.get(name))
    models = {"SpectralSphere": "matrices", "LoRARite": "matrices"}
    steps = dict.fromkeys(closure, "closure") | dict.fromkeys(graph, "graph")
    steps |= dict.fromkeys(("SAM", "LookSAM", "FriendlySAM", "WSAM", "BSAM", "GSAM"), "sam")
    steps |= dict.fromkeys(("LOMO", "AdaLOMO"), "fused")
    return [
        Case(
            "pytorch_optimizer",
            name,
            special.get(name) or _of(kind),
            model=models.get(name, "net"),
            step=steps.get(name, "plain"),
            grouped=name not in ("AdaLOMO", "LOMO", "AdamMini", "GSAM"),
        )
        for name, kind in kinds.items()
    ]


def _with_base(kind: Any, base: Any, groups: Groups, _model: nn.Module) -> Any:
    return kind(groups, base_optimizer=base)


def _around(kind: Any, base: Any, groups: Groups, _model: nn.Module) -> Any:
    return kind(base(groups))


def _with_muon(kind: Any, groups: Groups, _model: nn.Module) -> Any:
    """Muon for matrices, Adam for the others: two groups of each."""
    parted: Groups = []
    for group in groups:
        for matrices in (True, False):
            part = [item for item in group["params"] if (_tensor(item).ndim == 2) is matrices]
            if part or not group["params"]:
                parted.append(group | {"params": part, "use_muon": matrices})
    return kind(parted)


def _tensor(item: Any) -> torch.Tensor:
    tensor: torch.Tensor = item[1] if isinstance(item, tuple) else item
    return tensor


def _schedulefree_cases() -> list[Case]:
    library = importlib.import_module("schedulefree")
    kinds = _optimizers(library)
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    cases = [
        Case(
            "schedulefree", name, _of(kind), step="closure" if name.endswith("Closure") else "plain"
        )
        for name, kind in kinds.items()
        if "Wrapper" not in name
    ]
    # Not optimizers by their type: anything with the two methods.
    return cases + [
        Case("schedulefree", name, functools.partial(_around, getattr(library, name), momentum))
        for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference")
    ]


def _timm_cases() -> list[Case]:
    library = _timm_alone()
    kinds = _optimizers(library, leave=("Optimizer",))
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    special = {"Lookahead": functools.partial(_around, library.Lookahead, momentum)}
    return [
        Case(
            "timm",
            name,
            special.get(name) or _of(kind),
            step="graph" if name == "Adahessian" else "plain",
        )
        for name, kind in kinds.items()
        if kind.__module__.startswith("timm")
    ]


def _timm_alone() -> Any:
    """`timm.optim` without the models of timm, which need a torchvision built for this torch."""
    if "timm" not in sys.modules:
        spec = importlib.util.find_spec("timm")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("timm", name="timm")
        package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        package.__path__ = [str(Path(spec.origin).parent)]
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules |= {"timm": package, "timm.models": models}
        try:
            return importlib.import_module("timm.optim")
        finally:
            del sys.modules["timm"], sys.modules["timm.models"]
    return importlib.import_module("timm.optim")


def _torchao_cases() -> list[Case]:
    library = importlib.import_module("torchao.optim")
    kinds = _optimizers(library, leave=("CPUOffloadOptimizer",))  # for GPUs
    return [
        # A state below `block_size` elements is not quantized.
        Case("torchao", name, _of(kind), model="wide")
        for name, kind in kinds.items()
        if not name.startswith("_")
    ]


def _distributed_cases() -> list[Case]:
    """Optimizers for ranks, over others; only for rows of two ranks."""

    def zero(groups: Groups, _model: nn.Module) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        (group,) = groups
        adam = torch.optim.AdamW
        return ZeroRedundancyOptimizer(group["params"], adam, lr=group["lr"])

    def post_local(groups: Groups, _model: nn.Module) -> Any:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        return PostLocalSGDOptimizer(torch.optim.SGD(groups, momentum=0.9), averager)

    return [
        Case("distributed", "ZeroRedundancyOptimizer", zero),
        Case("distributed", "PostLocalSGDOptimizer", post_local),
    ]


LIBRARIES: dict[str, Callable[[], list[Case]]] = {
    "torch": _torch_cases,
    "kinds": _kinds,
    "pytorch_optimizer": _pytorch_optimizer_cases,
    "schedulefree": _schedulefree_cases,
    "timm": _timm_cases,
    "torchao": _torchao_cases,
    "distributed": _distributed_cases,
}


@functools.cache
def cases_of(library: str) -> tuple[Case, ...]:
    """The optimizers of a library, which must be installed."""
    return tuple(LIBRARIES[library]())


def case_of(library: str, name: str) -> Case:
    (case,) = (case for case in cases_of(library) if case.name == name)
    return case
