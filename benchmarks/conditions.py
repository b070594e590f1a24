"""Under which conditions the sink answers: TLS, latency, and what it allows."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def _percent(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError(f"must be from 0 to 100, not {text}")
    return number


def _record_bytes(text: str) -> int:
    size_bytes = int(text)
    if not 512 <= size_bytes <= 16384:
        raise argparse.ArgumentTypeError(f"must be from 512 to 16384, not {text}")
    return size_bytes


def _condition(default: Any, text: str, kind: Any = _positive) -> Any:
    return field(default=default, metadata={"text": text, "kind": kind})


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a client of the sink meets. The defaults are loopback as it is: plain HTTP, no limits.

    Each field is an option of the command line. A store like S3 has `latency_ms=30` and
    `rate_mib_per_connection=60`.
    """

    tls: bool = _condition(False, "https, with a certificate made for this run", kind=bool)
    tls_record_bytes: int = _condition(
        16384, "largest TLS record that the sink sends, 512 to 16384", kind=_record_bytes
    )
    latency_ms: float | None = _condition(None, "from a request's end to its answer's first byte")
    rate_mib_per_connection: float | None = _condition(
        None, "of bodies, in MiB/s, in each direction of one connection"
    )
    slow_percent: float = _condition(0.0, "of the answers are slow", kind=_percent)
    slow_factor: float = _condition(20.0, "so many times as long as the others a slow one takes")
    slow_seed: int = _condition(0, "another one makes other answers slow", kind=int)
    gib_per_second: float | None = _condition(
        None, "of bodies, all connections together; inf: no limit"
    )
    requests_per_second: float | None = _condition(
        None, "for each bucket; the sink answers what exceeds them with 503 SlowDown"
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser, **defaults: object) -> None:
        """Add an option for each field.

        Args:
            parser: to add them to.
            defaults: of options, where they differ from the fields'.
        """
        group = parser.add_argument_group("conditions of the sink")
        for one in fields(cls):
            name = f"--{one.name.replace('_', '-')}"
            kind, text = one.metadata["kind"], one.metadata["text"]
            default = defaults.get(one.name, one.default)
            if kind is bool:
                group.add_argument(name, action="store_true", help=text)
            else:
                shown = "none" if default is None else default
                group.add_argument(
                    name, type=kind, default=default, help=f"{text}; default {shown}"
                )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Conditions:
        """Make them from parsed options."""
        return cls(**{one.name: getattr(options, one.name) for one in fields(cls)})

    @property
    def arguments(self) -> list[str]:
        """As options of a command line."""
        usual = asdict(Conditions())
        changed = {n: v for n, v in asdict(self).items() if v != usual[n]}
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in changed.items()
        ]

    def described(self, target: str) -> str:
        """Return what a table calls the target: `sink (https, 30 ms to the first byte)`."""
        if target != "sink":
            return target
        found = ["https" if self.tls else "http"]
        if self.tls and self.tls_record_bytes < 16384:
            found.append(f"records of {self.tls_record_bytes} bytes")
        if self.latency_ms is not None:
            found.append(f"{self.latency_ms:g} ms to the first byte")
        if self.rate_mib_per_connection is not None:
            found.append(f"{self.rate_mib_per_connection:g} MiB/s per connection")
        if self.slow_percent:
            found.append(f"{self.slow_percent:g} % take {self.slow_factor:g} times as long")
        if self.gib_per_second is not None:
            found.append(f"{self.gib_per_second:g} GiB/s in all")
        if self.requests_per_second is not None:
            found.append(f"{self.requests_per_second:g} requests/s")
        return f"sink ({', '.join(found)})"
