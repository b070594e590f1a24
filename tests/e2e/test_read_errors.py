"""What a load says of a state that does not fit, and a save of credentials that may only read."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.errors import PermissionDeniedError
from tests.support.checkpoints import Options, cause, load_here, save_edition_here
from tests.support.ranks import run_ranks
from tests.support.servers import READ_ONLY
from tests.support.states import tensor_state


def load_wrongly(rank: int, world_size: int, url: str, options: Options) -> None:
    for state, key in (
        ({**tensor_state("shard0"), "evem": torch.zeros(3)}, "evem"),
        ({**tensor_state("plain"), "even": torch.zeros(16, 9)}, "even"),
    ):
        with pytest.raises(CheckpointException, match=key):
            dcp.load(state, storage_reader=dos.ObjectStoreReader(url, storage_options=options))


def test_a_key_or_shape_that_the_checkpoint_lacks_is_named_on_every_rank(bucket):
    url, options = bucket.at("step-1"), bucket.storage_options
    save_edition_here("good", url, options)
    run_ranks(2, load_wrongly, url, options)


@pytest.mark.backends("seaweed")
def test_credentials_that_may_only_read_load_but_cannot_save(bucket):
    options = {**bucket.storage_options, **READ_ONLY}
    save_edition_here("good", bucket.at("step-1"), bucket.storage_options)
    load_here(bucket.at("step-1"), options)
    before = bucket.keys()
    with pytest.raises(CheckpointException) as caught:
        save_edition_here("never", bucket.at("step-2"), options)
    assert isinstance(cause(caught.value), PermissionDeniedError)
    assert bucket.keys() == before
