"""A call that some ranks do not make: one rank says which ones, long before a time-out."""

from __future__ import annotations

import logging
import math
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore import torch_private
from dcp_objstore.distributed import arrivals, failures
from tests.support.ranks import run_ranks


class Warned(logging.Handler):
    """Records the warnings of missing ranks; sets a key in the store at one that has a text."""

    def __init__(self, store: Any, until: str, key: str) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.store, self.until, self.key = store, until, key

    def emit(self, record: logging.LogRecord) -> None:
        if "has waited" in record.getMessage():
            self.texts.append(record.getMessage())
            if self.until in self.texts[-1]:
                self.store.set(self.key, "1")


def enter(url: str) -> None:
    with dos.CheckpointManager(url, claim_run=False):
        pass


CALLS: dict[str, Any] = {
    "dcp_objstore.save": lambda url: dos.save({"w": torch.ones(2)}, url, progress=False),
    "dcp_objstore.load": lambda url: dos.load({"w": torch.ones(2)}, url, progress=False),
    "dcp_objstore.async_save": lambda url: dos.async_save(
        {"w": torch.ones(2)}, f"{url}-async"
    ).result(60),
    "dcp_objstore.claim_run": lambda url: dos.claim_run(f"{url}-claimed"),
    "CheckpointManager.__enter__": lambda url: enter(f"{url}-run"),
}


def one_rank_is_late(rank: int, world: int, url: str) -> list[tuple[str, list[str]]]:
    """The last rank makes each call only when another has said that it is missing."""
    warnings = []
    store: Any = torch_private.default_store()
    apart = store.clone()  # another thread may wait in the group's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_NOTED_AFTER_SECONDS", 600.0 if rank == world - 1 else 0.0)
        patch.setattr(arrivals, "_WARNED_AFTER_SECONDS", 0.05)
        patch.setattr(arrivals, "_WARNING_FACTOR", 1.5)
        for name, make in CALLS.items():
            handler = Warned(apart, f"for rank {world - 1}, which", name)
            logging.getLogger("dcp_objstore").addHandler(handler)
            try:
                if rank == world - 1:
                    store.wait([name])
                make(url)
            finally:
                logging.getLogger("dcp_objstore").removeHandler(handler)
            warnings.append((name, handler.texts))
            dist.barrier()
    # The first rank has removed the notes of each call.
    while any("/calls/" in key for key in getattr(apart, "list_keys", list)()):
        threading.Event().wait(0.01)
    dist.barrier()
    return warnings


def test_every_call_names_the_ranks_that_do_not_make_it_and_goes_on_when_they_come(tmp_path):
    url = (tmp_path / "step").as_uri()
    first, second, _ = run_ranks(3, one_rank_is_late, url)
    for (name, texts), (_, more) in zip(first, second, strict=True):
        # The thread of a background save may have waited for rank 2, too.
        told = [text for text in texts + more if "for rank 2, which" in text and name in text]
        assert told, texts + more
        last = told[0]
        assert url in last
        assert "has not made this call" in last
        assert ("if rank == 0" in last) == name.startswith("dcp_objstore.")
        assert f'"{__file__}", line' in last


def short_calls(rank: int, world: int, url: str) -> int:
    """How often short calls looked at who has come."""
    looks: list[arrivals._Call] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_NOTED_AFTER_SECONDS", 600.0)
        patch.setattr(arrivals._Call, "note_or_warn", looks.append)
        dos.save({"w": torch.ones(2)}, f"{url}/step", progress=False)
        dos.load({"w": torch.ones(2)}, f"{url}/step", progress=False)
    return len(looks)


def test_a_short_call_asks_for_nothing(tmp_path):
    assert run_ranks(2, short_calls, tmp_path.as_uri()) == [0, 0]


def fails_soon(rank: int, world: int, url: str) -> str:
    """Both ranks are in the call; only rank 0 for so long that it has left a note."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_NOTED_AFTER_SECONDS", 600.0 if rank else 0.0)
        with (
            pytest.raises(dos.errors.RankFailedError) as caught,
            failures.meeting(url, dist.group.WORLD),
        ):
            call = arrivals._current()
            assert call is not None
            while rank == 0 and not call._is_first:
                threading.Event().wait(0.01)
            dist.barrier()
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    return str(caught.value)


def test_a_broken_call_does_not_say_of_a_healthy_rank_that_it_died(tmp_path):
    first, second = run_ranks(2, fails_soon, tmp_path.as_uri())
    assert "not seen in this call: rank 1" in first
    for text in (first, second):
        assert "a rank died" in text
        assert "gloo" not in text
    assert "seen" not in second, "it has not looked"


class Store:
    """As torch's, as far as notes need it."""

    def __init__(self) -> None:
        self.texts: dict[str, Any] = {}
        self.timeouts: list[timedelta] = []
        self.set_timeout = self.timeouts.append
        self.delete_key = self.texts.pop

    def clone(self) -> Store:
        return self

    def append(self, key: str, text: str) -> None:
        self.texts[key] = self.texts.get(key, "") + text

    def add(self, key: str, number: int) -> int:
        self.texts[key] = self.texts.get(key, 0) + number
        return int(self.texts[key])

    def get(self, key: str) -> bytes:
        return bytes(self.texts[key].encode())


