"""What boto3 is made to send, and what becomes of failures that only it meets."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, InputError, StoreUnavailableError, UploadLostError
from dcp_objstore.stores import IfAbsent, IfVersion, Version, open_store
from dcp_objstore.stores.ranges import read_range
from tests.support.scripted import Scripted

ONCE = TransferConfig(
    max_retries=0, connect_timeout_seconds=5, request_timeout_seconds=20, transport="boto3"
)
RANGE = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    """One for all tests here, whose clients are then made once."""
    with Scripted() as found:
        yield found


def test_http_where_tls_is_and_the_reverse_say_so(scripted):
    options = scripted.spec(ONCE).storage_options
    assert options is not None
    endpoint = str(options["endpoint_url"]).replace("http://", "https://")
    with pytest.raises(ConfigError, match="http://"):
        open_store("s3://bucket/run", {**options, "endpoint_url": endpoint}, ONCE).head("k")


# --- retries


def test_no_retry_begins_after_the_retry_timeout(scripted):
    scripted.answer = lambda *_: (503, {}, b"")
    config = TransferConfig(max_retries=5, retry_timeout_seconds=0, transport="boto3")
    store = scripted.store(config)
    before = len(scripted.requests)
    with pytest.raises(StoreUnavailableError):
        store.head("k")
    assert len(scripted.requests) == before + 1


def test_a_body_that_breaks_off_is_asked_for_again(scripted):
    data = bytes(range(100))
    wanted: list[str] = []
    first = len(scripted.requests)

    def answer(method: str, target: str, nth: int) -> tuple[int, dict[str, str], bytes]:
        headers = scripted.requests[-1][2]
        wanted.append(headers["Range"])
        start, end = (int(n) for n in headers["Range"].removeprefix("bytes=").split("-"))
        body = data[start : end + 1]
        given = {"Content-Range": f"bytes {start}-{end}/100", "Content-Length": str(len(body))}
        broken = len(scripted.requests) - first == 1
        return 206, {**RANGE, **given}, body[:50] if broken else body

    scripted.answer = answer
    store = scripted.store(TransferConfig(max_retries=2, transport="boto3"))
    assert read_range(store, "k", 0, 100) == data
    assert wanted == ["bytes=0-99", "bytes=50-99"]  # from the byte where it broke


# --- what is sent


def test_settings_reach_the_requests(scripted):
    scripted.answer = lambda *_: (200, RANGE, b"")

    def sent(**options: object) -> dict[str, str]:
        scripted.store(ONCE, **options).put("k", b"x")
        method, target, headers = scripted.requests[-1]
        assert (method, target) == ("PUT", "/bucket/run/k")
        return {name.lower(): value for name, value in headers.items()}

    plain = sent()
    assert plain["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert not any("checksum" in name or name == "content-md5" for name in plain)
    assert "x-amz-request-payer" not in plain
    assert len(sent(sign_payload=True)["x-amz-content-sha256"]) == 64
    assert sent(requester_pays=True)["x-amz-request-payer"] == "requester"
    encryption = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "key-1",
        "BucketKeyEnabled": True,
    }
    sealed = sent(s3_additional_kwargs=encryption)
    assert sealed["x-amz-server-side-encryption"] == "aws:kms"
    assert sealed["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
    assert sealed["x-amz-server-side-encryption-bucket-key-enabled"] == "true"
    checked = sent(s3_additional_kwargs={"ChecksumAlgorithm": "SHA256"})
    assert checked["x-amz-checksum-sha256"] == b64encode(sha256(b"x").digest()).decode()
    assert "authorization" not in sent(key=None, secret=None, anon=True)
    assert "/eu-west-3/s3/" in sent(region="eu-west-3")["authorization"]
    assert "x-amz-security-token" in sent(token="t")


def test_preconditions_become_headers(scripted):
    scripted.answer = lambda *_: (200, RANGE, b"")
    store = scripted.store(ONCE)
    store.put("k", b"x", precondition=IfAbsent())
    assert scripted.requests[-1][2]["If-None-Match"] == "*"
    store.put("k", b"x", precondition=IfVersion(Version('"e"')))
    assert scripted.requests[-1][2]["If-Match"] == '"e"'
    with pytest.raises(InputError, match="e_tag"):
        store.put("k", b"x", precondition=IfVersion(Version(None, "7")))


# --- a completion whose first answer was lost


def test_an_upload_that_the_store_does_not_know_is_said_to_be_lost(scripted):
    """SeaweedFS and moto answer a second completion as the first; others say NoSuchUpload."""

    def answer(method: str, target: str, nth: int) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in target:
            name = b"InitiateMultipartUploadResult"
            return 200, {}, b"<%b><UploadId>u</UploadId></%b>" % (name, name)
        if method == "PUT":
            return 200, {"ETag": '"e"'}, b""
        return 404, {}, b"<Error><Code>NoSuchUpload</Code><Message>m</Message></Error>"

    scripted.answer = answer
    with pytest.raises(UploadLostError, match="lost this upload"):
        scripted.store(ONCE).put_stream(
            "k", iter([bytes(5 << 20)]), part_size_bytes=5 << 20, max_concurrency=1
        )
