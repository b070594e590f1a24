"""Storage options: obstore knows its names, hints tell the right one, the README has the table."""

from __future__ import annotations

import os

import pytest
from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, S3Store

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores import open_store
from dcp_objstore.stores.schemes import SCHEMAS

# Of HTTP clients in general, not of S3: obstore takes them elsewhere.
OF_CLIENTS = {"allow_http", "allow_invalid_certificates", "root_certificate"}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_spelling_belongs_to_one_option(scheme):
    options = SCHEMAS[scheme].options().values()
    taken = [spelling for option in options for spelling in option.spellings]
    assert len(taken) == len(set(taken))
    for option in options:
        leaves = {spelling.rpartition(".")[2] for spelling in taken}
        assert not leaves & set(option.called)


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
KEYS = {"key": "x", "secret": "y"}
BAD: list[tuple[str, object, str]] = [
    (S3, ["key"], "mapping"),
    (S3, {"kye": "x"}, "did you mean 'key'?"),
    (S3, {"endpoint": "x"}, "did you mean 'endpoint_url'?"),
    (S3, {"aws_secret_access_key": "x"}, "did you mean 'secret'?"),
    (S3, {"virtual_hosted_style_request": True}, "did you mean 'addressing_style'?"),
    (S3, {"zzzzzz": 1}, ". Known: key, secret"),
    (S3, {"client_kwargs": {"region": "x"}}, "did you mean 'region_name'?"),
    (S3, {"client_kwargs": {"key": "x"}}, "did you mean 'aws_access_key_id'?"),
    (S3, {"client_kwargs": {"profile": "x"}}, "'profile', outside of this mapping?"),
    (S3, {"client_kwargs": "x"}, "must be a mapping"),
    (S3, {"sse_kms_key_id": "x"}, "'s3_additional_kwargs': {'SSEKMSKeyId': …}?"),
    (S3, {"s3_additional_kwargs": {"RequestPayer": "x"}}, "in s3_additional_kwargs"),
    (S3, {"s3_express": True}, "no need for it"),
    (S3, {"max_retries": 3}, "TransferConfig(max_retries=…)"),
    (S3, {"anon": "yes"}, "must be bool"),
    (S3, {"key": "x"}, "'secret' is missing"),
    (S3, {"secret": "x"}, "'key' is missing"),
    (S3, {"token": "x"}, "without 'key'"),
    (S3, {"anon": True, **KEYS}, "choose one"),
    (S3, {"profile": "p", **KEYS}, "choose one"),
    (S3, {"addressing_style": "sideways"}, "'path', 'virtual' or 'auto'"),
    (S3, {"anon": True, "endpoint_url": "ftp://host"}, "endpoint"),
    (S3, {"anon": True, "endpoint_url": "http://user:pw@host"}, "without credentials"),
    ("gs://bucket", {"secret": "x"}, "gs://"),
    ("gs://bucket", {"tokn": "x"}, "did you mean 'token'?"),
    ("gs://bucket", {"service_account": "x"}, "did you mean 'token'?"),
    ("gs://bucket", {"user_project": "x"}, "did you mean 'requester_pays'?"),
    ("gs://bucket", {"requester_pays": True, "token": "t"}, "in 'project'"),
    ("gs://bucket", {"token": "browser"}, "gcloud auth application-default login"),
    ("az://box", {"acount_name": "x"}, "did you mean 'account_name'?"),
    ("az://box", {"key": "x"}, "did you mean 'account_key'?"),
    ("az://box", {"sas_key": "x"}, "did you mean 'sas_token'?"),
    ("az://box", {"account_key": 7}, "must be str"),
    ("az://box", {"account_key": "a\nb"}, "control character"),
    ("az://box", {"account_name": "a", "anon": True, "credential": "s"}, "choose one"),
    ("az://box", {"account_name": "a", "client_secret": "s"}, "'client_id', 'tenant_id' missing"),
    ("az://box", {"account_name": "a", "credential": 7}, "an object of azure.identity"),
    ("az://box", {"account_key": "k"}, "which storage account?"),
    ("az://box", {"connection_string": "AccountName"}, "'AccountName=…;AccountKey=…'"),
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
