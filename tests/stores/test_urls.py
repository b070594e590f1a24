"""URLs and storage options: what is accepted, and what the error says otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dcp_objstore.errors import InvalidUrlError
from dcp_objstore.stores import StoreSpec, open_store
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.urls import parse_url


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket/a b%20c?d#e", "s3://bucket/a b%20c?d#e"),
        ("gs://my_bucket.example/x", "gs://my_bucket.example/x"),
        ("gcs://bucket/x", "gs://bucket/x"),
        ("file:///tmp/x/", "file:///tmp/x"),
        ("file://localhost/tmp/x", "file:///tmp/x"),
        ("file:///tmp/a%20b", "file:///tmp/a%20b"),
        ("memory://name/x", "memory://name/x"),
        *((f"{name}://box/run/", "az://box/run") for name in ("az", "azure", "abfs", "abfss")),
    ],
)
def test_urls_are_taken_literally_and_brought_to_one_form(url, normal):
    assert str(parse_url(url)) == normal
    assert StoreSpec(url).url == normal


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("bucket/key", "no scheme"),
        ("/tmp/x", "file:///path"),
        ("", "no scheme"),
        ("s4://bucket/x", "did you mean s3://?"),
        ("s3a://bucket/x", "did you mean s3://?"),
        ("minio://bucket/x", "did you mean s3://?"),
        ("gcss://bucket/x", "did you mean gcs://?"),
        ("flie:///x", "did you mean file://?"),
        ("http://host/x", "unknown scheme"),
        ("s3:/bucket/x", "write 's3://bucket/x'"),
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
        ("memory://", "names no store name"),
        ("s3://bucket//x", "empty"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a\nb", "control"),
        ("s3://buck et/x", "no bucket name"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/a/x", "alias"),
        ("file://relative/x", "file:///path"),
        ("file:///", "root of the file system"),
        ("file:/tmp/x", "write 'file:///tmp/x'"),
        ("https://b.s3.amazonaws.com/run/1?X-Amz-Signature=1", "write 's3://b/run/1'"),
        ("https://b.s3.eu-west-1.amazonaws.com", "write 's3://b'"),
        ("https://s3.eu-west-1.amazonaws.com/b/run/", "write 's3://b/run/'"),
        ("https://storage.googleapis.com/b/run", "write 'gs://b/run'"),
        ("https://account.blob.core.windows.net/b/run", "write 'az://b/run'"),
        ("https://example.com/b/run", "unknown scheme"),
        ("abfss://box@acct.dfs.core.windows.net/run", "az://box/run"),
        ("abfss://box@acct.dfs.core.windows.net/run", "'account_name': 'acct'"),
        ("wasbs://box/run", "did you mean az://?"),
        ("az:///run", "names no container"),
        ("az://box/a\\b", "backslash"),
    ],
)
def test_a_bad_url_is_refused_with_the_way_out(url, says):
    with pytest.raises(InvalidUrlError) as caught:
        open_store(url)
    assert says in str(caught.value)


def test_a_state_in_the_place_of_the_url_is_told_where_it_belongs():
    with pytest.raises(InvalidUrlError, match="state comes first"):
        open_store({"w": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("url", [Path("s3://bucket/x"), Path("/tmp/x"), None, 7, b"s3://bucket"])
def test_a_url_that_is_no_str_is_refused(url):
    with pytest.raises(InvalidUrlError, match="must be a str"):
        open_store(url)  # type: ignore[arg-type]


def test_credentials_inside_a_url_are_refused_and_not_repeated():
    for scheme in ("s3", "az"):
        with pytest.raises(InvalidUrlError, match="storage_options") as caught:
            open_store(f"{scheme}://AKIA:hunter2@bucket/x")
        assert "hunter2" not in str(caught.value)


def test_fsspec_spellings_mean_the_same():
    plain = parse(
        S3Options,
        {"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://e", "region": "r"},
    )
    nested = parse(
        S3Options,
        {
            "client_kwargs": {
                "aws_access_key_id": "k",
                "aws_secret_access_key": "s",
                "aws_session_token": "t",
                "endpoint_url": "http://e",
                "region_name": "r",
            }
        },
    )
    assert plain == nested
    assert parse(S3Options, {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}) == parse(
        S3Options, {"addressing_style": "virtual"}
    )


def test_importing_the_stores_imports_no_sdk():
    code = (
        "import sys, dcp_objstore.stores, dcp_objstore.stores.wrappers;"
        "print([m for m in ('obstore', 'boto3', 'botocore', 'torch', 'google.auth', 'fsspec')"
        " if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
