"""Storage options: obstore knows its names, hints tell the right one, the README has the table."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, S3Store

from dcp_objstore.errors import ConfigError, InvalidUrlError
from dcp_objstore.stores import StoreSpec, open_store
from dcp_objstore.stores.options import cannot_be_sent, parse
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.schemes import (
    SCHEMAS,
    check_options,
    is_secret,
    public_options,
    secret_names,
)
from dcp_objstore.stores.urls import check_prefix, is_supported_url, parse_url

# Of HTTP clients in general, not of S3: obstore takes them elsewhere.
OF_CLIENTS = {"allow_http", "allow_invalid_certificates", "root_certificate"}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_spelling_belongs_to_one_option(scheme):
    options = SCHEMAS[scheme].options().values()
    taken = [spelling for option in options for spelling in option.spellings]
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize(
    ("scheme", "store"), [("s3", S3Store), ("gs", GCSStore), ("az", AzureStore)]
)
def test_obstore_knows_its_names(scheme, store):
    bucket = "container_name" if scheme == "az" else "bucket"
    for name in {
        name for row in SCHEMAS[scheme].options().values() for name in row.native
    } - OF_CLIENTS:
        try:
            store(config={bucket: "b", name: "true"})
        except BaseError as error:  # "true" is no checksum, say
            assert not isinstance(error, UnknownConfigurationKeyError), name


S3 = "s3://bucket/x"
KEYS = {"key": "KEYOFMINE", "secret": "SECRETOFMINE"}
AES = {"ServerSideEncryption": "AES256"}
BAD: list[tuple[str, object, str]] = [
    (S3, ["key"], "mapping"),
    (S3, {"kye": "x"}, "did you mean 'key'?"),
    (S3, {"sign": True}, "did you mean 'sign_payload'?"),
    (S3, {"zzzzzz": 1}, ". Known: key, secret"),
    (S3, {"client_kwargs": {"region": "x"}}, "did you mean 'region_name'?"),
    (S3, {"client_kwargs": {"key": "x"}}, "did you mean 'aws_access_key_id'?"),
    (S3, {"client_kwargs": {"profile": "x"}}, "'profile', outside of this mapping?"),
    (S3, {"client_kwargs": "x"}, "must be a mapping"),
    (S3, {"s3_additional_kwargs": {"RequestPayer": "x"}}, "in s3_additional_kwargs"),
    (S3, {"anon": "yes"}, "must be bool"),
    (S3, {"key": "x"}, "'secret' is missing"),
    (S3, {"secret": "x"}, "'key' is missing"),
    (S3, {"token": "x"}, "without 'key'"),
    (S3, {"anon": True, **KEYS}, "choose one"),
    (S3, {"profile": "p", **KEYS}, "choose one"),
    (S3, {"addressing_style": "sideways"}, "'path', 'virtual' or 'auto'"),
    (S3, {"anon": True, "endpoint_url": "ftp://host"}, "endpoint"),
    (S3, {"anon": True, "endpoint_url": "http://user:pw@host"}, "without credentials"),
    (S3, {"s3_additional_kwargs": {"ServerSideEncryption": "aes"}}, "must be one of"),
    (S3, {"s3_additional_kwargs": {"SSEKMSKeyId": "key-1"}}, "need 'ServerSideEncryption'"),
    (S3, {"s3_additional_kwargs": {"BucketKeyEnabled": True}}, "need 'ServerSideEncryption'"),
    (S3, {"s3_additional_kwargs": {**AES, "SSEKMSKeyId": "k"}}, "need 'ServerSideEncryption'"),
    (S3, {"s3_additional_kwargs": {"ChecksumAlgorithm": "MD5"}}, "must be one of"),
    ("gs://bucket", {"secret": "x"}, "gs://"),
    ("gs://bucket", {"tokn": "x"}, "did you mean 'token'?"),
    ("gs://bucket", {"requester_pays": True, "token": "t"}, "in 'project'"),
    ("gs://bucket", {"token": "browser"}, "gcloud auth application-default login"),
    ("gs://bucket", {"token": "cache"}, "gcloud auth application-default login"),
    ("gs://bucket", {"anon": True, "verify": "/nowhere"}, "cannot be read"),
    ("az://box", {"acount_name": "x"}, "did you mean 'account_name'?"),
    ("az://box", {"account_key": 7}, "must be str"),
    ("az://box", {"account_key": "a\nb"}, "control character"),
    ("az://box", {"account_name": "a", "client_secret": "s"}, "'client_id', 'tenant_id' missing"),
    ("az://box", {"account_name": "a", "credential": 7}, "an object of azure.identity"),
    ("az://box", {"account_key": "k"}, "which storage account?"),
    ("az://box", {"connection_string": "AccountName"}, "'AccountName=…;AccountKey=…'"),
    ("az://box", {"connection_string": "=a"}, "'AccountName=…;AccountKey=…'"),
    ("az://box", {"account_name": "a", "anon": True, "verify": "/nowhere"}, "cannot be read"),
    ("az://box", {"connection_string": "AccountName=a"}, "neither AccountKey nor"),
    ("az://box", {"account_host": "host?sig=x"}, "without credentials"),
    ("memory://x", {"key": "x"}, "take no options"),
    ("file:///tmp/x", {"key": "x"}, "take no options"),
]


@pytest.mark.parametrize(("url", "options", "says"), BAD)
def test_a_bad_option_is_refused_with_the_nearest_name(monkeypatch, url, options, says):
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    with pytest.raises(ConfigError) as caught:
        open_store(url, options)
    assert says in str(caught.value)


# Names of obstore and of other tools, and ours.
OTHERS_NAMES = {
    "s3": """
        key: access_key_id aws_access_key_id access_key
        secret: secret_access_key aws_secret_access_key secret_key
        token: session_token aws_session_token
        anon: skip_signature aws_skip_signature anonymous
        endpoint_url: endpoint aws_endpoint aws_endpoint_url aws_endpoint_url_s3
        region: aws_region default_region aws_default_region
        use_ssl: allow_http
        verify: allow_invalid_certificates root_certificate
        addressing_style: virtual_hosted_style_request aws_virtual_hosted_style_request
        requester_pays: request_payer aws_request_payer
        sign_payload: unsigned_payload aws_unsigned_payload
        s3_additional_kwargs.ServerSideEncryption: server_side_encryption
        s3_additional_kwargs.ServerSideEncryption: aws_server_side_encryption
        s3_additional_kwargs.SSEKMSKeyId: sse_kms_key_id aws_sse_kms_key_id
        s3_additional_kwargs.BucketKeyEnabled: sse_bucket_key_enabled aws_sse_bucket_key_enabled
        s3_additional_kwargs.ChecksumAlgorithm: checksum_algorithm aws_checksum_algorithm
    """,
    "gs": """
        token: service_account_key service_account application_credentials
        token: bearer_token credentials
        anon: skip_signature anonymous
        requester_pays: user_project
        endpoint_url: endpoint
        verify: allow_invalid_certificates root_certificate
    """,
    "az": """
        account_name: azure_storage_account_name account
        account_key: access_key azure_storage_account_key azure_storage_access_key key
        sas_token: sas_key azure_storage_sas_token azure_storage_sas_key
        credential: bearer_token credentials token
        tenant_id: authority_id azure_tenant_id
        client_id: azure_client_id
        client_secret: azure_client_secret
        anon: skip_signature anonymous
        endpoint_url: endpoint azure_storage_endpoint account_url
        verify: allow_invalid_certificates root_certificate
    """,
}


def test_settings_of_obstore_that_are_not_needed_are_answered_with_why():
    for name, why in {
        "s3_express": "known by its name",
        "aws_s3_express": "known by its name",
        "conditional_put": "tried out",
        "aws_conditional_put": "tried out",
        "bucket": "the URL names the bucket",
        "aws_bucket": "the URL names the bucket",
        "max_retries": "TransferConfig(max_retries",
        "retry_timeout": "TransferConfig(retry_timeout_seconds",
        "timeout": "TransferConfig(request_timeout_seconds",
        "connect_timeout": "TransferConfig(connect_timeout_seconds",
    }.items():
        with pytest.raises(ConfigError) as caught:
            StoreSpec("s3://bucket", {name: "x"})
        assert "no need for it" in str(caught.value) and why in str(caught.value), name


def test_of_a_foreign_scheme_only_well_known_options_are_no_secrets():
    public = (
        "account_name anon auto_mkdir default_location endpoint_override endpoint_type endpoint_url"
        " host port profile project project_id protocol region region_name timeout use_ssl verify"
    )
    assert not any(is_secret(name, "x", foreign=True) for name in public.split())
    for name, value in (("user", "x"), ("host", "a@b"), ("host", "b?sig=1"), ("host", {"a": 1})):
        assert is_secret(name, value, foreign=True), (name, value)
    assert is_secret("fs") and is_secret("fs", foreign=True)
    assert is_secret("token", "ya29.x") and is_secret("token", {}) and is_secret("token")
    assert not any(is_secret("token", how) for how in ("anon", "google_default", "cloud"))
    assert not is_secret("region", "ya29.x")
    nested = {"key": "k", "client_kwargs": {"aws_access_key_id": "k", "region_name": "r"}}
    assert secret_names(nested) == ["aws_access_key_id", "key"]
    assert secret_names({"z": {"key": "k"}, "a": "x"}, foreign=True) == ["a", "z"]
    shown = {"client_kwargs": {"region_name": "r"}}
    assert public_options(nested, mask=False) == shown
    masked = {"key": "***", "client_kwargs": {"aws_access_key_id": "***", "region_name": "r"}}
    assert public_options(nested, mask=True) == masked
    assert public_options({"fs": 7}, mask=True) == {"fs": "<int>"}


def test_a_key_in_json_may_have_line_breaks_which_no_header_may_have():
    given = ("a\nb", "a\x7f", ' {"a":\n1}', "a b")
    assert [cannot_be_sent(text) for text in given] == [True, True, False, False]


def test_options_of_a_foreign_scheme_are_copied_without_those_of_none():
    given = {"host": "h", "nested": {"a": None}, "port": None}
    checked = check_options("sftp", given)
    assert checked == {"host": "h", "nested": {"a": None}}
    assert checked["nested"] is not given["nested"]
    assert check_options("sftp", None) == {}
    assert check_options("sftp", {"fs": None}) == {}
    for wrong, says in ((["host"], "mapping"), ({"a": 1, 7: "x"}, "must be str")):
        with pytest.raises(ConfigError, match=says):
            check_options("sftp", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", OTHERS_NAMES)
def test_the_name_that_another_tool_has_for_an_option_is_answered_with_ours(scheme):
    for line in OTHERS_NAMES[scheme].strip().splitlines():
        ours, names = line.strip().split(": ")
        outer, _, inner = ours.partition(".")
        meant = f"did you mean '{outer}'" + (f": {{'{inner}': …}}?" if inner else "?")
        for name in names.split():
            with pytest.raises(ConfigError) as caught:
                StoreSpec(f"{scheme}://bucket", {name: "x"})
            assert meant in str(caught.value), name


@pytest.mark.parametrize(
    ("url", "options", "name"),
    [
        ("s3://b", {**KEYS, "endpoint_url": "  "}, "endpoint_url"),
        ("s3://b", {"key": "", "secret": ""}, "key"),
        ("s3://b", {**KEYS, "client_kwargs": {"endpoint_url": ""}}, "endpoint_url"),
        ("s3://b", {**KEYS, "s3_additional_kwargs": {"SSEKMSKeyId": ""}}, "SSEKMSKeyId"),
        ("gs://b", {"token": ""}, "token"),
        ("gs://b", {"anon": True, "requester_pays": ""}, "requester_pays"),
        ("az://b", {"account_name": "a", "sas_token": ""}, "sas_token"),
    ],
)
def test_an_empty_text_is_not_taken_for_an_option_that_was_left_out(url, options, name):
    with pytest.raises(ConfigError, match=f"'{name}' .* is empty; .*leave it out"):
        StoreSpec(url, options)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("s3://b", {"client_kwargs": {"aws_access_key_id": "OTHER"}}, r"key, client_kwargs\['aws_"),
        (
            "s3://b",
            {"region": "one", "region_name": "OTHER", "client_kwargs": {"region_name": "one"}},
            "region, region_name",
        ),
        ("s3://b", {"use_ssl": True, "client_kwargs": {"use_ssl": False}}, "use_ssl"),
        ("gs://b", {"endpoint_url": "http://one", "base_url": "OTHER"}, "endpoint_url, base_url"),
        ("gs://b", {"requester_pays": "one", "project": "OTHER"}, "two projects"),
        (
            "az://b",
            {"endpoint_url": "http://one", "account_host": "OTHER"},
            "endpoint_url, account",
        ),
    ],
)
def test_two_values_for_one_setting_are_refused(url, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        StoreSpec(url, {**(KEYS if url == "s3://b" else {"anon": True}), **options})
    assert "say it once" in str(caught.value)
    assert not any(value in str(caught.value) for value in ("OFMINE", "OTHER"))


def test_the_same_value_twice_is_no_contradiction():
    client = {"aws_access_key_id": "KEYOFMINE", "region_name": "r", "verify": False}
    options = {**KEYS, "region": "r", "region_name": "r", "client_kwargs": client}
    found = parse(S3Options, StoreSpec("s3://b", options).storage_options)
    assert (found.key, found.region, found.verify) == ("KEYOFMINE", "r", False)


def test_an_azure_identity_without_its_secret_is_refused_unless_pickled(monkeypatch):
    options = {"account_name": "a", "client_id": "c", "tenant_id": "t"}
    with pytest.raises(ConfigError, match=r"'client_id', .* without 'client_secret'"):
        open_store("az://b", options)
    whole = StoreSpec("az://b", {**options, "client_secret": "s"})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    pickle.loads(pickle.dumps(whole)).open()


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket/a b%20c?d#e\\f", "s3://bucket/a b%20c?d#e\\f"),
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
        ("s3n://bucket/x", "did you mean s3://?"),
        ("wasb://box/x", "did you mean az://?"),
        ("adl://box/x", "did you mean az://?"),
        ("mem://x", "did you mean memory://?"),
        ("quuux://host/x", "; known are s3://"),
        ("data://x", "unknown scheme"),
        ("AKIA:hunter2@s3://bucket/x", "'***@s3://bucket/x' has no scheme"),
        ("/tmp/a://b", "no scheme"),
        ("s3:/", "no scheme"),
        ("minio://bucket/x", "did you mean s3://?"),
        ("gcss://bucket/x", "did you mean gcs://?"),
        ("flie:///x", "did you mean file://?"),
        ("http://host/x", "unknown scheme"),
        ("s3:/bucket/x", "write 's3://bucket/x'"),
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
        ("memory://", "names no store;"),
        ("s3://bucket//x", "empty"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a\nb", "control"),
        ("s3://buck et/x", "no bucket name"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/a/x", "alias"),
        ("file://relative/x", "file:///path"),
        ("file:///", "root of the file system"),
        ("file://me@host/x", "'***@host/x' names a user"),
        ("file://localhost", "file:///path"),
        ("s3://?sig=1", "'s3://?***'"),
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
    assert not is_supported_url(url)


def test_a_prefix_to_list_is_empty_or_ends_in_a_slash():
    assert [check_prefix(prefix) for prefix in ("", "a/", "a/b/")] == ["", "a", "a/b"]
    for wrong in ("a", "/", "a//", "../"):
        with pytest.raises(InvalidUrlError):
            check_prefix(wrong)


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
    plain = {"key": "k", "secret": "s", "token": "t", "region": "r", "use_ssl": False}
    aws = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_session_token": "t"}
    nested = {"client_kwargs": {**aws, "region_name": "r", "use_ssl": False}}
    assert parse(S3Options, plain) == parse(S3Options, nested)
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
