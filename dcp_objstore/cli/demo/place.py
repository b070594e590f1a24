"""The place where the demo saves: a SeaweedFS server on loopback, or the user's bucket."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from dcp_objstore.checkpoint.probe import require_fencing
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import InputError
from dcp_objstore.stores import ObjectStore, StoreSpec

# Before any rank starts, a store that does not answer is an error to report at once.
_IMPATIENT = TransferConfig(
    connect_timeout_seconds=5.0,
    request_timeout_seconds=15.0,
    max_retries=2,
    retry_timeout_seconds=10.0,
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A run's URL, and how to reach the store there.

    Attributes:
        run_url: URL of the run, unique to this demo.
        storage_options: options for the store there.
        server: the server that was started for the demo, or None.
    """

    run_url: str
    storage_options: Mapping[str, object] | None = None
    server: SeaweedServer | None = None

    @property
    def described(self) -> str:
        """The place in words, for the output of the demo."""
        if self.server is None:
            return self.run_url
        return f"a SeaweedFS server at {self.server.endpoint_url}"

    def step_url(self, step: int) -> str:
        """Return the URL of a step's checkpoint."""
        return f"{self.run_url}/step-{step}"

    def open(self, step: int | None = None) -> ObjectStore:
        """Open the store, rooted at the run or at one step of it."""
        url = self.run_url if step is None else self.step_url(step)
        return StoreSpec(url, self.storage_options).open()


@contextmanager
def on_loopback() -> Iterator[Place]:
    """Start SeaweedFS and make a bucket there.

    Raises:
        UnsupportedError: SeaweedFS is not installed.
        StoreUnavailableError: the server did not start.
    """
    with SeaweedServer() as server:
        run_url = f"{server.create_bucket('demo')}/run"
        yield Place(run_url=run_url, storage_options=server.storage_options, server=server)


@contextmanager
def in_bucket(url: str, *, keep: bool) -> Iterator[Place]:
    """Choose a new prefix below the user's URL, with credentials from the environment.

    The bucket must allow to list, put conditionally and delete; this checks it. At the end the
    prefix is emptied, unless `keep`.

    Raises:
        InputError: the store refused: no such bucket, no credentials, no permission, ….
        StoreUnavailableError: the store does not answer.
    """
    spec = StoreSpec(url, None, _IMPATIENT)
    if spec.parsed.scheme == "memory":
        raise InputError("memory:// exists in one process only; the demo has many", url=url)
    run_url = f"{spec.url}/dcp-objstore-demo-{secrets.token_hex(4)}"
    store = spec.at(run_url).open()
    for _ in store.list():  # first, because the probe waits longer for a store that is away
        break
    require_fencing(store, replaces=True, allow_unfenced=False)
    place = Place(run_url=run_url)
    try:
        yield place
    finally:
        if not keep:
            _remove_all(place)


def _remove_all(place: Place) -> None:
    """Remove everything below the run's own prefix; if that fails, print what is left."""
    store = place.open()
    try:
        for meta in list(store.list()):
            store.delete(meta.key)
    except BaseException:
        print(f"dcp-objstore: left behind: {place.run_url}", file=sys.stderr)
        raise
