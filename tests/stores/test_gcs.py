"""What is GCS's own way of it: generations, tokens, options. (`test_stores` has the contract.)"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
import torch
from google.auth.credentials import Credentials
from google.oauth2.credentials import Credentials as UserCredentials

import dcp_objstore as dos
from dcp_objstore.checkpoint.probe import probe
from dcp_objstore.errors import (
    CredentialsError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dcp_objstore.stores import IfVersion, open_store
from dcp_objstore.stores.admission.limiter import Limiter
from dcp_objstore.stores.gcs.credentials import find_gcs_credentials
from dcp_objstore.stores.gcs.options import GcsOptions
from tests.contract import PART
from tests.support.gcs_tokens import ShortLived, is_valid, post
from tests.support.verbs import ONCE, VERBS, check

gcs = pytest.mark.backends("gcs")


@gcs
def test_versions_are_generations_and_grow_also_with_equal_bytes(bucket):
    store = open_store(bucket.url, bucket.storage_options)
    seen = [store.put("k", b"same") for _ in range(3)]
    seen.append(store.put_stream("k", iter([b"same"]), part_size_bytes=PART, max_concurrency=1))
    generations = [int(version.version or 0) for version in seen]
    assert generations == sorted(set(generations))
    assert store.head("k").version == seen[-1]
    for old in seen[:-1]:
        with pytest.raises(PreconditionFailedError):
            store.put("k", b"late", precondition=IfVersion(old), retry=False)
    assert bucket.get("k") == b"same"


# obstore uses a token for 0.1 s before it asks again; the rest is for a slow machine.
LIFETIME_SECONDS = 1.5


@gcs
def test_a_token_that_expires_in_the_middle_of_an_upload_is_renewed(bucket, gcs_server):
    credentials = ShortLived(gcs_server, LIFETIME_SECONDS)
    options = {**bucket.storage_options, "token": credentials}
    store = open_store(bucket.url, options, ONCE)

    def buffers() -> Iterator[np.ndarray]:
        yield np.full(PART, 0, dtype=np.uint8)
        yield np.full(PART, 1, dtype=np.uint8)
        first = credentials.handed_out[0]  # the upload was begun with it
        while is_valid(gcs_server, first):
            time.sleep(0.02)
        for number in range(2, 6):
            yield np.full(PART, number, dtype=np.uint8)

    store.put_stream("k", buffers(), part_size_bytes=PART, max_concurrency=2)
    assert bucket.get("k") == b"".join(bytes([number]) * PART for number in range(6))
    assert not is_valid(gcs_server, credentials.handed_out[0])


@gcs
def test_a_token_that_is_no_longer_valid_is_a_credentials_error(bucket, gcs_server):
    stale = str(post(f"{gcs_server.gcs_endpoint_url}/o/token?lifetime=-1")["access_token"])
    store = open_store(bucket.url, {**bucket.storage_options, "token": stale}, ONCE)
    for name, verb in VERBS.items():
        with pytest.raises(CredentialsError) as caught:
            verb(store)
        check(caught.value, store, name)
        assert stale not in str(caught.value)
    assert bucket.keys() == []


@gcs
def test_one_write_of_an_object_in_a_while_is_enough(bucket, gcs_server, monkeypatch):
    """GCS answers 429 to a second write of the same object within a second."""
    monkeypatch.setattr(Limiter, "wait_turn", lambda *_: None)  # retries alone are enough
    options = bucket.storage_options

    def limit(name: str, seconds: float) -> None:
        prefix = f"/{bucket.name}/{bucket.prefix}{name}"
        post(f"{gcs_server.gcs_endpoint_url}/o/limit?prefix={prefix}&seconds={seconds}")

    limit("never-again/", 600)
    limit("probed/", 0.2)
    limit("run/", 0.2)
    once = open_store(bucket.at("never-again"), options, ONCE)
    once.put("k", b"x")
    with pytest.raises(StoreUnavailableError):
        once.put("k", b"y", retry=False)
    assert bucket.get("never-again/k") == b"x"
    real = open_store(bucket.at("probed"), options, ONCE)
    assert probe(real) == real.capabilities
    url, state = bucket.at("run/step-1"), {"weight": torch.arange(100)}
    for _ in range(2):
        dos.save(state, url, overwrite=True, storage_options=options)
    assert dos.pin(url, "keep", storage_options=options) == ("keep",)
    assert dos.unpin(url, "keep", storage_options=options) == ()
    dos.delete(url, allow_newest=True, storage_options=options)
    # The marker, and what the first save left for a sweep.
    assert len(bucket.keys("run/step-1")) == 3


# What needs no server


def test_a_token_of_google_auth_is_renewed_only_when_it_has_to_be():
    def answer(credentials: Credentials) -> Any:
        provider = find_gcs_credentials(GcsOptions(token=credentials)).provider
        assert provider is not None
        return provider()

    # Nothing to renew it with: gcsfs's users wrap a bare token like this.
    assert answer(UserCredentials("ya29.bare")) == {"token": "ya29.bare", "expires_at": None}
    later = datetime.now(UTC) + timedelta(hours=1)
    still = UserCredentials("ya29.good", expiry=later.replace(tzinfo=None))
    given = answer(still)
    assert given["token"] == "ya29.good"
    assert given["expires_at"] < later
    with pytest.raises(CredentialsError, match=r"(?s)renewed.*gcloud auth"):
        answer(UserCredentials("ya29.old", expiry=datetime(2020, 1, 1)))


@pytest.mark.filterwarnings("ignore:The load_credentials_from_dict method:DeprecationWarning")
@pytest.mark.parametrize(
    "content", ["not json SECRET", '["SECRET"]', '{"type": "other", "x": "SECRET"}']
)
def test_a_broken_key_is_refused_and_not_shown(tmp_path, content):
    path = tmp_path / "key"
    path.write_text(content)
    with pytest.raises(CredentialsError) as caught:
        find_gcs_credentials(GcsOptions(token=str(path)))
    assert "SECRET" not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
