"""An optimizer goes on as if it had never been saved: every weight, entry and setting, bit for bit.

The reference is the same run through the optimizer's own `state_dict` and `load_state_dict`.
`python -m tests.support.optimizers` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import RankFailedError, StateMismatchError
from tests.support.campaign import cases
from tests.support.optimizers.cases import case_of, cases_of
from tests.support.optimizers.ranks import LAYOUTS, rows_of
from tests.support.optimizers.rows import NOT_RUN, REFUSED, RIGHT, SAID, WRONG, row
from tests.support.optimizers.scenes import SCENES, random_scene

_TORCH = [case.name for case in cases_of("torch")]
_CLASSES = [name for name in _TORCH if "(" not in name]
_KINDS = [case.name for case in cases_of("kinds")]

# For each optimizer by default; those of torch that cannot be trained so are left out.
_SHORT = ("much",)
_NOT_SO = {("LBFGS", "much"), ("SparseAdam", "much")}  # embeddings are not tied here
# Of one optimizer by default.
_EACH = (
    "much_stepped",
    "never_stepped_into_stepped",
    "looked_at",
    "empty_group_first",
    "two_empty_groups",
    "tensor_lr",
    "trains_again",
    "unused_then_used",
    "regrouped_split",
    "regrouped_in_conflict",
    "reordered",
    "empty_group_new",
    "named",
    "larger_stepped",
    "inference",
    "float16",
    "stock_saves",
    "stock_saves_flat",
    "stock_reads",
    "raw",
    "two_optimizers",
    "trainable",
    "optimizer_first",
)
_DEFAULT = [(name, scene) for name in _CLASSES for scene in _SHORT if (name, scene) not in _NOT_SO]
_DEFAULT += [(name, scene) for name in ("LBFGS", "SparseAdam") for scene in ("fresh", "stepped")]
_DEFAULT += [("AdamW", scene) for scene in _EACH]
_DEFAULT += [("Adagrad", scene) for scene in ("much_stepped", "never_stepped_into_stepped")]
_DEFAULT += [("SGD", scene) for scene in ("much_stepped", "never_stepped")]
_OF_KINDS = [*((name, "fresh") for name in _KINDS), ("Windowed", "stepped")]


@pytest.mark.parametrize(
    ("name", "scene"),
    cases([(name, scene) for name in _TORCH for scene in SCENES], default=_DEFAULT),
)
def test_each_optimizer_of_torch_goes_on_as_through_its_own_state_dict(name, scene):
    found = row(case_of("torch", name), SCENES[scene])
    allowed = {RIGHT} if (name, scene) in _DEFAULT else {RIGHT, NOT_RUN}
    # Parameters of one group were saved with different settings, or a plain dict has no places.
    allowed |= {REFUSED, SAID} if SCENES[scene].said else set()
    assert found.outcome in allowed, found


@pytest.mark.parametrize(
    ("name", "scene"),
    cases(
        [(name, scene) for name in _KINDS for scene in SCENES],
        default=_OF_KINDS,
    ),
)
def test_state_of_any_kind_goes_on_as_through_the_optimizers_own_state_dict(name, scene):
    found = row(case_of("kinds", name), SCENES[scene])
    assert found.outcome != WRONG, found
    assert (name, scene) not in _OF_KINDS or found.outcome == RIGHT, found


@pytest.mark.parametrize("seed", cases(range(200), default=range(3)))
def test_random_groups_freezing_and_steps_go_on_alike(seed):
    for name in ("AdamW", "SGD"):
        # `row(case_of("torch", name), random_scene(seed))` repeats it.
        found = row(case_of("torch", name), random_scene(seed))
        assert found.outcome == RIGHT, found


_OF_A_GPU = ("Adam", "AdamW", "SGD", "Adam(fused)", "Adam(capturable)", "SGD(fused)")


@pytest.mark.gpu
@pytest.mark.parametrize("scene", ["fresh", "stepped", "much", "much_stepped", "tensor_lr", "raw"])
@pytest.mark.parametrize("name", _OF_A_GPU)
def test_on_a_gpu_each_entry_comes_back_to_the_device_where_it_was(name, scene):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False")
    found = row(case_of("torch", name), replace(SCENES[scene], device="cuda"))
    assert found.outcome in ({RIGHT, SAID, REFUSED} if SCENES[scene].said else {RIGHT}), found


# Steps of the optimizer that loads, for each layout of the default suite.
_STEPPED = {"ddp": (0,), "fsdp2": (0,), "stages": (2,), "uneven": (2,), "experts": (0,)}
_OF_RANKS = [
    *(("torch", "AdamW", layout, steps) for layout, steps in _STEPPED.items()),
    ("kinds", "Norms", "fsdp2", (0,)),
]


@pytest.mark.parametrize(
    ("library", "name", "layout", "warm"),
    cases(
        [
            *_OF_RANKS,
            *(("torch", name, layout, (0, 2)) for name in _CLASSES for layout in LAYOUTS),
        ],
        default=_OF_RANKS,
    ),
)
def test_two_ranks_and_one_process_resume_as_by_their_own_state_dicts(library, name, layout, warm):
    for found in rows_of(case_of(library, name), layout, warm=warm):
        allowed = {RIGHT} if name in ("AdamW", "Norms") else {RIGHT, NOT_RUN}
        # Each rank has a `prev_loss` of its own, and torch one place for it.
        allowed |= {SAID} if name == "LBFGS" else set()
        assert found.outcome in allowed, found


_SHARED = [case.name for case in cases_of("distributed")]


@pytest.mark.parametrize(
    ("name", "steps"), cases(product(_SHARED, (0, 2)), default=[*product(_SHARED, (0,))])
)
def test_optimizers_that_ranks_share_go_on_as_if_uninterrupted(name, steps):
    for found in rows_of(case_of("distributed", name), "ddp", warm=(steps,)):
        one_process = found.scene.endswith("to 1")  # where they cannot be made
        assert found.outcome == (NOT_RUN if one_process else RIGHT), found


# --- the oracle itself ---------------------------------------------------------------------------


def _first_state(optimizer: Any) -> dict[str, Any]:
    return next(iter(optimizer.state.values()))


def _set_setting(state: dict[str, Any], name: str, change: Callable[[Any], Any]) -> None:
    group = state["optimizer"].param_groups[0]
    group[name] = change(group[name])


def _flip(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[0] ^= 1


_SLIPS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an entry is lost": lambda s: _first_state(s["optimizer"]).pop("momentum_buffer"),
    "all is lost": lambda s: s["optimizer"].state.clear(),
    "a bit of an entry": lambda s: _flip(_first_state(s["optimizer"])["momentum_buffer"]),
    "an entry is new": lambda s: _first_state(s["optimizer"]).update(more=1),
    "a bit of a weight": lambda s: _flip(s["model"].head.weight),
    "a setting": lambda s: _set_setting(s, "lr", lambda lr: lr * (1 + 1e-15)),
    "a setting is lost": lambda s: s["optimizer"].param_groups[0].pop("momentum"),
    "a gradient": lambda s: s["model"].head.weight.grad.add_(1),
    "a parameter is frozen": lambda s: s["model"].head.weight.requires_grad_(False),
    "the random state": lambda s: torch.rand(1),
    "a step": lambda s: torch.optim.SGD([torch.zeros(1)]).step(),
    "the mode": lambda s: s["model"].eval(),
}


_OF_A_SAVE = ("a bit of a weight", "a step", "the random state", "a setting")


@pytest.mark.parametrize(
    ("call", "slip"), [("load", slip) for slip in _SLIPS] + [("save", slip) for slip in _OF_A_SAVE]
)
def test_the_oracle_finds_a_slip(call, slip, monkeypatch):
    real = getattr(dos, call)

    def careless(state: dict[str, Any], url: str, **options: Any) -> None:
        real(state, url, **options)
        _SLIPS[slip](state)

    monkeypatch.setattr(dos, call, careless)
    assert row(case_of("torch", "SGD"), SCENES["stepped"]).outcome == WRONG


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StateMismatchError("no", key="optimizer.state.x"), REFUSED),
        (RankFailedError("KeyError: 'k'"), WRONG),
        (RankFailedError("KeyError: 'k'", key="optimizer"), WRONG),
        (KeyError("k"), WRONG),
    ],
)
def test_the_oracle_takes_only_a_typed_error_that_names_a_key_as_a_refusal(
    error, outcome, monkeypatch
):
    def refusing(*_: Any, **__: Any) -> None:
        raise error

    for call in ("load", "save"):
        with monkeypatch.context() as patched:
            patched.setattr(dos, call, refusing)
            assert row(case_of("torch", "SGD"), SCENES["stepped"]).outcome == outcome


def test_the_oracle_finds_that_a_refused_load_changed_the_optimizer(monkeypatch):
    def refusing(state: dict[str, Any], _url: str, **_: Any) -> None:
        state["optimizer"].state.clear()
        raise StateMismatchError("no", key="optimizer")

    monkeypatch.setattr(dos, "load", refusing)
    assert row(case_of("torch", "SGD"), SCENES["stepped"]).outcome == WRONG


def test_a_random_scene_is_the_same_in_every_process():
    found = row(case_of("torch", "SGD"), random_scene(5))
    assert (found.outcome, found) == (RIGHT, row(case_of("torch", "SGD"), random_scene(5)))
    assert len({str(random_scene(seed)) for seed in range(50)}) == 50
