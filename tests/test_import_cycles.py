"""No import cycles, neither of modules nor of folders; lazy and type-only imports count."""

from __future__ import annotations

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dcp_objstore

PACKAGE = Path(dcp_objstore.__file__).parent


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("dcp_objstore", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def imports(path: Path) -> set[str]:
    known = modules()
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.level, f"a relative import in {path}"
            inner = {f"{node.module}.{name.name}" for name in node.names}
            found |= inner & known.keys() or {node.module}
    return found & known.keys()


def folders() -> list[str]:
    places = [PACKAGE, *(path for path in PACKAGE.rglob("*") if (path / "__init__.py").is_file())]
    return [".".join(("dcp_objstore", *place.relative_to(PACKAGE).parts)) for place in places]


@pytest.mark.parametrize("folder", folders())
def test_neighbours_do_not_import_each_other(folder):
    known = modules()
    below = f"{folder}."
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        if name.startswith(below):
            child = name.removeprefix(below).partition(".")[0]
            others = {
                other.removeprefix(below).partition(".")[0]
                for other in imports(path)
                if other.startswith(below)
            }
            graph.setdefault(child, set()).update(others - {child})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"in {folder}: {' <- '.join(error.args[1])}")
