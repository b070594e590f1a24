"""A rank with more than one object may hold writes several, and everything knows them all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import parse_data_key
from dcp_objstore.config import MIB, TransferConfig
from tests.support.proxy import NetworkProxy
from tests.support.ranks import run_ranks
from tests.support.states import same_bits, seeded

CONFIG = TransferConfig(
    part_size_bytes=5 * MIB, max_object_size_bytes=5 * MIB, upload_concurrency=2
)
# In MiB. Three of 2 exceed an object; one of 7 by itself does.
SIZES = (2, 2, 2, 7, 1, 2)


def own_state(rank: int) -> dict[str, torch.Tensor]:
    return {
        f"rank-{rank}/{number}": seeded(f"{rank}/{number}", (size * MIB // 4,))
        for number, size in enumerate(SIZES)
    }


def save_own(rank: int, world: int, url: str, options: Mapping[str, object]) -> int:
    report = dos.save(own_state(rank), url, storage_options=options, config=CONFIG, progress=False)
    dist.barrier()
    return report.parts


@pytest.mark.backends("seaweed")
def test_a_rank_writes_several_objects_in_order_and_all_verbs_know_them(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    with NetworkProxy(options) as proxy:
        parts, _ = run_ranks(2, save_own, url, proxy.storage_options)
        sent = [asked for asked in proxy.asked if parse_data_key(asked.name) is not None]
    by_rank: dict[int, list[int]] = {0: [], 1: []}
    for asked in sent:
        name = parse_data_key(asked.name)
        assert name is not None
        if name.number not in by_rank[name.rank]:
            by_rank[name.rank].append(name.number)
    # Two tensors, one tensor, the large one, the last two: in this order, and none is begun twice.
    assert by_rank == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    # What carries bytes, and beginning and completing the one object per rank that has parts.
    assert parts == sum(asked.size_bytes > MIB for asked in sent) == 2 * (1 + 1 + 2 + 1)
    assert len(sent) == parts + 2 * 2

    loaded = {
        key: torch.zeros_like(value) for rank in (0, 1) for key, value in own_state(rank).items()
    }
    with NetworkProxy(options) as proxy:
        report = dos.load(loaded, url, storage_options=proxy.storage_options, progress=False)
    assert all(
        same_bits(loaded[key], value) for rank in (0, 1) for key, value in own_state(rank).items()
    )
    assert report.objects == 8
    assert report.requests <= 2 * 4  # one per object, none per tensor

    checked = dos.open(url, storage_options=options).verify(deep=True, progress=False)
    assert checked.ok
    assert checked.objects == 8
    damaged = next(key for key in bucket.keys() if "/__1_2." in key)  # noqa: SIM118
    bucket.flip_byte(damaged, 6 * MIB)
    assert not dos.open(url, storage_options=options).verify(progress=False).ok

    gone = dos.delete(url, allow_newest=True, storage_options=options)
    assert gone.objects == 8
    assert bucket.keys("step-1") == ["_COMMIT"]
