"""A node: a folder for copies, and a run whose steps one process saves to it and loads from it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

import dcp_objstore as dos
from dcp_objstore.config import LocalFolder
from dcp_objstore.local import copies, folder
from dcp_objstore.observe.events import Event, LocalUnused
from dcp_objstore.stores.local import TEMPORARY
from tests.support.states import same_bits, seeded


def state_of(step: int, rows: int = 100, *, blank: bool = False) -> dict[str, Any]:
    """Every element says which step it is of."""
    tensors = {"weights": (rows, 256), "bias": (11,)}
    state: dict[str, Any] = {
        key: torch.zeros(shape) if blank else seeded(f"{key} {step}", shape)
        for key, shape in tensors.items()
    }
    return {**state, "step": -1 if blank else step}


def assert_of_step(state: dict[str, Any], step: int, rows: int = 100) -> None:
    assert state["step"] == step
    for key, value in state_of(step, rows).items():
        assert not isinstance(value, torch.Tensor) or same_bits(state[key], value), key


@dataclass
class Node:
    """A folder for copies and a run.

    Attributes:
        folder: what `local` is.
        run: the run's URL.
        max_bytes: what `dos.Local` takes.
        rows: the state's size, a KiB each.
        unused: the events that say that copies are not used.
    """

    folder: Path
    run: str
    max_bytes: int | None = None
    rows: int = 100
    unused: list[LocalUnused] = field(default_factory=list)

    @property
    def local(self) -> LocalFolder:
        return dos.Local(str(self.folder), max_bytes=self.max_bytes)

    def note(self, event: Event) -> None:
        if isinstance(event, LocalUnused):
            self.unused.append(event)

    def save(self, step: int, **options: Any) -> dos.reports.SaveReport:
        options = {"local": self.local, "progress": False, "on_event": self.note, **options}
        return dos.save(state_of(step, self.rows), f"{self.run}/step-{step}", **options)

    def load(self, step: int, **options: Any) -> dos.reports.LoadReport:
        """Load a step and see that every value is right."""
        options = {"local": self.local, "progress": False, "on_event": self.note, **options}
        state = state_of(step, self.rows, blank=True)
        report = dos.load(state, f"{self.run}/step-{step}", **options)
        assert_of_step(state, step, self.rows)
        return report

    @property
    def home(self) -> Path:
        return folder.home_of(str(self.folder))

    @property
    def files(self) -> list[Path]:
        """All files in the folders of checkpoints, whatever they are."""
        return sorted(self.home.glob("*/*/*"))

    @property
    def copies(self) -> dict[str, Path]:
        """The whole copies, by the key of the object."""
        return {
            f"{unquote(path.parent.name)}/{path.name}": path
            for path in self.files
            if not path.name.startswith(TEMPORARY)
        }

    @property
    def steps(self) -> list[int]:
        """The steps of which there are copies."""
        return sorted({int(key.partition("/")[0].removeprefix("step-")) for key in self.copies})

    def copy_of(self, step: int) -> Path:
        """The copy of the only object of a step."""
        (copy,) = (path for key, path in self.copies.items() if key.startswith(f"step-{step}/"))
        return copy


def restart() -> None:
    """Forget what this process knows of folders, as if it began again now."""
    for state in (copies._saved, folder.runs_here):
        state._renew()
        state._inherited.clear()
    copies._warned_of.clear()


def open_files(below: Path) -> list[str]:
    """The files at or below ``below`` that this process has open.

    Not the number of all that it has open: what earlier tests left, a garbage collection closes
    at any time.
    """
    places = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists them, for one
            places.append(str(descriptor.readlink()))
    return sorted(place for place in places if place.startswith(str(below)))
