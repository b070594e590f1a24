"""One row: a training that is saved and resumed in one process, against the optimizer's own way."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

import dcp_objstore as dos
from tests.support.optimizers.cases import Case
from tests.support.optimizers.comparing import (
    contiguous,
    copied,
    differences,
    first,
    groups_of,
    state_of,
)
from tests.support.optimizers.scenes import Part, Scene, groups_of as groups_for, model_of
from tests.support.states import local

# DCP's is not an Exception.
ANY_ERROR = (Exception, CheckpointException)

RIGHT, REFUSED, SAID, WRONG, NOT_RUN = "right", "refused", "said", "WRONG", "not run"

_numbers = itertools.count()


@dataclass(frozen=True)
class Row:
    """What came of an optimizer in a scene.

    Attributes:
        outcome: "right"; "refused": a typed error names the key; "said": something was left out,
            as the scene allows, or ranks differ in it, and a warning says so; "WRONG"; "not run":
            the optimizer cannot be trained in this scene.
    """

    library: str
    optimizer: str
    scene: str
    outcome: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.library:17} {self.optimizer:24} {self.scene:28} {self.outcome:8} {self.note}"


class Training:
    """A model, its optimizers and a scheduler, built from one side of a scene."""

    def __init__(self, case: Case, scene: Scene, part: Part, *, seed: int, scale: float) -> None:
        torch.default_generator.manual_seed(seed)
        self.case, self.scene = case, scene
        self.model = self._make_model(part)
        self.average: AveragedModel | None = None
        self.optimizers = self._make_optimizers(part, scale)
        self.scheduler: Any = None
        if part.frozen in ("always", "excluded"):
            self.freeze()
        if scene.average:
            self.average = AveragedModel(self.model)
            for optimizer in self.optimizers:
                optimizer.register_step_post_hook(self._update_average)

    def _make_model(self, part: Part) -> torch.nn.Module:
        return model_of(self.case, part, self.scene.dtype, self.scene.device)

    def _make_optimizers(self, part: Part, scale: float) -> list[Any]:
        case, scene = self.case, self.scene
        if not case.grouped and (part.groups != "one" or part.frozen or scene.named):
            raise NotImplementedError("it takes no groups")
        named = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if part.frozen != "excluded" or not name.startswith("first.")
        ]
        others = named[len(named) // 2 :] if scene.two_optimizers else []
        if others and not case.grouped:
            raise NotImplementedError("it takes the whole model")
        own = named[: len(named) - len(others)]
        made = [case.make(groups_for(case, scene, part, own, scale), self.model)]
        if others:
            made.append(
                torch.optim.RMSprop([p for _, p in others], lr=0.01 * scale, momentum=0.5)
                if case.model != "embedding"
                else torch.optim.SparseAdam([p for _, p in others], lr=0.02 * scale)
            )
        for optimizer in made:
            if callable(getattr(optimizer, "train", None)):
                optimizer.train()
        return made

    @property
    def names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def freeze(self) -> None:
        for parameter in self.model.first.parameters():
            parameter.requires_grad_(False)

    def schedule(self, last: int = -1) -> None:
        self.scheduler = torch.optim.lr_scheduler.StepLR(
            self.optimizers[0], 2, gamma=0.5, last_epoch=last
        )

    def _update_average(self, *_: Any) -> None:
        assert self.average is not None
        self.average.update_parameters(self.model)

    def steps(self, first_step: int, count: int) -> None:
        for number in range(first_step, first_step + count):
            self._step(number)
            if self.scheduler is not None:
                self.scheduler.step()

    def _step(self, number: int) -> None:
        torch.default_generator.manual_seed(1000 + number)
        data = self._data(number).to(self.scene.device, self.scene.dtype)

        @torch.enable_grad()
        def loss() -> torch.Tensor:
            self.model.zero_grad()
            loss = self.model(data).float().square().mean()
            loss.backward(create_graph=self.case.step == "graph")
            return loss

        if self.case.step == "fused":
            self.optimizers[0].fused_backward(
                self.model(data).square().mean(), self.optimizers[0].param_groups[0]["lr"]
            )
            return
        closed = self.case.step in ("closure", "sam")
        if self.case.step != "closure":
            loss()
        for place, optimizer in enumerate(self.optimizers):
            optimizer.step(loss) if closed and not place else optimizer.step()

    def _data(self, number: int) -> torch.Tensor:
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(number + 1))

    def contents(self) -> dict[str, Any]:
        """A copy of everything that a resume has to bring back."""
        names, found = self.names, {}
        found["weights"] = copied(self.model.state_dict())
        for place, optimizer in enumerate(self.optimizers):
            found[f"optimizer{place}"] = {
                # Lookahead of timm leaves the state to the optimizer inside.
                "state": state_of(getattr(optimizer, "_base_optimizer", optimizer), names),
                # PostLocalSGDOptimizer's own groups are those from before a load.
                "groups": groups_of(getattr(optimizer, "optim", optimizer), names),
                "beside": _beside(optimizer),
            }
        if self.scheduler is not None:
            found["scheduler"] = copy.deepcopy(self.scheduler.state_dict())
        if self.average is not None:
            found["average"] = copied(self.average.state_dict())
        return found

    def untouched(self) -> dict[str, Any]:
        """A copy of what neither a save nor a load changes."""
        parameters = dict(self.model.named_parameters())
        return {
            "gradients": {n: (id(p.grad), copied(p.grad)) for n, p in parameters.items()},
            "trains": {name: parameter.requires_grad for name, parameter in parameters.items()},
            "parameters": {name: id(parameter) for name, parameter in parameters.items()},
            "memory": {name: local(parameter).data_ptr() for name, parameter in parameters.items()},
            "mode": self.model.training,
            "random": (
                torch.get_rng_state(),
                random.getstate(),
                np.random.get_state()[1].tobytes(),
            ),
            "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        }

    def as_state(self) -> dict[str, Any]:
        """The state as a user hands it to `dos.save` and `dos.load`."""
        scene, state = self.scene, {}
        model: Any = dos.trainable(self.model) if scene.trainable else self.model
        optimizers: list[Any] = self.optimizers
        if scene.way == "raw":
            model = self.model.state_dict()
            optimizers = [optimizer.state_dict() for optimizer in optimizers]
        state = {}
        _put(state, scene.keys[0], model)
        _put(state, scene.keys[1], optimizers[0])
        for optimizer in optimizers[1:]:
            state["other"] = optimizer
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler
        if self.average is not None:
            state["average"] = self.average
        return state


def _beside(optimizer: Any) -> dict[str, Any]:
    """What an optimizer's state dict has beside the state and the groups."""
    try:
        state: dict[str, Any] = optimizer.state_dict()
    except RuntimeError:  # ZeroRedundancyOptimizer gathers it first
        return {}
    return copied(
        {key: item for key, item in state.items() if key not in ("state", "param_groups")}
    )


