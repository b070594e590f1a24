"""Make obstore's clients of an Azure container, and Azure's requests for copies."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.message import Message
from email.utils import formatdate
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.stores.azure.options import AzureOptions
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.endpoint import server_url
from dcp_objstore.stores.obstore.copies import Ask, Copier, Steps, path_of
from dcp_objstore.stores.obstore.direct import LaneError, SignedGet
from dcp_objstore.stores.obstore.factory import (
    ClientFactory,
    new_client_of,
    quoted,
    signed_url,
    unsigned,
    with_token,
)
from dcp_objstore.stores.urls import StoreUrl

# The version of Azure's REST API. Access tokens need one of 2017 or later.
AZURE_VERSION = "2023-11-03"


def azure_factory(url: StoreUrl, options: AzureOptions, credentials: Credentials) -> ClientFactory:
    """Return the factory for an Azure container.

    Raises:
        ConfigError: an endpoint that cannot be used.
    """
    from obstore.store import AzureStore

    account = credentials.account_name
    config: dict[str, Any] = {"container_name": url.bucket, "account_name": account}
    endpoint = credentials.endpoint_url and server_url(credentials.endpoint_url, use_ssl=True)
    if endpoint is not None:
        config["endpoint"] = endpoint
    server = endpoint or f"https://{account}.blob.core.windows.net"
    container_url = f"{server}/{url.bucket}"
    provider, copier = credentials.provider, None
    # Without a provider, either no credentials are sent, or obstore finds them by itself. In the
    # second case there is no direct lane.
    sign = unsigned(container_url) if credentials.anonymous else None
    if provider is not None:
        sign = partial(_signed_get, container_url, provider)
        # Credentials that can be renewed are tokens, never a signature. Only the others are looked
        # at: to ask for a token may take a request.
        has_signature = credentials.renew is None and "sas_token" in provider()
        # A shared access signature would have to stand in the URL of the source, and Azure keeps
        # this URL among the properties of the copy.
        if not has_signature:
            copier = Copier(server, partial(azure_headers, account, provider), azure_steps)
    make = new_client_of(AzureStore, config, credentials, endpoint=endpoint, verify=options.verify)
    return ClientFactory(make, endpoint, sign, ordered=False, copier=copier)


def _signed_get(container: str, provider: Callable[[], Any], client: Any, key: str) -> SignedGet:
    """Return the GET of a key, signed as its credentials allow: by key, signature or token.

    Args:
        container: the URL of the container.
        provider: a function that returns the credentials.
        client: a client of obstore.
        key: the object's key in the container.

    Raises:
        LaneError: the key has characters that obstore does not sign as Azure does.
    """
    secret, quoted_key = provider(), quoted(key)
    key_url = f"{container}/{quoted_key}"
    if "access_key" in secret:
        if quoted_key != key:
            # obstore 0.12 signs the key as it stands in the URL; Azure checks it unquoted.
            raise LaneError("a key with such characters is not signed as Azure does")
        return signed_url(client, key)
    if "sas_token" in secret:
        return SignedGet(f"{key_url}?{secret['sas_token']}")
    return with_token(key_url, secret, {"x-ms-version": AZURE_VERSION})


def azure_steps(
    copier: Copier, ask: Ask, source: StoreUrl, target: StoreUrl, head: Message
) -> Steps:
    """Copy by "Copy Blob"; see `copies.Steps`.

    Azure answers when the copy is made, or has only begun. In the second case it is asked again and
    again how far it is, which it says as "4/10": the bytes that are copied, and all of them.
    """
    condition = {"x-ms-source-if-match": head["ETag"]}
    url = copier.server + path_of(source)
    answer, _ = ask("PUT", path_of(target), {"x-ms-copy-source": url, **condition})
    try:
        while (status := answer["x-ms-copy-status"]) != "success":
            # True: the new object is there as soon as its copy has begun.
            yield int(answer.get("x-ms-copy-progress", "0").partition("/")[0]), True
            if status != "pending":  # `failed` or `aborted`
                raise StoreUnavailableError(f"Azure's copy is not a success: {status}")
            answer, _ = ask("HEAD", path_of(target), {})
    except BaseException:
        # The copy is given up, or the caller has closed this generator (GeneratorExit): abort it.
        with suppress(Exception):
            query = f"comp=copy&copyid={answer['x-ms-copy-id']}"
            ask("PUT", f"{path_of(target)}?{query}", {"x-ms-copy-action": "abort"})
        raise
    yield int(head["Content-Length"]), True


def azure_headers(
    account: str | None,
    provider: Callable[[], Any],
    method: str,
    url: str,
    more: Mapping[str, str],
) -> Mapping[str, str]:
    """Return the headers of a request to Azure, signed with the account's key or a token.

    Such a request may read the source of a copy, too, if that is in the same account. The signature
    is made as "Authorize with Shared Key" says. It covers Azure's own headers (`x-ms-…`) and some
    others, none of which is sent here.

    Args:
        account: the storage account.
        provider: a function that returns the credentials.
        method: the method of the request.
        url: its URL.
        more: its other headers, all of them Azure's own.
    """
    credentials = provider()
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": AZURE_VERSION, **more}
    if "access_key" not in credentials:
        return {**headers, "Authorization": f"Bearer {credentials['token']}"}
    parts = urlsplit(url)
    header_lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    query_lines = "".join(f"\n{name}:{value}" for name, value in sorted(parse_qsl(parts.query)))
    # Behind the method stand eleven empty lines, for headers that are not sent (Content-Length,
    # Range…).
    text = method + 12 * "\n" + f"{header_lines}/{account}{parts.path}{query_lines}"
    digest = hmac.digest(base64.b64decode(credentials["access_key"]), text.encode(), "sha256")
    signature = base64.b64encode(digest).decode()
    return {**headers, "Authorization": f"SharedKey {account}:{signature}"}
