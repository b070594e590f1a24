from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.managers import run_url

Hold = Callable[[Any, str], threading.Event]


@pytest.fixture
def url() -> str:
    return run_url()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Have calls of a function, by its place and name, wait until the event is set."""
    events: list[threading.Event] = []

    def hold(where: Any, name: str) -> threading.Event:
        go, really = threading.Event(), getattr(where, name)

        def later(*args: Any, **settings: Any) -> Any:
            assert go.wait(60)
            return really(*args, **settings)

        monkeypatch.setattr(where, name, later)
        events.append(go)
        return go

    yield hold
    for go in events:
        go.set()
