"""What a store charges and how many requests it takes, from a table that can be replaced."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The table, as `prices.toml` describes it."""

    name: str
    usd_per_1000_put: float
    usd_per_1000_get: float
    usd_per_gib_month: float
    put_per_second: float
    get_per_second: float

    @classmethod
    def read(cls, path: str | Path) -> Prices:
        """Read a table.

        Raises:
            OSError, ValueError, TypeError: it cannot be read, or its names are not these.
        """
        return cls(**tomllib.loads(Path(path).read_text()))

    def usd(self, puts: float, gets: float) -> float:
        """Return what these requests cost."""
        return (puts * self.usd_per_1000_put + gets * self.usd_per_1000_get) / 1000

    def usd_of(self, verbs: Mapping[str, int]) -> float:
        """Return what requests cost, counted by the verbs of the sink."""
        gets = sum(verbs.get(verb, 0) for verb in ("GET", "HEAD"))
        free = sum(verbs.get(verb, 0) for verb in ("DELETE", "DELETE_MANY", "ABORT"))
        return self.usd(sum(verbs.values()) - gets - free, gets)

    def seconds(self, puts: float, gets: float) -> float:
        """Return how long one prefix takes for these requests, at the least."""
        return puts / self.put_per_second + gets / self.get_per_second
