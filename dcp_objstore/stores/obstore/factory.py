"""`ClientFactory`: how obstore's clients of a bucket are made, and the direct lane's GETs signed.

Nothing here sends a request, except to renew a token that has ended.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.obstore.copies import Copier
from dcp_objstore.stores.obstore.direct import SignedGet

if TYPE_CHECKING:
    from obstore.store import MemoryStore

    from dcp_objstore.stores.credentials import Credentials
    from dcp_objstore.stores.urls import StoreUrl

# A function that makes a store of obstore from time-outs and the retry configuration.
NewClient = Callable[[dict[str, Any], dict[str, Any]], Any]
# A function that makes the GET of a key in the bucket, which a client of obstore may sign.
Sign = Callable[[Any, str], SignedGet]

# A URL is signed for longer than it is used: the clocks of client and store may differ by minutes.
_SIGNED_FOR = timedelta(minutes=30)
# A token is not used so shortly before its end.
_LEAST_LEFT_SECONDS = 60.0

_memory: PerProcess[dict[str, MemoryStore]] = PerProcess(dict)


class ClientFactory(NamedTuple):
    """The way in which requests to a bucket are made.

    Attributes:
        new_client: a function that makes a client; they differ in their time-outs and retries.
        endpoint_url: the server; None for the provider's own.
        sign: a function that makes a GET for the direct lane; None if it takes more than that.
        ordered: whether a listing may begin behind a key. Directory buckets and Azure's
            hierarchical namespaces list in another order.
        copier: what asks for copies of whole objects; None where there are none.
    """

    new_client: NewClient
    endpoint_url: str | None = None
    sign: Sign | None = None
    ordered: bool = True
    copier: Copier | None = None


def memory_factory(url: StoreUrl) -> ClientFactory:
    """Return the factory for a memory store: the same store for its name in the whole process."""

    def make(_timeouts: dict[str, Any], _retry: dict[str, Any]) -> MemoryStore:
        from obstore.store import MemoryStore

        return _memory.here.setdefault(url.bucket, MemoryStore())

    return ClientFactory(make)


def new_client_of(
    store: Callable[..., Any],
    config: Mapping[str, Any],
    credentials: Credentials,
    *,
    endpoint: str | None,
    verify: bool | str,
    headers: Mapping[str, str] | None = None,
) -> NewClient:
    """Return a function that makes clients of one bucket.

    Args:
        store: the class of obstore, such as `S3Store`.
        config: the settings of the store that all the clients share.
        credentials: the credentials, which may add to the settings.
        endpoint: the server; None for the provider's own.
        verify: True for the usual TLS certificates, False for any, or the path of others.
        headers: headers to send with every request.
    """
    client: dict[str, Any] = {}
    proxies = urllib.request.getproxies()
    if proxies.pop("no", "").strip() == "*" and proxies:
        # NO_PROXY=* means no proxy for any host, which obstore does not understand. It excludes
        # hosts only from a proxy that is set here, so one is set, and all hosts are excluded.
        client = {"proxy_url": "http://127.0.0.1", "proxy_excludes": "*,0.0.0.0/0,::/0"}
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif verify is not True:
        client["root_certificate"] = Path(verify).read_bytes()
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
    if headers:
        client["default_headers"] = headers

    def make(timeouts: dict[str, Any], retry: dict[str, Any]) -> Any:
        return store(
            # `skip_signature` is always given, because the environment may set it, too.
            config={"skip_signature": False, **config, **credentials.config},
            client_options={**client, **timeouts},
            retry_config=retry,
            credential_provider=credentials.provider,
        )

    return make


def unsigned(place: str) -> Sign:
    """Send no credentials: everybody may read the bucket."""
    return lambda _client, key: SignedGet(f"{place}/{quoted(key)}")


def signed_url(client: Any, key: str) -> SignedGet:
    """Have a client of obstore sign the URL of a key; no request is sent."""
    import obstore

    return SignedGet(obstore.sign(client, "GET", key, _SIGNED_FOR))


def with_token(place: str, token: Any, headers: Mapping[str, str]) -> SignedGet:
    """Send an access token with the GET of a URL."""
    ends: datetime | None = token["expires_at"]
    left_seconds = (ends - datetime.now(UTC)).total_seconds() if ends else float("inf")
    until = time.monotonic() + left_seconds - _LEAST_LEFT_SECONDS
    return SignedGet(place, {"Authorization": f"Bearer {token['token']}", **headers}, until)


def quoted(key: str) -> str:
    """Return a key as it stands in a URL."""
    return quote(key, safe="/~")
