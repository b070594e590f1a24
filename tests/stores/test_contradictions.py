"""Options that say nothing, or two things at once, are refused; no value is repeated."""

from __future__ import annotations

import pickle

import pytest

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores import StoreSpec, open_store
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.s3.options import S3Options

KEYS = {"key": "KEYOFMINE", "secret": "SECRETOFMINE"}


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
        ("s3://b", {"region": "one", "region_name": "OTHER"}, "region, region_name"),
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
