"""What patterns and indices select, when chunks fill what is read, and nested dicts from places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given, reject, settings, strategies as st

import dcp_objstore as dos
from dcp_objstore.checkpoint.index import LiteralKey
from dcp_objstore.errors import CheckpointCorruptError, ConfigError, StateMismatchError
from dcp_objstore.inspect.selection import box_of, matching, nested
from dcp_objstore.read.geometry import Box
from tests.support.checkpoints import memory_url

KEYS = dict.fromkeys(["model.a.weight", "model.a.bias", "model.b[0]", "Model.c", "step"])


def test_patterns_match_whole_keys_and_keep_their_order():
    assert matching(KEYS, None) == list(KEYS)
    assert matching(KEYS, "model.*") == ["model.a.weight", "model.a.bias", "model.b[0]"]
    assert matching(KEYS, {"step", "*.bias", "model.?.bias"}) == ["model.a.bias", "step"]
    assert matching(KEYS, (name for name in ["[mM]odel.c"])) == ["Model.c"]
    assert matching(KEYS, []) == []
    assert matching(KEYS, "model.b[0]") == ["model.b[0]"], "a key may have brackets"


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model", r"'model\.\*' matches 3"),
        ("model.a.wieght", r"nearest: model\.a\.weight"),
        ("model.a.wieght*", r"nearest: model\.a\.weight"),
        ("[m]odel.a.wieght", r"nearest: model\.a\.weight"),
        ("modl.*", r"nearest: model, Model\)"),
        ("model.c", "no key matches"),
        ("b*", "no key matches"),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_a_hint(pattern, hint):
    with pytest.raises(StateMismatchError, match=hint):
        matching(KEYS, ["step", pattern])


@pytest.mark.parametrize("patterns", [3, [3], [None], [b"step"]])
def test_a_pattern_that_is_no_text_is_refused(patterns):
    with pytest.raises(ConfigError):
        matching(KEYS, patterns)


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def shapes_and_indices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = draw(SHAPES)
    edges = st.none() | st.integers(-7, 7)
    parts = st.integers(-6, 5) | st.builds(slice, edges, edges) | st.just(...)
    index = tuple(draw(st.lists(parts, max_size=4)))
    assume(sum(part is ... for part in index) < 2)  # torch takes several, NumPy and we one
    return shape, index


@settings(deadline=None, max_examples=150)
@given(shapes_and_indices())
def test_an_index_selects_what_it_selects_of_a_tensor(drawn):
    shape, index = drawn
    whole = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    try:
        wanted = whole[index]
    except IndexError:
        with pytest.raises(IndexError):
            box_of(index, shape)
        return
    box, kept = box_of(index, shape)
    part = whole
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        part = part.narrow(dim, min(offset, shape[dim]), size)
    assert torch.equal(part.reshape(kept), wanted)


def test_arrays_and_steps_are_no_part():
    arrays = (np.array([0, 1]), torch.tensor([0.5]), torch.tensor(True), np.True_, True)
    for index in (*arrays, (..., np.array([1, 2])), slice(0, 4, -1)):
        with pytest.raises(IndexError):
            box_of(index, (4, 4))
    assert box_of((np.int64(1), torch.tensor(2)), (4, 4)) == (Box((1, 2), (1, 1)), [])
    assert box_of(slice(1, 3, 1), (4, 4)) == (Box((1, 0), (2, 4)), [2, 4])


def test_places_become_dicts_and_lists_again():
    places: dict[str, tuple[str | int, ...]] = {
        "a.b": ("a", "b"),
        "a.1": ("a", "1"),
        "l.0.x": ("l", 0, "x"),
        "l.2": ("l", 2),
    }
    assert nested({"a.b": 1, "a.1": 2, "l.2": 3, "l.0.x": 4, "free.key": None}, places) == {
        "a": {"b": 1, "1": 2},
        "l": [{"x": 4}, None, 3],
        "free.key": None,
    }
    assert nested({"a.b": 1}, None) == {"a.b": 1}
    # 100,000 entries may be empty, beside those that the steps of the place may fill.
    assert len(nested({"x": 1}, {"x": ("l", 100_001)})["l"]) == 100_002


DICT_KEYS = st.one_of(
    st.text("a.1", min_size=1, max_size=3),
    st.integers(-2, 11),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
LEAVES = st.one_of(
    st.integers(0, 9).map(lambda number: torch.full((2,), number)),
    st.integers(0, 9),
    st.lists(st.integers(0, 9), max_size=2),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(DICT_KEYS, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


def in_order(value: Any) -> Any:
    """The same, with the keys of dicts in one order: a checkpoint may have another."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, list):
        return [in_order(item) for item in value]
    return value


