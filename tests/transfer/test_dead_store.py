"""A store that dies or refuses a part in mid-upload: what counts, what is said, what is tried."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import DcpObjstoreError, StoreUnavailableError
from dcp_objstore.observe.events import NoAnswer, PartUploaded
from dcp_objstore.stores import open_store
from dcp_objstore.stores.retries import RetryPolicy, small_policy
from dcp_objstore.transfer import progress as silence, upload
from dcp_objstore.transfer.parts import plan_parts
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import upload_object
from tests.support.campaign import cases
from tests.support.listening import Heard, heard_channel, of
from tests.support.proxy import Asked, Cut, Fault, NetworkProxy, Refuse
from tests.support.servers import Bucket

PART = 5 * MIB
TRANSPORTS = cases(["native", "boto3", "fsspec"], default=["native"])
PAUSE_SECONDS = RetryPolicy.pause_seconds  # as it is for users
DOCS = Path(__file__).parents[2] / "docs" / "transfers.md"


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "_ASK_SECONDS", 0.1)
    monkeypatch.setattr(silence, "_REPORT_SECONDS", 0.4)


def part_of(asked: Asked) -> int | None:
    """The number of the part that a request carries, from 0."""
    number = parse_qs(asked.query).get("partNumber")
    return int(number[0]) - 1 if number and asked.method == "PUT" else None


def save_parts(
    bucket: Bucket, transport: str, plan: Callable[[Asked], Fault | None], config: TransferConfig
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
        channel.flush()
        proxy.plan = lambda asked: None
        assert progress.moved_bytes == sum(part.size_bytes for part in of(PartUploaded, heard))
    assert list(bucket.sizes()) == ["warm"]
    return caught.value, heard, proxy.asked


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.backends("seaweed")
def test_a_part_that_the_store_refuses_is_never_reported_as_uploaded(bucket, transport):
    config = TransferConfig(part_size_bytes=PART, upload_concurrency=2, max_retries=1)
    refused: list[Asked] = []

    def refuse(asked: Asked) -> Fault | None:
        if part_of(asked) != 5:
            return None
        refused.append(asked)
        # aiohttp goes on sending after an early answer, which this proxy does not read.
        return Cut("answer", 0, "rst") if transport == "fsspec" else Refuse(403, "AccessDenied")

    error, heard, asked = save_parts(bucket, transport, refuse, config)
    assert refused
    assert error.object_key == "o"
    told = {part.part for part in of(PartUploaded, heard)}
    assert 5 not in told
    # Of the parts before it, all but the two that may be under way count in any case.
    assert len(told) >= 3
    assert told < {part_of(one) for one in asked}
    assert not of(NoAnswer, heard)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.backends("seaweed")
def test_a_store_that_dies_in_mid_upload_is_told_once_and_tried_as_often_as_is_said(
    bucket, transport, short_silence, caplog
):
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
    assert "may be left" in str(error)
    assert len(of(PartUploaded, heard)) <= 4
    # What is sent again is so once, as `max_retries` says, and the abort, too.
    parts = [part for part in dead if isinstance(part, int)]
    assert parts
    most = 4 if transport == "fsspec" else 2  # aiohttp sends again over a new connection
    assert all(dead[part] <= most for part in parts)
    assert len(parts) <= 3  # none is begun in a long silence
    assert dead["DELETE"] <= most
    warned = [record for record in caplog.records if "no answer" in record.getMessage()]
    assert len(of(NoAnswer, heard)) == len(warned) <= 1


def test_the_documented_sum_of_all_waits_for_a_dead_store_is_that_of_the_settings(monkeypatch):
    small = small_policy(TransferConfig())
    assert small.max_retries == 10
    sums = []
    for fraction in (0.5, 1.0):
        monkeypatch.setattr(random.Random, "uniform", lambda *_, f=fraction: f)
        sums.append(sum(PAUSE_SECONDS(small, retry) for retry in range(1, 11)))
    least, most = round(sums[0]), round(min(sums[1], small.patience_seconds + 2))
    ask, tell, grace = silence._ASK_SECONDS, silence._REPORT_SECONDS, upload._ABORT_GRACE_SECONDS
    text = " ".join(DOCS.read_text().split())
    for part in (
        f"{ask:.0f} s until it is asked",
        f"{least} to {most} s for the ten retries",
        f"{grace:.0f} s for the abort",
        f"{least + ask + grace:.0f} to {most + ask + grace:.0f} s after its last answer",
        f"a warning after {tell:.0f} s",
    ):
        assert part in text
