"""What differs between the rows: data, and the trainings that it describes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.support.optimizers.cases import Case, Groups


@dataclass(frozen=True)
class Part:
    """The model and the optimizer of one side: of the save, or of the load.

    Attributes:
        groups: how the parameters are parted into groups, a name of `GROUPINGS`, or "random:SEED".
        model: features of the model: "spare" (a layer that is not used), "used" (the spare layer
            is used), "tied", "shared" (a layer used twice), "odd" (parameters without dimensions
            and without elements), "larger" (a layer more), "deep:N" (N layers).
        frozen: "" or when the first layer is frozen: "always" and "excluded" (also from the
            optimizer), "late" (after the steps, before the save or the load).
    """

    groups: str = "one"
    model: tuple[str, ...] = ()
    frozen: str = ""


@dataclass(frozen=True)
class Scene:
    """What a row does.

    Attributes:
        steps: steps before the save.
        warm: steps of the destination before the load.
        more: steps after the load.
        saved: the side of the save.
        loaded: the side of the load; None for the same.
        scheduler: "", "before" or "after": when the destination's is made.
        way: "save", "async", "stock" (torch saves), "flat" (torch saves the flattened form),
            "stock_reads" (torch loads), "raw" (state dicts as values).
        fresh: the destination is touched before the load: "", "looked" (an empty entry for each
            parameter), "gradients" (a backward pass).
        said: a loss that a warning tells of is right here, too.
        partial: the load is not strict.
    """

    name: str
    steps: int = 3
    warm: int = 0
    more: int = 2
    saved: Part = field(default_factory=Part)
    loaded: Part | None = None
    scheduler: str = ""
    way: str = "save"
    fresh: str = ""
    tensor_lr: bool = False
    named: bool = False
    inference: bool = False
    average: bool = False
    said: bool = False
    partial: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    two_optimizers: bool = False
    trainable: bool = False
    keys: tuple[str, ...] = ("model", "optimizer")
    seed: int = 0

    @property
    def into(self) -> Part:
        return self.loaded or self.saved

    @property
    def same_places(self) -> bool:
        """Whether each parameter has the same number in both optimizers."""
        one, other = self.saved, self.into
        excluded = {one.frozen == "excluded", other.frozen == "excluded"}
        return one.groups == other.groups and one.model == other.model and len(excluded) == 1


def _scenes() -> list[Scene]:
    spare, tied = Part(model=("spare",)), Part(model=("tied",))
    two, late, always = Part("two"), Part(frozen="late"), Part(frozen="always")
    much = Part("two", model=("spare", "tied"), frozen="late")
    return [
        Scene("fresh"),
        Scene("stepped", warm=2),
        Scene("many_steps", steps=12),
        Scene("never_stepped", steps=0),
        Scene("never_stepped_into_stepped", steps=0, warm=2),
        Scene("looked_at", fresh="looked"),
        Scene("gradients", fresh="gradients"),
        Scene("two_groups", saved=two),
        Scene("two_groups_stepped", saved=two, warm=1),
        Scene("empty_group_first", saved=Part("empty_first")),
        Scene("empty_group_last", saved=Part("empty_last"), warm=1),
        Scene("two_empty_groups", saved=Part("empties")),
        Scene("tensor_lr", saved=two, tensor_lr=True),
        Scene("tensor_lr_stepped", saved=two, tensor_lr=True, warm=1),
        Scene("scheduler_before", saved=two, scheduler="before"),
        Scene("scheduler_after", saved=two, scheduler="after"),
        Scene("scheduler_after_stepped", saved=two, scheduler="after", warm=1),
        Scene("frozen", saved=always),
        Scene("frozen_not_given", saved=Part(frozen="excluded")),
        Scene("frozen_since", saved=late, loaded=always),
        Scene("frozen_since_stepped", saved=late, warm=2),
        Scene("frozen_for_the_load", loaded=always),
        Scene("frozen_and_not_given_any_more", loaded=Part(frozen="excluded")),
        Scene("trains_again", saved=always, loaded=Part()),
        Scene("trains_again_stepped", saved=always, loaded=Part(), warm=2),
        Scene("unused", saved=spare),
        Scene("unused_then_used", saved=spare, loaded=Part(model=("spare", "used")), warm=2),
        Scene("used_then_unused", saved=Part(model=("spare", "used")), loaded=spare, warm=2),
        Scene("tied", saved=tied),
        Scene("tied_stepped", saved=tied, warm=2),
        Scene("shared", saved=Part("two", model=("shared",))),
        Scene("odd_shapes", saved=Part(model=("odd",))),
        Scene("odd_shapes_stepped", saved=Part(model=("odd",)), warm=1),
        Scene("regrouped_one_to_two", loaded=Part("two_alike")),
        Scene("regrouped_two_to_one", saved=Part("two_alike"), loaded=Part("one")),
        Scene("regrouped_split", saved=two, loaded=Part("split")),
        Scene("regrouped_merged", saved=Part("split"), loaded=two),
        Scene("regrouped_swapped", saved=two, loaded=Part("swapped")),
        Scene("regrouped_swapped_stepped", saved=two, loaded=Part("swapped"), warm=2),
        Scene("reordered", loaded=Part("reversed")),
        Scene("regrouped_in_conflict", saved=two, loaded=Part("kinds"), said=True),
        Scene("empty_group_gone", saved=Part("empty_first"), loaded=Part("one")),
        Scene("empty_group_new", saved=Part("one"), loaded=Part("empty_first")),
        Scene("named", saved=two, named=True),
        Scene("larger", loaded=Part(model=("larger",)), partial=True),
        Scene("larger_stepped", loaded=Part(model=("larger",)), partial=True, warm=2),
        Scene("smaller", saved=Part(model=("larger",)), loaded=Part()),
        Scene("average", saved=two, average=True),
        Scene("inference", inference=True),
        Scene("inference_stepped", inference=True, warm=1),
        Scene("bfloat16", dtype=torch.bfloat16),
        Scene("float16", dtype=torch.float16, warm=1),
        Scene("float64", dtype=torch.float64),
        Scene("async", way="async"),
        Scene("stock_saves", saved=two, way="stock"),
        Scene("stock_saves_flat", saved=two, way="flat"),
        Scene("stock_saves_flat_stepped", saved=two, way="flat", warm=1),
        Scene("stock_reads", saved=two, way="stock_reads"),
        Scene("raw", saved=two, way="raw", said=True),
        Scene("raw_stepped", saved=two, way="raw", warm=2, said=True),
        Scene("two_optimizers", two_optimizers=True),
        Scene("two_optimizers_stepped", two_optimizers=True, warm=1),
        Scene("trainable", saved=Part(frozen="excluded"), trainable=True),
        Scene("trainable_frozen_given", saved=always, trainable=True),
        Scene("optimizer_first", keys=("policy", "adam")),
        # Much at a time: for the default suite.
        Scene("much", saved=much, scheduler="before", fresh="gradients", average=True, way="async"),
        Scene("much_stepped", saved=much, scheduler="after", warm=2, fresh="looked"),
        Scene("deep", keys=("train.models.net", "train.optims.0")),
    ]


SCENES = {scene.name: scene for scene in _scenes()}


def random_scene(seed: int) -> Scene:
    """A scene of random groups, freezing, steps and ways; the same for a seed in every process."""
    draw = random.Random(seed)
    features = [f"deep:{draw.randint(1, 4)}"]
    features += [one for one in ("spare", "tied", "shared") if draw.random() < 0.3]
    frozen = draw.choice(["", "", "", "always", "late"])
    saved = Part(f"random:{seed}", tuple(features), frozen)
    later = draw.choice([frozen, frozen, "", "always"])
    regrouped = f"random:{seed}:{draw.randint(1, 9)}" if draw.random() < 0.5 else saved.groups
    return Scene(
        f"random-{seed}",
        steps=draw.choice([0, 1, 2, 3, 5, 7]),
        warm=draw.choice([0, 0, 1, 3]),
        more=draw.randint(1, 4),
        saved=saved,
        loaded=Part(regrouped, saved.model, later),
        scheduler=draw.choice(["", "", "before", "after"]),
        fresh=draw.choice(["", "looked", "gradients"]),
        way=draw.choice(["save", "save", "async"]),
        inference=draw.random() < 0.2,
        average=draw.random() < 0.2,
        keys=draw.choice([("model", "optimizer"), ("policy", "adam"), ("a.m", "b.0")]),
        seed=seed,
    )


# --- models --------------------------------------------------------------------------------------


class Net(nn.Module):
    """A few layers, with what `features` name."""

    def __init__(self, kind: str, features: tuple[str, ...]) -> None:
        super().__init__()
        bias = kind != "matrices"
        width = 64 if kind == "wide" else 6
        depth = next((int(one[5:]) for one in features if one.startswith("deep:")), 2)
        self.features = features
        self.first = nn.Linear(4, width, bias=bias)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth - 1))
        if "tied" in features:
            self.tied = nn.Linear(width, width, bias=bias)
            self.tied.weight = (self.blocks[0] if depth > 1 else self.first).weight
            if depth == 1:
                del self.tied
        if "spare" in features:
            self.spare = nn.Linear(width, width, bias=bias)
        if "larger" in features:
            self.added = nn.Linear(width, width, bias=bias)
        if "odd" in features:
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(width, 4, bias=bias)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = torch.tanh(self.first(value))
        for block in self.blocks:
            value = torch.tanh(block(value))
            if "shared" in self.features:
                value = torch.tanh(block(value))
        if hasattr(self, "tied"):
            value = torch.tanh(self.tied(value))
        if "used" in self.features:
            value = torch.tanh(self.spare(value))
        if "larger" in self.features:
            value = torch.tanh(self.added(value))
        if "odd" in self.features:
            value = value * self.scale + self.nothing.sum()
        return self.head(value)


class Tables(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        if set(features) - {"spare", "used", "larger"}:
            raise NotImplementedError(f"no embeddings with {features}")
        self.features = features
        self.first = nn.Embedding(7, 4, sparse=True)
        self.second = nn.Embedding(7, 4, sparse=True)
        if "spare" in features:
            self.spare = nn.Embedding(7, 4, sparse=True)
        if "larger" in features:
            self.added = nn.Embedding(7, 4, sparse=True)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        rows = (value[:, 0].abs() * 100).long() % 7
        total = self.first(rows) * self.second(rows)
        if "used" in self.features:
            total = total + self.spare(rows)
        if "larger" in self.features:
            total = total + self.added(rows)
        return total


def model_of(
    case: Case, part: Part, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> nn.Module:
    model: nn.Module
    model = Tables(part.model) if case.model == "embedding" else Net(case.model, part.model)
    return model.to(device, dtype)


# --- groups --------------------------------------------------------------------------------------

Names = list[str]


def _halves(names: Names) -> tuple[Names, Names]:
    middle = (len(names) + 1) // 2
    return names[:middle], names[middle:]


# For each: lists of names, each with a number by which its learning rate is told from others'.
GROUPINGS: dict[str, Callable[[Names], list[tuple[Names, int]]]] = {
    "one": lambda names: [(names, 1)],
    "two": lambda names: [(_halves(names)[0], 1), (_halves(names)[1], 2)],
    "two_alike": lambda names: [(_halves(names)[0], 1), (_halves(names)[1], 1)],
    "swapped": lambda names: [(_halves(names)[1], 2), (_halves(names)[0], 1)],
    "split": lambda names: [(names[:1], 1), (_halves(names)[0][1:], 1), (_halves(names)[1], 2)],
    "kinds": lambda names: [(names[::2], 1), (names[1::2], 2)],
    "reversed": lambda names: [(names[::-1], 1)],
    "empty_first": lambda names: [([], 1), (names, 2)],
    "empty_last": lambda names: [(names, 1), ([], 2)],
    "empties": lambda names: [([], 1), (names, 2), ([], 3)],
}


def parted(groups: str, names: Names) -> list[tuple[Names, int]]:
    """The names of the parameters in groups."""
    kind, _, seeds = groups.partition(":")
    if kind != "random":
        return GROUPINGS[groups](names)
    first, _, second = seeds.partition(":")
    rates = random.Random(int(first))
    by_rate: dict[int, Names] = {}
    for name in names:
        by_rate.setdefault(rates.randint(1, 3), []).append(name)
    found = [(part, rate) for rate, part in by_rate.items()]
    if second:  # other groups, in which each parameter has the rate that it had
        other = random.Random(int(second))
        for part, rate in list(found):
            if len(part) > 1 and other.random() < 0.5:
                cut = other.randint(1, len(part) - 1)
                found.remove((part, rate))
                found += [(part[:cut], rate), (part[cut:], rate)]
        other.shuffle(found)
        found = [(other.sample(part, len(part)), rate) for part, rate in found]
    return found


def groups_of(
    case: Case, scene: Scene, part: Part, named: list[tuple[str, nn.Parameter]], scale: float
) -> Groups:
    """Parameter groups for an optimizer; each learning rate times `scale`."""
    by_name = dict(named)
    groups: Groups = []
    for names, number in parted(part.groups, list(by_name)):
        rate: Any = case.lr * number * scale
        if scene.tensor_lr:
            rate = torch.tensor(rate)
        params: list[Any] = [by_name[name] for name in names]
        if scene.named:
            params = list(zip(names, params, strict=True))
        groups.append({"params": params, "lr": rate})
    return groups
