"""Access tokens that GCS and Azure refuse before the time that was said to be their end.

On a server that looks at them: moto's GCS door, where a test takes a token back, and Azurite, which
reads in a token when it ends.
"""

from __future__ import annotations

import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import CredentialsError
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.protocol import CopySource
from tests.contract import PART
from tests.support.azurite import ACCOUNT, HOUR_SECONDS, KEY, AzureBucket, Azurite, Identity
from tests.support.campaign import cases
from tests.support.gcs_tokens import ShortLived, is_valid, post
from tests.support.proxy import Asked, NetworkProxy, Refuse
from tests.support.servers import BUCKET, Bucket, MotoServer
from tests.support.tls import Certificate, make_certificate
from tests.support.verbs import ONCE, VERBS, check

gcs = pytest.mark.backends("gcs")

VERSION = "2023-11-03"  # of Azure's API; access tokens need one from 2017 on


class Place(NamedTuple):
    """A fresh prefix, and what makes credentials for it whose tokens last so many seconds each.

    Attributes:
        option: the storage option that takes them.
        login: the command that the error names.
    """

    bucket: Bucket
    issue: Callable[..., ShortLived | Identity]
    option: str
    login: str

    def open(self, *lasting_seconds: float) -> tuple[ObjectStore, list[str]]:
        """The store, and the tokens that are handed out."""
        issued = self.issue(*lasting_seconds)
        options = {**self.bucket.storage_options, self.option: issued}
        return open_store(self.bucket.url, options, ONCE), issued.handed_out


