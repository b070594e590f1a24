"""The settings of botocore, for boto3 and s3fs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_objstore.config import at_most

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig


def botocore_settings(
    config: TransferConfig,
    addressing_style: str | None,
    read_seconds: float,
    *,
    sign_payload: bool = False,
) -> dict[str, Any]:
    """The arguments of botocore's `Config`, by which it sends each request once.

    Args:
        config: time-outs, and how many requests there may be.
        addressing_style: `virtual` or `path`; None leaves it to the profile.
        read_seconds: the longest time without a byte of an answer.
        sign_payload: sign bodies, too.
    """
    return {
        "s3": {
            **({} if addressing_style is None else {"addressing_style": addressing_style}),
            # SHA-256 of every body costs 1 CPU-second per GiB; see `obstore.makers`.
            "payload_signing_enabled": sign_payload,
        },
        # By default botocore computes CRC32 of every body in Python's zlib and sends it in a
        # trailer over TLS, which some stores that speak S3 refuse; see `s3.checksums`.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": config.connect_timeout_seconds,
        "read_timeout": read_seconds,
        # A save and a load may run at the same time.
        "max_pool_connections": at_most(config.upload_concurrency)
        + at_most(config.download_concurrency),
        "retries": {"total_max_attempts": 1},
    }