class Group:
    group_name = "job"

    def __init__(self, size: int = 3, *, is_registered: bool = True) -> None:
        self.size, self.is_registered = size, is_registered


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, in a job whose groups and store are those above; `rank` is this process's."""
    now = SimpleNamespace(at=100.0, rank=0, store=Store())
    own_dist = SimpleNamespace(
        ProcessGroup=Group,
        get_world_size=lambda group: group.size,
        get_process_group_ranks=lambda group: [*range(group.size)],
    )
    for name, value in {
        "time": SimpleNamespace(monotonic=lambda: now.at),
        "current_rank": lambda: now.rank,
        "dist": own_dist,
        "_call_counts": {},
    }.items():
        monkeypatch.setattr(arrivals, name, value)
    monkeypatch.setattr(torch_private, "default_store", lambda: now.store)
    monkeypatch.setattr(torch_private, "is_registered", lambda group: group.is_registered)
    return now


def call_of(now: SimpleNamespace, rank: int, group: Any) -> arrivals._Call:
    """The first call of a rank, in which it has been for long enough to note that."""
    arrivals._call_counts.clear()
    now.rank = rank
    call = arrivals._Call("s3://b/run", group, "call it")
    assert call.due == now.at + 1
    assert call.missing_now() == [], "it is unknown"
    call.note_or_warn()
    return call


def test_the_first_rank_to_leave_a_note_looks_less_and_less_often_who_is_missing(now, caplog):
    group = Group()
    first, second = (call_of(now, rank, group) for rank in (2, 0))
    notes = {"dcp_objstore/calls/job/1/ranks": "2 0 ", "dcp_objstore/calls/job/1/count": 2}
    assert (now.store.texts, now.store.timeouts) == (notes, [timedelta(seconds=5)] * 2)
    assert (first.due, second.due) == (130.0, math.inf)
    now.at, now.rank = 140.0, 2
    first.note_or_warn()
    (said,) = caplog.messages
    assert said.startswith(
        "s3://b/run: rank 2 has waited 40 s in dcp_objstore._Call.note_or_warn ("
    )
    assert said.endswith(" for rank 1, which has not made this call; call it")
    assert first.due == 100 + 4 * 40
    now.store.append("dcp_objstore/calls/job/1/ranks", "1 ")
    first.note_or_warn()
    assert (first.due, first.missing, len(caplog.messages)) == (math.inf, [], 1)
    second.clear()
    assert now.store.texts == notes | {"dcp_objstore/calls/job/1/ranks": "2 0 1 "}
    first.clear()
    assert now.store.texts == {}
    assert arrivals._call_counts == {group: 1}
    over = arrivals._Call(None, group, "")
    over.is_over = True
    over.note_or_warn()
    assert now.store.texts == {}, "nobody else would remove the notes"


def test_the_outermost_call_of_several_ranks_is_watched_until_it_ends(now, monkeypatch):
    noted: list[tuple[str, str | None]] = []

    class Watch:
        def add(self, call: arrivals._Call) -> None:
            noted.append(("add", call.url))
            raise RuntimeError("no thread can be started")

        def remove(self, call: arrivals._Call) -> None:
            noted.append(("remove", call.url))

    monkeypatch.setattr(arrivals, "_watch", SimpleNamespace(here=Watch()))
    for group in (None, "no group", Group(1), Group(2, is_registered=False)):
        with arrivals.watching("s3://b/0", group, ""):  # type: ignore[arg-type]
            assert arrivals._current() is None
    several: Any = Group(2)
    with (
        pytest.raises(KeyError),
        arrivals.watching("s3://b/1", several, ""),
        arrivals.watching("s3://b/2", several, ""),
    ):
        assert arrivals.missing_ranks() == ""
        call = arrivals._current()
        assert call is not None
        call.missing = [1]
        assert (call.url, arrivals.missing_ranks()) == ("s3://b/1", "rank 1")
        raise KeyError
    assert noted == [("add", "s3://b/1"), ("remove", "s3://b/1")]
    assert arrivals._current() is None
    assert arrivals.missing_ranks() == ""


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 2, 3], "ranks 1 to 3"),
        ([0, 2, 3, 9], "ranks 0, 2 to 3, 9"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_are_shown_as_ranges(ranks, text):
    assert arrivals.in_words(ranks) == text
