"""What a store holds, seen and changed by another client than the adapter under test.

Keys are those of the store under test: relative to its root.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from dcp_objstore.stores import ObjectStore
from tests.support.proxy import NetworkProxy
from tests.support.servers import Bucket, Folder


class NoDoor:
    """For a store that nothing but its adapter reaches: the adapter has to be believed."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def sizes(self) -> dict[str, int]:
        """Every object below the root."""
        return {meta.key: meta.size_bytes for meta in self.store.list()}

    def read(self, key: str) -> bytes:
        return self.store.get(key, max_size_bytes=1 << 30)[0]

    def write(self, key: str, data: bytes) -> None:
        self.store.put(key, data)

    def remove(self, key: str) -> None:
        self.store.delete(key)

    def leavings(self) -> list[str]:
        """What is there and is no object: open uploads, temporary ones."""
        return []

    def part_sizes(self, key: str) -> list[int] | None:
        """Of the upload that made the object; None if nobody tells."""
        return None


class BucketDoor:
    """The client of a bucket on the same server.

    Args:
        bucket: the fresh prefix of the test.
        below: the store's root, relative to it.
        proxy: that the store under test goes through, where the server does not tell parts.
    """

    def __init__(self, bucket: Bucket, below: str, proxy: NetworkProxy | None = None) -> None:
        self.bucket, self.proxy = bucket, proxy
        self.below = f"{below}/" if below else ""

    def sizes(self) -> dict[str, int]:
        return self.bucket.sizes(self.below)

    def read(self, key: str) -> bytes:
        return self.bucket.get(self.below + key)

    def write(self, key: str, data: bytes) -> None:
        self.bucket.put(self.below + key, data)

    def remove(self, key: str) -> None:
        self.bucket.delete(self.below + key)

    def leavings(self) -> list[str]:
        return self.bucket.uploads()

    def part_sizes(self, key: str) -> list[int] | None:
        if self.proxy is None:
            return self.bucket.part_sizes(self.below + key)
        meant = f"/{self.bucket.name}/{self.bucket.prefix}{self.below}{key}"
        sizes = {
            asked.query: asked.size_bytes
            for asked in self.proxy.asked
            if asked.key == meant and asked.method == "PUT" and "partNumber=" in asked.query
        }
        return [sizes[query] for query in sorted(sizes)]


class FolderDoor(BucketDoor):
    """The file system below `file://`."""

    def __init__(self, root: Path) -> None:
        super().__init__(Folder("file", f"file://{root}", {}), "")


SideDoor: TypeAlias = NoDoor | BucketDoor