@settings(max_examples=25)
@given(st.dictionaries(st.text("xy", min_size=1, max_size=2), VALUES, min_size=1, max_size=3))
def test_any_nested_state_is_read_as_it_was_saved(state):
    url = memory_url()
    try:
        dos.save(state, url, progress=False)
    except dos.errors.StateMismatchError as error:
        assert "the same name" in str(error)
        reject()
    assert repr(in_order(dos.read_state_dict(url))) == repr(in_order(state))


def test_keys_of_two_ranks_that_are_equal_in_one_dict_are_read_under_their_names():
    places = {"d.1": ("d", LiteralKey("1")), "d.True": ("d", LiteralKey("True"))}
    assert repr(nested({"d.1": "one"}, places)) == "{'d': {1: 'one'}}"
    both = nested({"d.1": "one", "d.True": "other"}, places)
    assert repr(both) == "{'d': {'1': 'one', 'True': 'other'}}"
    assert {type(key) for key in both["d"]} == {str}


@pytest.mark.parametrize(
    "places",
    [
        {"x": ("a", 100_002), "y": ("b",)},
        {"x": ("a", 60_000), "y": ("b", 60_000)},
        {"x": ("a", -1), "y": ("b",)},
        {"x": ("a",), "y": ("a",)},
        {"x": ("a",), "y": ("a", "b")},
        {"x": ("a", 0), "y": ("a", "b")},
        {"x": ("a", "b"), "y": ("a", 0)},
        {"x": (0,), "y": ("b",)},
        {"x": (), "y": ("b",)},
    ],
    ids=str,
)
def test_places_that_cannot_be_are_refused(places):
    with pytest.raises(CheckpointCorruptError, match="impossible place") as caught:
        nested({"x": 1, "y": 2}, places)
    assert caught.value.key in places


def test_the_modules_of_a_checkpoint_are_a_tree_by_the_dots_in_its_keys(tmp_path):
    state = {"model.w": torch.ones(10, 4), "model.a.b": torch.ones(3).half(), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    ckpt = dos.open((tmp_path / "stock").as_uri())
    root = ckpt.modules()
    assert list(root.modules) == ["model"]
    model = root.modules["model"]
    assert (model.name, model.modules["a"].name) == ("model", "model.a")
    assert [entry.key for entry in model.walk()] == ["model.w", "model.a.b"]
    assert model.total_bytes == 166
    assert list(model.bytes_by_dtype().items()) == [("float32", 160), ("float16", 6)]
    assert list(root.entries) == ["step"]
    assert root.bytes_by_dtype()["value"] == ckpt["step"].nbytes
    assert list(ckpt.modules("model.a.*").walk()) == [ckpt["model.a.b"]]
    assert (ckpt.commit_id, ckpt.created_at, ckpt.world_size, ckpt.user_metadata) == (None,) * 4
    dos.save({".".join("x" * 70): 1}, (tmp_path / "deep").as_uri(), progress=False)
    module = dos.open((tmp_path / "deep").as_uri()).modules()
    for _ in range(64):
        (module,) = module.modules.values()
    assert (module.name, list(module.entries)) == (".".join("x" * 64), ["x.x.x.x.x.x"])
