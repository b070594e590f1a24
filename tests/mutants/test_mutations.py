"""Each kind of slip is put in where it belongs, and known again when lines move."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.mutations import Mutant, mutants_of


def mutants(code: str) -> dict[str, Mutant]:
    return {mutant.change: mutant for mutant in mutants_of("module.py", code)}


@pytest.mark.parametrize(
    ("code", "change", "mutated"),
    [
        ("x = a < b", "a < b -> a <= b", "x = (a <= b)"),
        ("x = a and b", "a and b -> a or b", "x = (a or b)"),
        ("x = a and b", "a and b -> b", "x = (b)"),
        ("x = f(a, b)", "f(a, b) -> f(b, a)", "x = (f(b, a))"),
        ("x = f(a, b=c)", "f(a, b=c) -> f(a)", "x = (f(a))"),
        ("x = min(a, b)", "min(a, b) -> min(b)", "x = (min(b))"),
        (
            "with contextlib.suppress(A, B):\n    f()",
            "contextlib.suppress(A, B) -> contextlib.suppress(B)",
            "with (contextlib.suppress(B)):\n    f()",
        ),
        ("x = a, b", "a, b -> (b,)", "x = ((b,))"),
        ("x = [a for a in b if a]", "a -> True", "x = [a for a in b if (True)]"),
        ("x = 3", "3 -> 2", "x = (2)"),
        ("f(a)", "f(a) -> pass", "pass"),
        ("a.b += 1", "a.b += 1 -> a.b -= 1", "a.b -= 1"),
        ("with lock:\n    f()", "with lock: f() -> f()", "f()"),
        ("try:\n    f()\nfinally:\n    g()", "try: f() finally: g() -> f() g()", "f()\ng()"),
        (
            "try:\n    f()\nexcept (A, B):\n    g()",
            "(A, B) -> (B,)",
            "try:\n    f()\nexcept ((B,)):\n    g()",
        ),
        (
            "for a in b:\n    try:\n        f()\n    except A:\n        continue",
            "continue -> break",
            "for a in b:\n    try:\n        f()\n    except A:\n        break",
        ),
    ],
)
def test_a_slip_changes_one_place(code, change, mutated):
    assert mutants(code)[change].apply(code) == mutated


def test_texts_annotations_and_logging_are_left_alone():
    code = 'def f(a: int | None) -> "x":\n    """Doc."""\n    logger.info("no", a + 1)\n'
    assert mutants(f"{code}    assert a > 1") == {}


def test_a_mutant_keeps_its_name_while_its_function_and_line_stay():
    code = "class A:\n    def f(self):\n        return a + b\n"
    (before,) = (m for m in mutants(code).values() if m.kind == "computed")
    (after,) = (m for m in mutants(f"import os\n\n{code}").values() if m.kind == "computed")
    (elsewhere,) = (m for m in mutants(code.replace("A", "B")).values() if m.kind == "computed")
    assert (
        (before.place, before.name) == (after.place, after.name) == ("module.py: A.f", before.name)
    )
    assert before.lines != after.lines
    assert elsewhere.name != before.name


def test_slips_that_read_the_same_have_names_of_their_own():
    found = mutants_of("module.py", "def f():\n    if a:\n        pass\n    if a:\n        pass\n")
    assert len({mutant.name for mutant in found}) == len(found) == 6
    assert [mutant.change for mutant in found[1::3]] == ["a -> True", "a -> True (2)"]


def test_what_is_run_at_import_is_reached_by_its_name_or_its_function():
    found = mutants("LIMIT = 3\nclass A:\n    b: int = 5\ndef f(a=7):\n    return a\n")
    assert found["3 -> 4"].mentions == ("LIMIT",)
    assert found["5 -> 6"].mentions == ("b", "A")
    assert (found["7 -> 8"].mentions, found["7 -> 8"].lines) == ((), (5,))


def test_every_mutant_is_python():
    code = ast.unparse(ast.parse(open(ast.__file__).read()))[:10_000].rpartition("\ndef ")[0]  # noqa: PTH123, SIM115
    found = mutants_of("ast.py", code)
    assert len(found) > 150
    for mutant in found[:: len(found) // 100]:
        ast.parse(mutant.apply(code))
