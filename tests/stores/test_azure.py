"""`az://` on Microsoft's own emulator: the contract, and what is Azure's own way of it."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    PermissionDeniedError,
)
from dcp_objstore.stores import IfAbsent, ObjectStore, StoreSpec, open_store
from dcp_objstore.stores.azure.credentials import find_azure_credentials
from dcp_objstore.stores.azure.options import AzureOptions
from dcp_objstore.stores.credentials import Credentials, asked_by_clients
from dcp_objstore.stores.options import parse
from tests.contract import PART, SMALL_CROWD, ExpectedError, StoreContract, put_broken
from tests.support.azurite import ACCOUNT, KEY, Azurite
from tests.support.servers import BUCKET, Bucket
from tests.support.side_doors import BucketDoor
from tests.support.verbs import ONCE, VERBS, check

azure = pytest.mark.backends("azure")


@azure
class TestAzure(StoreContract):
    endpoint = "Azurite (`az://`)"
    lacks = frozenset({"clean_abort", "range_copies"})
    dialect = "azure"
    below = "pre fix #1"
    crowd_keys = SMALL_CROWD

    @pytest.fixture
    def store(self, bucket: Bucket) -> ObjectStore:
        return open_store(f"{bucket.url}/{self.below}", bucket.storage_options)

    @pytest.fixture
    def side_door(self, bucket: Bucket) -> BucketDoor:
        return BucketDoor(bucket, self.below)

    def store_at(self, endpoint_url: str) -> ObjectStore:
        options = {"account_name": "a", "account_key": "a2V5", "endpoint_url": endpoint_url}
        return open_store("az://bucket/run", options, ONCE)


@azure
def test_blocks_of_an_upload_that_was_given_up_are_no_object(bucket):
    store = open_store(bucket.url, bucket.storage_options)
    put_broken(store, "k", [bytes(PART)] * 2, ExpectedError(), at_once=1)
    assert list(store.list()) == []
    assert bucket.uploads() == [bucket.prefix + "k"], "the service removes them, after a week"
    store.put_stream("k", iter([b"whole"]), part_size_bytes=PART, max_concurrency=1)
    assert bucket.get("k") == b"whole"


def test_a_missing_container_and_a_wrong_key_are_no_outage_and_the_key_is_not_shown(azurite):
    wrong = {**azurite.storage_options, "account_key": "d3Jvbmcta2V5"}
    missing = open_store("az://no-such-container/run", azurite.storage_options, ONCE)
    refused = open_store(f"az://{BUCKET}/run", wrong, ONCE)
    for name, verb in VERBS.items():
        with pytest.raises(BucketNotFoundError) as caught:
            verb(missing)
        check(caught.value, missing, name)
        # Azure itself says AuthenticationFailed, which becomes a CredentialsError.
        with pytest.raises((PermissionDeniedError, CredentialsError)) as caught_too:
            verb(refused)
        check(caught_too.value, refused, name)
        assert "d3Jvbmcta2V5" not in str(caught_too.value)


def sas(azurite: Azurite, permissions: str) -> str:
    from azure.storage.blob import generate_container_sas

    return str(
        generate_container_sas(
            ACCOUNT, BUCKET, KEY, permission=permissions, expiry=datetime.now(UTC) + timedelta(1)
        )
    )


@azure
def test_every_way_to_sign_reaches_the_same_container(bucket, azurite, monkeypatch):
    endpoint = azurite.endpoint_url
    token = sas(azurite, "rwdlac")
    account = {"account_name": ACCOUNT, "endpoint_url": endpoint}
    ways: list[dict[str, object]] = [
        {**account, "account_key": KEY},
        {**account, "credential": KEY},
        {**account, "sas_token": token},
        {**account, "sas_token": f"?{token}"},
        {**account, "credential": token},
        {"connection_string": azurite.connection_string},
        {"connection_string": f"BlobEndpoint={endpoint};AccountName={ACCOUNT};"
         f"SharedAccessSignature={token}"},
    ]  # fmt: skip
    # Of another account: a user who names a credential must not get this one.
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI=")
    for number, options in enumerate(ways):
        open_store(bucket.url, options, ONCE).put(f"k{number}", b"x", precondition=IfAbsent())
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    open_store(bucket.url, None, ONCE).put("environment", b"x")
    for name in ("KEY", "NAME"):
        monkeypatch.delenv(f"AZURE_STORAGE_ACCOUNT_{name}")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    open_store(bucket.url, None, ONCE).put("connection", b"x")
    assert len(bucket.keys()) == len(ways) + 2


@azure
def test_a_signature_that_may_only_read_is_refused_by_type_and_not_shown(bucket, azurite):
    bucket.put("k", b"as it was")
    options = {"account_name": ACCOUNT, "endpoint_url": azurite.endpoint_url}
    token = sas(azurite, "rl")
    signature = re.search(r"sig=([^&]+)", token)
    assert signature is not None
    store = open_store(bucket.url, {**options, "sas_token": token}, ONCE)
    assert store.get("k", max_size_bytes=99)[0] == b"as it was"
    for verb in ("put", "put_absent", "put_stream", "delete"):
        with pytest.raises(PermissionDeniedError) as caught:
            VERBS[verb](store)
        check(caught.value, store, verb)
        assert signature[1] not in str(caught.value)
        assert signature[1] not in str(caught.value.__cause__)
    assert bucket.get("k") == b"as it was"
    assert bucket.keys() == ["k"]


# What needs no server


@pytest.fixture
def no_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "options",
    [
        {"account_name": "acct", "account_key": "SECRET"},
        {"account_name": "acct", "sas_token": "sig=SECRET"},
        {"account_name": "acct", "credential": "SECRET"},
        {"connection_string": "AccountName=acct;AccountKey=SECRET"},
        {"account_name": "acct", "client_id": "c", "tenant_id": "t", "client_secret": "SECRET"},
    ],
)
def test_no_secret_is_shown_or_pickled(no_azure, options):
    spec = StoreSpec("az://container/x", options)
    assert "SECRET" not in repr(spec)
    assert "SECRET" not in repr(spec.open())
    assert b"SECRET" not in pickle.dumps(spec)
    assert "SECRET" not in repr(find_azure_credentials(parse(AzureOptions, options)))
    back = pickle.loads(pickle.dumps(spec))
    assert back.stripped
    with pytest.raises(DcpObjstoreError, match="leaves credentials behind"):
        find_azure_credentials(
            parse(AzureOptions, {"endpoint_url": "http://127.0.0.1:1"}), back.stripped
        )


def test_account_and_endpoint_come_from_wherever_they_are_named(no_azure, monkeypatch):
    def found(**options: object) -> tuple[str, str | None]:
        result = find_azure_credentials(parse(AzureOptions, options))
        return result.account_name, result.endpoint_url

    key = {"account_key": KEY}
    assert found(account_name="a", **key) == ("a", None)
    assert found(account_host="a.blob.core.chinacloudapi.cn", **key) == (
        "a", "a.blob.core.chinacloudapi.cn",
    )  # fmt: skip
    assert found(endpoint_url="https://a.blob.core.windows.net", **key)[0] == "a"
    for nameless in ("https://.blob.core.windows.net", "https://a.dfs.core.windows.net"):
        with pytest.raises(ConfigError, match="which storage account"):
            found(endpoint_url=nameless, **key)
    string = f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={KEY}"
    assert found(connection_string=f"{string};EndpointSuffix=core.windows.net") == ("a", None)
    assert found(connection_string=f"{string};EndpointSuffix=core.usgovcloudapi.net") == (
        "a", "https://a.blob.core.usgovcloudapi.net",
    )  # fmt: skip
    bare = f" AccountName = a ; AccountKey={KEY};EndpointSuffix=core.x; "
    assert found(connection_string=bare) == ("a", "https://a.blob.core.x")
    with pytest.raises(ConfigError, match="which storage account"):
        found(connection_string=f"AccountKey={KEY};EndpointSuffix=core.x")
    emulator = "UseDevelopmentStorage=True"
    assert found(connection_string=emulator) == (ACCOUNT, f"http://127.0.0.1:10000/{ACCOUNT}")
    elsewhere = f"{emulator};BlobEndpoint=http://else"
    assert found(connection_string=elsewhere) == (ACCOUNT, "http://else")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{string};EndpointSuffix=core.x")
    assert found() == ("a", "https://a.blob.core.x")
    assert found(account_name="a") == found()
    assert found(anon=True, account_name="other") == ("other", None)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    assert found(account_name="other") == ("other", None), "not with the key of another account"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "of-the-environment")
    assert found(**key) == ("of-the-environment", None)


@pytest.mark.parametrize(
    ("variable", "kind"),
    [
        ("AZURE_STORAGE_TOKEN", "token"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "access_key"),
        ("AZURE_STORAGE_ACCESS_KEY", "access_key"),
        ("AZURE_STORAGE_MASTER_KEY", "access_key"),
        ("AZURE_STORAGE_SAS_TOKEN", "sas_token"),
        ("AZURE_STORAGE_SAS_KEY", "sas_token"),
    ],
)
def test_each_variable_that_holds_a_secret_is_enough(no_azure, monkeypatch, variable, kind):
    monkeypatch.setenv(variable, "?what-it-holds")
    found = find_azure_credentials(parse(AzureOptions, {"account_name": "a"}))
    assert found.source == f"{variable} in the environment"
    assert found.provider is not None
    assert found.provider() == {kind: "what-it-holds", "expires_at": None}


@pytest.mark.parametrize(
    "variables",
    [
        ["AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID"],
        ["AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"],
        ["AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID", "AZURE_TENANT_ID"],
        ["AZURE_USE_AZURE_CLI"],
    ],
)
def test_an_identity_of_the_environment_takes_all_of_its_variables(
    no_azure, monkeypatch, variables
):
    monkeypatch.setitem(sys.modules, "azure", None)
    options = parse(AzureOptions, {"account_name": "a", "endpoint_url": "http://127.0.0.1:1"})
    for name in variables:
        monkeypatch.setenv(name, "x")
    assert find_azure_credentials(options).source == f"{variables[0]} in the environment"
    for name in variables:
        with monkeypatch.context() as patched:
            patched.delenv(name)
            with pytest.raises(CredentialsError, match="no credentials"):
                find_azure_credentials(options)


def test_the_identity_of_the_machine_is_for_azure_alone(no_azure, monkeypatch):
    monkeypatch.setitem(sys.modules, "azure", None)
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        "dcp_objstore.stores.azure.credentials.metadata_answers",
        lambda *request: asked.append(request) or True,
    )
    found = find_azure_credentials(AzureOptions(account_name="a"))
    assert found.source == "managed identity"
    assert found.renew is asked_by_clients
    ((server, method, path, headers),) = asked
    assert (server, method, headers) == ("http://169.254.169.254", "GET", {"Metadata": "true"})
    assert str(path).startswith("/metadata/instance?api-version=")
    with pytest.raises(CredentialsError, match="no credentials for Azure"):
        find_azure_credentials(AzureOptions(account_name="a", endpoint_url="http://elsewhere"))
    assert len(asked) == 1


def test_two_ways_to_sign_are_refused_whichever_they_are():
    ways: dict[str, Any] = {
        "account_key": "k",
        "sas_token": "s",
        "connection_string": "c",
        "credential": "d",
        "client_secret": "e",
    }
    for first, second in itertools.combinations([*ways.items(), ("anon", True)], 2):
        with pytest.raises(ConfigError, match=f"choose one of '{first[0]}', '{second[0]}'"):
            AzureOptions(**dict([first, second])).check()
    with pytest.raises(ConfigError, match="; 'tenant_id' missing"):
        AzureOptions(client_secret="e", client_id="c").check()


def test_an_applications_secret_is_left_to_obstore_which_looks_nowhere_else(no_azure):
    application = {"client_id": "c", "client_secret": "s", "tenant_id": "t"}
    found = find_azure_credentials(AzureOptions(account_name="a", **application))
    config = {**application, "credential_type": "client_secret"}
    assert found == Credentials(
        "storage_options",
        config=config,
        renew=asked_by_clients,
        advice=found.advice,
        account_name="a",
    )
    assert "az login" in found.advice


def test_identities_of_azure_identity_are_asked_for_tokens(no_azure):
    class Token:
        token = "a-token"
        expires_on = 2_000_000_000

    class Identity:
        def get_token(self, *scopes: str, tenant_id: str | None = None) -> Token:
            assert scopes == ("https://storage.azure.com/.default",)
            return Token()

    class OfAio:
        async def get_token(self, *_: str) -> Token:
            return Token()

    class WithoutLogin:
        def get_token(self, *_: str, tenant_id: str | None = None) -> object:
            raise RuntimeError("no login")

    options = {"account_name": "a", "credential": WithoutLogin(), "endpoint_url": "http://x:1"}
    with pytest.raises(CredentialsError, match="no login"):
        open_store("az://container", options, ONCE).put("k", b"x")
    found = find_azure_credentials(
        parse(AzureOptions, {"account_name": "a", "credential": Identity()})
    )
    assert found.provider is not None
    assert found.provider()["token"] == "a-token"
    with pytest.raises(ConfigError, match="event loop"):
        find_azure_credentials(parse(AzureOptions, {"account_name": "a", "credential": OfAio()}))


def test_another_default_chain_is_made_only_for_other_tokens(no_azure, monkeypatch):
    made: list[object] = []

    class Provider:
        def __init__(self, credential: object) -> None:
            made.append(credential)

        def __call__(self) -> dict[str, object]:
            return {"token": f"t{len(made)}", "expires_at": None}

    monkeypatch.setattr("obstore.auth.azure.AzureCredentialProvider", Provider)
    found = find_azure_credentials(AzureOptions(account_name="a"))
    assert found.source == "azure-identity's DefaultAzureCredential"
    ask: Any = found.provider
    assert [ask.ask(others)["token"] for others in (False, False, True, False)] == [
        "t1", "t1", "t2", "t2"
    ]  # fmt: skip
    assert made == [None, None]


def test_without_azure_identity_what_to_do_is_said(no_azure, monkeypatch):
    monkeypatch.setitem(sys.modules, "azure", None)
    identity = SimpleNamespace(get_token=lambda *_: None)
    with pytest.raises(CredentialsError, match="'credential' needs azure-identity"):
        find_azure_credentials(AzureOptions(account_name="a", credential=identity))
    with pytest.raises(CredentialsError) as caught:
        find_azure_credentials(
            parse(AzureOptions, {"account_name": "a", "endpoint_url": "http://127.0.0.1:1"})
        )
    assert "pip install 'dcp-objstore[azure]'" in str(caught.value)
