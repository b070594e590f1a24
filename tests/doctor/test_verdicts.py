"""What each check says of each kind of error and of each lie of a store, without a server."""

from __future__ import annotations

import importlib.metadata
import json
import secrets
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dcp_objstore import errors
from dcp_objstore.config import TransferConfig
from dcp_objstore.doctor.access import (
    Access,
    lifecycle,
    unfinished,
    versions,
    working_directory,
)
from dcp_objstore.doctor.checks import Check, failure, ok
from dcp_objstore.doctor.objects import ObjectChecks
from dcp_objstore.doctor.runner import CONFIG, findings, table
from dcp_objstore.doctor.scratch import Scratch
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore, UnfinishedUpload
from dcp_objstore.stores.urls import parse_url
from dcp_objstore.stores.wrappers import WrappedStore
from tests.support.wrapped_stores import ChangingStore, Fault, FaultStore, Lacking

OPTIONS: dict[str, dict[str, object]] = {
    "s3": {"key": "key", "secret": "secret"},
    "gs": {"anon": True},
    "az": {"account_name": "account", "account_key": "c2VjcmV0"},
    "file": {},
}
BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
BUCKET, OBJECTS = "arn:aws:s3:::bucket", "arn:aws:s3:::bucket/run/*"
DELETE = (f"s3:DeleteObject on {OBJECTS}", "storage.objects.delete", f"{BLOBS}/delete")
# The rights of S3, GCS and Azure that each check needs.
RIGHTS: dict[str, tuple[str, str | None, str | None]] = {
    "put": (f"s3:PutObject on {OBJECTS}", "storage.objects.create", f"{BLOBS}/write"),
    "list": (f"s3:ListBucket on {BUCKET}", "storage.objects.list", f"{BLOBS}/read"),
    "read": (f"s3:GetObject on {OBJECTS}", "storage.objects.get", f"{BLOBS}/read"),
    "multipart": (
        f"s3:PutObject on {OBJECTS}",
        "storage.multipartUploads.create and storage.objects.create",
        f"{BLOBS}/write",
    ),
    "abort": (
        f"s3:AbortMultipartUpload on {OBJECTS}",
        "storage.multipartUploads.abort",
        None,
    ),
    "conditional put": (
        f"s3:PutObject and s3:GetObject on {OBJECTS}",
        "storage.objects.create, .get and .delete (to replace an object)",
        f"{BLOBS}/write",
    ),
    "delete": DELETE,
    "lifecycle": (f"s3:GetLifecycleConfiguration on {BUCKET}", None, None),
    "unfinished uploads": (
        f"s3:ListBucketMultipartUploads on {BUCKET} and s3:ListMultipartUploadParts on {OBJECTS}",
        None,
        None,
    ),
    "clean-up": DELETE,
}


def checks_of(url: str) -> list[Check]:
    spec = StoreSpec(url, OPTIONS[url.partition(":")[0]])
    return list(table(spec, ObjectChecks(spec)))


@pytest.mark.parametrize(("number", "scheme"), [(0, "s3"), (1, "gs"), (2, "az")])
def test_each_check_names_the_right_that_it_needs(number: int, scheme: str) -> None:
    url = parse_url(f"{scheme}://bucket/run")
    for check in checks_of(f"{scheme}://bucket/run"):
        found = failure(url, check, errors.PermissionDeniedError("denied"))
        assert found.status == ("not made" if check.kind == "rule" else "failed")
        right = RIGHTS[check.name][number] if check.name in RIGHTS else None
        if right is None:
            assert found.advice == "give the account of these credentials the right to do this"
        else:
            account = "" if scheme == "s3" else " on the bucket 'bucket' to this account"
            assert found.advice.partition(";")[0] == f"allow {right}{account}"
        assert ("sign_payload" in found.advice) == ((check.name, scheme) == ("put", "s3"))
    folder = failure(parse_url("file:///run"), check, errors.PermissionDeniedError("denied"))
    assert "read and write /run" in folder.advice


