"""Where the bytes go: the sink, a real S3 server on loopback, or a bucket of your own."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.sink import Sink


@dataclass(frozen=True, kw_only=True)
class Place:
    """A prefix in a bucket. Without an endpoint: AWS, with the credentials of the environment.

    Attributes:
        bucket, prefix: where; the prefix has no slash at either end.
        endpoint_url, access_key, secret_key: of a server on loopback, or None.
        counted: the endpoint is a sink, which counts requests.
    """

    bucket: str
    prefix: str
    endpoint_url: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    counted: bool = False

    @property
    def url(self) -> str:
        """As `s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """In fsspec's spelling."""
        if self.endpoint_url is None:
            return {}
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
        }

    def at(self, name: str) -> Place:
        """A place below this one."""
        return Place(**{**vars(self), "prefix": f"{self.prefix}/{name}"})

    def clear(self) -> None:
        """Delete every object below the prefix."""
        from dcp_objstore.stores import open_store

        store = open_store(self.url, self.storage_options)
        for meta in list(store.list()):
            store.delete(meta.key)


@contextlib.contextmanager
def open_target(
    name: str, *, keep: bool, throttle_gib_per_second: float | None = None
) -> Iterator[Place]:
    """A fresh prefix on `sink`, `seaweedfs` or `s3://bucket[/prefix]`, emptied in the end.

    Args:
        name: which of them.
        keep: what is saved must be readable (the sink else discards large bodies).
        throttle_gib_per_second: of the sink; see there.

    Raises:
        ValueError: it is none of them.
    """
    run = f"benchmarks-{secrets.token_hex(4)}"
    if name == "sink":
        with Sink(keep=keep, throttle_gib_per_second=throttle_gib_per_second) as sink:
            options: dict[str, Any] = sink.storage_options
            yield Place(
                bucket="bench",
                prefix=run,
                endpoint_url=sink.endpoint_url,
                access_key=options["key"],
                secret_key=options["secret"],
                counted=True,
            )
    elif name == "seaweedfs":
        from dcp_objstore.cli.seaweedfs import SeaweedServer

        with SeaweedServer() as server:
            server.create_bucket("bench")
            yield Place(
                bucket="bench",
                prefix=run,
                endpoint_url=server.endpoint_url,
                access_key=server.access_key,
                secret_key=server.secret_key,
            )
    elif name.startswith("s3://"):
        bucket, _, prefix = name.removeprefix("s3://").strip("/").partition("/")
        place = Place(bucket=bucket, prefix=f"{prefix}/{run}".lstrip("/"))
        try:
            yield place
        finally:
            place.clear()
    else:
        raise ValueError(f"--target must be sink, seaweedfs or s3://bucket, not {name!r}")
