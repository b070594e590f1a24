"""A URL is taken literally: what it says is the prefix of the keys, and what `ls` shows again."""

from __future__ import annotations

import json

import pytest
import torch

import dcp_objstore as dos
from tests.support.command_line import environment, run_here

# Large enough that it is read over signed URLs too, which quote such keys by themselves.
VALUES = 200_000


@pytest.mark.parametrize("name", ["k?x=1", "k#part", "a b/100%25+c"])
def test_a_checkpoint_under_a_key_that_looks_like_a_query_is_saved_listed_and_loaded(bucket, name):
    url, options = bucket.at(name), bucket.storage_options
    dos.save({"w": torch.arange(VALUES)}, url, storage_options=options)
    assert "_COMMIT" in bucket.keys(name)
    assert all(key.startswith(f"{name}/") for key in bucket.keys(""))

    state = {"w": torch.zeros(VALUES, dtype=torch.int64)}
    dos.load(state, url, storage_options=options)
    assert torch.equal(state["w"], torch.arange(VALUES))

    for place in (url, bucket.url):
        listed = run_here("ls", place, "--json", **environment(options))
        assert json.loads(listed.stdout)["url"] == url