@pytest.mark.parametrize(
    ("kind", "word", "is_of_folders"),
    [
        (errors.BucketNotFoundError, "create the bucket 'bucket'", True),
        (errors.CredentialsError, "clock", True),
        (errors.CorruptDataError, "range requests", False),
        (errors.UnsupportedError, "cannot be used as a store", False),
        (errors.ObjectNotFoundError, "cannot be used as a store", True),
        (errors.StoreUnavailableError, "try again", True),
        (errors.UploadLostError, "try again", True),
        (errors.ConfigError, "--json", True),
        (errors.DcpObjstoreError, "--json", True),
    ],
)
def test_each_kind_of_error_has_its_advice(
    kind: type[errors.DcpObjstoreError], word: str, *, is_of_folders: bool
) -> None:
    put = checks_of("s3://bucket/run")[5]
    found = failure(parse_url("s3://bucket/run"), put, kind("it failed"))
    assert word in found.advice
    assert found.details == {"error": kind.__name__, "message": "it failed"}
    in_folder = failure(parse_url("file:///run"), put, kind("it failed"))
    assert ("that /run is a folder" in in_folder.advice) == is_of_folders
    assert (word in in_folder.advice) != is_of_folders


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://b", ("endpoint_url", "AWS_ENDPOINT_URL", "AWS_REGION")),
        ("gs://b", ("endpoint_url", "GOOGLE_BASE_URL")),
        ("az://b", ("account_name", "endpoint_url", "AZURE_STORAGE_ACCOUNT_NAME")),
        ("sftp://host/x", ("the host in the URL",)),
    ],
)
def test_the_advice_on_the_server_says_what_names_it(url: str, words: tuple[str, ...]) -> None:
    (endpoint,) = (check for check in checks_of("s3://b/x") if check.name == "endpoint")
    found = failure(parse_url(url), endpoint, errors.StoreUnavailableError("refused"))
    assert all(word in found.advice for word in words)
    assert ("AWS" in found.advice) == url.startswith("s3")


@pytest.mark.parametrize(
    ("kind", "scheme", "status"),
    [
        (errors.UnsupportedError, "s3", "not made"),
        (errors.UnsupportedError, "az", "not applicable"),
        (errors.StoreUnavailableError, "s3", "not made"),
        (errors.StoreUnavailableError, "az", "not made"),
    ],
)
def test_a_rule_that_cannot_be_read_is_not_a_failure(
    kind: type[errors.DcpObjstoreError], scheme: str, status: str
) -> None:
    for check in checks_of("s3://bucket/run"):
        if check.kind == "rule":
            found = failure(parse_url(f"{scheme}://bucket/run"), check, kind("why"))
            assert found == (status, "why", "", {})


