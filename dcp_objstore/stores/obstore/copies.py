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

# A function that sends a request of a method, a path and headers, and returns the headers and the
# body of the answer.
Ask = Callable[[str, str, Mapping[str, str]], tuple[Message, bytes]]
# What yields the bytes that are copied so far, and whether there is something under the key.
Steps = Generator[tuple[int, bool]]

# The first version of Azure's REST API with access tokens is of 2017.
AZURE_VERSION = "2023-11-03"
# The patience with a copy that has begun and does not go on.
_PENDING = RetryPolicy(None, 60.0)


class Copier(NamedTuple):
    """How a provider is asked for copies.

    Attributes:
        server: the URL of its server; on Azure that of the account.
        sign: a function that makes the headers of a request from its method, its URL and headers
            to be sent.
        steps: a function that copies an object to another place by `Ask`. The condition is in the
            headers of its HEAD.
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
        copier: what knows the provider, or None.
        send: a function that sends a request: `Clients.ask`.
        sources: a single source, which is a whole object.
        target: the URL of the new object.
        moved: a function that is called with the size of what was copied, as in
            `ObjectStore.copy`.
        remove: a function that removes the new object, if the copy is stopped when it is there.

    Raises:
        As `ObjectStore.copy`.
    """
    source, *others = sources
    origin = parse_url(source.url)
    if copier is None or origin.scheme != target.scheme or source.version.e_tag is None:
        raise UnsupportedError(f"{source.url} is not on this store, or its ETag is not known")

    def ask(method: str, path: str, headers: Mapping[str, str]) -> tuple[Message, bytes]:
        def make() -> Request:
            url = copier.server + path
            return Request(url, headers=dict(copier.sign(method, url, headers)), method=method)

        return send(f"{method} in a copy of {source.url}", make)

    head, _ = ask("HEAD", _path(origin), {})
    size_bytes = int(head["Content-Length"])
    if head["ETag"] != source.version.e_tag:
        raise PreconditionFailedError(f"{source.url} was changed by another writer")
    if source.end > size_bytes:
        raise CorruptDataError(f"{source.url} has only {size_bytes} bytes")
    if others or (source.start, source.end) != (0, size_bytes):
        raise UnsupportedError("this store copies whole objects, one into one")
    copied_bytes, is_there, tries = 0, False, Tries(_PENDING)
    try:
        with closing(copier.steps(copier, ask, origin, target, head)) as steps:
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


def gcs_steps(_: Copier, ask: Ask, source: StoreUrl, target: StoreUrl, head: Message) -> Steps:
    """Copy by "Objects: rewrite" of the JSON API; what takes long takes several requests."""
    places = [f"b/{url.bucket}/o/{quote(url.prefix, safe='')}" for url in (source, target)]
    path = f"/storage/v1/{'/rewriteTo/'.join(places)}"
    path += f"?ifSourceGenerationMatch={head['x-goog-generation']}"
    token, done = "", False
    while not done:
        _headers, body = ask("POST", path + token, {})
        answer = json.loads(body)
        done = answer["done"]
        token = f"&rewriteToken={quote(answer.get('rewriteToken', ''), safe='')}"
        yield int(answer["totalBytesRewritten"]), done


def azure_steps(
    copier: Copier, ask: Ask, source: StoreUrl, target: StoreUrl, head: Message
) -> Steps:
    """Copy by "Copy Blob"; wait where Azure has only begun, and abort what is given up."""
    condition = {"x-ms-source-if-match": head["ETag"]}
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
    yield int(head["Content-Length"]), True


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
    credentials = provider()
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": AZURE_VERSION, **asked}
    if "access_key" not in credentials:
        return {**headers, "Authorization": f"Bearer {credentials['token']}"}
    parts = urlsplit(url)
    named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    query = "".join(f"\n{name}:{value}" for name, value in sorted(parse_qsl(parts.query)))
    text = method + 12 * "\n" + f"{named}/{account}{parts.path}{query}"
    digest = hmac.digest(base64.b64decode(credentials["access_key"]), text.encode(), "sha256")
    signature = base64.b64encode(digest).decode()
    return {**headers, "Authorization": f"SharedKey {account}:{signature}"}
