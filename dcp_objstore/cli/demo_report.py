"""The report of the demo, of which the demo itself knows nothing.

Its sections are the fields of `.github/ISSUE_TEMPLATE/benchmark-results.yml`. It names no bucket.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

import dcp_objstore as dos
from dcp_objstore.config import processors
from dcp_objstore.observe.report import GIB, counted, size_text

if TYPE_CHECKING:
    from dcp_objstore.cli.demo_crew import Crew
    from dcp_objstore.stores import StoreSpec


class Shown(Protocol):
    """A demo that has ended: what it proved, in phases."""

    crew: Crew
    spec: StoreSpec
    ranks: int
    resume_ranks: int
    phases: list[tuple[str, list[str]]]


def text(
    demo: Shown,
    speeds: Sequence[dos.measure.BenchReport],
    seconds: float,
    place: str | None,
) -> str:
    """Return the report as Markdown.

    Args:
        demo: a demo that has run.
        speeds: what `bench` has measured in each process that started ranks.
        seconds: the duration of all of it.
        place: the store, if the demo has started it.
    """
    ways = {
        name: sum(getattr(one, name).gib_per_second.median for one in speeds)
        for name in ("save", "plain_puts", "load", "plain_gets")
    }
    phases = {title.lstrip("1234. "): proofs for title, proofs in demo.phases}
    results = {
        "versions": _versions(),
        "ranks": demo.ranks,
        "resume_ranks": demo.resume_ranks,
        "launcher": demo.crew.launcher,
        "device": demo.crew.device,
        "seconds": round(seconds, 1),
        "gib_per_second": {name: round(speed, 3) for name, speed in ways.items()},
        "processes": len(speeds),
    }
    store = place or _store_of(demo)
    started = f"started by {demo.crew.launcher}" if demo.crew.launcher else "on one machine"
    gpu = f", {torch.cuda.get_device_name()}" if demo.crew.device == "cuda" else ""
    words = [
        word if "://" not in word else f"{word.partition('://')[0]}://..." for word in sys.argv[1:]
    ]
    lines = [
        "### Machine",
        f"{demo.ranks} ranks {started}; each machine: {processors()} processors,"
        f" {_memory_gib()} GiB of memory{gpu}. Was anything else running?",
        "### Store",
        store,
        "### Command",
        shlex.join(["dcp-objstore", *words]),
        "### results.json",
        f"```json\n{json.dumps(results, indent=1)}\n```",
        "### What should readers know?",
        *(
            f"**{title}**\n\n" + "\n".join(f"- {proof}" for proof in proofs)
            for title, proofs in phases.items()
        ),
        "**Speed**",
        f"{size_text(speeds[0].size_bytes)} in each of {counted(len(speeds), 'process')}, in turns;"
        " medians. The plain loop sends as many requests at a time, of the same size, without"
        " digests.",
        "| | GiB/s | plain loop | |\n|---|---|---|---|\n"
        + "\n".join(
            f"| {name} | {ways[name]:.3f} | {ways[plain]:.3f} | {ways[name] / ways[plain]:.0%} |"
            for name, plain in (("save", "plain_puts"), ("load", "plain_gets"))
        ),
        "**Cost**",
        f"The measurement sent {size_text(sum(one.sent_bytes for one in speeds))}, beside the"
        " requests of the proofs (a few hundred with 4 ranks). All objects were removed: a listing"
        " shows none.",
    ]
    return "\n\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "dcp_objstore": dos.__version__}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "obstore")}
    return found | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def _memory_gib() -> int:
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB)


def _store_of(demo: Shown) -> str:
    own = demo.spec.open().endpoint_url is not None
    where = "an endpoint of its own" if own else "the provider's endpoint"
    return f"{demo.spec.parsed.scheme}:// at {where}. Which provider, storage class and region?"