@pytest.fixture(params=["gcs", "azure"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "azure":
        return Place(request.getfixturevalue("container"), Identity, "credential", "az login")
    server: MotoServer = request.getfixturevalue("gcs_server")
    url = f"gs://{BUCKET}/{request.node.name.partition('[')[0]}-{secrets.token_hex(4)}"
    bucket = Bucket("gcs", url, server.gcs_storage_options, server.storage_options)
    return Place(bucket, partial(ShortLived, server), "token", "gcloud auth")


SOME_VERBS = cases(VERBS, default=["list", "put_stream"])


@pytest.mark.parametrize("verb", SOME_VERBS)
def test_a_token_that_is_refused_before_its_time_is_renewed_once(place, verb):
    place.bucket.put("k", b"as it was")
    store, handed_out = place.open(-10, HOUR_SECONDS)
    if verb == "put_stream":
        with pytest.raises(CredentialsError, match="the next try asks for fresh ones"):
            VERBS[verb](store)
    VERBS[verb](store)
    assert len(handed_out) == 2


@pytest.mark.parametrize("verb", SOME_VERBS)
def test_fresh_tokens_that_are_refused_too_say_what_to_do(place, verb):
    store, handed_out = place.open(-10)
    says = "the next try" if verb == "put_stream" else f"(?s)fresh ones.*{place.login}"
    with pytest.raises(CredentialsError, match=says) as caught:
        VERBS[verb](store)
    check(caught.value, store, verb)
    assert len(handed_out) <= 2
    assert handed_out[-1] not in f"{caught.value} {caught.value.__cause__}"
    assert place.bucket.keys() == []


@gcs
@pytest.mark.parametrize("verb", SOME_VERBS)
def test_gcs_a_token_that_nobody_can_renew_says_so(bucket, gcs_server, verb):
    from google.oauth2.credentials import Credentials as UserCredentials

    stale = str(post(f"{gcs_server.gcs_endpoint_url}/o/token?lifetime=-1")["access_token"])
    for token, says in (
        (stale, "(?s)storage_options.*cannot be refreshed from here.*gcloud auth"),
        (UserCredentials(stale), "(?s)could not be renewed.*gcloud auth"),
    ):
        store = open_store(bucket.url, {**bucket.storage_options, "token": token}, ONCE)
        with pytest.raises(CredentialsError, match=says) as caught:
            VERBS[verb](store)
        check(caught.value, store, verb)
        assert stale not in f"{caught.value} {caught.value.__cause__}"


@gcs
def test_gcs_a_save_refused_in_a_part_can_be_repeated_with_the_same_writer(bucket, gcs_server):
    tokens = ShortLived(gcs_server, HOUR_SECONDS)
    state = {"weight": torch.arange(2_000_000)}
    config = dos.TransferConfig(part_size_bytes=5 * 1024 * 1024)
    with NetworkProxy(bucket.storage_options) as proxy:
        options = {**proxy.storage_options, "token": tokens}

        def plan(asked: Asked) -> None:
            if "partNumber=2" in asked.query and len(tokens.handed_out) == 1:
                tokens.revoke(tokens.handed_out[0])

        proxy.plan = plan
        url = bucket.at("step-1")
        with pytest.raises(CredentialsError, match="the next try asks for fresh ones"):
            dos.save(state, url, storage_options=options, config=config, progress=False)
        assert "_COMMIT" not in bucket.keys("step-1")
        dos.save(state, url, storage_options=options, config=config, progress=False)
        assert len(tokens.handed_out) == 2
        back = {"weight": torch.zeros(2_000_000, dtype=torch.int64)}
        tokens.revoke(tokens.handed_out[1])
        dos.load(back, url, storage_options=options, config=config, progress=False)
    assert torch.equal(back["weight"], state["weight"])
    assert not is_valid(gcs_server, tokens.handed_out[1])


@gcs
def test_gcs_a_listing_that_is_refused_in_its_midst_goes_on_where_it_was(
    bucket, gcs_server, monkeypatch
):
    for adapter in ("obstore.store", "base"):
        monkeypatch.setattr(f"dcp_objstore.stores.{adapter}._PAGE_KEYS", 10)
    tokens = ShortLived(gcs_server, HOUR_SECONDS)
    gcs_server.create_bucket("in-pages")
    post(f"{gcs_server.gcs_endpoint_url}/o/pages?bucket=in-pages&keys=10")
    options = {**bucket.storage_options, "token": tokens}
    store = open_store("gs://in-pages/run", options, ONCE)
    client = bucket.client()
    keys = [f"k{number:04}" for number in range(25)]
    for key in keys:
        client.put_object(Bucket="in-pages", Key=f"run/{key}", Body=b"")
    listed = store.list()
    seen = [next(listed).key]
    tokens.revoke(tokens.handed_out[0])
    seen += [meta.key for meta in listed]
    assert seen == keys
    assert len(tokens.handed_out) == 2


# Azure


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def token_server(certificate: Certificate) -> Iterator[Azurite]:
    with Azurite(certificate) as server:
        yield server


@pytest.fixture
def container(
    request: pytest.FixtureRequest, token_server: Azurite, certificate: Certificate
) -> AzureBucket:
    """A fresh prefix, with options that lack credentials."""
    options = {
        "account_name": ACCOUNT,
        "endpoint_url": token_server.endpoint_url,
        "verify": str(certificate[0]),
    }
    url = f"az://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}"
    return AzureBucket("azure", url, options, server=token_server)


def opened(container: AzureBucket, identity: object) -> ObjectStore:
    return open_store(container.url, {**container.storage_options, "credential": identity}, ONCE)


def test_azure_a_copy_is_made_with_a_fresh_token(container):
    container.put("k", b"as it was")
    store = opened(container, Identity(HOUR_SECONDS))
    source = CopySource(f"{store.url}/k", 0, 9, store.head("k").version)
    identity = Identity(-10, HOUR_SECONDS)
    opened(container, identity).copy(
        "copy", [source], part_size_bytes=9, max_concurrency=1, moved=lambda _: None
    )
    assert container.get("copy") == b"as it was"
    assert len(identity.handed_out) == 2, "not one for each request"


def test_azure_an_upload_that_is_refused_in_a_part_can_be_tried_again(container, certificate):
    identity = Identity(2, HOUR_SECONDS)
    store = opened(container, identity)
    trusted = ssl.create_default_context(cafile=certificate[0])

    def is_refused() -> bool:
        headers = {"Authorization": f"Bearer {identity.handed_out[0]}", "x-ms-version": VERSION}
        url = f"{container.storage_options['endpoint_url']}/{BUCKET}?restype=container"
        request = urllib.request.Request(url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=trusted):
                return False
        except urllib.error.HTTPError as error:
            assert error.code == 403
            return True

    def buffers() -> Iterator[bytes]:
        yield from [bytes(PART)] * 2
        while len(identity.handed_out) == 1 and not is_refused():
            pass
        yield from [bytes(PART)] * 2

    with pytest.raises(CredentialsError, match="the next try asks for fresh ones"):
        store.put_stream("k", buffers(), part_size_bytes=PART, max_concurrency=1)
    assert container.keys() == []
    store.put_stream("k", buffers(), part_size_bytes=PART, max_concurrency=1)
    assert container.get("k") == bytes(4 * PART)
    assert len(identity.handed_out) == 2


def test_azure_a_key_that_is_refused_says_that_nobody_can_renew_it(azurite):
    # In Azurite's place: it tells a wrong key otherwise than Azure does.
    with NetworkProxy(azurite.storage_options) as proxy:
        proxy.plan = lambda asked: Refuse(403, "AuthenticationFailed")
        endpoint_url = f"{proxy.storage_options['endpoint_url']}/{ACCOUNT}"
        options = {**azurite.storage_options, "endpoint_url": endpoint_url}
        store = open_store(f"az://{BUCKET}/refused", options, ONCE)
        with pytest.raises(CredentialsError, match=r"(?s)cannot be refreshed.*az login") as caught:
            store.put("k", b"x")
        check(caught.value, store, "put")
        assert KEY not in str(caught.value)


def test_the_end_of_a_signature_is_told():
    from azure.storage.blob import generate_container_sas

    from dcp_objstore.stores.azure.credentials import find_azure_credentials
    from dcp_objstore.stores.azure.options import AzureOptions
    from dcp_objstore.stores.options import parse

    end = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    sas = generate_container_sas(ACCOUNT, BUCKET, KEY, permission="r", expiry=end)
    found = find_azure_credentials(parse(AzureOptions, {"account_name": ACCOUNT, "sas_token": sas}))
    assert found.source == "storage_options: a signature that ends at 2030-01-02T03:04:05Z"
    assert found.renew is None
