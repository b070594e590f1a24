"""Every setting for S3 reaches the wire, on every request that it concerns, and on no other."""

from __future__ import annotations

import base64
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import ConfigError, CredentialsError, DcpObjstoreError
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.clients import make_filesystems
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.gcs.options import GcsOptions
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.protocol import IfAbsent
from dcp_objstore.stores.s3.endpoint import s3_checksum, s3_server
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.s3.s3fs import S3Filesystems, make_s3fs
from dcp_objstore.stores.s3.upload import Checksums, checksums_for
from dcp_objstore.stores.urls import parse_url
from tests.support.s3_requests import carrying, requests_of
from tests.support.scripted import Answer, RawServer, ScriptedServer
from tests.support.tampering import TamperingProxy

PART = 5 * MIB
OF_AWSCRT = ("CRC32C", "CRC64NVME")
HAS_AWSCRT = importlib.util.find_spec("awscrt") is not None
NATIVE = [("native", "CRC64NVME"), ("native", "SHA256")]
BOTO3 = [("boto3", name) for name in ("CRC32", "CRC32C", "CRC64NVME", "SHA256")]
ONCE = TransferConfig(max_retries=0)


def options_of(chosen: tuple[str, str]) -> dict[str, object]:
    transport, algorithm = chosen
    return {"transport": transport, "s3_additional_kwargs": {"ChecksumAlgorithm": algorithm}}


def choice(chosen: tuple[str, str]) -> dict[str, object]:
    """The options for a transport and an algorithm, if what it takes is installed."""
    if chosen[0] == "boto3" and chosen[1] in OF_AWSCRT:
        pytest.importorskip("awscrt")
    return options_of(chosen)


TRANSPORTS = pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])


@pytest.mark.backends("seaweed")
@TRANSPORTS
def test_without_settings_a_compatible_server_gets_plain_unsigned_bodies(bucket, transport):
    found = requests_of(bucket, {"transport": transport})
    assert found["put"].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    own = {"amz-sdk-invocation-id", "amz-sdk-request"}  # of botocore
    for kind, asked in found.items():
        extra = {name for name in asked.headers if name.startswith(("x-amz-", "amz-"))}
        extra -= {name for name in extra if name.startswith("x-amz-copy-source")}
        assert extra <= {"x-amz-content-sha256", "x-amz-date", *own}, kind
    found = requests_of(bucket, {"transport": transport, "sign_payload": True})
    assert len(found["put"].headers["x-amz-content-sha256"]) == 64
    assert len(found["part"].headers["x-amz-content-sha256"]) == 64


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("chosen", [*NATIVE, ("boto3", "SHA256"), ("fsspec", "CRC32")])
def test_a_checksum_goes_with_every_body(bucket, chosen):
    algorithm = chosen[1]
    found = requests_of(bucket, options_of(chosen))
    assert carrying(found, f"x-amz-checksum-{algorithm.lower()}") == {"put", "part"}
    assert found["begin"].headers["x-amz-checksum-algorithm"] == algorithm
    # The store makes its own of what it copies.
    assert "x-amz-checksum-algorithm" not in found["begin copy"].headers
    assert found["put"].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("chosen", [("native", "CRC64NVME"), ("boto3", "CRC32")])
def test_a_body_damaged_on_its_way_is_refused_where_a_checksum_goes_with_it(bucket, chosen):
    def store(algorithm: str) -> ObjectStore:
        options = {**proxy.storage_options, **options_of((chosen[0], algorithm))}
        return open_store(bucket.url, options, ONCE)

    with TamperingProxy(bucket.storage_options) as proxy:
        proxy.damage = lambda asked: asked.method == "PUT"
        with pytest.raises(DcpObjstoreError):
            store(chosen[1]).put("k", b"body")
        with pytest.raises(DcpObjstoreError):
            parts = iter([bytes(PART), b"last"])
            store(chosen[1]).put_stream("k", parts, part_size_bytes=PART, max_concurrency=1)
        assert bucket.keys() == []
        store("none").put("k", b"body")  # nobody sees it before it is loaded
        assert bucket.get("k") != b"body"


