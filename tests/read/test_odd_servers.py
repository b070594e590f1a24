"""Weights are read from servers that answer otherwise than S3 does, but within HTTP.

`tests/faults/test_odd_servers.py` has every verb on each of them.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import save

import dcp_objstore as dos
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.stores import open_store
from tests.support.odd_servers import BEHAVIOURS, Behaviour, OddServer
from tests.support.scripted import Answer

ALL = pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
WEIGHT = torch.arange(100_000, dtype=torch.int32)
KEY = "m/model.safetensors"


def weights(behaviour: Behaviour) -> OddServer:
    """An odd server with a folder of weights."""
    server = OddServer(behaviour)
    server.objects[KEY] = save({"w": WEIGHT})
    return server


def load(server: OddServer) -> bool:
    """Load the weights; return whether they are right."""
    state = dos.read_state_dict("s3://bucket/m", storage_options=server.options())
    return torch.equal(state["w"], WEIGHT)


@pytest.mark.parametrize("behaviour", ["weak ETags", "a CDN's ETags"])
def test_weights_load_where_answers_have_other_etags_than_listings(behaviour):
    with weights(BEHAVIOURS[behaviour]) as server:
        assert load(server)


def test_weights_that_were_replaced_since_they_were_listed_are_not_loaded():
    """Only a second listing that is as the first one says that nothing was replaced."""
    new = save({"w": WEIGHT + 1})
    tag = hashlib.md5(new).hexdigest()
    with weights(Behaviour(e_tag=lambda _: f'"{tag}"')) as server:
        listing = server._listing

        def changing(query: dict[str, str]) -> Answer:
            if server.listings:
                server.objects[KEY] = new
            return listing(query)

        server._listing = changing  # type: ignore[method-assign]
        with pytest.raises(dos.errors.CheckpointGoneError):
            load(server)


@ALL
def test_answers_in_chunks_are_read_and_measured(transport):
    with weights(BEHAVIOURS["chunked answers"]) as server:
        store = open_store("s3://bucket/m", server.options(transport))
        size_bytes = len(server.objects[KEY])
        assert store.head("model.safetensors").size_bytes == size_bytes
        body, meta = store.get("model.safetensors", max_size_bytes=size_bytes)
        assert (body, meta.size_bytes) == (server.objects[KEY], size_bytes)
        with pytest.raises(dos.errors.CorruptDataError, match="at most"):
            store.get("model.safetensors", max_size_bytes=size_bytes - 1)


@ALL
def test_a_key_with_an_empty_segment_hides_no_other(transport):
    with weights(behaviour := BEHAVIOURS["empty segments"]) as server:
        listed = open_store("s3://bucket/m", server.options(transport)).list()
        assert [meta.key for meta in listed] == sorted({*behaviour.strays, "model.safetensors"})


def test_what_was_listed_before_such_a_key_comes_once(monkeypatch):
    """obstore gives a thousand keys at a time. Without boto3 it is said what to do."""
    names = [f"a{number:04}" for number in range(1001)]
    with weights(Behaviour(strays=(*names, "b//c", "d"))) as server:
        store = open_store("s3://bucket/m", server.options())
        assert [meta.key for meta in store.list()] == [*names, "b//c", "d", "model.safetensors"]
        monkeypatch.setattr(store, "_over_boto3", None)
        with pytest.raises(UnsupportedError, match="fsspec"):
            list(store.list())
