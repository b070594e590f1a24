"""A store that dies, or refuses a part, in mid-upload: what counts, what is said, how often it is tried."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

import dcp_objstore as dos
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import DcpObjstoreError, StoreUnavailableError
from dcp_objstore.observe.events import AnyEvent, Failed, NoAnswer, PartUploaded, Retried
from dcp_objstore.stores import open_store
from dcp_objstore.stores.retries import RetryPolicy, policies
from dcp_objstore.transfer import silence, upload
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import upload_object
from tests.support.campaign import cases
from tests.support.listening import Heard, heard_channel, of
from tests.support.proxy import Asked, Cut, Fault, NetworkProxy, Refuse
from tests.support.servers import BUCKET, Bucket

PART = 5 * MIB
TRANSPORTS = ("native", "boto3", "fsspec")
DOCS = Path(__file__).parents[2] / "docs" / "transfers.md"


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "_ASK_SECONDS", 0.1)
    monkeypatch.setattr(silence, "_TELL_SECONDS", 0.4)


def part_of(asked: Asked) -> int | None:
    """The number of the part that a request carries, from 0."""
    number = parse_qs(asked.query).get("partNumber")
    return int(number[0]) - 1 if number and asked.method == "PUT" else None


def save_parts(
    bucket: Bucket,
    transport: str,
    plan: Callable[[Asked], Fault | None],
    config: TransferConfig,
) -> tuple[DcpObjstoreError, Heard, list[Asked]]:
    """Upload eight parts through a proxy; return the error, the events, and what was asked."""
    channel, heard = heard_channel()
    with NetworkProxy(bucket.storage_options) as proxy:
        store = open_store(bucket.url, {**proxy.storage_options, "transport": transport}, config)
        store.put("warm", b"")
        proxy.plan = plan
        pieces = (np.full(PART, number, np.uint8) for number in range(8))
        progress = Progress(60, channel)
        with channel.current(), pytest.raises(DcpObjstoreError) as caught:
            upload_object(store, "o", pieces, plan_parts(8 * PART, PART), config, progress)
        channel.settle()
        proxy.plan = lambda asked: None
        assert progress.moved_bytes == sum(part.size_bytes for part in of(PartUploaded, heard))
    assert [meta.key for meta in store.list()] == ["warm"]
    return caught.value, heard, proxy.asked


@pytest.mark.parametrize("transport", cases(TRANSPORTS, default=TRANSPORTS))
@pytest.mark.backends("seaweed")
def test_a_part_that_the_store_refuses_is_never_reported_as_uploaded(
    bucket: Bucket, transport: str
) -> None:
    config = TransferConfig(part_size_bytes=PART, upload_concurrency=2)

    def refuse(asked: Asked) -> Fault | None:
        return Refuse(403, "AccessDenied") if part_of(asked) == 5 else None

    error, heard, _ = save_parts(bucket, transport, refuse, config)
    assert "AccessDenied" in str(error)
    told = {part.part for part in of(PartUploaded, heard)}
    assert told <= {0, 1, 2, 3, 4}
    assert len(told) >= 2
    assert not of(NoAnswer, heard)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.backends("seaweed")
def test_a_store_that_dies_in_mid_upload_is_told_once_and_tried_as_often_as_is_said(
    bucket: Bucket, transport: str, short_silence: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = TransferConfig(part_size_bytes=PART, upload_concurrency=2, max_retries=1)
    dead: Counter[object] = Counter()

    def die(asked: Asked) -> Fault | None:
        part = part_of(asked)
        if not dead and (part is None or part < 4):
            return None
        dead[asked.method if part is None else part] += 1
        return Cut("request", 0, "rst")

    with caplog.at_level(logging.WARNING, "dcp_objstore"):
        error, heard, _ = save_parts(bucket, transport, die, config)
    assert isinstance(error, StoreUnavailableError)
    assert error.object_key == "o"
    assert len(of(PartUploaded, heard)) <= 4
    # Each part and each question is tried twice, as `max_retries` says; the abort no more often.
    assert all(tries <= 2 for part, tries in dead.items() if isinstance(part, int))
    assert dead["DELETE"] <= 2
    assert len(of(NoAnswer, heard)) == len([r for r in caplog.records if "no answer" in r.message])
    assert len(of(NoAnswer, heard)) <= 1
    assert "PUT" in str(error) or "o" == error.object_key
    assert "may be left" in str(error)