@pytest.mark.parametrize("chosen", BOTO3)
def test_boto3_sends_the_checksum_of_what_it_sends_and_the_store_keeps_it(bucket, chosen):
    """Empty, joined of several buffers, and in parts; against botocore's own of the same bytes."""
    store = open_store(bucket.url, {**bucket.storage_options, **choice(chosen)}, ONCE)
    store.put("empty", b"")
    store.put("joined", [b"one", b"", b"two" * 40_000])
    pieces = [b"x" * 1000, b"y" * PART, b"z" * 3]
    store.put_stream("parts", iter(pieces), part_size_bytes=PART, max_concurrency=2)
    algorithm = chosen[1]
    client = bucket.client()
    for key, body in (("empty", b""), ("joined", b"one" + b"two" * 40_000)):
        assert bucket.get(key) == body
        theirs = client.put_object(
            Bucket=bucket.name, Key="of-botocore", Body=body, ChecksumAlgorithm=algorithm
        )
        kept = client.head_object(
            Bucket=bucket.name, Key=bucket.prefix + key, ChecksumMode="ENABLED"
        )
        wanted = theirs.get(f"Checksum{algorithm}")
        assert wanted is None or kept.get(f"Checksum{algorithm}", wanted) == wanted
    assert bucket.get("parts") == b"".join(pieces)
    assert bucket.uploads() == []


def test_aws_gets_a_checksum_and_other_servers_only_where_it_is_asked_for():
    asked = S3Options(checksum_algorithm="SHA256")
    off = S3Options(checksum_algorithm="none")
    for aws in (
        None,
        "https://s3.eu-west-1.amazonaws.com",
        "https://vpce-1.s3.us-east-1.vpce.amazonaws.com",
        "https://s3.cn-north-1.amazonaws.com.cn",
    ):
        assert s3_checksum(S3Options(), aws) == "CRC64NVME"
        assert s3_checksum(asked, aws) == "SHA256"
        assert s3_checksum(off, aws) is None
    for other in (
        "http://127.0.0.1:9000",
        "https://account.r2.cloudflarestorage.com",
        "https://s3.amazonaws.com.example.org",
    ):
        assert s3_checksum(S3Options(), other) is None
        assert s3_checksum(asked, other) == "SHA256"


def test_checksums_are_those_that_are_known():
    """CRC: the check values of the catalogue of parametrised CRC algorithms; SHA-256: FIPS 180."""
    views = [memoryview(b"1234"), memoryview(b""), memoryview(b"56789")]
    known = {
        "CRC32": "cbf43926",
        "CRC32C": "e3069283",
        "CRC64NVME": "ae8b14860a799888",
        "SHA256": "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
    }
    for algorithm, digest in known.items():
        if algorithm in OF_AWSCRT and not HAS_AWSCRT:
            continue
        expected = base64.b64encode(bytes.fromhex(digest)).decode()
        assert Checksums(algorithm).of(views) == {f"Checksum{algorithm}": expected}
    assert Checksums(None).of(views) == Checksums(None).beginning == {}


def test_a_checksum_that_a_transport_cannot_send_is_refused_with_what_to_do(monkeypatch):
    def opened(transport: str, algorithm: str) -> ObjectStore:
        return open_store("s3://b", {**KEY, **options_of((transport, algorithm))})

    for algorithm in ("CRC32", "CRC32C"):
        with pytest.raises(ConfigError, match="transport 'boto3'"):
            opened("native", algorithm)
    for missing_or_old in (None, SimpleNamespace(checksums=None)):
        monkeypatch.setitem(sys.modules, "awscrt", missing_or_old)
        assert Checksums("CRC32").beginning
        for algorithm in OF_AWSCRT:
            with pytest.raises(ConfigError, match=r"pip install 'botocore\[crt\]'"):
                Checksums(algorithm)


