"""The table: see the package."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from unittest import mock

from tests.crash import scenes as scenes_module
from tests.crash.jobs import in_memory
from tests.crash.judging import Verdict, quiet, verdicts
from tests.crash.on_server import ServerBucket
from tests.crash.scenes import Scene, large_scenes, scenes
from tests.support.ceph import CephServer

_COLUMNS = [one.name for one in fields(Verdict)]


def measure(scene: Scene, *, shown: bool = False) -> tuple[int, dict[str, int]]:
    """How many cuts there are, and after how many of them each thing was wrong."""
    found = dict.fromkeys(_COLUMNS, 0)
    total = 0
    for where, verdict in verdicts(scene):
        total += 1
        for name in _COLUMNS:
            found[name] += bool(getattr(verdict, name))
        if shown and verdict != Verdict():
            print(f"  {where}: {verdict}")
    return total, found


@contextmanager
def on_ceph() -> Iterator[None]:
    """The buckets of the scenes lie on a gateway of Ceph, which runs as long as the block."""
    with (
        CephServer() as server,
        mock.patch.object(ServerBucket, "storage_options", server.storage_options, create=True),
        mock.patch.object(scenes_module, "Bucket", ServerBucket),
    ):
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Print it; 1 if anything is wrong with ours."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--all", action="store_true", help="also uploads in parts on two ranks")
    parser.add_argument("--ceph", action="store_true", help="on Ceph's gateway, which is started")
    parser.add_argument("--shown", action="store_true", help="print each cut that did harm")
    options = parser.parse_args(arguments)
    print(
        f"{'writer':13} {'operation':25} {'ranks':>5} {'cuts':>5} {'silently torn':>13}"
        f" {'unreadable':>10} {'stock torn':>10} {'false success':>13} {'resumable':>10}"
        f" {'orphans left':>12} {'seconds':>7}"
    )
    wrong = 0
    with on_ceph() if options.ceph else nullcontext(), in_memory(), quiet():
        for scene in scenes() + (large_scenes() if options.all else []):
            began = time.perf_counter()
            total, found = measure(scene, shown=options.shown)
            seconds = time.perf_counter() - began
            name = scene.name + (" (parts)" if scene.shape.large_rank is not None else "")
            print(
                f"{scene.writer:13} {name:25} {scene.ranks:5} {total:5} {found['torn']:13}"
                f" {found['unreadable']:10} {found['stock_torn']:10} {found['false_success']:13}"
                f" {total - found['stuck']:5}/{total:<4} {found['orphans']:12} {seconds:7.1f}",
                flush=True,
            )
            wrong += scene.writer == "dcp_objstore" and sum(found.values())
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
