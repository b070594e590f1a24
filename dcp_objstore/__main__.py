"""Run the command line with `python -m dcp_objstore`."""

from __future__ import annotations

from dcp_objstore.cli import main

if __name__ == "__main__":
    main()
