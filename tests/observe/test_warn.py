"""A warning names the line of the program that led to it."""

from __future__ import annotations

import inspect

import pytest
import torch

import dcp_objstore as dos


def test_a_warning_names_the_line_of_the_program():
    url = "memory://warnings/step-1"
    dos.save({"w": torch.full((2,), 1.0009)}, url, progress=False)
    with pytest.warns(UserWarning, match="converted") as warned:
        line = inspect.currentframe().f_lineno + 1
        dos.load({"w": torch.zeros(2, dtype=torch.bfloat16)}, url, progress=False)
    ours = [one for one in warned if "converted" in str(one.message)]  # torch warns, too
    assert [(one.filename, one.lineno) for one in ours] == [(__file__, line)]
