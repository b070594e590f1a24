"""`torch.set_default_device` in the user's program changes no tensor that this library makes."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

import dcp_objstore

_PACKAGE = Path(dcp_objstore.__file__).parent

_FACTORIES = {function.__name__ for function in _device_constructors()}


def test_every_call_that_makes_a_tensor_names_its_device() -> None:
    without = [
        f"{path.relative_to(_PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in _PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _FACTORIES
        and ast.unparse(node.func.value) == "torch"
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert without == []
