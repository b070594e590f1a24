"""The entries of a checkpoint below a place of the state, and what is loaded into."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Replicate, Shard

from dcp_objstore.errors import StateMismatchError
from dcp_objstore.state import record as module
from dcp_objstore.state.record import Asked, Record, is_numbered_state
from tests.support.wrappers import Boxed


def record_of(*keys: str, paths: dict[str, Any] | None = None) -> Record:
    return Record(Metadata(dict.fromkeys(keys, BytesStorageMetadata())), paths or {})


def test_what_was_saved_below_a_place_is_told_from_names_that_only_begin_alike():
    keys = ("a", "a-b.c", "a.x", "a.y.0", "a/b", "ab.c", "b.a.x")
    record = record_of(*keys, paths={"a.x": ("a", "x"), "a.y.0": ("a.y", 0)})
    assert record.below(("a",)) == {"x": ("x",), "y.0": ("y", 0)}
    assert record.below(("b", "a")) == record.below(("b.a",)) == {"x": ("x",)}
    assert record.below(("a", "x")) == {}
    assert [record.names("x", place) for place in (("a",), ("b", "a"), ("b",))] == [True] * 2 + [
        False
    ]
    assert record.places_beside(("z",)) == {"a", "a-b", "a/b", "ab", "b"}
    beside = {"a", "a-b.c", "a.x", "a.y", "a/b", "ab.c", "b.a"}
    assert record.places_beside(("b", "a")) == record.places_beside(("b.a",)) == beside


@pytest.mark.parametrize(
    ("sizes", "plain", "fits"),
    [((2, 3), (2, 3), True), ((1, 3), (2, 3), False), ((2, 3), (1, 3), False)],
)
def test_a_stored_subclass_takes_the_place_of_a_plain_tensor_of_its_size(sizes, plain, fits):
    record, stored = record_of("a.x"), Boxed(torch.ones(2, 3))
    asked = Asked({}, record, ("a",))
    asked.wanted["x"] = torch.empty(plain)
    assert not record.takes("a.x", stored, sizes), "the user has a tensor there"
    record.destinations["a.x"] = module._Destination(asked.wanted, "x")
    if fits:
        assert record.takes("a.x", stored, sizes)
        assert type(asked.wanted["x"]) is Boxed
    else:
        with pytest.raises(StateMismatchError, match="parts of a Boxed") as caught:
            record.takes("a.x", stored, sizes)
        assert caught.value.key == "a.x"
        assert caught.value.advice is not None


@pytest.mark.parametrize(
    ("offsets", "ndim", "placements"),
    [
        ([(0, 0)], 1, [Replicate()]),
        ([(0, 0), (0, 2), (0, 4)], 1, [Shard(1)]),
        ([(0, 0), (0, 2), (3, 0)], 1, [Replicate()]),
        ([(0, 0), (3, 0)], 2, [Replicate()] * 2),
    ],
)
def test_a_new_tensor_is_split_as_the_saved_one_where_the_mesh_can(offsets, ndim, placements):
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size((1, 1))) for at in offsets]
    saved = TensorStorageMetadata(TensorProperties(), torch.Size((9, 9)), chunks)
    mesh: Any = SimpleNamespace(ndim=ndim)
    assert module._placements(saved, mesh) == placements


@pytest.mark.parametrize(
    ("like", "dtype", "strides"),
    [
        (None, torch.float32, (3, 1)),
        (torch.ones(3, 2, dtype=torch.int8).t(), torch.float32, (1, 2)),
        (torch.ones(2, 2).t(), torch.float32, (3, 1)),
        (Boxed(torch.ones(3, 2).t()), torch.float32, (3, 1)),
        (3, None, (3, 1)),
    ],
)
def test_a_new_tensor_has_the_saved_dtype_and_lies_as_one_of_its_shape(like, dtype, strides):
    saved = TensorStorageMetadata(TensorProperties(dtype), torch.Size((2, 3)), [])
    made = module._destination(saved, like)
    found = type(made), made.dtype, made.shape, made.stride()
    assert found == (torch.Tensor, dtype or torch.uint8, (2, 3), strides)


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ({"state": {}, "param_groups": []}, True),
        ({"state": 0, "param_groups": [{"params": 1}]}, True),
        ({"param_groups": []}, False),
        ({"state": {}}, False),
        ({"state": {}, "param_groups": ({"params": 1},)}, False),
        ({"state": {}, "param_groups": [{"params": 1}, {"lr": 1}]}, False),
        ({"state": {}, "param_groups": [["params"]]}, False),
        (["state", "param_groups"], False),
    ],
)
def test_a_numbered_state_has_groups_each_of_which_names_its_parameters(value, is_one):
    assert is_numbered_state(value) is is_one
