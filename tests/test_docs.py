"""The README: its snippets run as they stand, and its commands and links are the right ones."""

from __future__ import annotations

import importlib.util
import re
import secrets
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


class Counted:
    """In place of a metrics or tracing library: any call gives itself, and is counted."""

    calls: ClassVar[Counter[str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_: object, **__: object) -> Counted:
            self.calls[name] += 1
            return self

        return call


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests do not install what the recipes are for."""
    for name in ("prometheus_client", "opentelemetry"):
        if importlib.util.find_spec(name) is None:
            module: Any = types.ModuleType(name)
            module.Counter = module.Histogram = lambda *_: Counted()
            module.trace = Counted()
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_every_snippet_runs_one_after_the_other_and_the_recipes_hear_of_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {
        "state": {"w": torch.ones(3)},
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "step": 7,
        "steps": 2,
        "train": lambda state: 0.5,
        "loader": {"position": 3},
        "torch": torch,
    }
    found = blocks("python")
    assert len(found) >= 2
    bucket = f"memory://{secrets.token_hex(4)}"
    for block in found:
        exec(block.replace("s3://bucket", bucket).replace("gs://bucket", f"{bucket}/gs"), names)
    names["future"].result()
    # Of either that is installed, which another dependency may bring, only that it goes through.
    stood_in = [] if not isinstance(names["moved"], Counted) else ["inc", "observe"]
    stood_in += ["start_span", "end"] if isinstance(names["trace"], Counted) else []
    assert all(Counted.calls[name] >= 4 for name in stood_in)
    if not isinstance(names["moved"], Counted):
        assert names["moved"].labels("PartUploaded", "0")._value.get() >= 12
    assert names["state"]["step"] == 7


def test_the_two_commands_are_those_that_install_and_run_everything() -> None:
    commands = blocks("sh")[0]
    lines = [line.partition("#")[0].strip() for line in commands.splitlines()]
    assert lines == [
        "pip install -e '.[demo]' && dcp-objstore demo",
        "pip install -e '.[test]' && pytest",
    ]
    runner = (Path(__file__).parent.parent / ".ci" / "run").read_text()
    assert "pip install -e '.[test]' && pytest\n" in runner


def test_links_to_files_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
