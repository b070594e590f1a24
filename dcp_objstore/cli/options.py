"""Options that several commands have, and those before the command's name, which all use.

They never include credentials, because other users can see a command line. Credentials come from
the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, TypeAlias

import typer

from dcp_objstore.errors import ConfigError

Checkpoint: TypeAlias = Annotated[str, typer.Argument(help="URL of a checkpoint.", metavar="URL")]
CheckpointOrRun: TypeAlias = Annotated[
    str, typer.Argument(help="URL of a checkpoint or a run.", metavar="URL")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonLines: TypeAlias = Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")]
Keys: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--keys", help="Only these keys; shell patterns. Repeatable.", metavar="PATTERN"),
]
TrustPickle: TypeAlias = Annotated[
    bool, typer.Option("--trust-pickle", help="Unpickle any class. This may run code in it.")
]
Overwrite: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace what exists.")]

_UNITS_BYTES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)},
}
_UNITS_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]*)", re.IGNORECASE)

_chosen: ContextVar[Mapping[str, str]] = ContextVar("storage_options")


def choose(options: Mapping[str, str]) -> None:
    """Keep these options for the command that follows."""
    _chosen.set(options)


def chosen() -> dict[str, str]:
    """Return the `storage_options` for every store that a command opens."""
    return dict(_chosen.get({}))


def size_bytes(option: str, text: str) -> int:
    """Return the number of bytes that a size such as 500MB or 2GiB means.

    Raises:
        ConfigError: it is not a size; names the option.
    """
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS_BYTES.get(match[2].upper())
    if match is None or unit is None or not float(match[1]):
        raise ConfigError(f"{option} {text}: write a size such as 500MB, 5GB or 2GiB")
    return int(float(match[1]) * unit)


def seconds(text: str) -> float:
    """Return the number of seconds that a duration such as 90m, 24h or 7d means.

    Raises:
        ConfigError: it is not a duration.
    """
    match = _DURATION.match(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write 90m, 24h or 7d")
    return float(match[1]) * _UNITS_SECONDS[match[2]]
