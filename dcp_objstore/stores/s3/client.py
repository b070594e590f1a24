"""Make obstore's clients of an S3 bucket. None of this sends a request."""

from __future__ import annotations

import os
from typing import Any

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.obstore.factory import (
    ClientFactory,
    Sign,
    new_client_of,
    signed_url,
    unsigned,
)
from dcp_objstore.stores.s3.endpoint import (
    is_aws,
    is_directory_bucket,
    is_virtual,
    s3_checksum,
    s3_server,
    virtual_url,
)
from dcp_objstore.stores.s3.options import CHECKSUM_VARIABLE, S3Options
from dcp_objstore.stores.urls import StoreUrl

# Checksums that obstore does not have, and boto3 has.
_BOTO3_CHECKSUMS = ("CRC32", "CRC32C")


def s3_factory(url: StoreUrl, settings: S3Options, credentials: Credentials) -> ClientFactory:
    """Return the factory for an S3 bucket.

    Raises:
        ConfigError: an endpoint, a region or a checksum that cannot be used.
    """
    from obstore.store import S3Store

    endpoint, region = s3_server(settings, credentials)
    style = settings.addressing_style or credentials.addressing_style
    virtual = is_virtual(style, endpoint, url.bucket)
    config: dict[str, Any] = {
        "bucket": url.bucket,
        "region": region,
        # One object per DELETE: the bulk call is missing in some stores that speak S3.
        "disable_bulk_delete": True,
        # SHA-256 of every body took 1.0 instead of 0.3 CPU-seconds per GiB (2 cores, loopback).
        # AWS, SeaweedFS and moto take bodies without; TLS and our own digests protect the bytes.
        "unsigned_payload": not settings.sign_payload,
        "virtual_hosted_style_request": virtual,
        # Given here, so that AWS_CONDITIONAL_PUT and AWS_S3_EXPRESS, which obstore would read in
        # the environment, do not count.
        "conditional_put": "etag",
        "s3_express": _is_express(url.bucket, endpoint),
    }
    server = endpoint or f"https://s3.{region}.amazonaws.com"
    bucket_url = virtual_url(server, url.bucket) if virtual else f"{server}/{url.bucket}"
    if endpoint is not None:
        # obstore knows several settings for the endpoint; this one wins over all others, also over
        # those in the environment. For virtual addressing it has to contain the bucket.
        config["aws_endpoint_url_s3"] = bucket_url if virtual else endpoint
    if settings.requester_pays:
        config["request_payer"] = True
    for name in ("sse", "sse_kms_key_id", "sse_bucket_key"):
        value = getattr(settings, name)
        if value is not None:  # `native` are obstore's names of an option
            config[settings.option(name).native[0]] = value
    checksum = s3_checksum(settings, endpoint)
    if checksum in _BOTO3_CHECKSUMS:
        raise ConfigError(
            f"transport 'native' sends CRC64NVME or SHA256, not {checksum}; transport 'boto3' does"
        )
    if checksum is not None:
        config["checksum_algorithm"] = checksum
    elif os.environ.get(CHECKSUM_VARIABLE) is not None:
        # No checksum is to be sent, but obstore would send the variable's, and cannot be told not
        # to.
        raise ConfigError(
            f"{CHECKSUM_VARIABLE} is set in the environment, and obstore reads it, which has no"
            " word for none: unset it, or use transport 'boto3'"
        )
    sign: Sign | None = None
    # Without `sign` there is no direct lane. obstore's signed URLs do not say who pays, and a
    # directory bucket takes only URLs that were signed with the credentials of a session.
    if not (settings.requester_pays or config["s3_express"]):
        sign = unsigned(bucket_url) if settings.anon else signed_url
    make = new_client_of(S3Store, config, credentials, endpoint=endpoint, verify=settings.verify)
    return ClientFactory(make, endpoint, sign, ordered=not is_directory_bucket(url.bucket))


def _is_express(bucket: str, endpoint: str | None) -> bool:
    """Whether a bucket is a directory bucket of AWS itself.

    Raises:
        ConfigError: the bucket's name has no zone; or the endpoint is given, and obstore would use
            it as that of an ordinary bucket.
    """
    # On another server than AWS, a bucket with such a name is an ordinary one.
    if not is_directory_bucket(bucket) or not is_aws(endpoint):
        return False
    if endpoint is not None:
        raise ConfigError(
            f"{bucket!r} is a directory bucket, whose endpoint follows from its name and the"
            f" region: leave out endpoint_url ({endpoint}), or use transport 'boto3'"
        )
    if bucket.count("--") < 2:  # the form is BASE--ZONE--x-s3
        raise ConfigError(f"{bucket!r} has no zone in its name, as directory buckets do")
    return True
