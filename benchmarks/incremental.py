"""`incremental`: saves with a base against full ones, and the copies of the store alone.

One tensor in 20 changes, or all of them. What the store needs for the copies is measured by
`UploadPartCopy` of as many bytes, sent by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dcp_objstore as dos
from benchmarks.conditions import Conditions
from benchmarks.settings import MIB, Settings
from benchmarks.steps import compare_steps, main, random_state
from benchmarks.table import Result, Table
from benchmarks.targets import Place

_FULL, _FROZEN, _CHANGED, _PLAIN, _BY_HAND = (
    "all of it",
    "base, 95 % frozen",
    "base, nothing frozen",
    "nothing frozen, without a base",
    "UploadPartCopy of 95 %, by hand",
)
_STEPS = (_FULL, _FROZEN, _CHANGED, _PLAIN, _BY_HAND)
_COLUMNS = {
    "seconds": ("seconds", ".2f"),
    "x full": ("time", ".2f"),
    "CPU-s/GiB": ("cpu_seconds_per_gib", ".2f"),
    "CPU x full": ("cpu", ".2f"),
    "extra MiB": ("extra_mib", ".0f"),
}
_CHANGES_EACH = 20
_PART_SIZE_BYTES = 32 * MIB
_PARTS_AT_ONCE = 16


def incremental(
    settings: Settings, target: str, rounds: int, conditions: Conditions
) -> tuple[Table, Result]:
    """Measure every step once a round; medians of the rounds."""
    return compare_steps(
        "incremental",
        _STEPS,
        lambda step: _PLAIN if step == _CHANGED else _FULL,
        _COLUMNS,
        settings,
        target,
        rounds,
        conditions,
    )


def _prepare(step: str, settings: Settings, place: Place) -> Callable[[], None]:
    if step == _BY_HAND:
        return _by_hand(settings, place)
    turn = _STEPS.index(step)
    changed = _CHANGES_EACH if step == _FROZEN else 1
    seeds = (i + 1000 * turn * (i % changed == 0) for i in range(settings.tensors))
    state = random_state(settings, seeds)
    base = "latest" if step in (_FROZEN, _CHANGED) else None

    def act() -> None:
        dos.save(
            state,
            f"{place.url}/step-{turn}",
            base=base,
            storage_options=place.storage_options,
            progress=False,
        )

    return act


def _by_hand(settings: Settings, place: Place) -> Callable[[], None]:
    import boto3

    client: Any = boto3.client(
        "s3",
        endpoint_url=place.endpoint_url,
        aws_access_key_id=place.access_key,
        aws_secret_access_key=place.secret_key,
        region_name="us-east-1",
        verify=place.certificate,
    )
    where = {"Bucket": place.bucket, "Key": f"{place.prefix}/by-hand"}
    below = {"Bucket": place.bucket, "Prefix": f"{place.prefix}/step-0/"}
    listed = client.list_objects_v2(**below)["Contents"]
    source = max(listed, key=lambda one: one["Size"])
    end = min(source["Size"], settings.total_bytes) * (_CHANGES_EACH - 1) // _CHANGES_EACH
    starts = range(0, end, _PART_SIZE_BYTES)

    def act() -> None:
        upload = client.create_multipart_upload(**where)["UploadId"]

        def copy(number_: int) -> dict[str, Any]:
            start = starts[number_ - 1]
            answer = client.upload_part_copy(
                **where,
                UploadId=upload,
                PartNumber=number_,
                CopySource={"Bucket": place.bucket, "Key": source["Key"]},
                CopySourceRange=f"bytes={start}-{min(end, start + _PART_SIZE_BYTES) - 1}",
            )
            return {"PartNumber": number_, "ETag": answer["CopyPartResult"]["ETag"]}

        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            parts = list(pool.map(copy, range(1, len(starts) + 1)))
        client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})

    return act


if __name__ == "__main__":
    main(_STEPS, _prepare)
