"""A node: a folder for copies, and a run whose steps one process saves to it and loads from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dcp_objstore as dos
from dcp_objstore.local import copies, folder
from dcp_objstore.local.folder import file_name, home_name, key_of
from dcp_objstore.local.settings import LocalFolder
from dcp_objstore.observe.events import Event, LocalUnused
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
        return self.folder / home_name()

    @property
    def files(self) -> list[Path]:
        """All files in the folders of objects, whatever they are."""
        return sorted(self.home.glob("*/objects/*"))

    @property
    def copies(self) -> dict[str, Path]:
        """The whole copies, by the key of the object."""
        keys = {path: key_of(path.name) for path in self.files}
        return {key: path for path, key in keys.items() if key is not None}

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
    for state in (copies._folders, folder._began):
        state._renew()
        state._inherited.clear()
    time.sleep(0.02)  # the kernel's clock for files is so coarse
    folder._began._renew()


def put(into: Path, key: str, body: bytes) -> Path:
    """Put a copy of an object there."""
    path = into / file_name(key)
    path.write_bytes(body)
    path.chmod(0o600)
    return path


def open_files() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