def test_boto3_sends_aws_a_checksum_by_default_where_it_can(monkeypatch):
    other = "http://127.0.0.1:9000"
    by_default = {"ChecksumAlgorithm": "CRC64NVME"} if HAS_AWSCRT else {}
    assert checksums_for(S3Options(), None).beginning == by_default
    assert checksums_for(S3Options(), other).beginning == {}
    assert checksums_for(S3Options(checksum_algorithm="none"), None).beginning == {}
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "sha256")
    assert checksums_for(parse(S3Options, {}), other).beginning == {"ChecksumAlgorithm": "SHA256"}
    monkeypatch.delenv("AWS_CHECKSUM_ALGORITHM")
    monkeypatch.setitem(sys.modules, "awscrt", None)
    assert checksums_for(S3Options(), None).beginning == {}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[RawServer]:
    """An HTTP proxy that sends nothing on: it tells where requests were to go."""
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with RawServer(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n") as server:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://{server.address}")
        yield server


KEY = {"key": "k", "secret": "s", "region": "eu-west-1"}
EXPRESS = "name--euw1-az2--x-s3"


@pytest.mark.parametrize(
    ("url", "options", "line"),
    [
        ("s3://bkt/x", {"addressing_style": "auto"}, "CONNECT bkt.s3.eu-west-1.amazonaws.com:443"),
        ("s3://bkt/x", {"addressing_style": "path"}, "CONNECT s3.eu-west-1.amazonaws.com:443"),
        (
            f"s3://{EXPRESS}/x",
            {},
            f"CONNECT {EXPRESS}.s3express-euw1-az2.eu-west-1.amazonaws.com:443",
        ),
        (
            "s3://bkt/x",
            {"endpoint_url": "http://s3.invalid", "addressing_style": "virtual"},
            "PUT http://bkt.s3.invalid/x/key",
        ),
    ],
)
def test_the_bucket_is_in_the_host_or_in_the_path(gate, url, options, line):
    with pytest.raises(DcpObjstoreError):
        open_store(url, {**KEY, **options}, ONCE).put("key", b"body")
    head = gate.heads[0]
    assert head.startswith(f"{line} ")
    host = line.removeprefix("CONNECT ").removeprefix("PUT http://").split("/")[0]
    assert f"\r\nhost: {host}\r\n" in head.lower()


@pytest.mark.parametrize(
    ("region", "variable", "host"),
    [
        ("cn-north-1", "", "s3.cn-north-1.amazonaws.com.cn"),
        ("us-iso-east-1", "", "s3.us-iso-east-1.c2s.ic.gov"),
        ("us-gov-west-1", "", "bkt.s3.us-gov-west-1.amazonaws.com"),
        ("us-gov-west-1", "AWS_USE_FIPS_ENDPOINT", "s3-fips.us-gov-west-1.amazonaws.com"),
        ("us-east-2", "AWS_USE_DUALSTACK_ENDPOINT", "s3.dualstack.us-east-2.amazonaws.com"),
    ],
)
def test_aws_is_asked_at_the_server_that_region_and_variables_ask_for(
    gate, monkeypatch, region, variable, host
):
    if variable:
        monkeypatch.setenv(variable, "TRUE")
    with pytest.raises(DcpObjstoreError):
        open_store("s3://bkt/x", {**KEY, "region": region}, ONCE).put("key", b"body")
    assert gate.heads[0].startswith(f"CONNECT {host}:443 ")


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("use_fips_endpoint = true", "CONNECT s3-fips.us-east-1.amazonaws.com:443"),
        (
            "endpoint_url = http://oss.test\ns3 =\n    addressing_style = virtual",
            "PUT http://bkt.oss.test/x/key",
        ),
    ],
)
@pytest.mark.parametrize("transport", ["native", "boto3"])
def test_a_profile_says_which_server_and_where_the_bucket_is_named(
    gate, tmp_path, settings, line, transport
):
    keys = "aws_access_key_id = a\naws_secret_access_key = b\nregion = us-east-1"
    (tmp_path / "config").write_text(f"[profile oss]\n{keys}\n{settings}\n")
    with pytest.raises(DcpObjstoreError):
        open_store("s3://bkt/x", {"profile": "oss", "transport": transport}, ONCE).put("key", b"x")
    assert gate.heads[0].startswith(f"{line} ")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_no_proxy_is_asked_where_the_environment_says_none(gate, monkeypatch, host):
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(DcpObjstoreError):
        open_store("s3://bkt/x", {**KEY, "endpoint_url": f"http://{host}:1"}, ONCE).put("key", b"x")
    assert gate.heads == []


