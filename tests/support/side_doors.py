"""What a store holds, seen and changed by another client than the adapter under test."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from botocore.exceptions import ClientError

from dcp_objstore.stores import ObjectStore
from tests.support.proxy import NetworkProxy
from tests.support.servers import Bucket


class SideDoor(Protocol):
    """Keys are those of the store under test: relative to its root."""

    def sizes(self) -> dict[str, int]:
        """Every object below the root."""
        ...

    def read(self, key: str) -> bytes: ...

    def write(self, key: str, data: bytes) -> None: ...

    def remove(self, key: str) -> None: ...

    def leavings(self) -> list[str]:
        """What is there and is no object: open uploads, temporary ones."""
        ...

    def part_sizes(self, key: str) -> list[int] | None:
        """Of the upload that made the object; None if nobody tells."""
        ...


class NoDoor:
    """For a store that nothing but its adapter reaches: the adapter has to be believed."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def sizes(self) -> dict[str, int]:
        return {meta.key: meta.size_bytes for meta in self.store.list()}

    def read(self, key: str) -> bytes:
        return self.store.get(key, max_size_bytes=1 << 30)[0]

    def write(self, key: str, data: bytes) -> None:
        self.store.put(key, data)

    def remove(self, key: str) -> None:
        self.store.delete(key)

    def leavings(self) -> list[str]:
        return []

    def part_sizes(self, key: str) -> list[int] | None:
        return None


class FolderDoor:
    """The file system below `file://`.

    Args:
        root: the folder that the store is rooted at.
        ours: how names begin that are no objects.
        lasting: names that may stay: locks.
    """

    def __init__(self, root: Path, ours: str = ".dcp-objstore.", lasting: str = "lock") -> None:
        self.root = root
        self._ours = ours
        self._lasting = ours + lasting

    def sizes(self) -> dict[str, int]:
        return {
            str(place.relative_to(self.root)): place.stat().st_size
            for place in self.root.rglob("*")
            if place.is_file() and not place.name.startswith(self._ours)
        }

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        place = self.root / key
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)

    def remove(self, key: str) -> None:
        (self.root / key).unlink()

    def leavings(self) -> list[str]:
        found = (place.name for place in self.root.rglob(f"{self._ours}*"))
        return sorted(name for name in found if name != self._lasting)

    def part_sizes(self, key: str) -> list[int] | None:
        return None


class BucketDoor:
    """boto3 on the same server.

    Args:
        bucket: the fresh prefix of the test.
        below: the store's root, relative to it.
        proxy: that the store under test goes through, where the server does not tell parts.
    """

    def __init__(self, bucket: Bucket, below: str, proxy: NetworkProxy | None = None) -> None:
        self.bucket = bucket
        self.below = f"{below}/" if below else ""
        self.proxy = proxy
        self._client = bucket.client()

    def sizes(self) -> dict[str, int]:
        root = self._full("")
        pages = self._client.get_paginator("list_objects_v2")
        return {
            entry["Key"].removeprefix(root): entry["Size"]
            for page in pages.paginate(Bucket=self.bucket.name, Prefix=root)
            for entry in page.get("Contents", ())
        }

    def read(self, key: str) -> bytes:
        return self.bucket.get(self.below + key)

    def write(self, key: str, data: bytes) -> None:
        self.bucket.put(self.below + key, data)

    def remove(self, key: str) -> None:
        self.bucket.delete(self.below + key)

    def leavings(self) -> list[str]:
        return self.bucket.uploads()

    def part_sizes(self, key: str) -> list[int] | None:
        if self.proxy is not None:
            meant = f"/{self.bucket.name}/{self._full(key)}"
            sizes = {
                asked.query: asked.size_bytes
                for asked in self.proxy.asked
                if asked.key == meant and asked.method == "PUT" and "partNumber=" in asked.query
            }
            return [sizes[query] for query in sorted(sizes)]
        found: list[int] = []
        while True:
            try:
                part = self._client.head_object(
                    Bucket=self.bucket.name, Key=self._full(key), PartNumber=len(found) + 1
                )
            except ClientError:
                return found
            if "PartsCount" not in part:
                return None
            found.append(part["ContentLength"])
            if len(found) == part["PartsCount"]:
                return found

    def _full(self, key: str) -> str:
        return f"{self.bucket.prefix}{self.below}{key}"
