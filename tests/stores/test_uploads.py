"""Orphaned multipart uploads are seen with their bytes and aborted; nobody else's are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from dcp_objstore.checkpoint.names import data_key, new_nonce
from dcp_objstore.doctor.access import covering_days, lifecycle_configuration
from dcp_objstore.errors import (
    BucketNotFoundError,
    PermissionDeniedError,
    UnsupportedError,
)
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import open_uploads
from tests.support.scripted import Scripted
from tests.support.servers import Bucket
from tests.support.unfinished_uploads import PART, begin_upload


@pytest.mark.backends("seaweed", "moto")
def test_uploads_are_listed_with_their_bytes_and_aborted(bucket):
    ours = f"step-1/{data_key(0, 0, new_nonce())}"
    begin_upload(bucket, ours, parts=2)
    begin_upload(bucket, "step-10/other #1")
    uploads = open_uploads(StoreSpec(bucket.url, bucket.storage_options))
    found = {one.key: one for one in uploads.list()}
    assert found.keys() == {ours, "step-10/other #1"}
    assert found[ours].size_bytes == 2 * len(PART)
    assert found[ours].initiated.tzinfo is not None
    below = uploads.below("step-1")
    (one,) = below.list()  # not step-10's
    assert one.key == ours.removeprefix("step-1/")
    below.abort(one)
    below.abort(one)  # somebody else may have been quicker
    assert below.list() == []
    assert bucket.uploads() == [f"{bucket.prefix}step-10/other #1"]


LISTED = b"""<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>
<Upload><Key>run/k</Key><UploadId>u</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>
<Upload><Key>other/k</Key><UploadId>v</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>
</ListMultipartUploadsResult>"""


def test_an_upload_that_ends_meanwhile_is_no_error_and_what_is_refused_is_one():
    """The server looks at no prefix, and each request but that for rules names who pays."""

    def answer(method: str, target: str, _nth: int) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in target:
            return 200, {"Content-Type": "application/xml"}, LISTED
        if "lifecycle" in target and wrong[1] == "NoSuchUpload":
            return 200, {}, b"<LifecycleConfiguration></LifecycleConfiguration>"
        status, code = wrong
        return status, {}, f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()

    with Scripted(answer) as scripted:
        uploads = open_uploads(scripted.spec(requester_pays=True))
        wrong = (404, "NoSuchUpload")
        (one,) = uploads.list()
        assert (one.key, one.upload_id, one.size_bytes) == ("k", "u", 0)
        uploads.abort(one)
        assert [method for method, *_ in scripted.requests] == ["GET", "GET", "DELETE"]
        assert all("requester" in headers.values() for _, _, headers in scripted.requests)
        assert uploads.lifecycle_rules() == ()
        for answered, expected in (
            ((403, "AccessDenied"), PermissionDeniedError),
            ((404, "NoSuchBucket"), BucketNotFoundError),
            ((501, "NotImplemented"), UnsupportedError),
        ):
            wrong = answered
            for ask in (uploads.list, partial(uploads.abort, one), uploads.lifecycle_rules):
                with pytest.raises(expected) as caught:
                    ask()
                assert caught.value.url == "s3://bucket/run"


def test_an_upload_of_more_parts_than_a_page_has_is_as_large_as_all_of_them():
    page = (
        "<ListPartsResult><IsTruncated>{more}</IsTruncated><NextPartNumberMarker>1"
        "</NextPartNumberMarker><Part><PartNumber>1</PartNumber><Size>{size}</Size></Part>"
        "</ListPartsResult>"
    )

    def answer(method: str, target: str, _nth: int) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in target:
            return 200, {"Content-Type": "application/xml"}, LISTED
        goes_on = "part-number-marker=1" in target
        return (
            200,
            {},
            page.format(more=str(not goes_on).lower(), size=4 if goes_on else 3).encode(),
        )

    with Scripted(answer) as scripted:
        (one,) = open_uploads(scripted.spec()).list()
    assert one.size_bytes == 7


def test_stores_that_have_none_say_so(monkeypatch):
    with pytest.raises(UnsupportedError, match="no multipart uploads"):
        open_uploads(StoreSpec("memory://x/y"))
    with pytest.raises(UnsupportedError, match="after a week"):
        open_uploads(StoreSpec("az://bucket/x", {"account_name": "a", "anon": True}))
    with pytest.raises(UnsupportedError, match="lifecycle rule"):
        open_uploads(StoreSpec("gs://bucket/x", {"anon": True}))
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'dcp-objstore\[s3\]'"):
        open_uploads(StoreSpec("s3://bucket/x", {"key": "k", "secret": "s"}))


# --- the bucket's lifecycle rule


@pytest.fixture
def ruled(bucket: Bucket) -> Iterator[StoreSpec]:
    """In a bucket that no other test looks at."""
    client = bucket.client()
    client.create_bucket(Bucket="with-rules")
    yield StoreSpec("s3://with-rules/run", bucket.storage_options)
    client.delete_bucket_lifecycle(Bucket="with-rules")


@pytest.mark.backends("moto")
def test_the_rule_that_is_advised_is_taken_and_found_and_others_stay(bucket, ruled):
    uploads, prefix = open_uploads(ruled), f"{ruled.parsed.prefix}/"
    client = bucket.client()
    other = {
        "ID": "logs",
        "Status": "Enabled",
        "Filter": {"Prefix": "logs/"},
        "Expiration": {"Days": 3},
    }
    client.put_bucket_lifecycle_configuration(
        Bucket="with-rules", LifecycleConfiguration={"Rules": [other]}
    )
    rules = uploads.lifecycle_rules()
    assert covering_days(rules, prefix) is None
    text = lifecycle_configuration("s3", prefix, rules)
    client.put_bucket_lifecycle_configuration(
        Bucket="with-rules", LifecycleConfiguration=json.loads(text)
    )
    rules = uploads.lifecycle_rules()
    assert covering_days(rules, prefix) == 2
    assert covering_days(rules, "elsewhere/") is None
    assert {rule["ID"] for rule in rules} == {"logs", "dcp-objstore-incomplete-uploads"}
    assert lifecycle_configuration("s3", prefix, rules).count("incomplete-uploads") == 1
    client.delete_bucket_lifecycle(Bucket="with-rules")
    assert uploads.lifecycle_rules() == ()


def rule(**changes: object) -> dict[str, object]:
    abort = {"DaysAfterInitiation": 7}
    return {"Status": "Enabled", "AbortIncompleteMultipartUpload": abort, **changes}


@pytest.mark.parametrize(
    ("rules", "days"),
    [
        ([], None),
        ([rule(Filter={})], 7),
        ([rule(Filter={"Prefix": ""})], 7),
        ([rule(Prefix="run/")], 7),
        ([rule(Filter={"And": {"Prefix": "run"}})], 7),
        ([rule(Filter={"Prefix": "run/step-1/"})], None),
        ([rule(Status="Disabled", Prefix="")], None),
        ([{"Status": "Enabled", "Prefix": "", "Expiration": {"Days": 1}}], None),
        ([rule(Prefix=""), rule(AbortIncompleteMultipartUpload={"DaysAfterInitiation": 3})], 3),
    ],
)
def test_which_rules_cover_a_run(rules, days):
    assert covering_days(rules, "run/") == days


def test_rule_for_gcs_is_in_its_own_form():
    (one,) = json.loads(lifecycle_configuration("gs", "run/"))["rule"]
    assert one["action"] == {"type": "AbortIncompleteMultipartUpload"}
    assert one["condition"] == {"age": 2, "matchesPrefix": ["run/"]}