def test_settings_of_another_tool_on_object_store_do_not_count(monkeypatch):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    monkeypatch.setenv("AWS_S3_EXPRESS", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    with ScriptedServer(lambda *_: Answer(200, {"ETag": '"e"'}, b"")) as server:
        store = open_store("s3://bkt/x", {**KEY, "endpoint_url": server.endpoint_url}, ONCE)
        store.put("key", b"x", precondition=IfAbsent())
        ((method, target, headers),) = server.requests
    assert (method, target) == ("PUT", "/bkt/x/key")
    sent = {name.lower(): value for name, value in headers.items()}
    assert sent["if-none-match"] == "*"
    assert "authorization" in sent


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("name--x-s3", {}, "no zone"),
        (EXPRESS, {"endpoint_url": "https://s3.eu-west-1.amazonaws.com"}, "leave out endpoint_url"),
    ],
)
def test_a_directory_bucket_that_cannot_be_reached_is_refused_without_a_request(
    gate, name, options, says
):
    with pytest.raises(ConfigError, match=says):
        open_store(f"s3://{name}/x", {**KEY, **options}, ONCE).put("key", b"body")
    assert gate.heads == []


ALL = pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
KEYS = {"key": "a", "secret": "b"}


@pytest.mark.backends("moto")
@ALL
def test_the_environment_seals_pays_and_checks_over_every_transport(bucket, monkeypatch, transport):
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "key-1")
    monkeypatch.setenv("AWS_SSE_BUCKET_KEY_ENABLED", "true")
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "SHA256")
    found = requests_of(bucket, {"transport": transport})
    writes = {"put", "begin", "begin copy"}
    assert carrying(found, "x-amz-server-side-encryption") == writes
    for kind in writes:
        headers = found[kind].headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
        assert headers["x-amz-server-side-encryption-bucket-key-enabled"] == "true"
    assert carrying(found, "x-amz-checksum-sha256") == {"put", "part"}
    assert carrying(found, "x-amz-request-payer") == set(found)
    assert not any(asked.signed_url for asked in found.values())  # it could not be there
    # Options count before the environment.
    extra = {"ServerSideEncryption": "aws:kms:dsse", "SSEKMSKeyId": "key-2"}
    found = requests_of(bucket, {"transport": transport, "s3_additional_kwargs": extra})
    for kind in writes:
        headers = found[kind].headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms:dsse"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SERVER_SIDE_ENCRYPTION", "sse-c"),
        ("AWS_SSE_KMS_KEY_ID", "key-1"),
        ("AWS_SSE_BUCKET_KEY_ENABLED", "perhaps"),
        ("AWS_SSE_BUCKET_KEY_ENABLED", "true"),
    ],
)
@ALL
def test_encryption_that_would_not_take_place_is_refused(monkeypatch, transport, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        open_store("s3://bucket", {**KEYS, "transport": transport})
    if name == "AWS_SSE_KMS_KEY_ID":
        extra = {"ServerSideEncryption": "AES256"}
        with pytest.raises(ConfigError, match=name):
            open_store(
                "s3://bucket", {**KEYS, "transport": transport, "s3_additional_kwargs": extra}
            )
    monkeypatch.setenv(name, "")
    assert parse(S3Options, KEYS).sse is None


@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL"]
)
@ALL
def test_the_endpoint_of_the_environment_may_hold_no_password_and_is_known(
    monkeypatch, transport, name
):
    scheme = "s3" if name.startswith("AWS") else "gs"
    if (scheme, transport) == ("gs", "boto3"):
        pytest.skip("boto3 carries S3")
    options = {"anon": True, "transport": transport}
    monkeypatch.setenv(name, "http://u:SECRET@127.0.0.1:1")
    with pytest.raises(ConfigError, match="without credentials") as caught:
        open_store(f"{scheme}://bucket", options)
    assert "SECRET" not in str(caught.value)
    monkeypatch.setenv(name, "http://127.0.0.1:1/")
    found: Any = open_store(f"{scheme}://bucket", options)
    assert found.endpoint_url == "http://127.0.0.1:1"


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize("transport", ["native", "fsspec"])
@pytest.mark.parametrize("with_scheme", [True, False])
def test_an_emulator_of_gcs_is_asked_where_googles_variable_names_one(
    monkeypatch, transport, with_scheme
):
    with ScriptedServer(lambda *_: Answer(404, {}, b"")) as server:
        named = server.endpoint_url if with_scheme else server.endpoint_url.partition("://")[2]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", named)
        store = open_store("gs://bucket/x", {"transport": transport}, ONCE)
        assert store.endpoint_url == server.endpoint_url  # type: ignore[attr-defined]
        with pytest.raises(DcpObjstoreError):
            store.head("k")
        assert server.requests
        assert not any("Authorization" in headers for _, _, headers in server.requests)
        del server.requests[:]
        if transport == "native":  # gcsfs trades a token for credentials first
            with pytest.raises(DcpObjstoreError):
                open_store("gs://bucket/x", {"token": "t"}, ONCE).head("k")
            assert all("Bearer t" in str(headers) for _, _, headers in server.requests)


