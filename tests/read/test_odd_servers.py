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


def load(server: OddServer, transport: str) -> bool:
    """Load the weights; return whether they are right."""
    state = dos.read_state_dict("s3://bucket/m", storage_options=server.options(transport))
    return torch.equal(state["w"], WEIGHT)


@ALL
@pytest.mark.parametrize("behaviour", ["weak ETags", "a CDN's ETags"])
def test_weights_load_where_answers_have_other_etags_than_listings(transport, behaviour):
    with weights(BEHAVIOURS[behaviour]) as server:
        assert load(server, transport)


@ALL
def test_weights_that_were_replaced_since_they_were_listed_are_not_loaded(transport):
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
            load(server, transport)


@ALL
def test_weights_load_from_answers_in_chunks(transport):
    with weights(BEHAVIOURS["chunked answers"]) as server:
        assert load(server, transport)
        store = open_store("s3://bucket/m", server.options(transport))
        size_bytes = len(server.objects[KEY])
        assert store.head("model.safetensors").size_bytes == size_bytes
        body, meta = store.get("model.safetensors", max_size_bytes=size_bytes)
        assert body == server.objects[KEY]
        assert meta.size_bytes == size_bytes
        with pytest.raises(dos.errors.CorruptDataError, match="at most"):
            store.get("model.safetensors", max_size_bytes=size_bytes - 1)


@ALL
@pytest.mark.parametrize("stray", ["/README.md", "./a", "../a", "a//b"])
def test_a_key_with_an_empty_segment_hides_no_other(transport, stray):
    strays = ("-first", stray, "zlast")
    with weights(Behaviour(strays=strays)) as server:
        assert load(server, transport)
        store = open_store("s3://bucket/m", server.options(transport))
        listed = [meta.key for meta in store.list()]
        assert listed == sorted({*strays, "model.safetensors"})


def test_without_boto3_a_key_with_an_empty_segment_is_an_error_that_says_what_to_do(monkeypatch):
    with weights(BEHAVIOURS["empty segments"]) as server:
        store = open_store("s3://bucket/m", server.options())
        monkeypatch.setattr(store, "_over_boto3", None)
        with pytest.raises(UnsupportedError, match="fsspec"):
            list(store.list())


def test_what_was_listed_before_such_a_key_comes_once():
    """obstore gives a thousand keys at a time."""
    names = [f"a{number:04}" for number in range(1001)]
    with weights(Behaviour(strays=(*names, "b//c", "d"))) as server:
        listed = [meta.key for meta in open_store("s3://bucket/m", server.options()).list()]
        assert listed == [*names, "b//c", "d", "model.safetensors"]
