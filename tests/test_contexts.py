"""Context managers that free an error at once."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import pytest

from dcp_objstore.contexts import contextmanager, led_to


class State:
    pass


@contextmanager
def swallowing(*, kind: type[Exception] = OSError) -> Iterator[None]:
    with suppress(kind):
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
    with swallowing(kind=KeyError):
        raise KeyError("another kind")


def test_what_led_to_an_error_is_told_once_without_what_the_caller_was_handling():
    error, cause, context, more, handled = (OSError(number) for number in range(5))
    error.__cause__, error.__context__, cause.__cause__ = cause, context, error
    context.__context__, handled.__context__ = handled, OSError("led to what is handled")
    others = {id(cause): [more, "not an error"]}
    found = led_to(error, handled=id(handled), more=lambda one: others.get(id(one), ()))
    assert [one.args[0] for one in found] == [0, 2, 1, 3]
