"""Where the bytes go: the sink, a real S3 server on loopback, or a bucket of your own."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.conditions import Conditions
from benchmarks.sink import Sink, fetch_stats


@dataclass(frozen=True, kw_only=True)
class Place:
    """A prefix in a bucket. Without an endpoint: AWS, with the credentials of the environment.

    Attributes:
        bucket, prefix: where; the prefix has no slash at either end.
        endpoint_url, access_key, secret_key: of a server on loopback, or None.
        certificate: the file with the certificate to trust for https; None: the system's.
        counted: the endpoint is a sink, which counts requests.
    """

    bucket: str
    prefix: str
    endpoint_url: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    certificate: str | None = None
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
        options = {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
        }
        return options if self.certificate is None else {**options, "verify": self.certificate}

    def at(self, name: str) -> Place:
        """A place below this one."""
        return Place(**{**vars(self), "prefix": f"{self.prefix}/{name}"})

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """Return what the sink there has counted; see `fetch_stats`."""
        return fetch_stats(str(self.endpoint_url), self.certificate, reset=reset)

    def clear(self) -> None:
        """Delete every object below the prefix."""
        from dcp_objstore.stores import open_store

        store = open_store(self.url, self.storage_options)
        for meta in list(store.list()):
            store.delete(meta.key)


@contextlib.contextmanager
def open_target(name: str, *, keep: bool, conditions: Conditions | None = None) -> Iterator[Place]:
    """A fresh prefix on `sink`, `seaweedfs` or `s3://bucket[/prefix]`, emptied in the end.

    Args:
        name: which of them.
        keep: what is saved must be readable (the sink else discards large bodies).
        conditions: of the sink. Default None: plain HTTP without limits.

    Raises:
        ValueError: it is none of them.
    """
    run = f"benchmarks-{secrets.token_hex(4)}"
    if name == "sink":
        with Sink(keep=keep, conditions=conditions) as sink:
            options: dict[str, Any] = sink.storage_options
            yield Place(
                bucket="bench",
                prefix=run,
                endpoint_url=sink.endpoint_url,
                access_key=options["key"],
                secret_key=options["secret"],
                certificate=sink.certificate,
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
