"""Values that differ between ranks are named in one warning; equal ones never are."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import enum
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import dcp_objstore as dos
from dcp_objstore.write import same_values
from dcp_objstore.write.same_values import SeenValues, _digest, _Exact, _Quick
from tests.support.campaign import cases
from tests.support.optimizers.rows import listening
from tests.support.ranks import run_ranks

Seen = list[list[str]]


@dataclasses.dataclass
class Progress:
    step: int
    names: Any = None


class Color(enum.Enum):
    RED = 1
    BLUE = 2


HASHABLE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(-2, 2, width=16),
    st.text("ab", max_size=2), st.binary(max_size=2), st.sampled_from(Color),
    st.sampled_from([Path("a"), Path("b")]),
)  # fmt: skip
LEAVES = HASHABLE | st.one_of(
    st.lists(st.integers(0, 2), max_size=3).map(torch.tensor),
    st.lists(st.integers(0, 2), max_size=3).map(np.array),
    st.binary(max_size=2).map(io.BytesIO),
    st.sampled_from([torch.float32, torch.int64, torch.Size([1]), np.float32(1)]),
    st.dates(datetime.date(2026, 1, 1), datetime.date(2026, 1, 3)),
    st.sets(HASHABLE, max_size=3),
    st.frozensets(HASHABLE, max_size=3),
)


def _nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(HASHABLE, values, max_size=3)
    return st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(int, items)),
        st.builds(Progress, st.integers(0, 2), values),
        values.map(lambda value: [value, value]),  # one object in two places
    )


VALUES = st.recursive(LEAVES, _nested, max_leaves=8)


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911 - one for each kind
    """Whether two values have equal contents, of equal types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    if isinstance(one, Progress):
        return same(vars(one), vars(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same_items([*one.items()], [*other.items()])
    if isinstance(one, set | frozenset):
        return same_items([*one], [*other])
    return bool(one == other) and str(one) == str(other)  # 0.0 and -0.0


def same_items(ones: list[Any], others: list[Any]) -> bool:
    left = list(others)
    for one in ones:
        at = next((at for at, other in enumerate(left) if same(one, other)), None)
        if at is None:
            return False
        del left[at]
    return not left


def of_another_rank(value: Any) -> Any:
    """Return an equal value in which nothing is shared, and dicts and sets have another order."""
    if isinstance(value, str):
        return "".join(list(value))
    if isinstance(value, Progress):
        return Progress(value.step, of_another_rank(value.names))
    if isinstance(value, dict):
        turned = copy.copy(value)
        turned.clear()
        for key, item in reversed(value.items()):
            turned[of_another_rank(key)] = of_another_rank(item)
        return turned
    if type(value) in (list, tuple, set, frozenset):
        items = [of_another_rank(item) for item in value]
        return type(value)(items if isinstance(value, list | tuple) else reversed(items))
    return copy.deepcopy(value)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_equal_values_are_equal_whatever_their_order_and_whatever_is_shared(value):
    digest = _digest(_Exact, value)
    assert digest is not None
    assert _digest(_Exact, of_another_rank(value)) == digest
    assert _digest(_Exact, pickle.loads(pickle.dumps(value))) == digest
    assert _digest(_Quick, pickle.loads(pickle.dumps([value, value]))[0]) == _digest(
        _Quick, value
    ) or ("{" in repr(value) or "set" in repr(value))


@settings(max_examples=100, deadline=None)
@given(VALUES, VALUES)
def test_different_values_are_different(one, other):
    for pickler in (_Exact, _Quick):
        if not same(one, other):
            assert _digest(pickler, one) != _digest(pickler, other)


def test_arrays_of_the_same_bytes_are_different_where_their_dtypes_or_shapes_are():
    of_one_pattern = [np.zeros(2), np.zeros(2, int), np.zeros((2, 1)), np.zeros((1, 2))]
    for pickler in (_Exact, _Quick):
        assert len({_digest(pickler, value) for value in of_one_pattern}) == 4


def test_each_rank_has_a_gpu_of_its_own():
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    for pickler in (_Exact, _Quick):
        first, second = (_digest(pickler, {"device": device}) for device in devices)
        assert first == second != _digest(pickler, {"device": torch.device("cpu")})


def test_what_no_pickle_holds_is_left_to_its_upload():
    around: list[Any] = []
    around.append(around)
    for value in (lambda: None, around):
        assert SeenValues().digest({"a": 1, "b": value}) is None


def test_tensors_are_not_compared_but_random_states_are():
    state = {
        "w": torch.ones(3), "rng": torch.get_rng_state(), "large": torch.zeros(8193).byte(),
        "largest": torch.zeros(8192).byte(), "on a GPU": torch.zeros(3, device="meta").byte(),
        "step": 1, "model._extra_state": 2, "file": b"PK\x03\x04...", "pickle": pickle.dumps(1),
        "bytes": b"text", "param_groups.0.lr": 1,
    }  # fmt: skip
    seen = SeenValues()
    assert [*seen.compared(state)] == ["rng", "largest", "step", "bytes"]
    first = seen.digest(seen.compared(state))
    torch.rand(1)
    assert seen.digest(seen.compared({**state, "rng": torch.get_rng_state()})) != first


def warned_of(state: dict[str, Any], url: str, *, background: bool = False) -> list[str]:
    """Save a state; return what was said meanwhile."""
    with listening() as said:
        if background:
            dos.async_save(state, url).result()
        else:
            dos.save(state, url, progress=False)
    return said


def differing(rank: int, world: int, root: str, background: bool) -> Seen:
    """Save values some of which differ, again and again."""
    last, saved = rank == world - 1, iter(range(100))

    def say(**state: Any) -> list[str]:
        state["w"] = torch.full((3,), rank)  # a tensor that was trained, and is rank 0's
        return warned_of(state, f"{root}/{next(saved)}", background=background)

    turned = {"a": 1, "b": (2,)} if last else {"b": (2,), "a": 1}
    rank_name = {f"own-{rank}": 5}
    return [
        say(step=1, order=(turned,)),
        say(step=1, order=(turned,)),  # now by the exact digest
        say(step=1, order=(turned | {"a": rank},)),
        say(step=1, order=(turned | {"a": rank},)),  # it was named
        say(step=2 + last, **rank_name),
        say(step=3 + rank, **rank_name),
        say(own=dos.PerRank(rank), some=rank) if rank else say(own=dos.PerRank(rank)),
        say(deep={"list": [rank, {"x": 1}]}, rng=torch.tensor([rank]).byte(), epoch=7),
        say(epoch=7 + (rank == 1)),
    ]


@pytest.mark.parametrize("background", cases([False, True], default=[False]))
def test_one_warning_names_the_keys_and_two_ranks_and_what_to_do(tmp_path, background):
    first, *others = run_ranks(3, differing, tmp_path.as_uri(), background)
    assert others == [[[]] * len(first)] * 2  # one rank says it
    said = [" ".join(messages) for messages in first]
    named = [["order"], ["step on ranks 0 and 2"], ["some on ranks 1 and 2"],
             ["deep.list.0 on ranks 0 and 1", "rng on ranks 0 and 1"],
             ["epoch on ranks 0 and 1"]]  # fmt: skip
    assert [number for number, text in enumerate(said) if text] == [2, 4, 6, 7, 8]
    for text, keys in zip(filter(None, said), named, strict=True):
        assert all(key in text for key in keys), text
        assert "dos.PerRank" in text
        assert "epoch" not in text or keys == named[-1]


def fails_on_one(rank: int, world: int, root: str) -> list[str]:
    """What cannot be pickled on one rank alone."""
    value: Any = {"step": 1, "own": (lambda: None) if rank else 5}
    return warned_of({**value, "w": torch.ones(1)}, f"{root}/1")


def test_a_value_that_only_one_rank_could_not_save_stops_none(tmp_path):
    assert run_ranks(2, fails_on_one, tmp_path.as_uri()) == [[], []]


def compared(monkeypatch: pytest.MonkeyPatch, *of_ranks: dict[str, Any]) -> list[SeenValues]:
    """Let ranks compare these values; return what each has seen."""
    sent: list[Any] = []
    monkeypatch.setattr(same_values, "from_all", lambda own, *_: sent.append(own) or sent)
    monkeypatch.setattr(same_values, "global_rank", lambda rank, _: rank)
    monkeypatch.setattr(same_values, "is_first", lambda _: True)
    seen = [SeenValues() for _ in of_ranks]
    for turn in range(2):  # in the second turn each rank has what all send
        for own, values in zip(seen, of_ranks, strict=True):
            if turn:
                monkeypatch.setattr(same_values, "from_all", lambda *_: sent[: len(seen)])
            assert own.compare(values, "memory://x/1", None) is None
        for own in seen if not turn else ():
            own.left_out.clear()
            own.unordered.clear()
    return seen


def test_equal_values_in_another_order_are_then_compared_without_a_meeting(monkeypatch):
    ranks: list[dict[str, Any]] = [
        {"order": {"a": 1, "b": 2}, "n": 1},
        {"n": 1, "order": {"b": 2, "a": 1}},
    ]
    seen = compared(monkeypatch, *ranks)
    assert [one.unordered for one in seen] == [{"order"}] * 2
    assert not any(one.left_out for one in seen)
    assert SeenValues().digest(ranks[0]) != SeenValues().digest(ranks[1])
    first, second = (one.digest(values) for one, values in zip(seen, ranks, strict=True))
    assert first == second != seen[1].digest({**ranks[1], "order": {"b": 2, "a": 2}})


def test_what_some_ranks_lack_is_compared_once(monkeypatch, caplog):
    ranks: list[dict[str, Any]] = [{"n": 1, "stage.0": 5}, {"n": 1, "stage.1": 6}]
    seen = compared(monkeypatch, *ranks)
    assert [one.left_out for one in seen] == [{"stage.0", "stage.1"}] * 2
    first, second = (
        one.digest(one.compared(values)) for one, values in zip(seen, ranks, strict=True)
    )
    assert first == second
    assert not caplog.text