def _put(state: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for step in above:
        state = state.setdefault(step, {})
    state[last] = value


# --- the optimizer's own way ---------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """What a training's own `state_dict` calls give, copied."""

    model: dict[str, Any]
    optimizers: list[tuple[dict[str, Any], list[list[str]]]]  # with the names in its groups
    scheduler: Any
    average: Any

    @classmethod
    def of(cls, training: Training) -> Own:
        rest = [training.scheduler, training.average]
        return cls(
            copied(training.model.state_dict()),
            [(copied(one.state_dict()), _names(one, training)) for one in training.optimizers],
            *(one and copied(one.state_dict()) for one in rest),
        )

    def contiguous(self) -> Own:
        """The same, with each tensor of the optimizers in the order of its dimensions."""
        return replace(self, optimizers=[(contiguous(s), names) for s, names in self.optimizers])

    def load_into(self, training: Training) -> None:
        """Load all by the objects' own `load_state_dict`; an optimizer's state by name."""
        scene, model = training.scene, self.model
        if scene.trainable:
            trains = {n for n, p in training.model.named_parameters() if p.requires_grad}
            model = {name: value for name, value in model.items() if name in trains}
        training.model.load_state_dict(
            {name: value for name, value in model.items() if name in training.model.state_dict()},
            strict=not (scene.partial or scene.trainable),
        )
        for optimizer, (state, names) in zip(training.optimizers, self.optimizers, strict=True):
            if not isinstance(optimizer, torch.optim.Optimizer):  # nothing knows its names
                optimizer.load_state_dict(copied(state))
                continue
            own = _by_name(copied(state), names, optimizer, _names(optimizer, training))
            is_named = scene.trainable and "state" in own
            optimizer.load_state_dict(_of_what_trains(own, training) if is_named else own)
        if training.scheduler is not None:
            training.scheduler.load_state_dict(self.scheduler)
        if training.average is not None:
            training.average.load_state_dict(self.average)


def _of_what_trains(state: dict[str, Any], training: Training) -> dict[str, Any]:
    """With what it has for frozen parameters, which `dos.trainable` leaves out."""
    optimizer = training.optimizers[0]
    now = copied(optimizer.state_dict())["state"]
    numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = {
        number: value
        for number, value in state["state"].items()
        if not isinstance(number, int) or numbered[number].requires_grad
    }
    return state | {"state": {**now, **kept}}


def _names(optimizer: Any, training: Training) -> list[list[str]]:
    names = training.names
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _by_name(
    saved: dict[str, Any], saved_names: list[list[str]], optimizer: Any, names: list[list[str]]
) -> dict[str, Any]:
    """A saved state dict as an optimizer with other groups needs it."""
    if saved_names == names:
        return saved
    now = copied(optimizer.state_dict())
    group_of, number_of = {}, {}
    for group, known in zip(saved["param_groups"], saved_names, strict=True):
        for name, number in zip(known, group["params"], strict=True):
            group_of[name], number_of[name] = group, number
    state = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    groups = []
    for group, known in zip(now["param_groups"], names, strict=True):
        for name, number in zip(known, group["params"], strict=True):
            entries = now["state"] if name not in number_of else saved["state"]
            place = number_of.get(name, number)
            if place in entries:
                state[number] = entries[place]
        settings = next((group_of[name] for name in known if name in group_of), group)
        own = {key: group[key] for key in ("params", "param_names") if key in group}
        groups.append(copied(settings) | own)
    return saved | {"state": state, "param_groups": groups}


# --- ours, and torch's ---------------------------------------------------------------------------


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    logger, handler = logging.getLogger("dcp_objstore"), _Warnings()
    logger.addHandler(handler)
    passed_on, logger.propagate = logger.propagate, False
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on


@contextlib.contextmanager
def guarding(training: Training, call: str, problems: list[str]) -> Iterator[None]:
    """Note what a call changes that is not its business, and steps that it takes."""
    before, steps = training.untouched(), []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        yield
    finally:
        hook.remove()
    if steps:
        problems.append(f"the {call} took {len(steps)} steps")
    changed = first(differences(before, training.untouched(), f"by the {call}"))
    if changed:
        problems.append(changed)


def _new_url(scene: Scene, folder: str) -> str:
    if scene.way in ("stock", "flat", "stock_reads"):
        return f"file://{folder}/c"
    return f"memory://optimizers-{next(_numbers)}/c"


def _stock_state(training: Training, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(training.model),
        "optimizer": get_optimizer_state_dict(
            training.model, training.optimizers[0], options=options
        ),
    }


def _stock_save(training: Training, path: str, *, flat: bool = False) -> None:
    dcp.save(_stock_state(training, flat=flat), checkpoint_id=path, no_dist=True)


def _stock_load(training: Training, path: str) -> None:
    state = _stock_state(training, flat=False)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(
        training.model,
        training.optimizers[0],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def _save(
    training: Training, url: str, folder: str, then: Callable[[], None], problems: list[str]
) -> None:
    """Save, and train on; as soon as an async save allows it."""
    scene = training.scene
    if scene.way in ("stock", "flat"):
        try:
            _stock_save(training, f"{folder}/c", flat=scene.way == "flat")
        except ANY_ERROR as error:
            raise NotImplementedError(f"torch does not save it: {text_of(error)}") from error
        then()
        return
    with guarding(training, "save", problems):
        if scene.way == "async":
            handle = dos.async_save(training.as_state(), url, progress=False)
            handle.staged()
        else:
            dos.save(training.as_state(), url, progress=False)
    then()
    if scene.way == "async":
        handle.result()


def _load(training: Training, url: str, folder: str, *, trust_pickle: bool) -> None:
    scene = training.scene
    if scene.way == "stock_reads":
        _stock_load(training, f"{folder}/c")
        return
    state = training.as_state()
    with torch.inference_mode(scene.inference):
        dos.load(state, url, progress=False, strict=not scene.partial, trust_pickle=trust_pickle)
    if scene.way == "raw":
        training.model.load_state_dict(state[scene.keys[0]])
        training.optimizers[0].load_state_dict(state[scene.keys[1]])


# --- one row -------------------------------------------------------------------------------------


def row(case: Case, scene: Scene) -> Row:
    """Run an optimizer through a scene."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as folder,
    ):
        warnings.simplefilter("ignore")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            outcome, note = _outcome(case, scene, folder)
        finally:
            torch.set_num_threads(threads)
    return Row(case.library, case.name, scene.name, outcome, " ".join(note.split()))


def _destination(case: Case, scene: Scene) -> Training:
    made = Training(case, scene, scene.into, seed=scene.seed + 7, scale=3.0)
    if scene.scheduler == "before":
        made.schedule()
    made.steps(100, scene.warm)
    if scene.into.frozen == "late":
        made.freeze()
    if scene.fresh == "looked":
        for parameter in made.model.parameters():
            made.optimizers[0].state[parameter].get("exp_avg")
    elif scene.fresh == "gradients":
        # As a fused optimizer does, but without a step.
        made.model(torch.ones(3, 4, dtype=scene.dtype, device=scene.device)).sum().backward()
    return made


def text_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class _RefusedError(Exception):
    """A clear refusal; its text is the row's note."""


def _checked(call: str, do: Callable[[], None]) -> None:
    """Call `do`; its typed errors that name a key are refusals."""
    try:
        do()
    except dos.errors.UntrustedPickleError:
        raise
    except dos.errors.DcpObjstoreError as error:
        # Of many keys, the text lists the first ones.
        named = error.key is not None or isinstance(error, dos.errors.StateMismatchError)
        if not named or isinstance(error, dos.errors.RankFailedError):
            raise
        raise _RefusedError(f"at the {call}: {text_of(error)}") from error


def _outcome(case: Case, scene: Scene, folder: str) -> tuple[str, str]:
    problems: list[str] = []
    try:
        source = Training(case, scene, scene.saved, seed=scene.seed, scale=1.0)
        if scene.scheduler:
            source.schedule()
        source.steps(0, scene.steps)
        if scene.saved.frozen == "late":
            source.freeze()
        own, saved = Own.of(source), source.contents()
        reference, target = _destination(case, scene), _destination(case, scene)
    except ANY_ERROR as error:
        return NOT_RUN, f"it cannot be trained here: {text_of(error)}"
    notes: list[str] = []
    expected = _own_way(own, reference, source, notes)
    if expected is not None:
        expected.of_contiguous = lambda: _own_way(
            own.contiguous(), _destination(case, scene), source, []
        )
    url = _new_url(scene, folder)
    unchanged: list[str] = []

    def check_and_train_on() -> None:
        unchanged.append(first(differences(saved, source.contents(), "by the save")))
        try:
            source.steps(scene.steps, scene.more)
        except ANY_ERROR as error:
            raise NotImplementedError(f"it cannot be trained here: {text_of(error)}") from error

    with listening() as heard:
        try:
            _checked("save", lambda: _save(source, url, folder, check_and_train_on, problems))
            problems += filter(None, unchanged)
            heard_saving = len(heard)
            if scene.way in ("stock_reads", "stock", "flat"):
                _require_stock(case, scene, expected, folder)
            _load_checked(target, url, folder, problems, notes)
        except _RefusedError as refused:
            wrong = "; ".join(problems)
            return (WRONG, f"{refused}; {wrong}") if wrong else (REFUSED, str(refused))
        except NotImplementedError as error:
            return NOT_RUN, str(error)
        except ANY_ERROR as error:
            return WRONG, text_of(error)
    loading = heard[heard_saving:]
    if expected is None:
        if not scene.same_places:
            return RIGHT, "; ".join([*notes, "nothing to compare with"])
        expected = _Expected(saved, source.contents)
    return _compare(target, expected, problems, notes, loading)


@dataclass
class _Expected:
    """What is right after the load, and after more steps.

    Attributes:
        of_contiguous: the same of contiguous copies. A checkpoint does not know in which order the
            elements of a tensor lay, and some optimizers compute other last bits by it.
    """

    loaded: dict[str, Any]
    later: Callable[[], dict[str, Any]]
    of_contiguous: Callable[[], _Expected | None] = lambda: None


def _own_way(own: Own, reference: Training, source: Training, notes: list[str]) -> _Expected | None:
    """Load by the objects' own calls; None if these fail."""
    scene = reference.scene
    try:
        own.load_into(reference)
        _schedule_after(reference)
    except ANY_ERROR as error:
        notes.append(f"its own load_state_dict fails: {text_of(error)}")
        return None
    loaded = reference.contents()
    if scene.same_places and not scene.trainable and scene.scheduler != "after":
        inexact = first(differences(source.contents(), loaded))
        if inexact:
            notes.append(f"its own load_state_dict is not exact: {inexact[:70]}")

    def later() -> dict[str, Any]:
        reference.steps(scene.steps, scene.more)
        return reference.contents()

    return _Expected(loaded, later)


def _schedule_after(training: Training) -> None:
    if training.scene.scheduler == "after":
        training.schedule(training.scene.steps - 1)


def _require_stock(case: Case, scene: Scene, expected: _Expected | None, folder: str) -> None:
    """Raise NotImplementedError if torch alone does not bring this optimizer back."""
    try:
        source = Training(case, scene, scene.saved, seed=scene.seed, scale=1.0)
        source.steps(0, scene.steps)
        _stock_save(source, f"{folder}/s")
        target = _destination(case, scene)
        _stock_load(target, f"{folder}/s")
    except ANY_ERROR as error:
        raise NotImplementedError(f"torch alone does not load it: {text_of(error)}") from error
    if expected is not None:
        other = first(differences(expected.loaded, target.contents()))
        if other:
            raise NotImplementedError(f"torch alone does not bring it back: {other}")


def _load_checked(
    target: Training, url: str, folder: str, problems: list[str], notes: list[str]
) -> None:
    before = target.contents()
    calls: list[int] = []
    for optimizer in target.optimizers:
        hooked = getattr(optimizer, "register_load_state_dict_post_hook", None)
        with contextlib.suppress(AttributeError, TypeError):
            if hooked is not None:
                hooked(lambda _: calls.append(1))

    def load(*, trust_pickle: bool) -> None:
        with (
            guarding(target, "load", problems)
            if target.scene.way not in ("raw", "stock_reads")
            else contextlib.nullcontext()
        ):
            _checked("load", lambda: _load(target, url, folder, trust_pickle=trust_pickle))

    try:
        load(trust_pickle=False)
    except dos.errors.UntrustedPickleError:
        notes.append("with trust_pickle=True")
        calls.clear()
        problems.clear()
        load(trust_pickle=True)
    except _RefusedError as refused:
        if "partly filled" not in str(refused.__cause__):
            changed = first(differences(before, target.contents(), "by the refused load"))
            if changed:
                problems.append(changed)
        raise
    if len(calls) > len(target.optimizers) and target.scene.way != "stock_reads":
        problems.append(f"load_state_dict ran {len(calls)} times")


def _compare(
    target: Training, expected: _Expected, problems: list[str], notes: list[str], heard: list[str]
) -> tuple[str, str]:
    scene = target.scene
    by_name = isinstance(target.optimizers[0], torch.optim.Optimizer)
    in_conflict = by_name and scene.name == "regrouped_in_conflict"
    compare = _same_but_settings if in_conflict else differences
    try:
        _schedule_after(target)
        problems += filter(None, [first(compare(expected.loaded, target.contents(), "loaded"))])
        if not in_conflict:
            problems += filter(None, [_train_on(target, expected, notes)])
        else:
            target.steps(scene.steps, scene.more)
    except ANY_ERROR as error:
        problems.append(f"after the load: {text_of(error)}")
    if heard:
        notes.append(f"warned: {heard[0].split('/c ')[-1][:100]}")
    if not problems:
        return RIGHT, "; ".join(notes)
    outcome = SAID if scene.said and heard else WRONG
    return outcome, "; ".join([*problems, *notes])


def _train_on(target: Training, expected: _Expected, notes: list[str]) -> str:
    """Train both on; what differs then, or "" (also if both fail alike)."""

    def later() -> dict[str, Any]:
        target.steps(target.scene.steps, target.scene.more)
        return target.contents()

    wanted, got = _result(expected.later), _result(later)
    if isinstance(wanted, str) or isinstance(got, str):
        return "" if wanted == got else f"later: {got if isinstance(got, str) else wanted}"
    found = first(differences(wanted, got, "later"))
    other = expected.of_contiguous() if found else None
    if other is not None and not first(differences(_result(other.later), got)):
        notes.append("as its own load_state_dict goes on with contiguous copies")
        return ""
    return found


def _result(train: Callable[[], dict[str, Any]]) -> Any:
    try:
        return train()
    except ANY_ERROR as error:
        return text_of(error)


def _same_but_settings(
    expected: Mapping[str, Any], actual: Mapping[str, Any], path: str
) -> Iterator[str]:
    """Differences, but for which of several saved settings a group has."""
    bare = []
    for contents in (expected, actual):
        bare.append(
            {
                place: {
                    key: [{"names": group["names"], "has": sorted(group)} for group in value]
                    if key == "groups"
                    else value
                    for key, value in part.items()
                }
                if place.startswith("optimizer")
                else part
                for place, part in contents.items()
            }
        )
    return differences(*bare, path)
