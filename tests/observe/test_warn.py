"""A warning names the line of the program that led to it, and a record is on one line."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.observe.report import log_failure, logger, warn


def test_a_warning_names_the_line_of_the_program():
    url = "memory://warnings/step-1"
    dos.save({"w": torch.full((2,), 1.0009)}, url, progress=False)
    with pytest.warns(UserWarning, match="converted") as warned:
        line = inspect.currentframe().f_lineno + 1
        dos.load({"w": torch.zeros(2, dtype=torch.bfloat16)}, url, progress=False)
    ours = [one for one in warned if "converted" in str(one.message)]  # torch warns, too
    assert [(one.filename, one.lineno) for one in ours] == [(__file__, line)]


@pytest.mark.parametrize("library", ["dcp_objstore.write", "torch.distributed", "contextlib"])
def test_no_line_of_a_library_in_between_is_named(library):
    names = {"__name__": library, "warn": warn}
    exec("def say(): warn('odd')\ndef call(): say()", names)
    with pytest.warns(UserWarning, match="odd") as warned:
        line = inspect.currentframe().f_lineno + 1
        names["call"]()
    assert [(one.filename, one.lineno) for one in warned] == [(__file__, line)]


def test_a_record_that_acts_on_no_terminal_stays_as_it_is(caplog):
    """Programs that collect logs tell records apart by the text without its arguments."""
    logger.warning("%d\tkept", 3)
    logger.warning("%s", "first\nsecond\x1b[2J")
    kept, changed = caplog.records
    assert (kept.msg, kept.args) == ("%d\tkept", (3,))
    assert (changed.getMessage(), changed.args) == (r"first; second\x1b[2J", None)


def test_a_filter_that_fails_does_not_take_the_place_of_the_error(caplog):
    def fail(record: logging.LogRecord) -> bool:
        raise ValueError(record)

    logger.addFilter(fail)
    try:
        log_failure("s3://b/run", KeyError("w"))
    finally:
        logger.removeFilter(fail)
    log_failure("s3://b/run", KeyError("w"))
    assert caplog.messages == ["saving s3://b/run in the background failed: 'w'"]
