"""The one loop that sends requests again: how long it goes on, and what ends it."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from obstore.exceptions import GenericError

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import (
    CorruptDataError,
    ForkedProcessError,
    PermissionDeniedError,
    StoreUnavailableError,
)
from dcp_objstore.stores import retries
from dcp_objstore.stores.admission.limiter import RETRY_BUDGET, Limiter
from dcp_objstore.stores.errors import ErrorDetails, Failure
from dcp_objstore.stores.obstore.clients import Clients
from dcp_objstore.stores.obstore.direct import SignedGet
from dcp_objstore.stores.obstore.factory import ClientFactory
from dcp_objstore.stores.retries import (
    FIRST_PATIENCE_SECONDS,
    Requests,
    RetryPolicy,
    Tries,
    guard_fork,
)
from dcp_objstore.stores.urls import StoreUrl


class Clock:
    """Time passes in `sleep` only, and there at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def short_pauses() -> None:
    """Not here: they are what is tested here."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all requests."""
    found = Clock()
    monkeypatch.setattr("dcp_objstore.stores.retries.time.monotonic", found.monotonic)
    monkeypatch.setattr("dcp_objstore.stores.retries.time.sleep", found.sleep)
    return found


class Server:
    """Fails each request, as often as it is told to, and counts them."""

    def __init__(self, failures: int = 10**9, **details: object) -> None:
        self.requests = 0
        self.failures = failures
        self.details: dict[str, object] = {"status": 500, "code": None, **details}

    def ask(self) -> str:
        self.requests += 1
        if self.requests <= self.failures:
            raise OSError("no")
        return "answer"

    def judge(self, error: Exception) -> Failure:
        return Failure(StoreUnavailableError(str(error)), ErrorDetails(text="no", **self.details))  # type: ignore[arg-type]


def refused() -> Server:
    return Server(status=None, connected=False)


def run(server: Server, policy: RetryPolicy, clock: Clock, **settings: object) -> object:
    tries = Tries(policy, clock=clock, **settings)  # type: ignore[arg-type]
    return tries.run(server.ask, server.judge)


@pytest.mark.parametrize("attempt", range(20))
def test_a_store_that_restarts_within_half_a_minute_fails_no_request(attempt):
    clock, config = Clock(), TransferConfig()
    server = Server()
    policy = RetryPolicy(config.max_retries, config.retry_timeout_seconds)
    with pytest.raises(StoreUnavailableError, match=r"\(10 retries in \d\d\.\d s\)"):
        run(server, policy, clock)
    assert server.requests == 11
    assert 30 < clock.now < 63


def test_pauses_double_up_to_the_longest_and_differ_between_clients():
    policy = RetryPolicy(10, 1e9)
    for retry, most in enumerate([0.4, 0.8, 1.6, 3.2, 6.4, 10, 10], 1):
        found = [policy.pause_seconds(retry) for _ in range(200)]
        assert most / 2 <= min(found) < 0.6 * most
        assert 0.9 * most < max(found) <= most
    assert policy.pause_seconds(5000) <= 10
    # However many there were, a power of 2 can be had.
    assert 2**29 <= RetryPolicy(None, 1.0, 1.0, 1e12).pause_seconds(5000) < 2**30


def test_a_pause_leaves_the_programs_random_numbers_alone():
    before = random.getstate()
    RetryPolicy(10, 1e9).pause_seconds(1)
    assert random.getstate() == before


def test_no_retry_begins_after_the_patience_has_ended():
    clock, began = Clock(), []

    def ask() -> None:
        began.append(clock.now)
        raise OSError("no")

    with pytest.raises(StoreUnavailableError):
        Tries(RetryPolicy(None, 20.0), clock=clock).run(ask, Server().judge)
    assert began[-1] == 20.0
    tries = Tries(RetryPolicy(None, 20.0), clock=clock)
    clock.now += 20.0
    assert not tries.pause()
    tries.restart_clock()
    assert tries.pause()


def test_a_request_that_succeeds_at_last_is_answered_and_each_retry_is_reported():
    told: list[int] = []
    answer = run(
        Server(failures=3),
        RetryPolicy(10, 60),
        Clock(),
        on_retry=lambda number, error, began_at: told.append(number),
    )
    assert answer == "answer"
    assert told == [2, 3, 4]
    # A pause that follows no error is no retry of a request.
    assert Tries(RetryPolicy(10, 60), clock=Clock(), on_retry=Mock(side_effect=KeyError)).pause()


