"""What a rank says of its objects, and names of dtypes as an index has them."""

from __future__ import annotations

import torch

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.state.stored import StoredObject, constant_name, known_dtype


def test_an_object_counts_as_copied_only_where_that_is_said():
    entry = ix.ObjectEntry("a", 8, None, b"d" * 16)
    assert [StoredObject(entry, 1, "memory://x", *copied).copied for copied in ((), (True,))] == [
        False,
        True,
    ]


def test_constants_have_their_names_in_torch():
    constants = [torch.float32, torch.strided, torch.channels_last]
    assert [constant_name(one) for one in constants] == ["float32", "strided", "channels_last"]


def test_a_dtype_is_known_if_torch_and_this_version_know_it(monkeypatch):
    assert known_dtype("bfloat16") is torch.bfloat16
    for name in ("quint4x2", "strided", "float3"):
        assert known_dtype(name) is None
    monkeypatch.setitem(ix.ITEM_SIZE_BYTES, "float3", 1)
    assert known_dtype("float3") is None
