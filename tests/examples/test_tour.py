"""examples/tour.ipynb: its cells run, and print what the file shows."""

from __future__ import annotations

import pytest

pytest.importorskip("ipykernel")
tour = pytest.importorskip("tests.support.tour")


def test_each_cell_of_the_tour_prints_what_the_notebook_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_STANDALONE", "1")  # else each torchrun of a machine wants port 29500
    assert tour.printed(tour.run(tmp_path)) == tour.printed(tour.kept())
