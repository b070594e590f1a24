"""Make the GETs that the direct lane sends: by a URL, signed or not, or with an access token.

None of this makes a request, but for a token that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dcp_objstore.stores.endpoint import (
    is_directory_bucket,
    is_virtual,
    s3_server,
    virtual_url,
)
from dcp_objstore.stores.obstore.direct import LaneError, SignedGet

if TYPE_CHECKING:
    from dcp_objstore.stores.credentials.base import Credentials
    from dcp_objstore.stores.options.azure import AzureOptions
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


def s3_sign(
    url: StoreUrl, settings: S3Options, found: Credentials, endpoint: str | None
) -> Sign | None:
    """Sign requests by a signed URL; None if they need more than that."""
    express = endpoint is None and is_directory_bucket(url.bucket)
    if settings.requester_pays or express:
        return None
    if not settings.anon:
        return _signed_url
    base = endpoint or f"https://s3.{s3_server(settings, found)[1]}.amazonaws.com"
    virtual = is_virtual(settings, endpoint, url.bucket)
    return _unsigned(virtual_url(base, url.bucket) if virtual else f"{base}/{url.bucket}")


def gcs_sign(
    url: StoreUrl, options: GcsOptions, found: Credentials, endpoint: str | None
) -> Sign | None:
    """Send an access token, because a signed URL takes a private key or another request."""
    place = f"{endpoint or 'https://storage.googleapis.com'}/{url.bucket}"
    provider = found.provider
    if provider is None:
        return _unsigned(place) if found.anonymous else None
    headers = {"x-goog-user-project": options.payer} if options.payer else {}

    def sign(_client: Any, key: str) -> SignedGet:
        return _with_token(f"{place}/{_quoted(key)}", provider(), headers)

    return sign


def azure_sign(
    url: StoreUrl, _options: AzureOptions, found: Credentials, endpoint: str | None
) -> Sign | None:
    """Sign by the account's key, a SAS or an access token; None if obstore finds its own."""
    place = f"{endpoint or f'https://{found.account_name}.blob.core.windows.net'}/{url.bucket}"
    provider = found.provider
    if provider is None:
        return _unsigned(place) if found.anonymous else None

    def sign(client: Any, key: str) -> SignedGet:
        given, quoted = provider(), _quoted(key)
        if "access_key" in given:
            if quoted != key:
                # obstore 0.12 signs the key as it is in the URL; Azure checks it as it is.
                raise LaneError("a key with such characters is not signed as Azure does")
            return _signed_url(client, key)
        if "sas_token" in given:
            return SignedGet(f"{place}/{quoted}?{given['sas_token']}")
        return _with_token(f"{place}/{quoted}", given, {"x-ms-version": _AZURE_VERSION})

    return sign


def _unsigned(place: str) -> Sign:
    """Send no credentials: everybody may read the bucket."""
    return lambda _client, key: SignedGet(f"{place}/{_quoted(key)}")


def _signed_url(client: Any, key: str) -> SignedGet:
    import obstore

    return SignedGet(obstore.sign(client, "GET", key, _SIGNED_FOR))


def _with_token(place: str, given: Any, headers: Mapping[str, str]) -> SignedGet:
    ends: datetime | None = given["expires_at"]
    left_seconds = (ends - datetime.now(UTC)).total_seconds() if ends else float("inf")
    until = time.monotonic() + left_seconds - _LEAST_LEFT_SECONDS
    return SignedGet(place, {"Authorization": f"Bearer {given['token']}", **headers}, until)


def _quoted(key: str) -> str:
    return quote(key, safe="/~")
