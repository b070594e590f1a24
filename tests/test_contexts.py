"""Context managers that free an error at once."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import pytest

from dcp_objstore.contexts import contextmanager


class State:
    pass


@contextmanager
def swallowing() -> Iterator[None]:
    with suppress(OSError):
        yield


@contextmanager
def turning() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError("turned") from error


@contextmanager
def turning_in_two() -> Iterator[None]:
    with turning():
        yield


def kept_by(guarded: Callable[[], AbstractContextManager[None, bool | None]]) -> object:
    state = State()

    def fail() -> None:
        with suppress(ValueError), guarded():
            raise OSError

    fail()
    return weakref.ref(state)


@pytest.mark.parametrize("guarded", [swallowing, turning, turning_in_two])
def test_an_error_that_was_handled_keeps_no_variables_of_the_callers(guarded):
    gc.collect()
    gc.disable()
    try:
        assert kept_by(guarded)() is None  # type: ignore[operator]
    finally:
        gc.enable()


def test_an_error_passes_unchanged_and_with_its_traceback():
    with pytest.raises(KeyError) as caught, turning():
        raise KeyError("passed")
    assert caught.traceback[-1].name == "test_an_error_passes_unchanged_and_with_its_traceback"
    with pytest.raises(ValueError, match="turned") as turned, turning():
        raise OSError
    cause = turned.value.__cause__
    assert isinstance(cause, OSError)
    here = "test_an_error_passes_unchanged_and_with_its_traceback"
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == [here]
