"""Hostile checkpoints through the public doors: nothing runs or changes, memory stays bounded,
and the error is typed. The inputs are in `support/hostile_cases.py`, by name.

    pytest tests/compat/test_hostile_inputs.py -m 'campaign or not campaign'     # all, 1 min
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcp_objstore
from tests.support import hostile, hostile_cases  # noqa: F401 - registers the cases
from tests.support.campaign import cases
from tests.support.hostile_worker import answer
from tests.support.launcher import Ranks
from tests.support.ranks import start_workers

# What reading any of these may take beyond twice the input: parsing takes up to 100 times a hostile
# `.metadata` (some 20 times a real one), of which the largest here has 200 KB; the rest is small.
CONSTANT_BYTES = 48 * 1024**2


@pytest.fixture(scope="module")
def crew() -> Iterator[Ranks]:
    """A process that loads cases; another takes its place when a case has ended it."""
    with start_workers() as crew:
        yield crew


FIRST_OF_ITS_FAMILY = {case.family: case.id for case in reversed(hostile.CASES.values())}


@pytest.mark.parametrize("case_id", cases(hostile.CASES, default={*FIRST_OF_ITS_FAMILY.values()}))
def test_it_is_refused_and_nothing_else_happens(case_id, crew):
    (ended,) = crew.start(1, answer, case_id, grouped=False).end()
    assert not ended.failed, ended
    case, result = hostile.CASES[case_id], ended.value
    assert (result["fired"], result["events"]) == (0, [])
    assert result["changed"] == []
    outcomes = result["outcomes"]
    wrong = {door: found for door, found in outcomes.items() if found.startswith("!")}
    assert not wrong
    # Where it opens, the hostile part is found by those that read it.
    reading = ["read", "load", "dcp.load"] if outcomes["open"] == "value" else ["open", "load"]
    if case.expect != hostile.HARMLESS and "takes memory" in case.family:
        reading += ["import .pt"] * ("import .pt" in outcomes)
    for door in reading:
        # A state that does not fit is found before anything is read.
        if outcomes.get(door, "StateMismatchError") != "StateMismatchError" or door == "read":
            assert outcomes[door] in case.expect, outcomes
    allowed = 2 * result["input_bytes"] + CONSTANT_BYTES
    assert result["resident_bytes"] <= allowed


# Each place of the package that unpickles, and what its bytes have passed before.
UNPICKLES = {
    "cli.demo.prove_preempted: torch.load": "torch has just written it",
    "cli.demo_crew._ended: pickle.loads": "a rank of the demo wrote it to a folder of its own",
    "cli.demo_crew.share: pickle.loads": "the demo's own processes wrote it to their TCPStore",
    "compat.foreign._Unpickler: Unpickler": "`scan`; all globals are stand-ins",
    "compat.values._unsafe_globals: torch.serialization.get_unsafe_globals_in_checkpoint": "`vet`",
    "compat.values.unpickled: torch.load": "`vet` or `check_safe`; see below",
    "compat.vet._DryUnpickler: Unpickler": "`scan`; all globals are stand-ins",
    "read.planner.load_bytes: torch.load": "`check_safe`, by `ItemRead.finish`",
    "write.staging.state._copied: torch.load": "this process has just written it",
    # What calls the one function that has torch unpickle what comes from a store.
    "compat.values._test_load: unpickled": "`vet`",
    "convert.import_checkpoint._loaded: unpickled": "`vet`, by `_is_mappable`",
    "convert.frameworks.nest_for_lightning: unpickled": "`check_safe`",
    "inspect.fill.destination_of: unpickled": "`check_safe`, by `ItemRead.finish`",
    "integrations.hf._load_optimizer_and_scheduler: unpickled": "`vet`, by `_write_files`",
    "integrations.lightning.load_state_dict: unpickled": "`check_safe`",
    "integrations.megatron._load_file: torch.load": "Megatron's own call, of an older `common.pt`",
    "read.item_read._load_tensor: unpickled": "`vet`",
}


UNPICKLER = r"\b(torch\.load|pickle\.loads?|Unpickler|unpickled|get_unsafe_globals_in_checkpoint)"
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def unpickling(tree: ast.AST, module: str, within: str = "") -> Iterator[str]:
    """The places of a module that unpickle, by the function or class that they are in."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", within) if isinstance(node, SCOPES) else within
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if re.search(f"{UNPICKLER}$", called):
                yield f"{module}.{name}: {called}"
        elif any("Unpickler" in ast.unparse(base) for base in getattr(node, "bases", ())):
            yield f"{module}.{name}: Unpickler"
        yield from unpickling(node, module, name)


def test_every_byte_that_is_unpickled_has_passed_a_gate():
    """A new place is added here with what its bytes pass, or it calls what is here."""
    root = Path(dcp_objstore.__file__).parent
    found: set[str] = set()
    for path in root.rglob("*.py"):
        if re.search(UNPICKLER, text := path.read_text()):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            found |= set(unpickling(ast.parse(text), module))
    assert found == UNPICKLES.keys()


def test_there_are_more_than_two_hundred_and_all_differ():
    bodies = {
        tuple(sorted(case.build().items()))
        for case in hostile.CASES.values()
        if "takes memory" not in case.family  # they take a while to build
    }
    same = sum("takes memory" not in case.family for case in hostile.CASES.values())
    assert len(bodies) > 200
    assert same - len(bodies) <= 1
