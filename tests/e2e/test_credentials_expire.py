"""Credentials that end while they are used, on a server that looks at when they end.

A key is named by the moment of its end, so what hands one out and what checks it agree. What counts
is when a request was signed: how long it then takes to arrive is up to the machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import CredentialsError
from dcp_objstore.stores import open_store
from tests.support.campaign import cases
from tests.support.proxy import Asked, Fault, Refuse
from tests.support.slow_sink import SlowSink
from tests.support.verbs import VERBS

pytestmark = pytest.mark.usefixtures("bare_environment")
MIB = 1024 * 1024
CONFIG = dos.TransferConfig(part_size_bytes=5 * MIB, request_size_bytes=4 * MIB)
SAVED = torch.zeros(60 * MIB, dtype=torch.uint8)
LASTING_SECONDS = 3
# A key that is asked for again when two thirds of its life are over signs nothing in its last half
# second, even if it took a second until it was received.
ON_THE_WAY_SECONDS = 0.5
# What a profile's credential_process runs: JSON as AWS documents it ("Sourcing credentials with
# an external process").
PROCESS = """
import datetime, json, sys, time
end = time.time() + float(sys.argv[1])
expiration = datetime.datetime.fromtimestamp(end, datetime.timezone.utc).isoformat()
print(json.dumps({"Version": 1, "AccessKeyId": f"K{end:.3f}", "SecretAccessKey": "s",
                  "SessionToken": "t", "Expiration": expiration}))
"""


class Guard:
    """A plan: refuses what was signed when its key was about to end, and what `revoked` names."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.revoked: set[str] = set()
        self.refused: list[Asked] = []

    def __call__(self, asked: Asked) -> Fault | None:
        self.keys.add(asked.access_key)
        ends_at = float(asked.access_key[1:]) - ON_THE_WAY_SECONDS
        if asked.access_key in self.revoked or asked.signed_at > ends_at:
            self.refused.append(asked)
            return Refuse(403, "ExpiredToken")
        return None


@pytest.fixture
def guard() -> Guard:
    return Guard()


@pytest.fixture
def sink(guard: Guard) -> Iterator[SlowSink]:
    """A save of `SAVED` takes it longer than a key lasts, a part a fraction of that."""
    with SlowSink(bytes_per_second=15 * MIB) as sink:
        sink.plan = guard
        yield sink


def profile(tmp_path: Path, lasting_seconds: float) -> dict[str, object]:
    script = tmp_path / "give.py"
    script.write_text(PROCESS)
    (tmp_path / "config").write_text(
        f"[profile short]\ncredential_process = {sys.executable} {script} {lasting_seconds}\n"
    )
    return {"profile": "short"}


def save(sink: SlowSink, options: dict[str, object]) -> None:
    options = {**options, "endpoint_url": sink.storage_options["endpoint_url"]}
    dos.save(
        {"zeros": SAVED}, "s3://bucket/x", storage_options=options, config=CONFIG, progress=False
    )


def test_a_save_outlives_its_credentials(sink, guard, tmp_path):
    save(sink, profile(tmp_path, LASTING_SECONDS))
    print(f"{len(guard.keys)} keys for {len(sink.asked)} requests")
    assert len(guard.keys) > 1
    # Asked for in time, and not for every request.
    assert guard.refused == []
    assert len(guard.keys) < len(sink.asked) / 4


SOME_VERBS = cases([verb for verb in VERBS if verb != "put_stream"], default=["get", "list"])


@pytest.mark.parametrize("verb", SOME_VERBS)
def test_credentials_that_are_refused_before_their_time_are_renewed_once(
    sink, guard, tmp_path, verb
):
    options = {**profile(tmp_path, 3600), "endpoint_url": sink.storage_options["endpoint_url"]}
    store = open_store("s3://bucket/x", options)
    store.put("k", b"x")
    guard.revoked |= guard.keys
    VERBS[verb](store)
    assert len(guard.keys) == 2
    assert len(guard.refused) == (2 if verb == "head" else 1)


@pytest.mark.parametrize("verb", SOME_VERBS)
def test_fresh_credentials_that_are_refused_too_say_what_to_do(sink, guard, tmp_path, verb):
    options = {**profile(tmp_path, -3600), "endpoint_url": sink.storage_options["endpoint_url"]}
    (tmp_path / "give.py").write_text(PROCESS.replace('"Expiration": expiration', '"Unused": 0'))
    with pytest.raises(CredentialsError, match=r"(?s)profile 'short'.*fresh ones.*log in again"):
        VERBS[verb](open_store("s3://bucket/x", options))
    assert len(guard.refused) <= 4


def test_fixed_credentials_that_expire_say_that_nobody_can_renew_them(sink, guard):
    options: dict[str, object] = {"secret": "s", "token": "t", "key": f"K{time.time() + 3600:.3f}"}

    def end(asked: Asked) -> Fault | None:
        if asked.number == 12:
            guard.revoked |= guard.keys
        return guard(asked)

    sink.plan = end
    with pytest.raises(
        CredentialsError, match=r"(?s)storage_options.*cannot be refreshed"
    ) as caught:
        save(sink, options)
    assert guard.refused
    assert str(options["key"]) not in str(caught.value)
    assert not any(asked.name == "_COMMIT" and asked.method == "PUT" for asked in sink.asked)
