"""The command line: `python -m benchmarks COMMAND`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields

from benchmarks.peers import PEERS
from benchmarks.settings import Settings
from benchmarks.table import Result, Table

_COMPARED = {
    "save": "throughput, processor time, memory and requests of a save",
    "load": "the same of a load, from what each peer saved itself",
    "async-loop": "steps per second of a Python loop while async_save uploads",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in _COMPARED.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--target", default="sink", help="sink, seaweedfs or s3://bucket")
        command.add_argument("--rounds", type=int, default=5)
        command.add_argument(
            "--peers",
            nargs="+",
            choices=list(PEERS),
            default=list(PEERS),
            metavar="PEER",
            help=f"of {', '.join(PEERS)}; default all",
        )
        for field in fields(Settings):
            kind = float if field.name == "gib" else int
            option = f"--{field.name.replace('_', '-')}"
            command.add_argument(option, type=kind, default=field.default)
    command = commands.add_parser("small", help="cost of each small tensor inside write_data")
    command.add_argument("--tensors", type=int, default=20_000)
    command.add_argument("--tensor-bytes", type=int, default=1024)
    command.add_argument("--rounds", type=int, default=5)
    command = commands.add_parser("startup", help="seconds of the import and of --help")
    command.add_argument("--rounds", type=int, default=7)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print data, not a table")
    return parser


def _run(options: argparse.Namespace) -> tuple[Table, Result]:
    # Each command imports what it needs: the sink and `startup` do without torch.
    if options.command == "small":
        from benchmarks.small import small

        return small(options.tensors, options.tensor_bytes, options.rounds)
    if options.command == "startup":
        from benchmarks.startup import startup

        return startup(options.rounds)
    settings = Settings.from_options(options)
    if options.command == "async-loop":
        from benchmarks.async_loop import async_loop

        return async_loop(options.peers, settings, options.target, options.rounds)
    from benchmarks.rounds import compare

    return compare(options.command, options.peers, settings, options.target, options.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 unless something that is installed failed."""
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