def test_a_long_error_is_cut_and_an_answer_is_its_meaning_and_code() -> None:
    url, put = parse_url("s3://bucket/run"), checks_of("s3://bucket/run")[5]
    for length in (400, 401):
        words = "x" * (2 - length % 2) + " x" * ((length - 1) // 2)
        text = failure(url, put, errors.DcpObjstoreError(words))
        assert len(text.text) <= 400
        assert ("…" in text.text) == (length > 400)
    meaning = "the credentials do not allow this"
    denied, other = errors.PermissionDeniedError, errors.DcpObjstoreError
    for kind, message, code, shown in (
        (denied, f"{meaning}: a long story", "AccessDenied", f"{meaning}: 403 AccessDenied"),
        (denied, f"{meaning}: a long story", None, f"{meaning}: a long story"),
        (denied, "a long story", "AccessDenied", "a long story"),
        (other, "a long story", "Odd", "a long story"),
    ):
        error = kind(message)
        error.status, error.code = 403, code
        assert failure(url, put, error).text == shown


@pytest.mark.parametrize("scheme", ["s3", "gs", "gcs", "az", "azure", "abfs", "abfss"])
def test_a_folder_that_was_made_of_a_url_is_reported(tmp_path, monkeypatch, scheme):
    """By a program that takes `s3://bucket/run` for a local path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert working_directory().status == "ok"
    (tmp_path / f"{scheme}:" / "bucket").mkdir(parents=True)
    found = working_directory()
    assert (found.status, found.details) == ("warning", {"folders": [f"{scheme}:"]})
    assert str(tmp_path) in found.text


def test_the_versions_are_those_of_what_carries_requests(monkeypatch) -> None:
    packages = ("dcp-objstore", "torch", "obstore", "boto3", "fsspec", "s3fs", "gcsfs")
    present = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    found = versions()
    assert set(found.details) == {"python", *present.intersection(packages)}
    assert f"torch {importlib.metadata.version('torch')}" in found.text

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert set(versions().details) == {"python"}


@pytest.mark.parametrize(
    ("scheme", "text", "details", "region"),
    [
        ("s3", "key…, from storage_options", ("storage_options", "key…", None), "us-east-1"),
        ("gs", "anonymous", ("anonymous", None, None), None),
        ("az", "account, from storage_options", ("storage_options", None, "account"), None),
    ],
)
def test_the_credentials_and_the_server_are_named(
    scheme: str, text: str, details: Any, region: str | None
) -> None:
    options = {**OPTIONS[scheme], "endpoint_url": "http://127.0.0.1:1"}
    access = Access(StoreSpec(f"{scheme}://bucket/run", options, replace(CONFIG, max_retries=0)))
    found = access.credentials()
    assert (found.status, found.text) == ("ok", text)
    assert found.details == dict(zip(("source", "access_key", "account"), details, strict=True))
    vars(access)["_error"] = None  # as if it had answered
    where = "http://127.0.0.1:1" + (f", region {region}" if region else "")
    assert access.endpoint() == ok(where, endpoint_url="http://127.0.0.1:1", region=region)


@pytest.mark.parametrize(("given", "waited"), [(30.0, 10.0), (4.0, 4.0)])
def test_the_first_answer_decides_soon_and_no_request_is_sent_again(monkeypatch, given, waited):
    settings: list[object] = []

    def unavailable(spec: StoreSpec) -> ObjectStore:
        settings.append(spec.config)
        raise errors.StoreUnavailableError("away")

    monkeypatch.setattr(StoreSpec, "open", unavailable)
    config = replace(CONFIG, request_timeout_seconds=given)
    access = Access(StoreSpec("s3://bucket/run", OPTIONS["s3"], config))
    for check in (access.endpoint, access.bucket):
        with pytest.raises(errors.StoreUnavailableError):
            check()
    assert settings == [replace(config, request_timeout_seconds=waited, max_retries=0)]


def test_time_outs_are_shorter_than_those_of_a_save() -> None:
    usual = TransferConfig()
    for name in ("connect_timeout", "request_timeout", "stall_timeout", "retry_timeout"):
        assert getattr(CONFIG, f"{name}_seconds") < getattr(usual, f"{name}_seconds")
    assert CONFIG.max_retries < usual.max_retries


@pytest.mark.parametrize(
    ("verb", "fault", "error"),
    [
        ("list", errors.PermissionDeniedError, None),
        ("open_range", errors.PermissionDeniedError, None),
        ("open_range", errors.CorruptDataError, errors.ConfigError),
        ("list", errors.BucketNotFoundError, None),
        ("list", errors.CredentialsError, None),
        ("list", errors.StoreUnavailableError, errors.StoreUnavailableError),
    ],
)
def test_the_server_has_failed_unless_the_credentials_or_the_bucket_have(
    through, verb: str, fault: type[Exception], error: type[Exception] | None
) -> None:
    through(
        lambda store: FaultStore(
            store, lambda asked, *_: Fault("before", fault("said")) if asked == verb else None
        )
    )
    access = Access(StoreSpec("memory://bucket/run", {}, CONFIG))
    checks = {"endpoint": access.endpoint, "credentials": access.credentials}
    ended: dict[str, object] = {}
    for name, check in {**checks, "bucket": access.bucket}.items():
        try:
            ended[name] = check().status
        except errors.DcpObjstoreError as caught:
            ended[name] = type(caught)
    assert ended == {
        "endpoint": error or "ok",
        "credentials": fault if fault is errors.CredentialsError else "ok",
        "bucket": error or (fault if fault is not errors.PermissionDeniedError else "ok"),
    }


@pytest.mark.parametrize(
    ("scheme", "options", "is_unsigned"),
    [("s3", {}, True), ("s3", {"sign_payload": True}, False), ("gs", {}, False)],
)
def test_a_put_that_is_not_signed_is_said_to_be(
    monkeypatch, scheme: str, options: dict[str, object], *, is_unsigned: bool
) -> None:
    opened = StoreSpec.open
    here = StoreSpec(f"memory://{secrets.token_hex(6)}/run")
    monkeypatch.setattr(StoreSpec, "open", lambda _: opened(here))
    objects = ObjectChecks(StoreSpec(f"{scheme}://bucket/run", {**OPTIONS[scheme], **options}))
    assert ("unsigned" in objects.put().text) is is_unsigned
    assert objects.has_written


@pytest.mark.parametrize(("url", "prefix"), [("s3://b", ""), ("s3://b/run", "run/")])
def test_the_rule_that_is_advised_is_for_what_is_below_the_url(url: str, prefix: str) -> None:
    scratch = SimpleNamespace(around=SimpleNamespace(lifecycle_rules=list))
    advice = lifecycle(cast(Scratch, scratch), parse_url(url)).advice
    (rule,) = json.loads(shlex.split(advice.split("`")[1])[-1])["Rules"]
    assert rule["Filter"] == {"Prefix": prefix}
    advice = lifecycle(cast(Scratch, scratch), parse_url(url.replace("s3", "gs"))).advice
    (rule,) = json.loads(shlex.split(advice.split("`")[1])[1])["rule"]
    assert rule["condition"] == {"age": 2, **({"matchesPrefix": [prefix]} if prefix else {})}
    aborts = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}, "Status": "Enabled"}
    scratch = SimpleNamespace(around=SimpleNamespace(lifecycle_rules=lambda: [aborts]))
    found = lifecycle(cast(Scratch, scratch), parse_url(url))
    assert found == ok("the bucket removes unfinished uploads after 1 day", days=1)


def test_an_unfinished_upload_is_old_after_a_day() -> None:
    uploads = [
        UnfinishedUpload("step-1/x", "id", datetime.now(UTC) - timedelta(hours=hours), 5 * 1024)
        for hours in (23.9, 24.1, 99)
    ]
    scratch = SimpleNamespace(around=SimpleNamespace(list=lambda: uploads))
    assert unfinished(cast(Scratch, scratch), parse_url("s3://bucket/run")) == (
        "warning",
        "2 older than a day (10.00 KiB), billed but not visible",
        "`dcp-objstore sweep s3://bucket/run --yes` removes those of saves",
        {"old_uploads": 2, "old_bytes": 10240},
    )
    del uploads[1:]
    found = unfinished(cast(Scratch, scratch), parse_url("s3://bucket/run"))
    assert found == ok("none below the URL is older than a day")


# --- a store that lies


class Unlisting(WrappedStore):
    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return iter(())


class Undeleting(WrappedStore):
    def delete(self, key: str) -> None:
        pass


def flip(name: str, at: int) -> Callable[[ObjectStore], ObjectStore]:
    """Change one byte of an object when it is read."""

    def change(key: str, start: int, body: memoryview) -> None:
        if key.endswith(name) and start <= at < start + len(body):
            body[at - start] ^= 1

    return lambda store: ChangingStore(store, change)


def denying(verb: str, name: str) -> Callable[[ObjectStore], ObjectStore]:
    fault = Fault("before", errors.PermissionDeniedError("denied"))
    return lambda store: FaultStore(
        store, lambda asked, key, _: fault if (asked, key) == (verb, name) else None
    )


@pytest.mark.parametrize(
    ("wrapper", "wrong", "says"),
    [
        (lambda store: store, {}, ""),
        (Unlisting, {"list": "failed"}, "is not listed"),
        (Undeleting, {"delete": "failed", "clean-up": "failed"}, "still there"),
        (flip("put", 100), {"read": "failed"}, "differ"),
        (flip("put", 1499), {"read": "failed"}, "differ"),
        (flip("multipart", 5_242_880 + 999), {"multipart": "failed"}, "differ"),
        (denying("open_range", "put"), {"read": "failed"}, "denied"),
        (denying("open_range", "absent"), {"read": "failed"}, "no checkpoint yet"),
        (denying("open_range", "multipart"), {}, ""),
        (denying("head", "put"), {}, ""),
        (
            denying("put", "put"),
            {"put": "failed", **dict.fromkeys(("read", "abort"), "not made")},
            "denied",
        ),
        (
            lambda store: Lacking(store, "conditional_update"),
            {"conditional put": "warning"},
            "not replaced",
        ),
        (
            lambda store: Lacking(store, "conditional_create", "conditional_update"),
            {"conditional put": "failed"},
            "If-None-Match",
        ),
    ],
)
def test_each_lie_of_a_store_is_told_by_its_check(through, wrapper, wrong, says) -> None:
    through(wrapper)
    spec = StoreSpec(f"memory://{secrets.token_hex(6)}/run", {}, CONFIG)
    objects = ObjectChecks(spec)
    found = {finding.check: finding for finding in findings(spec, objects, table(spec, objects))}
    seen = {
        name: finding.status
        for name, finding in found.items()
        if finding.status in ("failed", "warning") or name in wrong
    }
    assert seen == wrong
    assert says in found[next(iter(wrong), "put")].text
    conditions = found["conditional put"]
    assert ("allow_unfenced=True" in conditions.advice) == (conditions.status == "failed")
    can = {"ok": (True, True), "warning": (True, False), "failed": (False, False)}
    names = ("conditional_create", "conditional_update")
    if conditions.status in can:
        assert conditions.details == dict(zip(names, can[conditions.status], strict=True))
    assert found["put"].text == "an object was written" or "put" in wrong
    left = found["clean-up"].details
    assert ("clean-up" in wrong) == bool(left) == ({"multipart", "put"} <= {*left.get("keys", ())})
    assert left.get("url", objects.scratch.spec.url) == objects.scratch.spec.url
    if left:
        assert found["clean-up"].advice == f"remove everything below {left['url']}"


@pytest.mark.parametrize("is_removed", [True, False])
def test_checks_that_are_stopped_remove_what_they_wrote_or_name_it(
    through, caplog, *, is_removed: bool
) -> None:
    through(lambda store: store if is_removed else Undeleting(store))
    objects = ObjectChecks(StoreSpec(f"memory://{secrets.token_hex(6)}/run", {}, CONFIG))
    objects.abandon()
    assert "scratch" not in vars(objects), "nothing was written yet"
    objects.put()
    objects.abandon()
    assert [*objects.scratch.store.list()] == [] or not is_removed
    assert ("put could not be removed" in caplog.text) is not is_removed
