"""A store that stops answering: it is asked, the user is told once, and given up with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dcp_objstore.errors import (
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
    TransferStalledError,
)
from dcp_objstore.observe.events import NoAnswer
from dcp_objstore.threads import STEP_SECONDS, spawn
from dcp_objstore.transfer import progress as module
from dcp_objstore.transfer.progress import Progress, Silence
from tests.support.listening import heard_channel, of


class Scene:
    """An upload of which two parts are under way, its clock, and a store that a test plays.

    Attributes:
        questions: what the store was asked; a test gives the answers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.questions: list[Future[Any]] = []
        self.channel, self.heard = heard_channel()
        self.progress = Progress(180, self.channel, clock=lambda: self.now)
        self.pauses: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.pauses.append)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "run_in_thread", self._ask)
        store: Any = Mock(url="stub://asked")
        self.head = store.head
        self.silence = Silence(store, "o", self.progress)

    def _ask(self, ask: Callable[[], Any], name: str) -> Future[Any]:
        ask()
        self.head.assert_called_with("o")
        self.questions.append(Future())
        return self.questions[-1]

    def look(self, seconds: float, parts: int = 2, *, is_open: bool = True) -> None:
        self.now += seconds
        self.silence.check(parts, is_open=is_open)

    def told(self) -> list[NoAnswer]:
        self.channel.flush()
        return of(NoAnswer, self.heard)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    yield Scene(monkeypatch)


def test_the_user_is_told_once_of_a_store_that_answers_nothing_for_five_seconds(scene, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            scene.look(1)
    assert len(scene.questions) == 1
    (record,) = caplog.records
    assert "stub://asked: no answer for 6 s, 2 parts of o under way" in record.getMessage()
    assert "174 s more at most (TransferConfig.stall_timeout_seconds=180)" in record.getMessage()
    (event,) = scene.told()
    assert (event.object_key, event.parts, event.wait_seconds) == ("o", 2, 174)


@pytest.mark.parametrize("answer", [None, ObjectNotFoundError("no"), PermissionDeniedError("no")])
def test_a_line_that_is_slow_is_no_dead_store_whatever_it_answers(scene, answer, caplog):
    for _ in range(40):
        scene.look(1)
        if scene.questions and not (question := scene.questions[-1]).done():
            question.set_result(None) if answer is None else question.set_exception(answer)
    assert len(scene.questions) == 8  # every five seconds: four, and the look that hears it
    assert not scene.told()
    assert not caplog.records


def test_no_question_is_asked_while_parts_end_or_no_request_is_open(scene):
    for _ in range(10):
        scene.look(2.9)
        scene.silence.heard()
    scene.look(60, parts=0, is_open=False)
    assert not scene.questions
    assert not scene.told()


def test_parts_that_are_dropped_in_a_long_silence_show_no_life(scene):
    """The transport drops them because it gives up, so the save ends at its stall time-out."""
    for _ in range(31):
        scene.look(6)
        scene.silence.heard()
    with pytest.raises(TransferStalledError):
        scene.look(6)


def test_no_part_is_begun_in_a_long_silence_and_all_go_on_after_an_answer(scene):
    for _ in range(6):
        scene.look(1)
    waiting = spawn(scene.silence.wait, "wait")
    waiting.join(0.05)
    assert waiting.is_alive()
    scene.questions[-1].set_result(None)
    scene.look(1)
    waiting.join(30)
    assert not waiting.is_alive()
    assert set(scene.pauses) == {STEP_SECONDS}
    scene.look(2.5)
    assert len(scene.questions) == 1


def test_a_wait_for_an_answer_can_be_stopped(scene):
    for _ in range(6):
        scene.look(1)
    scene.progress.stop(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        scene.silence.wait()


def test_a_store_is_given_up_when_question_and_parts_have_failed_and_not_before(scene):
    for _ in range(40):
        scene.look(1)
    scene.questions[-1].set_exception(StoreUnavailableError("connection refused"))
    scene.look(1)  # a request with a longer time-out may still be answered
    assert len(scene.questions) == 2
    with pytest.raises(StoreUnavailableError, match=r"^PUT of parts of o: no answer for 42 s"):
        scene.look(1, parts=0)


def test_a_store_that_answers_after_the_first_question_failed_is_not_given_up(scene):
    scene.progress.channel = None
    for _ in range(10):
        scene.look(1)
    scene.questions[-1].set_exception(StoreUnavailableError("no answer in time"))
    scene.look(1)
    scene.questions[-1].set_result(None)
    scene.look(1, parts=0)
    scene.look(1, parts=0)
    assert len(scene.questions) == 2


def test_a_question_that_fails_soon_is_asked_again_and_gives_nothing_up(scene):
    scene.look(4, parts=0)
    scene.questions[-1].set_exception(StoreUnavailableError("connection refused"))
    scene.look(0.5, parts=0, is_open=False)
    assert len(scene.questions) == 2
