"""What a rank of `resume` is told."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from benchmarks.settings import Settings
from benchmarks.targets import Place


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a rank does.

    Attributes:
        action: `save` (once, not measured) or `load` (measured and checked).
        peers: by name, in turn.
        layout: one of `resume_state.LAYOUTS`.
        place: each peer has a place of its own below it.
        meeting: a file through which the ranks find each other; does not exist yet.
    """

    action: str
    rank: int
    world_size: int
    peers: list[str]
    layout: str
    rounds: int
    place: Place
    settings: Settings
    meeting: str

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> RankJob:
        """From JSON."""
        fields: dict[str, Any] = json.loads(text)
        fields["place"] = Place(**fields["place"])
        fields["settings"] = Settings(**fields["settings"])
        return cls(**fields)
