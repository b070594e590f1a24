"""The place where the demo saves: a SeaweedFS server on loopback, or the user's bucket."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dcp_objstore.checkpoint.probe import require_fencing
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import InputError
from dcp_objstore.stores import StoreSpec

# Before any rank starts, a store that does not answer is an error to report at once.
_IMPATIENT = TransferConfig(
    connect_timeout_seconds=5.0,
    request_timeout_seconds=15.0,
    max_retries=2,
    retry_timeout_seconds=10.0,
)


@dataclass(frozen=True)
class Place:
    """The run that the demo saves, unique to it, and the server that was started for it, if any."""

    run: StoreSpec
    server: SeaweedServer | None = None

    def step(self, number: int) -> StoreSpec:
        """Return the place of a step's checkpoint."""
        return self.run.child(f"step-{number}")


@contextmanager
def on_loopback() -> Iterator[Place]:
    """Start SeaweedFS and make a bucket there."""
    with SeaweedServer() as server:
        url = f"{server.create_bucket('demo')}/run"
        yield Place(StoreSpec(url, server.storage_options), server)


@contextmanager
def in_bucket(url: str, *, keep: bool) -> Iterator[Place]:
    """Choose a new prefix below the user's URL, with credentials from the environment.

    The bucket must allow to list, put conditionally and delete; this checks it. At the end the
    prefix is emptied, unless `keep`.

    Raises:
        InputError: the store refused: no such bucket, no credentials, no permission, ….
        StoreUnavailableError: the store does not answer.
    """
    spec = StoreSpec(url)
    if spec.parsed.scheme == "memory":
        raise InputError("memory:// exists in one process only; the demo has many", url=url)
    run = spec.child(f"dcp-objstore-demo-{secrets.token_hex(4)}")
    store = replace(run, config=_IMPATIENT).open()
    for _ in store.list():  # first, because the probe waits longer for a store that is away
        break
    require_fencing(store, replaces=True, allow_unfenced=False)
    try:
        yield Place(run)
    finally:
        if not keep:
            try:
                store = run.open()  # patient: after a minute's work, a busy store is worth a wait
                for meta in list(store.list()):
                    store.delete(meta.key)
            except BaseException:
                print(f"dcp-objstore: left behind: {run.url}", file=sys.stderr)
                raise
