"""The same bucket as fsspec sees it, for stock torch: `cut://bucket/key`.

Requests as s3fs makes them: a body below the block size is one PUT, a larger one a multipart
upload; a rename is a copy and a delete.
"""

from __future__ import annotations

import io
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dcp_objstore.errors import ObjectNotFoundError
from tests.crash.process import here

# As our part size in these runs, so that cuts are comparable.
BLOCK_SIZE_BYTES = 5 * 1024 * 1024


class CutFile(AbstractBufferedFile):
    """An object that is being written."""

    def _initiate_upload(self) -> None:
        self.upload: str | None = None
        self.number = 0

    def _upload_chunk(self, final: bool = False) -> bool:
        body = self.buffer.getvalue()
        if final and self.upload is None:
            self.fs.request("put", self.path, lambda: self.fs.bucket.put(self.path, body))
            return True
        if self.upload is None:
            self.upload = self.fs.request(
                "begin", self.path, lambda: self.fs.bucket.begin(self.path)
            )
        name = self.upload
        if body:
            self.number += 1
            number = self.number
            self.fs.request("part", self.path, lambda: self.fs.bucket.part(name, number, body))
        if final:
            self.fs.request("complete", self.path, lambda: self.fs.bucket.complete(name))
        return True

    def __del__(self) -> None:
        """A process that was killed runs no destructors."""


class CutFileSystem(AbstractFileSystem):
    """Flat keys; directories are not objects."""

    protocol = "cut"
    cachable = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.bucket, self.process = here.bucket, here.process

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        """Without the bucket's name, too."""
        rest = path.removeprefix("cut://")
        return rest.partition("/")[2] if path.startswith("cut://") else rest

    def request(self, verb: str, key: str, effect: Any) -> Any:
        """One request of the process that made this."""
        return self.process.request(verb, key, effect)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self._found("get", path)[0])
        return CutFile(self, path, mode, block_size=BLOCK_SIZE_BYTES)

    def _found(self, verb: str, path: str) -> Any:
        try:
            return self.request(verb, path, lambda: self.bucket.get(path))
        except ObjectNotFoundError as error:
            raise FileNotFoundError(path) from error

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        _, meta = self._found("head", path)
        return {"name": path, "size": meta.size_bytes, "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        root = self._strip_protocol(path).rstrip("/") + "/"
        found = self.request("list", root, lambda: self.bucket.list(root))
        entries = [{"name": one.key, "size": one.size_bytes, "type": "file"} for one in found]
        return entries if detail else [entry["name"] for entry in entries]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to do."""

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)

        def effect() -> None:
            self.bucket.put(target, self.bucket.get(source)[0])

        self.request("copy", target, effect)

    def _rm(self, path: str) -> None:
        self.request("delete", path, lambda: self.bucket.delete(path))


fsspec.register_implementation("cut", CutFileSystem, clobber=True)
