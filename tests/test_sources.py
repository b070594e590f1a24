"""Rules of the package's own source: imports, context managers, tensors, torch's private API."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.utils._device import _device_constructors

import dcp_objstore

_PACKAGE = Path(dcp_objstore.__file__).parent
_PRIVATE = "dcp_objstore.torch_private"


@pytest.fixture(scope="module")
def sources() -> dict[str, list[ast.AST]]:
    """The nodes of each module, by its name."""
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        parts = ("dcp_objstore", *path.relative_to(_PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[".".join(parts).removesuffix(".__init__")] = list(ast.walk(tree))
    return found


def _imports(nodes: list[ast.AST], known: set[str]) -> set[str]:
    """The modules that one imports, lazily or for types alone as well."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, f"relative: {ast.unparse(node)}"
            inner = {f"{node.module}.{name.name}" for name in node.names}
            found |= inner & known or {node.module}
    return found & known


def test_neither_modules_nor_folders_import_each_other_in_a_circle(sources):
    imports = {name: _imports(nodes, {*sources}) for name, nodes in sources.items()}
    folders = {name.rpartition(".")[0] for name in sources} - {""}
    for folder in folders:
        graph: dict[str, set[str]] = {}
        for name, others in imports.items():
            if name.startswith(f"{folder}."):
                child, *neighbours = (
                    other.removeprefix(f"{folder}.").partition(".")[0]
                    for other in (name, *others)
                    if other.startswith(f"{folder}.")
                )
                graph.setdefault(child, set()).update({*neighbours} - {child})
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"in {folder}: {' <- '.join(error.args[1])}")


def test_every_context_manager_of_the_library_frees_its_errors(sources):
    """It is one of `dcp_objstore.contexts`. Those of the command line may stay: it ends."""
    others = [
        f"{name}:{node.lineno}"
        for name, nodes in sources.items()
        if name.split(".")[1:2] not in (["cli"], ["contexts"])
        for node in nodes
        if (isinstance(node, ast.Attribute) and node.attr == "contextmanager")
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "contextlib"
            and any(imported.name == "contextmanager" for imported in node.names)
        )
    ]
    assert others == []


def test_every_call_that_makes_a_tensor_names_its_device(sources):
    """What a program sets in torch for all of its tensors changes none of ours."""
    factories = {function.__name__ for function in _device_constructors()}
    without = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, nodes in sources.items()
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in factories
        and ast.unparse(node.func.value) == "torch"
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert without == []


_OF_PYTHON = {
    "os._exit",
    "pickle._Pickler",
    "sys._current_frames",
    "sys._getframe",
    "threading._register_atexit",
}
_OF_MEGATRON = {
    "library._ActiveAsyncRequest",
    "strategies._replace_state_dict_keys_with_sharded_keys",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.fixture(scope="module")
def own(sources: dict[str, list[ast.AST]]) -> set[str]:
    """All names that the package itself gives to something, but for `torch_private` and `stores`.

    The stores import no torch.
    """
    defined = set()
    for name, nodes in sources.items():
        if name == _PRIVATE or name.startswith("dcp_objstore.stores"):
            continue
        for node in nodes:
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            else:  # a function, a class or an imported name
                defined.add(getattr(node, "name", None))
    return {name for name in defined if isinstance(name, str)}


def _private_uses(nodes: list[ast.AST], own: set[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            whole = ast.unparse(node)
            if node.attr not in own or whole.startswith(("torch.", "dist.")):
                yield whole
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            assert node.module is not None
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            if any(map(_is_private, names)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and "._" in alias.name:
                    yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            for argument in node.args:
                text = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(text, str) and text not in own and _is_private(text):
                    yield ast.unparse(node)


def test_nothing_private_of_torch_is_used_elsewhere(sources, own):
    used = {
        (name, use)
        for name, nodes in sources.items()
        if name != _PRIVATE and not name.startswith("dcp_objstore.stores")
        for use in _private_uses(nodes, own)
        # A NamedTuple's are no private names.
        if use not in _OF_PYTHON | _OF_MEGATRON and not use.endswith(("._replace", "._asdict"))
    }
    assert not used, "put it into torch_private.py"


def test_no_private_name_of_a_base_of_dcps_is_taken(own):
    bases = (StorageReader, StorageWriter, DefaultLoadPlanner, DefaultSavePlanner, AsyncStager)
    assert not own & {name for base in bases for name in dir(base) if _is_private(name)}


def test_the_names_of_tests_can_be_said():
    texts = [file.read_text() for file in Path(__file__).parent.rglob("test_*.py")]
    names = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    assert [name for name in names if len(name) > 80] == []
