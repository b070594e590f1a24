"""The command `dcp-objstore`. Importing this module is cheap; `main` imports what it needs."""

from __future__ import annotations

import gc
import importlib.util
import sys


def main() -> None:
    """Run the command line and exit with its status."""
    if importlib.util.find_spec("typer") is None:
        print(
            "dcp-objstore needs its 'cli' extra: pip install 'dcp-objstore[cli]'", file=sys.stderr
        )
        sys.exit(2)
    # Imported objects stay alive. If Python looked through them for reference cycles as often as it
    # does by default, that would take a tenth of the time of a short command.
    gc.set_threshold(100_000)
    from dcp_objstore.cli.app import app

    app()