@pytest.mark.parametrize(
    ("environment", "options", "found"),
    [
        ({}, {}, {"requester_pays": False, "sse": None, "region": None, "verify": True}),
        ({"AWS_REQUEST_PAYER": "Requester"}, {}, {"requester_pays": True}),
        ({"AWS_REQUEST_PAYER": "TRUE"}, {}, {"requester_pays": True}),
        ({"AWS_REQUEST_PAYER": "false"}, {}, {"requester_pays": False}),
        ({}, {"requester_pays": True}, {"requester_pays": True}),
        ({"AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"}, {}, {"region": "a"}),
        ({"AWS_DEFAULT_REGION": "b"}, {}, {"region": "b"}),
        ({"AWS_REGION": "a"}, {"region": "c"}, {"region": "c"}),
        ({"AWS_CA_BUNDLE": __file__}, {}, {"verify": __file__}),
        ({"AWS_CA_BUNDLE": __file__}, {"verify": False}, {"verify": False}),
        ({"AWS_CA_BUNDLE": "/nowhere"}, {"verify": __file__}, {"verify": __file__}),
        (
            {"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms", "AWS_SSE_BUCKET_KEY_ENABLED": "y"},
            {"ServerSideEncryption": "aws:kms", "BucketKeyEnabled": False},
            {"sse_bucket_key": False},
        ),
        *(
            (
                {"AWS_SSE_BUCKET_KEY_ENABLED": text},
                {"ServerSideEncryption": "aws:kms"},
                {"sse_bucket_key": is_on},
            )
            for is_on, texts in ((True, "1 true On yes y"), (False, "0 false off NO n"))
            for text in texts.split()
        ),
        ({"AWS_SSE_BUCKET_KEY_ENABLED": "off"}, {}, {"sse_bucket_key": None}),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, {}, {"sse": "AES256"}),
        ({"AWS_CHECKSUM_ALGORITHM": "crc32c"}, {}, {"checksum_algorithm": "CRC32C"}),
    ],
)
def test_the_environment_completes_the_options_and_never_replaces_them(
    monkeypatch, environment, options, found
):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sealing = {name: value for name, value in options.items() if name[0].isupper()}
    given = {name: value for name, value in options.items() if name not in sealing}
    settings = parse(S3Options, {**given, "s3_additional_kwargs": sealing})
    assert {name: getattr(settings, name) for name in found} == found


PROFILE = Credentials("a profile", endpoint_url="http://of.profile", region="of-profile")


