"""boto3's own chain finds the credentials, and renews those that expire in the middle of a save."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import CredentialsError
from dcp_objstore.stores import StoreSpec, open_store
from tests.support.proxy import Asked
from tests.support.scripted import fault_answer
from tests.support.servers import Bucket
from tests.support.states import fill, tensor_state, wrong_keys
from tests.support.tampering import TamperingProxy

pytestmark = pytest.mark.usefixtures("bare_environment")
MIB = 1024 * 1024
CONFIG = dos.TransferConfig(
    transport="boto3", part_size_bytes=5 * MIB, request_size_bytes=4 * MIB, max_retries=2
)
SHAPES = {"big": (3001, 4096), "small": (3, 3)}  # 12 MiB of bytes
USES = 5


class ExpiringKeys(TamperingProxy):
    """Accepts each key for `USES` requests: counted, so that one expires however fast a save is.

    Attributes:
        used: how often each access key id was accepted.
        expired: requests with a key that had expired.
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket.storage_options)
        self.used: Counter[str] = Counter()
        self.expired = 0
        self.refuse(self._is_expired, fault_answer("s3", "expired"))

    def _is_expired(self, asked: Asked) -> bool:
        with self._lock:
            fresh = bool(asked.access_key) and self.used[asked.access_key] < USES
            self.used[asked.access_key] += fresh
            self.expired += not fresh
        return not fresh


def short_lived_profile(folder: Path, endpoint_url: str) -> dict[str, str]:
    """The environment of a profile whose `credential_process` gives other keys at every call."""
    script = folder / "keys"
    script.write_text(
        f"#!{sys.executable}\n"
        "import datetime, json, secrets\n"
        "until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'ASIA' + secrets.token_hex(8),"
        " 'SecretAccessKey': secrets.token_hex(16), 'SessionToken': secrets.token_hex(16),"
        " 'Expiration': until.isoformat()}))\n"
    )
    script.chmod(0o700)
    (folder / "config").write_text(
        f"[profile short]\ncredential_process = {script}\nendpoint_url = {endpoint_url}\n"
    )
    return {"AWS_PROFILE": "short"}


@pytest.mark.backends("moto")
def test_keys_that_expire_in_the_middle_of_a_save_are_renewed(bucket, monkeypatch, tmp_path):
    state = tensor_state("plain", SHAPES, torch.uint8)
    fill(state)
    back = tensor_state("plain", SHAPES, torch.uint8)
    with ExpiringKeys(bucket) as server:
        for name, value in short_lived_profile(tmp_path, server.endpoint_url).items():
            monkeypatch.setenv(name, value)
        dos.save(dict(state), bucket.at("step-1"), config=CONFIG, progress=False)
        saved_with = len(server.used)
        dos.load(back, bucket.at("step-1"), config=CONFIG, progress=False)
    assert wrong_keys(back) == []
    assert saved_with >= 3, "the save was too short to show anything"
    assert len(server.used) > saved_with
    assert server.expired == 0
    assert bucket.uploads() == []


@pytest.mark.backends("moto")
def test_keys_that_expire_and_have_no_source_end_the_save(bucket):
    state = tensor_state("plain", SHAPES, torch.uint8)
    with ExpiringKeys(bucket) as server:
        options = {"key": "static", "secret": "s", "endpoint_url": server.endpoint_url}
        with pytest.raises(CredentialsError, match="ExpiredToken"):
            dos.save(
                dict(state),
                bucket.at("step-1"),
                config=CONFIG,
                storage_options=options,
                progress=False,
            )
        assert server.expired
    assert "_COMMIT" not in bucket.keys("step-1")


def test_a_credential_process_that_fails_is_an_error_about_credentials(monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[profile broken]\ncredential_process = /bin/false\n")
    with pytest.raises(CredentialsError):
        open_store("s3://bucket/x", {"profile": "broken"}, CONFIG)


def test_credentials_that_were_left_behind_by_a_pickle_are_named():
    spec = StoreSpec("s3://bucket/x", {"key": "k", "secret": "s"}, CONFIG)
    bare = StoreSpec(spec.url, None, CONFIG, ("key", "secret"))
    with pytest.raises(CredentialsError, match="key, secret were given"):
        bare.open()