def test_each_try_waits_for_its_turn_at_the_limiter():
    limiter = Mock(spec=Limiter)
    run(Server(failures=2), RetryPolicy(10, 60), Clock(), limiter=limiter)
    clock, policy = Clock(), RetryPolicy(10, 60)
    server = Server(failures=2)

    def ask() -> str:
        clock.now += 0.25
        return server.ask()

    tries = Tries(policy, clock=clock, limiter=limiter, refunds=True)
    assert tries.run(ask, server.judge) == "answer"
    limiter.note_latency.assert_called_once_with(0.25)
    assert run(Server(failures=0), policy, clock, refunds=True) == "answer"
    names = [name for name, *_ in limiter.method_calls]
    calls = ["wait_turn", "spend_retry", "wait_turn", "spend_retry", "wait_turn"]
    assert names == [*calls, *calls, "refund_retry", "note_latency"]


@pytest.mark.parametrize("kind", [PermissionDeniedError, CorruptDataError])
def test_what_will_not_pass_is_sent_once(kind):
    server = Server()
    with pytest.raises(OSError, match="no"):
        Tries(RetryPolicy(10, 60), clock=Clock()).run(
            server.ask, lambda _: Failure(kind("no"), ErrorDetails(text="no", status=403))
        )
    assert server.requests == 1


def test_what_the_adapter_finds_in_an_answer_is_not_asked_again():
    server = Server()

    def ask() -> None:
        server.requests += 1
        raise StoreUnavailableError("a key outside the root")

    with pytest.raises(StoreUnavailableError, match="outside the root"):
        Tries(RetryPolicy(10, 60), clock=Clock()).run(ask, server.judge)
    assert server.requests == 1


@pytest.mark.parametrize(
    ("details", "sent"),
    [({"status": 503}, 4), ({"status": None, "connected": False}, 4), ({"status": None}, 1)],
    ids=["refused by the store", "never connected", "answer lost"],
)
def test_what_must_not_be_sent_twice_is_sent_again_only_if_it_had_no_effect(details, sent):
    server = Server(**details)
    with pytest.raises((StoreUnavailableError, OSError)):
        Tries(RetryPolicy(3, 60), clock=Clock()).run(server.ask, server.judge, repeatable=False)
    assert server.requests == sent
    with pytest.raises(StoreUnavailableError):
        run(server := Server(**details), RetryPolicy(3, 60), Clock())
    assert server.requests == 4


def test_retries_of_all_requests_end_with_the_budget_that_they_share():
    limiter, server = Limiter(), Server()
    found = ""
    for _ in range(30):
        with pytest.raises(StoreUnavailableError) as caught:
            run(server, RetryPolicy(10, 1e9), Clock(), limiter=limiter)
        found = str(caught.value)
    assert server.requests == 30 + RETRY_BUDGET
    assert "share are used up" in found
    run(Server(failures=0), RetryPolicy(10, 1e9), Clock(), limiter=limiter)
    assert not limiter.spend_retry(), "the answers to transfers are noted by their slots"


def test_a_request_that_may_not_be_sent_again_takes_nothing_from_the_budget():
    limiter = Limiter()
    for _ in range(2 * int(RETRY_BUDGET)):
        with pytest.raises(StoreUnavailableError):
            run(Server(), RetryPolicy(0, 60), Clock(), limiter=limiter)
    assert limiter.spend_retry()


@pytest.mark.parametrize("verb", ["get", "head", "list", "delete", "put"])
def test_every_tenth_small_request_may_fail_for_ever(clock, verb):
    server = Server()
    requests = requests_to(server)
    for _ in range(12 * int(RETRY_BUDGET)):
        server.failures = server.requests + (server.requests % 10 == 0)
        assert requests.run(requests.tries(verb, "k"), server.ask) == "answer"


def test_a_throttled_request_slows_the_process_down_and_the_error_says_so(clock):
    limiter = Limiter()
    with pytest.raises(StoreUnavailableError, match="the store was throttling; 1 retries") as told:
        run(Server(status=429), RetryPolicy(1, 1e9), clock, limiter=limiter)
    assert limiter.window.is_throttled
    assert "used up" not in str(told.value)
    limiter = Mock(spec=Limiter, spend_retry=Mock(return_value=False))
    for patience_seconds, spent in ((0.5, 1), (0.0, 0)):
        limiter.spend_retry.reset_mock()
        with pytest.raises(StoreUnavailableError) as told:
            run(Server(), RetryPolicy(None, patience_seconds), Clock(), limiter=limiter)
        assert limiter.spend_retry.call_count == spent
        assert ("used up" in str(told.value)) == bool(spent)
        assert "retries in" not in str(told.value)


def test_the_answers_to_transfers_give_nothing_back_to_the_budget():
    """Their slots note them, each once. Of a listing, obstore has the next keys already."""
    in_slots = ("open_range", "put_stream", "copy")
    over_obstore = clients_of(ClientFactory(lambda *_: None))
    for requests, verbs in (
        (requests_to(Server(failures=0)), in_slots),
        (over_obstore, (*in_slots, "list")),
    ):
        while requests.limiter.spend_retry():
            pass
        for verb in verbs:
            for _ in range(5):
                requests.run(requests.tries(verb, "k"), lambda: None)
            assert not requests.limiter.spend_retry(), verb
        for _ in range(5):
            requests.run(requests.tries("get", "k"), lambda: None)
        assert requests.limiter.spend_retry()