@pytest.mark.parametrize(
    ("settings", "profile", "server"),
    [
        (S3Options(), Credentials(""), (None, "us-east-1")),
        (S3Options(), PROFILE, ("http://of.profile", "of-profile")),
        (S3Options(endpoint_url="http://x", region="r"), PROFILE, ("http://x", "r")),
        (S3Options(endpoint_url="x:9"), Credentials(""), ("https://x:9", "us-east-1")),
        (S3Options(endpoint_url="x", use_ssl=False), Credentials(""), ("http://x", "us-east-1")),
        (S3Options(region="mx-central-1"), Credentials(""), (None, "mx-central-1")),
    ],
)
def test_the_server_is_that_of_the_options_then_of_the_profile_then_aws(settings, profile, server):
    assert s3_server(settings, profile) == server


def test_a_region_that_aws_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="AWS has no server for the region a_b"):
        s3_server(S3Options(region="a_b"), Credentials(""))


class Kept(SimpleNamespace):
    """Keeps its options, in the place of a filesystem of s3fs."""

    req_kw: ClassVar[dict[str, str]] = {}


def test_s3fs_gets_every_setting_and_waits_longer_for_a_write(monkeypatch):
    config = TransferConfig(
        request_timeout_seconds=77,
        connect_timeout_seconds=7,
        upload_concurrency=3,
        download_concurrency=5,
    )

    def made(**settings: Any) -> S3Filesystems:
        return make_s3fs(Kept, parse_url("s3://b"), S3Options(**settings), config)

    plain = {"endpoint_url": "x", "requester_pays": True}
    keys = {"key": "k", "secret": "s", "token": "t"}
    both = made(**plain, **keys, use_ssl=False, region="r", verify="/ca", sse="AES256")
    assert both.endpoint_url == "http://x"
    for fs, seconds in ((both.read, 30), (both.write, 77)):
        sent = vars(fs).pop("config_kwargs")
        assert vars(fs) == {
            **plain,
            **keys,
            "endpoint_url": "http://x",
            "anon": False,
            "profile": None,
            "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
            "client_kwargs": {"verify": "/ca", "region_name": "r"},
            "skip_instance_cache": True,
        }
        assert (sent["connect_timeout"], sent["read_timeout"]) == (7, seconds)
        assert (sent["max_pool_connections"], sent["retries"]) == (8, {"total_max_attempts": 1})
    # What the environment holds counts only where nothing else is named.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "line\nbreak")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    for named in (keys, {"anon": True}, {"profile": "p"}):
        assert made(**named).read.client_kwargs == {"verify": None, "region_name": None}
    with pytest.raises(CredentialsError, match="line break"):
        made()


@pytest.mark.parametrize(
    ("options", "payer"),
    [
        ({"requester_pays": "other"}, "other"),
        ({"requester_pays": True, "project": "mine"}, "mine"),
        ({"requester_pays": "mine", "project": "mine"}, "mine"),
        ({}, None),
    ],
)
def test_gcsfs_names_the_project_that_pays(options, payer):
    given = {"anon": True, "endpoint_url": "http://127.0.0.1:1", **options}
    fs = make_filesystems(parse_url("gs://bucket"), given, TransferConfig()).read
    assert fs._get_params({}).get("userProject") == payer == parse(GcsOptions, options).payer
    assert ("project" in fs.storage_options) == ("project" in options)


def test_gcsfs_gets_every_setting_that_it_has():
    config = TransferConfig(request_timeout_seconds=77, connect_timeout_seconds=7)
    url = parse_url("gs://bucket")
    given = {"token": "google_default", "anon": True, "project": "p", "endpoint_url": "x"}
    made = make_filesystems(url, given, config)
    assert made.endpoint_url == "https://x"
    assert make_filesystems(url, given, config).read is not made.read
    options = dict(made.read.storage_options)
    time_out = options.pop("requests_timeout")
    assert (time_out.total, time_out.sock_connect) == (77, 7)
    assert options == {
        "token": "anon",
        "project": "p",
        "endpoint_url": "https://x",
        "requester_pays": False,
    }
    with pytest.raises(ConfigError, match="no 'verify'"):
        make_filesystems(url, {**given, "verify": False}, config)
