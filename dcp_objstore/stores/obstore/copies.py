"""Copies of whole objects that GCS and Azure make, on the condition that the source is unchanged.

obstore's own `copy` takes no condition and knows one bucket alone. So these few requests are made
here and sent by Python's HTTP client, with the credentials and the retries of all others. One that
is sent again copies the same bytes once more, so it does not matter if an answer was lost.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from email.message import Message
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit
from urllib.request import Request

from dcp_objstore.errors import (
    CorruptDataError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.retries import RetryPolicy, Tries
from dcp_objstore.stores.urls import StoreUrl, parse_url

if TYPE_CHECKING:
    from dcp_objstore.stores.protocol import CopySource

# Sends a request of a method, a path and headers; returns the answer's headers and body.
Ask = Callable[[str, str, Mapping[str, str]], tuple[Message, bytes]]
# Yields the bytes that are copied so far, and whether there is something under the target's key.
Steps = Generator[tuple[int, bool]]

# The first version of Azure's REST API with access tokens is of 2017.
AZURE_VERSION = "2023-11-03"
# The patience with a copy that has begun and does not go on.
_PENDING = RetryPolicy(None, 60.0)


class Copier(NamedTuple):
    """How a provider is asked for copies.

    Attributes:
        server: its URL; on Azure that of the account.
        sign: makes the headers of a request, of its method, its URL and headers to be sent.
        steps: copies, by `Ask`, an object to another place. The condition is in the headers that
            came with its HEAD.
    """

    server: str
    sign: Callable[[str, str, Mapping[str, str]], Mapping[str, str]]
    steps: Callable[[Copier, Ask, StoreUrl, StoreUrl, Message], Steps]


def copy_object(
    copier: Copier | None,
    send: Callable[[str, Callable[[], Request]], tuple[Message, bytes]],
    sources: Sequence[CopySource],
    target: StoreUrl,
    moved: Callable[[int], None],
    remove: Callable[[], None],
) -> None:
    """Have the store copy an object, in the state in which its HEAD shows the ETag asked for.

    Args:
        copier: knows the provider.
        send: sends a request; `Clients.ask`.
        sources: one whole object.
        target: the URL of the new one.
        moved: called with the size of what was copied; see `ObjectStore.copy`.
        remove: removes the new one, if the copy is stopped when it is there.

    Raises:
        As `ObjectStore.copy`.
    """
    source = sources[0]
    origin = parse_url(source.url)
    if copier is None or origin.scheme != target.scheme or source.version.e_tag is None:
        raise UnsupportedError(f"{source.url} is not on this store, or its ETag is not known")

    def ask(method: str, path: str, headers: Mapping[str, str]) -> tuple[Message, bytes]:
        def make() -> Request:
            url = copier.server + path
            return Request(url, headers=dict(copier.sign(method, url, headers)), method=method)

        return send(f"{method} in a copy of {source.url}", make)

    found, _ = ask("HEAD", _path(origin), {})
    size_bytes = int(found["Content-Length"])
    if found["ETag"] != source.version.e_tag:
        raise PreconditionFailedError(f"{source.url} was changed by another writer")
    if source.end > size_bytes:
        raise CorruptDataError(f"{source.url} has only {size_bytes} bytes")
    if len(sources) > 1 or (source.start, source.end) != (0, size_bytes):
        raise UnsupportedError("this store copies whole objects, one into one")
    copied_bytes, is_there, tries = 0, False, Tries(_PENDING)
    try:
        with closing(copier.steps(copier, ask, origin, target, found)) as steps:
            for now_bytes, is_there in steps:  # noqa: B007  for what follows
                if now_bytes > copied_bytes:
                    moved(now_bytes - copied_bytes)
                    copied_bytes, tries = now_bytes, Tries(_PENDING)
                elif not tries.pause():
                    raise StoreUnavailableError("the store does not go on with a copy")
    except BaseException:
        if is_there:
            with suppress(Exception):
                remove()
        raise


def _path(url: StoreUrl) -> str:
    return f"/{url.bucket}/{quote(url.prefix)}"


def gcs_steps(_: Copier, ask: Ask, source: StoreUrl, target: StoreUrl, found: Message) -> Steps:
    """Copy by "Objects: rewrite" of the JSON API; what takes long takes several requests."""
    places = [f"b/{one.bucket}/o/{quote(one.prefix, safe='')}" for one in (source, target)]
    path = f"/storage/v1/{'/rewriteTo/'.join(places)}"
    path += f"?ifSourceGenerationMatch={found['x-goog-generation']}"
    token, done = "", False
    while not done:
        answer = json.loads(ask("POST", path + token, {})[1])
        done = answer["done"]
        token = f"&rewriteToken={quote(answer.get('rewriteToken', ''), safe='')}"
        yield int(answer["totalBytesRewritten"]), done


def azure_steps(
    copier: Copier, ask: Ask, source: StoreUrl, target: StoreUrl, found: Message
) -> Steps:
    """Copy by "Copy Blob"; wait where Azure has only begun, and abort what is given up."""
    condition = {"x-ms-source-if-match": found["ETag"]}
    url = copier.server + _path(source)
    answer, _ = ask("PUT", _path(target), {"x-ms-copy-source": url, **condition})
    try:
        while (status := answer["x-ms-copy-status"]) != "success":
            yield int(answer.get("x-ms-copy-progress", "0").partition("/")[0]), True
            if status != "pending":
                raise StoreUnavailableError(f"Azure's copy is not a success: {status}")
            answer, _ = ask("HEAD", _path(target), {})
    except BaseException:
        with suppress(Exception):
            query = f"comp=copy&copyid={answer['x-ms-copy-id']}"
            ask("PUT", f"{_path(target)}?{query}", {"x-ms-copy-action": "abort"})
        raise
    yield int(found["Content-Length"]), True


def azure_headers(
    account: str | None,
    provider: Callable[[], Any],
    method: str,
    url: str,
    asked: Mapping[str, str],
) -> Mapping[str, str]:
    """Sign a request to Azure with the account's key or an access token.

    Both hold for the source of a copy in the same account, too. ("Authorize with Shared Key"; of
    the headers that would be signed, only Azure's own are sent.)
    """
    given = provider()
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": AZURE_VERSION, **asked}
    if "access_key" not in given:
        return {**headers, "Authorization": f"Bearer {given['token']}"}
    parts = urlsplit(url)
    named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    query = "".join(f"\n{name}:{value}" for name, value in sorted(parse_qsl(parts.query)))
    text = method + 12 * "\n" + f"{named}/{account}{parts.path}{query}"
    digest = hmac.digest(base64.b64decode(given["access_key"]), text.encode(), "sha256")
    signature = base64.b64encode(digest).decode()
    return {**headers, "Authorization": f"SharedKey {account}:{signature}"}
