"""Rows of two ranks: a resume against each rank's own `state_dict` and `load_state_dict`.

Optimizers that are made for ranks are compared with the run that was not interrupted.

Each rank trains and saves; then it loads into a model and an optimizer of other values and trains
on. What two ranks have saved is also loaded into one process.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dcp_objstore as dos
from tests.support.optimizers.cases import Case, Groups, case_of
from tests.support.optimizers.comparing import differences, first
from tests.support.optimizers.rows import (
    ANY_ERROR,
    NOT_RUN,
    REFUSED,
    RIGHT,
    SAID,
    WRONG,
    Own,
    Row,
    Training,
    guarding,
    listening,
    text_of,
)
from tests.support.optimizers.scenes import Part, Scene, model_of
from tests.support.ranks import RanksFailedError, run_ranks

_STEPS, _MORE = 3, 2


class Stages(nn.Module):
    """Nets beside each other, of which a rank has one or more; its output has theirs in turn, so
    that the gradients of one do not depend on the others."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(value) for part in self.parts.values()])


class RankTraining(Training):
    """A training of one rank.

    Layouts: "ddp"; "fsdp2"; "stages" (each rank has a net of its own, with its own learning rate);
    "uneven" (as stages, with two groups on one rank and one on the other); "experts" (a net that
    both have, and one of the rank's own, in two groups); "one" (a process that has all of it).
    """

    def __init__(
        self, case: Case, layout: str, nets: list[str], *, seed: int, scale: float
    ) -> None:
        self.layout, self.nets = layout, nets
        rate = {"stage0": 1, "stage1": 2}.get(nets[-1], 1) if layout in ("stages", "uneven") else 1
        groups = "two" if layout == "uneven" and nets == ["stage0"] else "one"
        self.rates = {net: number + 1 for number, net in enumerate(sorted(nets))}
        super().__init__(case, Scene(layout), Part(groups), seed=seed, scale=scale * rate)

    def _make_model(self, part: Part) -> nn.Module:
        if self.layout == "ddp":
            return DistributedDataParallel(model_of(self.case, part))
        if self.layout == "fsdp2":
            model, mesh = model_of(self.case, part), init_device_mesh("cpu", (2,))
            for block in getattr(model, "blocks", ()):
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        parts = {}
        for net in self.nets:
            # The net that all ranks have begins alike on all of them.
            torch.default_generator.manual_seed(torch.initial_seed() + sum(map(ord, net)))
            parts[net] = model_of(self.case, part)
        return Stages(parts)

    def _make_optimizers(self, part: Part, scale: float) -> list[Any]:
        if self.layout not in ("experts", "one") or len(self.nets) == 1:
            return super()._make_optimizers(part, scale)
        if not self.case.grouped:
            raise NotImplementedError("it takes no groups")
        groups: Groups = [
            {"params": list(self.model.parts[net].parameters()), "lr": self.case.lr * rate * scale}
            for net, rate in self.rates.items()
        ]
        return [self.case.make(groups, self.model)]

    def _data(self, number: int) -> torch.Tensor:
        # DDP and FSDP average the gradients of the ranks; the others have the same on all of them.
        apart = dist.get_rank() * 50 if self.layout in ("ddp", "fsdp2") else 0
        return super()._data(number + apart)


def _nets(layout: str, rank: int) -> list[str]:
    return ["shared", f"stage{rank}"] if layout == "experts" else [f"stage{rank}"]


def job(
    rank: int, world_size: int, library: str, name: str, layout: str, warm: int, url: str
) -> Any:
    """Run one row on this rank.

    Returns:
        What came of it, and what was saved, in full tensors.
    """
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        return _run(case_of(library, name), layout, _nets(layout, rank), warm, url)


def _run(case: Case, layout: str, nets: list[str], warm: int, url: str) -> Any:
    problems: list[str] = []
    failed = ""
    try:
        source = RankTraining(case, layout, nets, seed=1, scale=1.0)
        source.steps(0, _STEPS)
        target, reference = (RankTraining(case, layout, nets, seed=2, scale=3.0) for _ in range(2))
        for training in (target, reference):
            training.steps(100, warm)
        if case.library == "distributed":
            reference = source  # its own state dict has what all ranks have, or is none
        else:
            Own.of(source).load_into(reference)
    except ANY_ERROR as error:
        failed = f"it cannot be trained here: {text_of(error)}"
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, failed)
    if any(of_ranks):
        return NOT_RUN, "; ".join(filter(None, of_ranks)), None
    expected = reference.contents()
    full = _full(expected)
    with listening() as heard:
        try:
            with guarding(source, "save", problems):
                dos.save(source.as_state(), url, progress=False)
            with guarding(target, "load", problems):
                dos.load(target.as_state(), url, progress=False)
            loaded = [*differences(expected, target.contents(), "loaded")]
            for training in (reference, target):
                training.steps(_STEPS, _MORE)
            later = [*differences(reference.contents(), target.contents(), "later")]
        except dos.errors.DcpObjstoreError as error:
            clear = error.key is not None and not isinstance(error, dos.errors.RankFailedError)
            return REFUSED if clear else WRONG, text_of(error), full
        except ANY_ERROR as error:
            return WRONG, "; ".join([*problems, text_of(error)]), full
    dist.all_gather_object(of_ranks, heard)
    named = [text for text in of_ranks[0] if "not the same on all ranks" in text]
    problems += filter(None, [first(iter(loaded)), first(iter(later))])
    # Torch has one place for what the ranks differ in here. A warning names all of it.
    if named and len(problems) == bool(loaded) + bool(later):
        is_said = all(f"{_key(one)} on ranks" in named[0] for one in loaded)
        return SAID if is_said else WRONG, "; ".join([*problems, *named]), full
    return WRONG if problems else RIGHT, "; ".join([*problems, *heard]), full


