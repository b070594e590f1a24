"""Run examples/tour.ipynb: `python -m tests.support.tour` keeps what it prints in the file."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def kept() -> Any:
    """The notebook with the output that is in the file."""
    return nbformat.read(NOTEBOOK, as_version=4)


def run(folder: Path) -> Any:
    """The notebook with the output of a run in this folder; raises what a cell raises."""
    client = NotebookClient(
        kept(),
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
        record_timing=False,
        coalesce_streams=True,
    )
    return client.execute()


def printed(notebook: Any) -> list[str]:
    """What each cell of code shows, without the date and the name of a commit."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = ["".join(shown.get("text", str(shown)) for shown in cell.outputs) for cell in cells]
    return [re.sub(r"saved \S+ \S+ UTC|commit [0-9a-f]{32}", "...", text) for text in texts]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        notebook = run(Path(folder))
    notebook.metadata = kept().metadata  # the run adds the version of this Python
    nbformat.write(notebook, NOTEBOOK)
