"""A process group of this process alone, and memory for copies that no other test has used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dcp_objstore.write.staging import state as staging
from dcp_objstore.write.staging.memory import StagingMemory


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> StagingMemory:
    """That of the process, for this test alone."""
    fresh = StagingMemory()
    monkeypatch.setattr(staging._memory, "here", fresh)
    return fresh