def test_a_process_forked_after_the_first_use_is_refused(monkeypatch):
    monkeypatch.setattr(retries, "_first_pid", None)
    for _ in range(2):
        guard_fork()
    child = os.getpid() + 1
    monkeypatch.setattr("os.getpid", lambda: child)
    with pytest.raises(ForkedProcessError, match="spawn"):
        guard_fork()


def requests_to(server: Server, **settings: Any) -> Requests:
    config = TransferConfig(**settings)
    return Requests(config, server.judge, None, StoreUrl("s3", secrets.token_hex(4), ""))


def clients_of(factory: ClientFactory) -> Clients:
    return Clients(StoreUrl("s3", secrets.token_hex(4), ""), factory, TransferConfig())


def test_a_body_that_broke_off_may_be_asked_for_again_unless_it_is_no_outage(clock, monkeypatch):
    reported = Mock()
    monkeypatch.setattr(retries, "emit_retry", reported)
    requests = requests_to(Server(status=None))
    tries = requests.tries("open_range", "k")
    requests.wait_to_try_again(tries, OSError("broke off"), clock.now)
    assert tries.retries == 1
    reported.assert_called_once_with("k", 2, "broke off", 0.0)
    with pytest.raises(CorruptDataError, match="another range"):
        requests.wait_to_try_again(tries, CorruptDataError("another range"), clock.now)
    assert tries.retries == 1


def seconds_of(request: Callable[[], object], clock: Clock) -> float:
    began_at = clock.now
    with pytest.raises(StoreUnavailableError):
        request()
    return clock.now - began_at


def test_a_server_that_never_answered_is_given_up_before_one_that_did(clock):
    server = refused()
    requests = requests_to(server)

    def get() -> str:
        return requests.run(requests.tries("get", "k"), server.ask)

    assert seconds_of(get, clock) == pytest.approx(FIRST_PATIENCE_SECONDS)
    server.failures = 0
    assert get() == "answer"
    server.failures = 10**9
    assert seconds_of(get, clock) > 25


def test_what_the_direct_lane_has_seen_of_a_server_is_a_sign_of_life_too(clock):
    def refuse() -> None:
        raise GenericError("no\n\nDebug source: legacy::Error( Connect,")

    clients = clients_of(ClientFactory(lambda *_: None, sign=lambda *_: SignedGet("")))
    run = partial(clients.run, clients.tries("get", "k"), refuse)
    assert seconds_of(run, clock) == pytest.approx(FIRST_PATIENCE_SECONDS)
    assert clients.lane is not None and not clients.reached
    clients.lane.answered = True
    run = partial(clients.run, clients.tries("get", "k"), refuse)
    assert seconds_of(run, clock) > 25


@pytest.mark.parametrize(
    ("details", "answered"),
    [
        ({"status": 503}, True),
        ({"status": None}, True),
        ({"status": None, "timed_out": True}, False),
        ({"status": None, "connected": False}, False),
    ],
    ids=["503", "hung up", "silent", "refused"],
)
def test_only_a_sign_of_life_gets_all_the_patience(clock, details, answered, monkeypatch):
    monkeypatch.setattr(Limiter, "wait_turn", lambda *_: None)  # it waits in real time
    server = Server(**details)
    requests = requests_to(server)
    took = seconds_of(lambda: requests.run(requests.tries("head", "k"), server.ask), clock)
    assert requests.reached == answered
    assert took > 25 if answered else took <= FIRST_PATIENCE_SECONDS + 0.1


@pytest.mark.parametrize(
    ("verb", "size_bytes", "settings", "seconds"),
    [
        ("get", 0, {}, 3),
        ("put", 4 * MIB, {}, 3),
        ("put", 4 * MIB + 1, {}, 60),
        ("open_range", 0, {}, 60),
        ("get", 0, {"retry_timeout_seconds": 2}, 2),
        ("put", 4 * MIB + 1, {"retry_timeout_seconds": 2}, 2),
    ],
)
def test_small_requests_have_a_third_of_the_stall_time_out(
    clock, monkeypatch, verb, size_bytes, settings, seconds
):
    monkeypatch.setattr(Limiter, "spend_retry", lambda _: True)
    given = {"stall_timeout_seconds": 9, "retry_timeout_seconds": 60, "max_retries": 1000}
    for server in (Server(), refused()):  # the second one is given up sooner, if that is sooner
        requests = requests_to(server, **{**given, **settings})
        tries = requests.tries(verb, "k", size_bytes)
        took = seconds_of(partial(requests.run, tries, server.ask), clock)
        reached = seconds if server.details["status"] else min(seconds, FIRST_PATIENCE_SECONDS)
        assert took == pytest.approx(reached)
