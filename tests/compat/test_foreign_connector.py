"""What s3torchconnector's S3StorageWriter really wrote to a server, with every prefix strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import (
    BinaryPrefixStrategy,
    DefaultPrefixStrategy,
    HexPrefixStrategy,
    S3StorageWriter,
)
from s3torchconnector.dcp.s3_prefix_strategy import RoundRobinPrefixStrategy

import dcp_objstore as dos
from tests.support.checkpoints import Options
from tests.support.command_line import environment
from tests.support.ranks import run_ranks
from tests.support.states import fill, tensor_state, wrong_keys

STRATEGIES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "default": (DefaultPrefixStrategy, ["", "", ""]),
    "binary": (lambda: BinaryPrefixStrategy(min_prefix_length=3), ["000/", "010/", "100/"]),
    "hex": (
        lambda: HexPrefixStrategy(epoch_num=4, min_prefix_length=2),
        ["00/epoch_4/", "10/epoch_4/", "20/epoch_4/"],
    ),
    "round robin": (
        lambda: RoundRobinPrefixStrategy(["shard-a", "shard-b/inner"], epoch_num=1),
        ["shard-a/epoch_1/", "shard-a/epoch_1/", "shard-b/inner/epoch_1/"],
    ),
}


def save_by_connector(
    rank: int, world_size: int, url: str, options: Options, strategy: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The client underneath takes endpoint and credentials from nowhere else.
        for name, value in environment(options).items():
            patch.setenv(name, value)
        state = {"sharded": tensor_state("shard0"), "same": tensor_state("plain"), "step": 7}
        fill(state)
        writer = S3StorageWriter(
            "us-east-1",
            url,
            s3client_config=S3ClientConfig(force_path_style=True),
            prefix_strategy=STRATEGIES[strategy][0](),
        )
        dcp.save(state, storage_writer=writer)


def load_ours(rank: int, world_size: int, url: str, options: Options) -> None:
    state = {"sharded": tensor_state("shard1"), "same": tensor_state("plain"), "step": 0}
    dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))
    assert wrong_keys(state) == []
    assert state["step"] == 7


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_s3torchconnector_wrote_loads_with_any_prefix_strategy(bucket, strategy):
    url = bucket.at("step-1")
    run_ranks(3, save_by_connector, url, bucket.storage_options, strategy)
    prefixes = [f"{before}__" for before in STRATEGIES[strategy][1]]
    stored = [key for key in bucket.keys("step-1") if key != ".metadata"]
    assert sorted(key.partition("__")[0] + "__" for key in stored) == sorted(prefixes)
    run_ranks(2, load_ours, url, bucket.storage_options)
