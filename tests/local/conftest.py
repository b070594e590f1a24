from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node_copies import Node, restart


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The process knows of no folder before and after."""
    restart()
    yield
    restart()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "node").mkdir()
    return Node(tmp_path / "node", f"memory://{secrets.token_hex(6)}/run")
