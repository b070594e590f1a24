"""Storage options: obstore knows its names, hints tell the right one, the README has the table."""

from __future__ import annotations

import pytest
from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, S3Store

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores import StoreSpec
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


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_local_stores_have_no_options(scheme):
    assert not SCHEMAS[scheme].options()
    with pytest.raises(ConfigError, match="take no options"):
        StoreSpec(f"{scheme}:///tmp/x" if scheme == "file" else "memory://x", {"key": "x"})


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


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"aws_endpoint_url": "x"}, "did you mean 'endpoint_url'?"),
        ({"virtual_hosted_style_request": True}, "did you mean 'addressing_style'?"),
        ({"unsigned_payload": True}, "did you mean 'sign_payload'?"),
        ({"skip_signature": True}, "did you mean 'anon'?"),
        (
            {"ServerSideEncryption": "AES256"},
            "did you mean 's3_additional_kwargs': {'ServerSideEncryption': …}?",
        ),
        ({"sse_kms_key_id": "x"}, "did you mean 's3_additional_kwargs': {'SSEKMSKeyId': …}?"),
        (
            {"s3_additional_kwargs": {"server_side_encryption": "x"}},
            "did you mean 'ServerSideEncryption'?",
        ),
        ({"s3_additional_kwargs": {"RequestPayer": "x"}}, "in s3_additional_kwargs"),
        ({"client_kwargs": {"key": "x"}}, "did you mean 'aws_access_key_id'?"),
        ({"client_kwargs": {"secret_access_key": "x"}}, "did you mean 'aws_secret_access_key'?"),
        ({"client_kwargs": {"profile": "x"}}, "did you mean 'profile', outside of this mapping?"),
        (
            {"config_kwargs": {"addressing_style": "path"}},
            "did you mean 'addressing_style', outside of this mapping?",
        ),
        ({"s3_express": True}, "no need for it"),
        ({"max_retries": 3}, "TransferConfig(max_retries=…)"),
    ],
)
def test_another_spelling_gets_the_right_one(given, text):
    with pytest.raises(ConfigError) as caught:
        StoreSpec("s3://bucket", given)
    assert text in caught.value.message
