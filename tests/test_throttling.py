"""A store that answers SlowDown above a rate: saves and loads slow down with it, and end well.

A proxy before a real server has a bucket of tokens, and answers 503 or 429 when it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.stores import open_store
from dcp_objstore.stores.limiter import Limiter, limiter_of
from tests.support.proxy import Asked, NetworkProxy, SlowDown
from tests.support.servers import Bucket

MIB = 1024 * 1024
pytestmark = pytest.mark.backends("seaweed")

PARTS = 64
CONFIG = dos.TransferConfig(part_size_bytes=5 * MIB, request_size_bytes=4 * MIB)
# What the requests may be, of those without a fault.
MOST = 1.3


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[NetworkProxy]:
    with NetworkProxy(bucket.storage_options) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (PARTS * 5 * MIB // 2,)
    return {
        name: torch.randint(0, 256, size, dtype=torch.uint8, generator=generator) for name in "ab"
    }


def is_transfer(asked: Asked) -> bool:
    """Parts, and ranges of data."""
    return "partNumber=" in asked.query or (
        asked.method == "GET" and asked.name.endswith(".distcp")
    )


def limiter_at(url: str, proxy: NetworkProxy) -> Limiter:
    return limiter_of(open_store(url, proxy.storage_options))


def save(state: dict[str, torch.Tensor], url: str, proxy: NetworkProxy) -> None:
    dos.save(state, url, storage_options=proxy.storage_options, config=CONFIG, progress=False)


def load(state: dict[str, torch.Tensor], url: str, proxy: NetworkProxy) -> dos.LoadReport:
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    report = dos.load(
        found, url, storage_options=proxy.storage_options, config=CONFIG, progress=False
    )
    assert all(torch.equal(found[name], state[name]) for name in state)
    return report


@pytest.mark.parametrize("status", [503, 429])
def test_a_throttled_save_ends_well_with_few_more_requests(
    bucket: Bucket, proxy: NetworkProxy, state: dict[str, torch.Tensor], status: int
) -> None:
    save(state, bucket.at("step-1"), proxy)
    usual = len(proxy.asked)
    proxy.plan = slow = SlowDown(30, 10, status)
    save(state, bucket.at("step-2"), proxy)
    count = len(proxy.asked) - usual
    print(f"{count} requests instead of {usual}, {len(slow.refused)} refused with {status}")
    assert slow.refused
    assert count <= MOST * usual
    assert not limiter_at(bucket.url, proxy).pace.is_open
    proxy.plan = lambda asked: None
    load(state, bucket.at("step-2"), proxy)
    assert bucket.uploads() == []


@pytest.mark.parametrize("status", [503, 429])
def test_a_throttled_load_ends_well_with_few_more_requests(
    bucket: Bucket, proxy: NetworkProxy, state: dict[str, torch.Tensor], status: int
) -> None:
    url = bucket.at("step-1")
    save(state, url, proxy)
    before = len(proxy.asked)
    load(state, url, proxy)
    usual = len(proxy.asked) - before
    proxy.plan = slow = SlowDown(30, 10, status)
    before = len(proxy.asked)
    load(state, url, proxy)
    count = len(proxy.asked) - before
    print(f"{count} requests instead of {usual}, {len(slow.refused)} refused with {status}")
    assert slow.refused
    assert count <= MOST * usual
