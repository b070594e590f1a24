"""Runs of a `CheckpointManager`: what tests save in them, and waits for what it does in threads."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.distributed.step_consensus import StepConsensus
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.wrappers import WrappedStore


def run_url() -> str:
    """Return the URL of a run that nobody has saved to."""
    return f"memory://{secrets.token_hex(6)}/run"


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((4,), float(step)), "step": step}


def loaded(run: dos.CheckpointManager, step: int | None = None) -> tuple[int | None, int]:
    """Load; return the number of the step, and that in the state that was found."""
    found = state(-1)
    return run.load(found, step), found["step"]


def save_steps(url: str, steps: Iterable[int], **settings: Any) -> None:
    with dos.CheckpointManager(url, sweep=False, **settings) as run:
        for step in steps:
            run.save(step, state(step))


def save_each(url: str, *steps: int) -> None:
    """Save without a manager, and without a claim."""
    for step in steps:
        dos.save(state(step), f"{url}/step-{step}", progress=False)


def names(url: str) -> list[str]:
    return [step.name for step in dos.steps(url)]


def down(*_: object, **__: object) -> Any:
    """In place of what saves."""
    raise dos.errors.StoreUnavailableError("down")


def interrupted(*_: object, **__: object) -> Any:
    """In place of what is ended by Ctrl-C."""
    raise KeyboardInterrupt


def damage(url: str, word: bytes) -> None:
    """Change the last byte of a word in a checkpoint's data."""
    store = StoreSpec(url).open()
    key = next(meta.key for meta in store.list() if meta.key.endswith(".distcp"))
    body, _ = store.get(key, max_size_bytes=2**20)
    assert word in body
    store.put(key, body.replace(word, word[:-1] + bytes([word[-1] ^ 0xFF])))


def end_of(*threads: str) -> None:
    """Wait until no thread of these names runs."""
    for thread in threading.enumerate():
        if thread.name.removeprefix("dcp_objstore-") in threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} hangs"


def end_of_upkeep() -> None:
    """Wait for the deletions and the sweep that commits have begun."""
    end_of("upkeep")
    end_of("sweep")


@contextmanager
def noticed_at_each_step() -> Iterator[Callable[[], None]]:
    """Have each `step`, and no thread, look for signals and for the time; yield what looks now."""
    reached = StepConsensus.reached
    begun: list[StepConsensus] = []

    def start(consensus: StepConsensus) -> None:
        begun.append(consensus)

    def look_first(consensus: StepConsensus) -> frozenset[str]:
        consensus._poll()
        return reached(consensus)

    def look() -> None:
        for consensus in begun:
            consensus._poll()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepConsensus, "start", start)
        patch.setattr(StepConsensus, "reached", look_first)
        yield look


class Unconditional(WrappedStore):
    """A store that knows no conditions."""

    def put(self, key: str, data: Any, **settings: Any) -> Any:
        return self.inner.put(key, data, retry=settings.get("retry", True))
