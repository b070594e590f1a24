"""`startup`: how long `import dcp_objstore` and `dcp-objstore --help` take in a fresh process."""

from __future__ import annotations

import json
import statistics
import time

from benchmarks.processes import ChildFailedError, run_python
from benchmarks.table import Result, Table, number

_IMPORT = """
import json, sys, time
start = time.perf_counter()
import dcp_objstore
print(json.dumps([time.perf_counter() - start, "torch" in sys.modules]))
"""
_HELP = (
    "import sys; from dcp_objstore.cli import main; sys.argv = ['dcp-objstore', '--help']; main()"
)


def startup(rounds: int) -> tuple[Table, Result]:
    """Medians of the rounds; the first import of all (which may compile) is left out."""
    imports: list[tuple[float, bool]] = []
    helps: list[float] = []
    nothing: list[float] = []
    problems: dict[str, str] = {}
    for turn in range(rounds + 1):
        took, torch_loaded = json.loads(run_python(["-c", _IMPORT]))
        start = time.perf_counter()
        run_python(["-c", ""])
        middle = time.perf_counter()
        try:
            run_python(["-c", _HELP])
        except ChildFailedError as error:
            problems["dcp-objstore --help"] = f"failed:\n{error}"
        end = time.perf_counter()
        if turn:
            imports.append((took, torch_loaded))
            nothing.append(middle - start)
            helps.append(end - middle)
    figures = {
        "import_seconds": statistics.median(took for took, _ in imports),
        "help_seconds": None if problems else statistics.median(helps),
        "empty_process_seconds": statistics.median(nothing),
    }
    torch_loaded = any(loaded for _, loaded in imports)
    rows: list[list[str | None]] = [
        ["import dcp_objstore", number(figures["import_seconds"], ".3f")],
        ["dcp-objstore --help, the whole process", number(figures["help_seconds"], ".3f")],
        ["python -c '', the whole process", number(figures["empty_process_seconds"], ".3f")],
        ["the import loads torch", "yes" if torch_loaded else "no"],
    ]
    notes = [f"{what}: {problem}" for what, problem in problems.items()]
    table = Table(f"startup, medians of {rounds} rounds", ["what", "seconds"], rows, notes)
    result = {"command": "startup", **figures, "torch_loaded": torch_loaded, "problems": problems}
    return table, result