def _key(difference: str) -> str:
    """The last part of the key that differs, as a warning ends it."""
    return difference.partition(": ")[0].rpartition(".")[2]


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _full(item) for key, item in value.items()}
    return [_full(item) for item in value] if type(value) is list else value


LAYOUTS = ("ddp", "fsdp2", "stages", "uneven", "experts")


def rows_of(case: Case, layouts: str, *, warm: tuple[int, ...] = (0, 2)) -> Iterator[Row]:
    """The rows of an optimizer on two ranks, and in one process that resumes what they saved."""
    for layout in LAYOUTS:
        if layouts not in layout:
            continue
        for steps in warm:
            with tempfile.TemporaryDirectory() as folder:
                yield from _rows(case, layout, steps, f"file://{folder}/c")


def _rows(case: Case, layout: str, warm: int, url: str) -> Iterator[Row]:
    place = f"2 ranks, {layout}{', stepped' if warm else ''}"

    def make(scene: str, outcome: str, note: str) -> Row:
        return Row(case.library, case.name, scene, outcome, " ".join(note.split()))

    if layout == "uneven" and case.name == "ZeroRedundancyOptimizer":
        # Its own `consolidate_state_dict` fails or hangs then: each rank sends its share of groups
        # that are taken to be the same on all.
        yield make(place, NOT_RUN, "its ranks need the same groups of parameters")
        return
    try:
        found = run_ranks(2, job, case.library, case.name, layout, warm, url)
    except RanksFailedError as error:
        yield make(place, WRONG, text_of(error))
        return
    ranked = sorted(enumerate(found), key=lambda one: _SEVERITY.index(one[1][0]))
    rank, (outcome, note, _) = ranked[0]
    yield make(place, outcome, f"rank {rank}: {note}" if note else "")
    if outcome in (NOT_RUN, REFUSED) or warm or layout == "uneven" or not _is_saved(url):
        return
    # Of what the ranks differ in, the first one's was saved.
    of_ranks = found[:1] if outcome == SAID else found
    outcome, note = _into_one(case, layout, url, [contents for _, _, contents in of_ranks])
    yield make(f"{layout}, 2 ranks to 1", outcome, note)


def _is_saved(url: str) -> bool:
    try:
        return bool(dos.open(url).keys())
    except dos.errors.CheckpointNotFoundError:
        return False


_SEVERITY = (WRONG, REFUSED, SAID, NOT_RUN, RIGHT)


def _into_one(case: Case, layout: str, url: str, saved: list[Any]) -> tuple[str, str]:
    nets = {"experts": ["shared", "stage0", "stage1"], "stages": ["stage0", "stage1"]}
    problems: list[str] = []
    try:
        target: Training
        if layout in nets:
            target = RankTraining(case, "one", nets[layout], seed=2, scale=3.0)
        else:
            target = Training(case, Scene(layout), Part(), seed=2, scale=3.0)
    except ANY_ERROR as error:
        return NOT_RUN, text_of(error)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with guarding(target, "load", problems):
                dos.load(target.as_state(), url, progress=False)
        except dos.errors.DcpObjstoreError as error:
            clear = error.key is not None and not isinstance(error, dos.errors.RankFailedError)
            return REFUSED if clear else WRONG, text_of(error)
        except ANY_ERROR as error:
            return WRONG, text_of(error)
        for contents in saved:
            problems += filter(None, [first(_lacking(_plain(contents), _plain(target.contents())))])
        try:
            target.steps(_STEPS, _MORE)
        except ANY_ERROR as error:
            problems.append(f"later: {text_of(error)}")
    return WRONG if problems else RIGHT, "; ".join(problems)


def _plain(contents: dict[str, Any]) -> dict[str, Any]:
    """Weights, state and settings by parameter name, without DDP's prefix."""

    def bare(named: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("module."): value for name, value in named.items()}

    optimizer = contents["optimizer0"]
    settings = {
        name: {key: value for key, value in group.items() if key != "names"}
        for group in optimizer["groups"]
        for name in group["names"]
    }
    return {
        "weights": bare(contents["weights"]),
        "state": bare(optimizer["state"]),
        "settings": bare(settings),
    }


def _lacking(saved: dict[str, Any], loaded: dict[str, Any]) -> Iterator[str]:
    """Differences in what was saved; one process has more than each rank had."""
    for part, named in saved.items():
        there = {name: loaded[part][name] for name in named if name in loaded[part]}
        yield from differences(named, there, f"loaded.{part}")
