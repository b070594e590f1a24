"""Copies of whole objects that GCS and Azure make, on the condition that the source is unchanged.

obstore's own `copy` takes no condition and knows one bucket alone. So these few requests are made
here and sent by Python's HTTP client, with the credentials and the retries of all others. One that
is sent again copies the same bytes once more, so it does not matter if an answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from email.message import Message
from typing import NamedTuple
from urllib.parse import quote
from urllib.request import Request

from dcp_objstore.errors import (
    CorruptDataError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.protocol import CopySource
from dcp_objstore.stores.retries import RetryPolicy, Tries
from dcp_objstore.stores.urls import StoreUrl, parse_url

# A function that sends a request of a method, a path and headers, and returns the headers and the
# body of the answer.
Ask = Callable[[str, str, Mapping[str, str]], tuple[Message, bytes]]
# Yields the bytes that are copied so far, and whether there is something under the key.
Steps = Generator[tuple[int, bool]]

# The patience with a copy that has begun and does not go on.
_PENDING = RetryPolicy(None, 60.0)


class Copier(NamedTuple):
    """The requests by which a provider makes copies.

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
    """Have the store copy an object, if its HEAD has the ETag of the source's version.

    The copy is made on the condition that the object stays in the state that the HEAD shows.

    Args:
        copier: the provider's way to make copies; None if there is none.
        send: a function that sends a request: `Clients.ask`.
        sources: a single source, which is a whole object.
        target: the URL of the new object.
        moved: a function that is called with the size of what was copied, as in
            `ObjectStore.copy`.
        remove: a function that removes the new object. It is called if an error or Ctrl-C ends the
            copy once something is under the new key.

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

    head, _ = ask("HEAD", path_of(origin), {})
    size_bytes = int(head["Content-Length"])
    if head["ETag"] != source.version.e_tag:
        raise PreconditionFailedError(f"{source.url} was changed by another writer")
    if source.end > size_bytes:
        raise CorruptDataError(f"{source.url} has only {size_bytes} bytes")
    if others or (source.start, source.end) != (0, size_bytes):
        raise UnsupportedError("this store copies whole objects, one into one")
    # `is_there`: whether something is under the new key. `tries`: how long to wait for progress.
    reported_bytes, is_there, tries = 0, False, Tries(_PENDING)
    try:
        with closing(copier.steps(copier, ask, origin, target, head)) as steps:
            for copied_bytes, is_there in steps:  # noqa: B007  the `except` below needs it
                if copied_bytes > reported_bytes:
                    moved(copied_bytes - reported_bytes)
                    reported_bytes, tries = copied_bytes, Tries(_PENDING)  # patience begins anew
                elif not tries.pause():
                    raise StoreUnavailableError("the store does not go on with a copy")
    except BaseException:
        if is_there:
            with suppress(Exception):  # what stopped the copy matters more
                remove()
        raise


def path_of(url: StoreUrl) -> str:
    """Return the path of an object in the URLs of requests."""
    return f"/{url.bucket}/{quote(url.prefix)}"
