"""Measures dcp_objstore, the raw obstore loop and the other libraries.

    python -m benchmarks save                       1 GiB to the sink, every peer, 5 rounds
    python -m benchmarks load --peers raw dcp_objstore --gib 4 --tensors 64
    python -m benchmarks load --tls                 over https
    python -m benchmarks load --latency-ms 30 --rate-mib-per-connection 60    a store like S3
    python -m benchmarks save --requests-per-second 20    a store that throttles
    python -m benchmarks save --target seaweedfs    a real S3 server on loopback
    python -m benchmarks save --url s3://bucket     your own bucket; cleaned up afterwards
    python -m benchmarks resume --saved-by 8 --loaded-by 4 --target seaweedfs
    python -m benchmarks resume --layout shard1     a job of ranks loads in another layout
    python -m benchmarks resume --layout fsdp2      model and AdamW under fully_shard
    python -m benchmarks link save --gib 0.25       eight processes share a link of 0.25 GiB/s
    python -m benchmarks async-loop                 a Python loop's pace while async_save uploads
    python -m benchmarks restart                    a job that reads copies on its node
    python -m benchmarks killed                     from SIGKILL of all ranks to the first step
    python -m benchmarks weights --gib 2            a job fills a model with Hugging Face weights
    python -m benchmarks stage                      how long async_save holds training up
    python -m benchmarks gpu --gib 20               CUDA tensors, and pinned copies
    python -m benchmarks convert --target seaweedfs    exports, imports and copies
    python -m benchmarks export --gib 2             exports by one process and by four ranks
    python -m benchmarks incremental    saves with a base, on SeaweedFS
    python -m benchmarks small                      cost of each of 20,000 tensors of 1 KiB
    python -m benchmarks startup                    seconds of the import and of --help
    python -m benchmarks digests                    GiB/s of XXH3-128, also with a busy thread
    python -m benchmarks index --ranks 256          the index of a large job, and `.metadata`
    python -m benchmarks scale --ranks 10000 --tensors 2000    planning and requests of a large job
    python -m benchmarks environments               the other libraries, each by itself
    python -m benchmarks all --out results.json     saves and loads under all conditions, pictures
    python -m benchmarks timeline                   a save drawn from its trace
    python -m benchmarks soak --minutes 60          does anything grow in an hour of faults
    python -m benchmarks.sink --port 9000 [--keep]  the sink by itself

`pip install -e '.[bench]'` brings what this needs, and `python -m benchmarks environments` each of
the other libraries, in an environment of its own; one that is missing is reported and left out.
The sink discards what is saved to it, so that the client is what is measured; for `load` it keeps
one peer's data in memory. Every measurement runs in a fresh process, the peers in turn (A B C A B C
...). Figures are medians of the rounds, ratios medians of the ratios to the raw loop of the same
round; CPU seconds are the client's (user and system), with the sink's in a column of their own;
extra memory is the peak above what was resident once the state was allocated. The exit status is 1
if a peer failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module

from benchmarks.conditions import Conditions
from benchmarks.peers import OPTIONAL, PEERS, RESUME_PEERS
from benchmarks.prices import DEFAULT, Prices
from benchmarks.settings import Settings
from benchmarks.table import Result, Table
from dcp_objstore.config import Concurrency

_COMPARED = {
    "save": "throughput, processor time, memory and requests of a save",
    "load": "the same of a load, from what each peer saved itself",
}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _concurrency(text: str) -> Concurrency:
    return "auto" if text == "auto" else _positive(text)


def _target(text: str) -> str:
    if text not in {"sink", "seaweedfs"} and not text.startswith("s3://"):
        raise argparse.ArgumentTypeError(f"must be sink, seaweedfs or s3://bucket, not {text!r}")
    return text


def _add_target(command: argparse.ArgumentParser, default: str = "sink") -> None:
    command.add_argument(
        "--target",
        "--url",
        type=_target,
        default=default,
        help="sink, seaweedfs, or a bucket of your own (s3://bucket[/prefix]); default %(default)s",
    )


def _add_compared(command: argparse.ArgumentParser, peers: list[str], **conditions: object) -> None:
    _add_target(command)
    command.add_argument("--rounds", type=_positive, default=5)
    command.add_argument(
        "--peers",
        nargs="+",
        choices=peers,
        default=[name for name in peers if name not in OPTIONAL],
        metavar="PEER",
        help=f"of {', '.join(peers)}; default all"
        + "".join(f" but {name}" for name in peers if name in OPTIONAL),
    )
    _add_settings(command)
    Conditions.add_options(command, **conditions)


def _add_weights(command: argparse.ArgumentParser) -> None:
    _add_target(command, "seaweedfs")
    command.add_argument("--rounds", type=_positive, default=3)
    command.add_argument("--ranks", type=_positive, default=8)
    # The names in `weights.PEERS`, which needs torch.
    peers = ["dcp_objstore", "own checkpoint", "HuggingFaceStorageReader", "load_file"]
    peers += ["runai-model-streamer"]
    command.add_argument("--peers", nargs="+", choices=peers, default=peers, metavar="PEER")
    _add_settings(command)
    Conditions.add_options(command, latency_ms=30.0, rate_mib_per_connection=60.0)


def _add_settings(command: argparse.ArgumentParser) -> None:
    for field in fields(Settings):
        kind: Callable[[str], object] = float if field.name == "gib" else _positive
        if field.name.endswith("_concurrency"):
            kind = _concurrency
        option = f"--{field.name.replace('_', '-')}"
        command.add_argument(option, type=kind, default=field.default)


def _prices(text: str) -> Prices:
    try:
        return Prices.read(text)
    except (OSError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_scale(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", choices=["70b", "405b"], default="70b")
    command.add_argument("--ranks", type=_positive, default=256)
    command.add_argument("--tensors", type=_positive, help="default all of the model's; 4 or more")
    command.add_argument(
        "--measured-ranks", type=_positive, help="measure up to these; default what memory allows"
    )
    command.add_argument("--prices", type=_prices, default=str(DEFAULT), metavar="FILE")
    command.add_argument("--plot", metavar="FILE.png", help="seconds against chunks")
    command.add_argument(
        "--collector", action="store_true", help="leave Python's cyclic garbage collector on"
    )


def _add_soak(command: argparse.ArgumentParser) -> None:
    command.add_argument("--minutes", type=float, default=60.0)
    command.add_argument("--ranks", type=_positive, default=4)
    command.add_argument("--state-mib", type=_positive, default=64)
    command.add_argument(
        "--cycle-seconds", type=float, default=5.0, help="between two saves; default %(default)s"
    )
    command.add_argument(
        "--kill-every-minutes", type=float, help="default 15, or half of a shorter run"
    )
    command.add_argument("--seed", type=int, default=1, help="of the faults")
    command.add_argument("--plot", metavar="FILE.png", help="each figure against time")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in _COMPARED.items():
        _add_compared(commands.add_parser(name, help=text), list(PEERS))
    command = commands.add_parser(
        "async-loop", help="steps per second of a Python loop while async_save uploads"
    )
    # As a network would, so that the upload lasts.
    _add_compared(command, list(PEERS), gib_per_second=0.3)
    command = commands.add_parser("resume", help="a load by several ranks, in another layout")
    _add_compared(command, list(RESUME_PEERS))
    command.add_argument("--saved-by", type=_positive, default=8, help="ranks")
    command.add_argument("--loaded-by", type=_positive, default=4, help="ranks")
    layouts = ["shard0", "shard1", "replicated", "fsdp2"]
    command.add_argument(
        "--saved-layout", choices=layouts, help="default shard0; fsdp2 where that is loaded"
    )
    command.add_argument("--layout", choices=layouts, default="shard0", help="when loaded")
    for name, text, target in (
        ("convert", "exports, imports and copies", "sink"),
        ("incremental", "saves with a base", "seaweedfs"),  # the sink copies nothing
    ):
        command = commands.add_parser(name, help=text)
        _add_target(command, target)
        command.add_argument("--rounds", type=_positive, default=3)
        _add_settings(command)
        Conditions.add_options(command)
    command = commands.add_parser("gpu", help="a save and load of CUDA tensors; needs a GPU")
    command.add_argument("--target", choices=["sink", "memory"], default="sink")
    command.add_argument("--rounds", type=_positive, default=5)
    command.add_argument("--memory-budget-mib", type=_positive, default=128)
    _add_settings(command)
    command = commands.add_parser("link", help="what each of several processes gets of one link")
    command.add_argument("action", choices=["save", "load"])
    command.add_argument("--processes", type=_positive, default=8)
    command.add_argument("--seconds", type=_positive, default=20)
    _add_settings(command)
    Conditions.add_options(
        command, latency_ms=30.0, rate_mib_per_connection=60.0, gib_per_second=0.25
    )
    for name, text, ranks in (
        ("restart", "loads from copies on the node, and their cost", 8),
        ("export", "exports by one process and by several ranks", 4),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--rounds", type=_positive, default=5)
        command.add_argument("--ranks", type=_positive, default=ranks, help="of the job")
        _add_settings(command)
    Conditions.add_options(command, latency_ms=30.0, rate_mib_per_connection=60.0)
    command = commands.add_parser("killed", help="from SIGKILL of a job's ranks to its first step")
    command.add_argument("--rounds", type=_positive, default=3)
    command.add_argument("--ranks", type=_positive, default=8)
    _add_settings(command)
    Conditions.add_options(command, latency_ms=30.0, rate_mib_per_connection=60.0)
    _add_weights(commands.add_parser("weights", help="Hugging Face weights into a job's model"))
    command = commands.add_parser("stage", help="copies of a state by several stagers")
    command.add_argument("--rounds", type=_positive, default=3)
    _add_settings(command)
    command = commands.add_parser("timeline", help="a save, drawn from its trace")
    _add_target(command)
    command.add_argument("--out", default="timeline.svg", metavar="NAME.svg")
    _add_settings(command)
    Conditions.add_options(command, latency_ms=30.0, rate_mib_per_connection=60.0)
    command = commands.add_parser("small", help="cost of each small tensor inside write_data")
    command.add_argument("--tensors", type=_positive, default=20_000)
    command.add_argument("--tensor-bytes", type=_positive, default=1024)
    command.add_argument("--rounds", type=_positive, default=5)
    command = commands.add_parser("startup", help="seconds of the import and of --help")
    command.add_argument("--rounds", type=_positive, default=7)
    command = commands.add_parser("digests", help="GiB/s of XXH3-128, alone and with busy Python")
    command.add_argument("--rounds", type=_positive, default=5)
    command = commands.add_parser("index", help="cost of the index of many ranks and tensors")
    command.add_argument("--ranks", type=_positive, default=256)
    command.add_argument("--tensors", type=_positive, default=2000)
    command.add_argument("--rounds", type=_positive, default=3)
    _add_scale(commands.add_parser("scale", help="planning, requests and price of a large job"))
    command = commands.add_parser(
        "environments", help="each of the other libraries in an environment of its own"
    )
    command.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    command = commands.add_parser("all", help="saves and loads under all conditions, in one file")
    _add_target(command)
    command.add_argument("--rounds", type=_positive, default=3)
    peers = ["raw", "dcp_objstore", "s3torchconnector", "multi-storage-client", "fsspec"]
    command.add_argument("--peers", nargs="+", choices=list(PEERS), default=peers, metavar="PEER")
    command.add_argument(
        "--out", default="results.json", metavar="FILE", help="default %(default)s"
    )
    command.add_argument("--prices", type=_prices, default=str(DEFAULT), metavar="FILE")
    _add_settings(command)
    _add_soak(commands.add_parser("soak", help="what grows in a job that runs for an hour"))
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print data, not a table")
    return parser


def _conditions(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Conditions:
    """Return the conditions of the sink; only the sink can keep to what was asked for."""
    given = Conditions.from_options(options)
    target = getattr(options, "target", "sink")
    if target == "sink":
        return given
    if given != Conditions.from_options(parser.parse_args([options.command])):
        parser.error(f"--target {target} takes no conditions: they are the sink's")
    return Conditions()


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[Table, Result]:
    """Call the function of the command, in the module of its name, with its options."""
    arguments = {**vars(options)}
    del arguments["command"], arguments["json"]
    if hasattr(options, "gib"):
        arguments["settings"] = Settings(
            **{f.name: arguments.pop(f.name) for f in fields(Settings)}
        )
    if hasattr(options, "latency_ms"):
        arguments["conditions"] = _conditions(parser, options)
        for field in fields(Conditions):
            del arguments[field.name]
    module = name = options.command.replace("-", "_")
    if name in _COMPARED:
        arguments["action"], module, name = name, "rounds", "compare"
    elif name == "all":
        module, name = "suite", "measure_all"
    # Each command imports what it needs: the sink and `startup` do without torch.
    found: tuple[Table, Result] = getattr(import_module(f"benchmarks.{module}"), name)(**arguments)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 unless something that is installed failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    table, result = _run(parser, options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        table.show()
    failed = [text for text in result.get("problems", {}).values() if text.startswith("failed")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
