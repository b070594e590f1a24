"""One S3 request of each kind, and what it carried."""

from __future__ import annotations

from collections.abc import Mapping

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.stores import open_store
from dcp_objstore.stores.protocol import CopySource
from dcp_objstore.stores.ranges import read_range
from tests.support.servers import Bucket
from tests.support.tampering import Asked, TamperingProxy

PART = 5 * MIB
ONCE = TransferConfig(max_retries=0)


def requests_of(bucket: Bucket, more: Mapping[str, object]) -> dict[str, Asked]:
    """What each kind of request carried, by its kind."""
    with TamperingProxy(bucket.storage_options) as proxy:
        store = open_store(bucket.url, {**proxy.storage_options, **more}, ONCE)
        store.put("one", b"one")
        parts = iter([bytes(PART), b"last"])
        store.put_stream("many", parts, part_size_bytes=PART, max_concurrency=1)
        read_range(store, "many", 0, PART)
        assert store.get("one", max_size_bytes=10)[0] == b"one"
        assert {meta.key for meta in store.list()} - {"copy"} == {"one", "many"}
        source = CopySource(bucket.at("one"), 0, 3, store.head("one").version)
        store.copy("copy", [source], part_size_bytes=PART, max_concurrency=1, moved=lambda _: None)
        store.delete("one")
        asked = proxy.asked
    kinds = ["put", "begin", "part", "part", "complete", "range", "get", "list", "head"]
    methods = ["PUT", "POST", "PUT", "PUT", "POST", "GET", "GET", "GET", "HEAD"]
    kinds += ["begin copy", "copied part", "source", "complete copy", "delete"]
    methods += ["POST", "PUT", "HEAD", "POST", "DELETE"]
    assert [one.method for one in asked] == methods
    assert asked[10].headers["x-amz-copy-source-if-match"] == source.version.e_tag
    return dict(zip(kinds, asked, strict=True))


def carrying(found: Mapping[str, Asked], header: str) -> set[str]:
    return {kind for kind, asked in found.items() if header in asked.headers}
