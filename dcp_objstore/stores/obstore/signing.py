"""Make the GETs that the direct lane sends: by a signed URL, or with an access token.

None of this makes a request, but for a token that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dcp_objstore.stores.obstore.direct import LaneError, SignedGet

if TYPE_CHECKING:
    from dcp_objstore.stores.credentials.base import Credentials
    from dcp_objstore.stores.options.gcs import GcsOptions
    from dcp_objstore.stores.options.s3 import S3Options
    from dcp_objstore.stores.urls import StoreUrl

# From a client of obstore and a key in the bucket.
Sign = Callable[[Any, str], SignedGet]

# Signed for longer than it is used: the clocks of client and store may differ by minutes.
_SIGNED_FOR = timedelta(minutes=30)
# A token is not used so shortly before its end.
_LEAST_LEFT_SECONDS = 60.0
# The first version of Azure's REST API with access tokens is of 2017.
_AZURE_VERSION = "2023-11-03"


def s3_sign(settings: S3Options, *, express: bool) -> Sign | None:
    """By a signed URL; None for what needs more than that."""
    needs_more = settings.anon or settings.requester_pays or express
    return None if needs_more else _signed_url


def gcs_sign(url: StoreUrl, options: GcsOptions, found: Credentials, base: str) -> Sign | None:
    """With an access token: to sign, GCS would ask for a private key or make a request."""
    provider = found.provider
    if provider is None:
        return None
    headers = {"x-goog-user-project": options.payer} if options.payer else {}

    def sign(_client: Any, key: str) -> SignedGet:
        return _with_token(_url(base, url.bucket, key), provider(), headers)

    return sign


def azure_sign(url: StoreUrl, found: Credentials, base: str) -> Sign | None:
    """By the account's key, a SAS or an access token; None for what obstore finds by itself."""
    provider = found.provider
    if provider is None:
        return None

    def sign(client: Any, key: str) -> SignedGet:
        given = provider()
        place = _url(base, url.bucket, key)
        if "access_key" in given:
            if not place.endswith(key):
                # obstore 0.12 signs the key as it is in the URL; Azure checks it as it is.
                raise LaneError("a key with such characters is not signed as Azure does")
            return _signed_url(client, key)
        if "sas_token" in given:
            return SignedGet(f"{place}?{given['sas_token']}")
        return _with_token(place, given, {"x-ms-version": _AZURE_VERSION})

    return sign


def _signed_url(client: Any, key: str) -> SignedGet:
    import obstore

    return SignedGet(obstore.sign(client, "GET", key, _SIGNED_FOR))


def _with_token(place: str, given: Any, headers: Mapping[str, str]) -> SignedGet:
    ends: datetime | None = given["expires_at"]
    left_seconds = (ends - datetime.now(UTC)).total_seconds() if ends else float("inf")
    until = time.monotonic() + left_seconds - _LEAST_LEFT_SECONDS
    return SignedGet(place, {"Authorization": f"Bearer {given['token']}", **headers}, until)


def _url(base: str, bucket: str, key: str) -> str:
    return f"{base}/{bucket}/{quote(key, safe='/~')}"
