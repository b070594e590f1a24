"""The command line: `python -m benchmarks COMMAND`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields

from benchmarks.peers import PEERS
from benchmarks.rounds import compare
from benchmarks.settings import Settings
from benchmarks.table import Result, Table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("save", "throughput, processor time, memory and requests of a save"),
        ("load", "the same of a load, from what each peer saved itself"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--target", default="sink", help="sink, seaweedfs or s3://bucket")
        command.add_argument("--rounds", type=int, default=5)
        command.add_argument(
            "--peers",
            nargs="+",
            choices=list(PEERS),
            default=list(PEERS),
            metavar="PEER",
            help=f"of {', '.join(PEERS)}",
        )
        for field in fields(Settings):
            kind = float if field.name == "gib" else int
            option = f"--{field.name.replace('_', '-')}"
            command.add_argument(option, type=kind, default=field.default)
        command.add_argument("--json", action="store_true", help="print data in place of a table")
    return parser


def _run(options: argparse.Namespace) -> tuple[Table, Result]:
    settings = Settings.from_options(options)
    return compare(options.command, options.peers, settings, options.target, options.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 unless a peer that is installed failed."""
    options = _parser().parse_args(arguments)
    table, result = _run(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        table.show()
    failed = [text for text in result.get("problems", {}).values() if text.startswith("failed")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
