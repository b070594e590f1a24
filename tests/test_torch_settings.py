"""What a program sets in torch for all of its tensors changes none that this library makes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import dcp_objstore
from dcp_objstore.state.tensor_frame import frame, save_options

_PACKAGE = Path(dcp_objstore.__file__).parent

_FACTORIES = {function.__name__ for function in _device_constructors()}


def test_every_call_that_makes_a_tensor_names_its_device():
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


class FilledBytes(TorchFunctionMode):
    """Counts what `use_deterministic_algorithms` would fill: the memory of `torch.empty`."""

    count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.empty:
            self.count += result.nbytes
        return result


def test_a_frame_needs_no_memory_that_torch_would_fill():
    with FilledBytes() as filled:
        frame.__wrapped__(torch.uint8, (1 << 28,), save_options())
    assert filled.count == 0
