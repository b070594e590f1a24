"""Weights are read from servers that answer otherwise than S3 does, but within HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
import torch
from safetensors.torch import save

import dcp_objstore as dos
from dcp_objstore.errors import UnsupportedError
from dcp_objstore.stores import open_store
from tests.support.scripted import Answer, HttpServer

ALL = pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
TIME = "Mon, 01 Jan 2024 00:00:00 GMT"


class Weights(HttpServer):
    """A bucket of objects that are read.

    Args:
        size: how many numbers the weight has.
        e_tag: what an answer has for the ETag of a listing.
        chunked: whether bodies come in chunks, so that their length is not announced.
        keys: further objects, which are small.
    """

    def __init__(
        self,
        size: int = 100_000,
        e_tag: Callable[[str], str] = lambda listed: listed,
        *,
        chunked: bool = False,
        keys: tuple[str, ...] = (),
    ) -> None:
        self.weight = torch.arange(size, dtype=torch.int32)
        weights = save({"w": self.weight})
        self.objects = {"m/model.safetensors": weights, **dict.fromkeys(keys, b"x")}
        self.tags = {
            key: f'"{hashlib.md5(body).hexdigest()}"' for key, body in self.objects.items()
        }
        self.e_tag, self.chunked = e_tag, chunked
        self.listings = 0
        super().__init__()

    def options(self, transport: str = "native") -> dict[str, object]:
        """How to open it."""
        return {
            "endpoint_url": self.endpoint_url,
            "key": "k",
            "secret": "s",
            "transport": transport,
        }

    def load(self, transport: str) -> bool:
        """Load the weights; return whether they are right."""
        state = dos.load_state_dict("s3://b/m", storage_options=self.options(transport))
        return torch.equal(state["w"], self.weight)

    def reply(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        parts = urlsplit(target)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        if not key:
            return self._listing(parse_qs(parts.query).get("prefix", [""])[0])
        if key not in self.objects:
            text = b"<Error><Code>NoSuchKey</Code><Message>m</Message></Error>"
            return Answer(
                404, {"Content-Type": "application/xml"}, b"" if method == "HEAD" else text
            )
        whole, status = self.objects[key], 200
        fields = {"ETag": self.e_tag(self.tags[key]), "Last-Modified": TIME}
        asked = {name.lower(): value for name, value in headers.items()}.get("range")
        if asked is not None:
            first, last = asked.removeprefix("bytes=").split("-")
            status, end = 206, min(int(last) + 1, len(whole))
            fields["Content-Range"] = f"bytes {first}-{end - 1}/{len(whole)}"
            whole = whole[int(first) : end]
        if self.chunked:
            fields["Transfer-Encoding"] = "chunked"
            middle = len(whole) // 2  # there are two
            chunks = [
                chunk for chunk in (whole[:middle], whole[middle:], b"") if chunk or not whole
            ]
            framed = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks if chunk]
            whole = b"".join(framed) + b"0\r\n\r\n"
        if method == "HEAD":
            fields.setdefault("Content-Length", str(len(whole)))
        return Answer(status, fields, whole)

    def _listing(self, prefix: str) -> Answer:
        self.listings += 1
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z"
            f"</LastModified><ETag>{escape(self.tags[key])}</ETag><Size>{len(body)}</Size></Contents>"
            for key, body in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return Answer(200, {"Content-Type": "application/xml"}, text.encode())


@ALL
@pytest.mark.parametrize(
    "e_tag", [lambda tag: f"W/{tag}", lambda tag: f'"cdn-{tag[1:9]}"'], ids=["weak", "of a CDN"]
)
def test_weights_load_where_answers_have_other_etags_than_listings(
    transport: str, e_tag: Callable[[str], str]
) -> None:
    with Weights(e_tag=e_tag) as server:
        assert server.load(transport)


@ALL
def test_weights_that_were_replaced_since_they_were_listed_are_not_loaded(transport: str) -> None:
    """Only a second listing that is as the first one says that nothing was replaced."""
    with Weights(e_tag=lambda _: '"new"') as server:
        listing = server._listing

        def changing(prefix: str) -> Answer:
            if server.listings:
                server.tags["m/model.safetensors"] = '"new"'
            return listing(prefix)

        server._listing = changing  # type: ignore[method-assign]
        with pytest.raises(dos.errors.CheckpointGoneError):
            server.load(transport)


@ALL
def test_weights_load_from_answers_in_chunks(transport: str) -> None:
    with Weights(chunked=True) as server:
        assert server.load(transport)
        store = open_store("s3://b/m", server.options(transport))
        size_bytes = len(server.objects["m/model.safetensors"])
        assert store.head("model.safetensors").size_bytes == size_bytes
        body, meta = store.get("model.safetensors", max_size_bytes=size_bytes)
        assert body == server.objects["m/model.safetensors"]
        assert meta.size_bytes == size_bytes
        with pytest.raises(dos.errors.CorruptDataError, match="at most"):
            store.get("model.safetensors", max_size_bytes=size_bytes - 1)


@ALL
@pytest.mark.parametrize("stray", ["m//README.md", "m/./a", "m/../a", "m/a//b"])
def test_a_key_with_an_empty_segment_hides_no_other(transport: str, stray: str) -> None:
    with Weights(keys=("m/-first", stray, "m/zlast")) as server:
        assert server.load(transport)
        store = open_store("s3://b/m", server.options(transport))
        listed = [meta.key for meta in store.list()]
        assert listed == sorted(key.removeprefix("m/") for key in server.objects)


def test_without_boto3_a_key_with_an_empty_segment_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Weights(keys=("m//README.md",)) as server:
        store = open_store("s3://b/m", server.options())
        monkeypatch.setattr(store, "_over_boto3", None)
        with pytest.raises(UnsupportedError, match="fsspec"):
            list(store.list())
