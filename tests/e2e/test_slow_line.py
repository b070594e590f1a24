"""A line that moves few bytes per second: a save holds no more in flight than it can send."""

from __future__ import annotations

import pytest
import torch

import dcp_objstore as dos
from tests.support.slow_sink import SlowSink

MIB = 1024 * 1024
PART_BYTES = 5 * MIB
PARTS = 24
BYTES_PER_SECOND = 5 * MIB
# 8 parts at once would take 8 s each.
TIMEOUT_SECONDS = 6.0


@pytest.mark.campaign
def test_a_save_over_a_slow_line_sends_each_part_once(monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.parts._GROWN_PART_SIZE_BYTES", PART_BYTES)
    state = {"zeros": torch.zeros(PARTS * PART_BYTES, dtype=torch.uint8)}
    config = dos.TransferConfig(
        part_size_bytes=PART_BYTES, request_timeout_seconds=TIMEOUT_SECONDS, max_retries=2
    )
    with SlowSink(bytes_per_second=BYTES_PER_SECOND) as sink:
        dos.save(state, "s3://bucket/step-1", storage_options=sink.storage_options, config=config)
        sent = [asked for asked in sink.asked if "partNumber=" in asked.query]
    assert len(sent) == PARTS + 1  # the last is what framing adds
