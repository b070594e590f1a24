"""Make the clients of a GCS bucket, obstore's and gcsfs's, and its requests for copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from email.message import Message
from functools import partial
from typing import Any
from urllib.parse import quote

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.endpoint import server_url
from dcp_objstore.stores.fsspec.filesystems import Filesystems
from dcp_objstore.stores.gcs.options import GcsOptions
from dcp_objstore.stores.obstore.copies import Ask, Copier, Steps
from dcp_objstore.stores.obstore.direct import SignedGet
from dcp_objstore.stores.obstore.factory import (
    ClientFactory,
    new_client_of,
    quoted,
    unsigned,
    with_token,
)
from dcp_objstore.stores.urls import StoreUrl


def gcs_factory(url: StoreUrl, options: GcsOptions, credentials: Credentials) -> ClientFactory:
    """Return the factory for a GCS bucket.

    Raises:
        ConfigError: an endpoint that cannot be used.
    """
    from obstore.store import GCSStore

    config = {"bucket": url.bucket}
    endpoint = options.endpoint_url and server_url(options.endpoint_url, use_ssl=True)
    if endpoint is not None:
        config["base_url"] = endpoint
    # The project to bill (documentation of the XML API, "HTTP headers").
    headers = {"x-goog-user-project": options.payer} if options.payer else {}
    server = endpoint or "https://storage.googleapis.com"
    bucket_url = f"{server}/{url.bucket}"
    provider, copier = credentials.provider, None
    sign = unsigned(bucket_url) if credentials.anonymous else None
    if provider is not None:  # as for all credentials but anonymous ones
        sign = partial(_get_with_token, bucket_url, provider, headers)
        # All requests of a copy have the same headers, whatever their URL.
        copier = Copier(server, lambda *_: with_token("", provider(), headers).headers, gcs_steps)
    make = new_client_of(
        GCSStore, config, credentials, endpoint=endpoint, verify=options.verify, headers=headers
    )
    return ClientFactory(make, endpoint, sign, copier=copier)


def _get_with_token(
    bucket_url: str, provider: Callable[[], Any], headers: Mapping[str, str], _client: Any, key: str
) -> SignedGet:
    """Return the GET of a key with an access token.

    obstore could sign a URL, but that takes a private key or one more request.
    """
    return with_token(f"{bucket_url}/{quoted(key)}", provider(), headers)


def gcs_steps(_: Copier, ask: Ask, source: StoreUrl, target: StoreUrl, head: Message) -> Steps:
    """Copy by "Objects: rewrite" of the JSON API; see `copies.Steps`.

    A large copy takes several requests. Each of them has the token that the answer before it gave.
    """
    paths = [f"b/{url.bucket}/o/{quote(url.prefix, safe='')}" for url in (source, target)]
    path = f"/storage/v1/{'/rewriteTo/'.join(paths)}"
    path += f"?ifSourceGenerationMatch={head['x-goog-generation']}"
    token_query, done = "", False
    while not done:
        _headers, body = ask("POST", path + token_query, {})
        answer = json.loads(body)
        done = answer["done"]
        token_query = f"&rewriteToken={quote(answer.get('rewriteToken', ''), safe='')}"
        # The second value says that there is an object under the key: not before all is copied.
        yield int(answer["totalBytesRewritten"]), done


def make_gcsfs(url: StoreUrl, options: GcsOptions, config: TransferConfig) -> Filesystems:
    """Make the filesystem of gcsfs that carries the requests to one bucket.

    Raises:
        ConfigError: certificates are named, or are not to be checked; gcsfs has no such option.
    """
    if options.verify is not True:
        raise ConfigError("gcsfs has no 'verify'; use the native transport")
    import aiohttp

    # Not the class that fsspec has registered for gs://. It asks Google over gRPC what kind of
    # bucket it is, for the sake of verbs that are not used here. If the server is another one, that
    # takes a minute for each bucket.
    from gcsfs.core import GCSFileSystem

    endpoint_url = options.endpoint_url and server_url(options.endpoint_url, use_ssl=True)
    fs = GCSFileSystem(
        endpoint_url=endpoint_url,
        token="anon" if options.anon else options.token,
        requester_pays=options.payer or False,
        requests_timeout=aiohttp.ClientTimeout(
            total=config.request_timeout_seconds, sock_connect=config.connect_timeout_seconds
        ),
        skip_instance_cache=True,
        **({} if options.project is None else {"project": options.project}),
    )
    return Filesystems(url, config, fs, endpoint_url=endpoint_url)
