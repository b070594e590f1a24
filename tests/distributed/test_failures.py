"""Failures of ranks: what they leave in memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.torch_version import TorchVersion

import dcp_objstore as dos
from dcp_objstore.distributed import failures
from dcp_objstore.distributed.failures import capture, drop_state, raise_on_all, typed_failures
from dcp_objstore.distributed.groups import gone_error
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.errors import (
    CommitLostError,
    DcpObjstoreError,
    InputError,
    RankFailedError,
    one_line,
)
from tests.support.rank_threads import RankThreads
from tests.support.ranks import run_ranks


def kept_by_failed_calls(rank: int, world: int, folder: str) -> list[str]:
    """The calls that failed and after which a tensor is still in memory."""
    dos.save({"w": torch.ones(2)}, f"file://{folder}/whole", progress=False)
    calls = {
        "load of nothing": lambda state: dos.load(state, f"file://{folder}/none", progress=False),
        "load of others": lambda state: dos.load(state, f"file://{folder}/whole", progress=False),
        "save": lambda state: dos.save(state, f"file://{folder}/whole", progress=False),
    }
    kept = []
    for name, call in calls.items():
        for _ in range(2):  # the first one may import modules, which leave garbage
            state = {"w": torch.ones(3, 3)}
            tensor = weakref.ref(state["w"])
            gc.collect()
            gc.disable()
            try:
                with contextlib.suppress(
                    dos.errors.DcpObjstoreError
                ):  # pytest.raises keeps the error
                    call(state)
                    kept.append(f"{name} did not fail")
                del state
            finally:
                gc.enable()
        if tensor() is not None:
            kept.append(name)
    return kept


def test_torchs_words_alone_do_not_make_a_group_one_that_was_destroyed():
    text = "Default process group has not been initialized, please make sure to call"
    with pytest.raises(dos.errors.RankFailedError, match=text), plugin_errors(0, None):
        raise ValueError(text)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> RankThreads:
    """The ranks 10, 11 and 12 of a job, which are a group, as threads."""
    ranks: Any = RankThreads(3)
    ranks.get_global_rank = lambda _, number: 10 + number
    monkeypatch.setattr(failures, "dist", ranks)
    ranks.without_group = []  # the ranks on which the group was destroyed
    monkeypatch.setattr(failures, "has_gone", lambda group: group.rank in ranks.without_group)
    monkeypatch.setattr(failures, "is_first", lambda group: group.rank == 0)
    monkeypatch.setattr(failures, "current_rank", lambda: 10 + ranks.calling.rank)
    return ranks


LOST, GONE = CommitLostError("lost"), one_line(gone_error("s3://b/run"))


@pytest.mark.parametrize(
    ("own", "gone", "raised"),
    [
        ({}, [], [None]),
        ({1: LOST}, [1], ["lost [rank 11, url 's3://b/run']", "lost [rank 1, url 's3://b/run']"]),
        (
            {2: LOST, 1: RankFailedError("foreign", url="s3://b/other")},
            [],
            ["foreign (also failed: rank 12: CommitLostError) [rank 11, url 's3://b/other']"],
        ),
        ({1: SystemExit("end")}, [], ["SystemExit: end [rank 11, url 's3://b/run']", "end"]),
        ({}, [1], [GONE.replace("[", "[rank 11, "), GONE.replace("[", "[rank 1, ")]),
    ],
)
def test_all_ranks_raise_a_copy_of_the_error_of_the_lowest_that_failed(ranks, own, gone, raised):
    """The second rank has its own exit, or no global rank where its group was destroyed."""
    held = {rank: str(error) for rank, error in own.items()}
    ranks.without_group += gone

    def call(rank: int, group: Any) -> None:
        ranks.calling.rank = rank
        not_to_be_sent = {"n": (lambda: 0) if rank in own else 1}
        raise_on_all(own.get(rank), "s3://b/run", group, same=not_to_be_sent)

    outcomes = ranks.run(call)
    said = [None if error is None else one_line(error) for error in outcomes]
    assert said == (raised * 3)[:3]
    assert all(error is None or str(error).startswith(error.args[0]) for error in outcomes)
    assert all(outcomes[rank] is error for rank, error in own.items() if error.args == ("end",))
    assert {rank: str(error) for rank, error in own.items()} == held


def test_an_argument_that_differs_is_named_on_all_ranks(ranks):
    def call(rank: int, group: Any) -> None:
        ranks.calling.rank = rank
        raise_on_all(None, "s3://b/run", group, same={"n": rank})

    said = "every rank must pass the same n=, but rank 10 has 0, rank 11 1 [url 's3://b/run']"
    assert [one_line(error) for error in ranks.run(call)] == [said] * 3


@pytest.mark.parametrize(
    ("meet", "advice"),
    [
        (lambda group: raise_on_all(None, "s3://b/run", group, "call it"), "call it"),
        (lambda group: failures.from_first(1, "s3://b/run", group, "call it"), "call it"),
        (lambda group: failures.from_all(1, "s3://b/run", group), failures._SAME_CALLS),
        (lambda group: failures.on_first(int, "s3://b/run", group), failures._SAME_CALLS),
    ],
)
def test_a_rank_that_does_not_come_is_one_that_failed_with_what_to_do(ranks, meet, advice):
    def call(rank: int, group: Any) -> None:
        ranks.calling.rank = rank
        if rank < 2:
            meet(group)

    *came, other = ranks.run(call)
    assert other is None
    for rank, error in enumerate(came):
        assert isinstance(error, RankFailedError)
        assert (error.rank, error.url, error.advice) == (10 + rank, "s3://b/run", advice)


@pytest.mark.parametrize(
    ("error", "gone", "made_by"),
    [(None, [], [0]), (LOST, [], [0]), (None, [0], []), (None, [1], [0])],
)
def test_what_the_first_rank_makes_and_what_each_has_comes_to_all(ranks, error, gone, made_by):
    ranks.without_group += gone
    made: list[int] = []

    def call(rank: int, group: Any) -> object:
        def make() -> str:
            made.append(rank)
            if error is not None:
                raise error
            return f"made by {rank}"

        ranks.calling.rank = rank
        of_first = failures.from_first(f"of {rank}", None, group)
        return failures.on_first(make, None, group), of_first, failures.from_all(rank, None, group)

    outcomes = ranks.run(call)
    assert made == made_by
    if error is None and not gone:
        assert outcomes == [("made by 0", "of 0", [0, 1, 2])] * 3
    else:
        assert [type(outcome) for outcome in outcomes] == [
            InputError if gone else CommitLostError
        ] * 3


@pytest.mark.parametrize(
    ("failed_at", "gone", "raised"),
    [
        (
            {2: ZeroDivisionError(), 1: CommitLostError("lost", rank=0)},
            False,
            "CommitLostError: lost (also failed: rank 2: ZeroDivisionError) [rank 1, url 's3://b']",
        ),
        ({0: KeyboardInterrupt("^C"), 1: KeyError()}, False, "KeyboardInterrupt: ^C"),
        (
            {3: KeyError("a")},
            False,
            "RankFailedError: KeyError: 'a' [rank 3, url 's3://b']",
        ),
        (
            {n: CommitLostError("lost") for n in range(10)},
            False,
            "CommitLostError: lost (also failed: "
            + "".join(f"rank {n}: CommitLostError, " for n in range(1, 9))[:-2]
            + " and 1 more) [rank 0, url 's3://b']",
        ),
        ({0: RuntimeError("gloo")}, True, f"InputError: {one_line(gone_error('s3://b'))}"),
        ({0: CommitLostError("lost")}, True, "CommitLostError: lost [rank 0, url 's3://b']"),
    ],
)
def test_what_dcp_reports_of_its_ranks_is_the_error_of_the_lowest(
    failed_at, gone, raised, monkeypatch
):
    monkeypatch.setattr(failures, "has_gone", lambda _: gone)
    reported = {number: (error, StackSummary()) for number, error in failed_at.items()}
    with pytest.raises(BaseException) as caught, typed_failures("s3://b", None):
        raise CheckpointException("", reported)
    assert f"{type(caught.value).__name__}: {one_line(caught.value)}" == raised


@pytest.mark.parametrize(
    ("error", "gone", "raised"),
    [
        (RuntimeError("gloo"), False, "did not answer in time (not seen in this call: rank 1)"),
        (ValueError("gloo"), False, "did not answer in time"),
        (KeyError("own"), False, None),
        (KeyError("own"), True, "the process group of this call was destroyed before its end"),
        (CommitLostError("lost"), True, None),
    ],
)
def test_what_breaks_a_collective_is_a_rank_that_failed_or_a_group_that_has_gone(
    error, gone, raised, monkeypatch
):
    monkeypatch.setattr(failures, "has_gone", lambda _: gone)
    monkeypatch.setattr(failures, "current_rank", lambda: 2)
    unseen = "rank 1" if isinstance(error, RuntimeError) else ""
    monkeypatch.setattr(failures, "missing_ranks", lambda: unseen)
    with pytest.raises(Exception) as caught, typed_failures("s3://b", None, "call it"):
        raise error
    if raised is None:
        assert caught.value is error
        return
    found: Any = caught.value
    assert (type(found), found.url) == (InputError if gone else RankFailedError, "s3://b")
    assert found.message.endswith(raised)
    assert gone or (found.rank, found.advice) == (2, "call it")
    assert found.__cause__ is error


def test_what_fails_on_one_rank_is_an_error_that_can_be_sent_or_a_ctrl_c(monkeypatch):
    monkeypatch.setattr(failures, "current_rank", lambda: 2)
    assert capture(lambda: 3) == (3, None)
    for raised, kind in ((KeyError("a"), RankFailedError), (SystemExit(3), SystemExit)):
        result, error = capture(Mock(side_effect=raised))
        assert (result, type(error), getattr(error, "rank", 2)) == (None, kind, 2)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ZeroDivisionError("theirs"), True),
        (dos.errors.RankFailedError("perhaps a bug"), True),
        (dos.errors.CheckpointExistsError("it exists"), False),
    ],
)
def test_only_an_error_that_may_be_a_bug_keeps_in_words_where_it_was_raised(error, kept):
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        fail()
    drop_state(error)
    assert error.__traceback__ is None
    assert ("in fail" in "".join(getattr(error, "__notes__", []))) is kept


@dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    text: str


def test_an_error_that_takes_no_note_and_those_of_its_ranks_lose_their_frames():
    with pytest.raises(KeyError) as inner:
        raise KeyError
    drop_state(CheckpointException("", {0: (inner.value, StackSummary())}))
    assert inner.value.__traceback__ is None
    with pytest.raises(Frozen) as frozen:
        raise Frozen("takes none")
    drop_state(frozen.value)
    assert frozen.value.__traceback__ is None


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="DCP of torch 2.9 keeps its own errors"
)
def test_a_failed_call_keeps_no_tensor_in_memory(tmp_path):
    """On a GPU a state that waits for the cyclic garbage collector may not fit in twice."""
    assert run_ranks(2, kept_by_failed_calls, str(tmp_path / "ranks")) == [[], []]


def test_the_error_that_the_program_was_handling_keeps_its_variables(tmp_path):
    """A debugger may want to show them, after a save in an `except` block that fails, too."""

    def train() -> None:
        batch = "cat"
        raise FloatingPointError(batch)

    with pytest.raises(FloatingPointError) as caught:
        try:
            train()
        except FloatingPointError:
            with contextlib.suppress(dos.errors.CheckpointNotFoundError):
                dos.load({"w": torch.ones(2)}, f"file://{tmp_path}/none", progress=False)
            raise
    assert caught.traceback[-1].frame.f_locals == {"batch": "cat"}


def save_here_load_there(rank: int, world: int, url: str, saving: int) -> str:
    state = {"w": torch.ones(2)}
    dos.save(state, url, progress=False)
    call = dos.save if rank == saving else dos.load
    with pytest.raises(dos.errors.RankFailedError) as caught:
        call(state, url, progress=False)
    return str(caught.value)


@pytest.mark.parametrize("saving", [0, 1])
def test_ranks_that_make_different_calls_are_told_before_anything_moves(tmp_path, saving):
    for text in run_ranks(2, save_here_load_there, (tmp_path / "run").as_uri(), saving):
        assert "rank 1 makes another call than rank 0" in text


@pytest.mark.parametrize(
    ("second", "error", "said"),
    [
        ({"advice": "call b"}, dos.errors.RankFailedError, "rank 1 makes another call than rank 0"),
        ({"same": {}}, dos.errors.RankFailedError, "rank 1 makes another call than rank 0"),
        ({"same": {"n": 1, "m": 3}}, dos.errors.ConfigError, "same m=, but rank 0 has 2, rank 1 3"),
    ],
)
def test_ranks_are_compared_with_the_first(second, error, said):
    first = failures._Report(None, "call a", {"n": 1, "m": 2})
    failures._check_same([first, first], "s3://b/run", None)
    with pytest.raises(error, match=said) as caught:
        failures._check_same([first, first._replace(**second)], "s3://b/run", None)
    assert caught.value.url == "s3://b/run"
    if error is dos.errors.RankFailedError:
        assert (caught.value.rank, caught.value.advice) == (1, "call a")


def test_alone_a_rank_raises_its_own_error_if_it_has_one():
    raise_on_all(None, "s3://b/run", None)
    for known in (None, "s3://b/other"):
        own = CommitLostError("lost", rank=4, url=known)
        with pytest.raises(CommitLostError) as lost:
            raise_on_all(own, "s3://b/run", None)
        found = lost.value
        assert (found.rank, found.url, own.url) == (4, known or "s3://b/run", known)
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as caught:
            raise_on_all(error, "s3://b/run", None)
        assert caught.value is error


def pass_nonsense(rank: int, world: int, url: str) -> str:
    base: object = (lambda: None) if rank else None
    with pytest.raises(dos.errors.InvalidUrlError) as caught:
        dos.save({"w": torch.ones(2)}, url, base=base, progress=False)  # type: ignore[arg-type]
    return str(caught.value)


def test_an_argument_that_cannot_be_sent_is_refused_on_all_ranks(tmp_path):
    texts = run_ranks(2, pass_nonsense, (tmp_path / "run").as_uri())
    assert all("base must be" in text and "rank 1" in text for text in texts)
    assert not (tmp_path / "run").exists()


def save_what_cannot_be(rank: int, world: int, root: str) -> list[str]:
    """Save what cannot be saved, on one rank and on all, by each call; what each raises."""
    said = []
    states: list[dict[str, object]] = [
        {"file-\udcff": torch.ones(2), "n": 1},
        {"n": 1, **({"\ud800": 2} if rank else {})},
        {"n": lambda: None},
        {"n": threading.Lock()},
    ]
    for number, state in enumerate(states):
        url = f"{root}/{number}"
        writer = dos.ObjectStoreWriter(url, progress=False)
        saves: list[Callable[[], object]] = [
            functools.partial(dos.save, state, url, progress=False),
            lambda: dos.async_save(state, url).result(),  # noqa: B023
            functools.partial(dcp.save, state, storage_writer=writer),
        ]
        for save in saves:
            with pytest.raises((DcpObjstoreError, dcp.api.CheckpointException)) as caught:
                save()
            error: BaseException = caught.value
            if isinstance(error, dcp.api.CheckpointException):
                error = next(failure for failure, _ in error.failures.values())
            assert isinstance(error, dos.errors.UnsupportedError)
            said.append(str(error.key))
    dos.save({"w": torch.ones(2)}, f"{root}/whole", progress=False)  # the ranks are in step again
    return said


def test_what_cannot_be_saved_is_refused_by_its_key_on_all_ranks_and_strands_none(tmp_path):
    keys = [key for key in ("file-\udcff", "\ud800", "n", "n") for _ in range(3)]
    assert run_ranks(2, save_what_cannot_be, tmp_path.as_uri()) == [keys] * 2
    assert [path.parent.name for path in tmp_path.glob("*/_COMMIT")] == ["whole"]
