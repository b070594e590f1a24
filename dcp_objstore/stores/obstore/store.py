"""`ObjectStore` over obstore: S3 and everything that speaks it, GCS, Azure, and memory.

Facts about obstore 0.12 that shape this module (each is pinned by a test):
- It takes an iterator of buffers and builds parts of `chunk_size` without copying; an error in
  the iterator aborts the multipart upload.
- It does not reply to HEAD with more than a status, so a failed HEAD is asked again as a GET.
- Azure has no call that aborts: blocks of an upload that was given up are unseen, and gone a week
  after the last of them (docs: "Put Block"). Its listing gives ETags without their quotes.
- It follows redirects to any host, with an S3 session token (docs/design/redirects-of-obstore.md).
- It raises `PanicException`, a `BaseException` that does not pickle, for hosts, ports, headers of
  which it can make no request.
- A client hangs in a forked child, also one made there, once the parent has used the runtime.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import Buffer

from dcp_objstore import errors
from dcp_objstore.contexts import contextmanager
from dcp_objstore.stores.base import BaseStore, WatchedBuffers
from dcp_objstore.stores.errors import NO_BUCKET, UNCLEAR_IN_HEAD, check_no_page
from dcp_objstore.stores.obstore.clients import Clients
from dcp_objstore.stores.obstore.copies import copy_object
from dcp_objstore.stores.obstore.errors import (
    http_code,
    is_unreadable,
    judge_obstore,
    no_store,
    parts_are_left,
    translate_panic,
)
from dcp_objstore.stores.obstore.ranges import MEMORY_BYTES, ObstoreSource
from dcp_objstore.stores.protocol import (
    Capabilities,
    CopySource,
    IfAbsent,
    IfVersion,
    ObjectMeta,
    Precondition,
    RangeReading,
    Version,
)
from dcp_objstore.stores.ranges import RangeSource
from dcp_objstore.stores.retries import SMALL_BYTES, guard_fork
from dcp_objstore.stores.urls import StoreUrl, check_key

# The page of S3 and GCS, and so of one call for the next keys.
_PAGE_KEYS = 1000
# Pages have a round number of keys. A server may say that there are more and give no token for
# them, and obstore then ends the listing; so one that ends like a page is continued once.
_ROUND_KEYS = 10
# A key that no store has; a web server may have a page for every one.
_NEVER_THERE = ".dcp_objstore/is-this-a-store"


class ObstoreStore(BaseStore[str]):
    """A store rooted at one URL, over obstore's blocking calls (which release the GIL).

    Args:
        url: the root of the store.
        clients: its bucket's clients.
        over_boto3: a function that opens the same root over boto3. It copies ranges, for which
            obstore has no call, and reads what obstore cannot: objects whose length is not
            announced, and listings with a key that has an empty segment. None where it is not.
    """

    # All but streams, whose parts obstore sends again.
    reports_throttling = ("put", "copy", "get", "open_range", "head", "list", "delete")

    def __init__(
        self,
        url: StoreUrl,
        clients: Clients,
        over_boto3: Callable[[], BaseStore[Any]] | None = None,
    ) -> None:
        super().__init__(url, clients.endpoint_url)
        self._clients = clients
        self._over_boto3 = over_boto3
        self._root = f"{url.prefix}/" if url.prefix else ""

    @property
    def capabilities(self) -> Capabilities:
        """Claim everything but what is known to be missing; `checkpoint.probe` tries the server.

        Memory has no parts, GCS lists no generations, and Azure keeps the blocks of an upload that
        was given up for a week. Only S3 copies ranges: GCS copies whole objects alone, and
        Azure wants the source of a range to be authorized in another way than the request.
        """
        scheme = self._url.scheme
        return Capabilities(
            multipart=scheme != "memory",
            listed_versions=scheme != "gs",
            clean_abort=scheme != "az",
            copies=self._over_boto3 is not None or self._clients.copier is not None,
            range_copies=scheme not in ("gs", "az"),
        )

    @property
    def range_reading(self) -> RangeReading:
        """Ranges are read ahead, as long as the direct lane works."""
        lane = self._clients.lane
        ahead = lane is not None and lane.is_used
        takes_gil = ahead and self._clients.is_secure
        return RangeReading(ahead=ahead, takes_gil=takes_gil, memory_bytes=MEMORY_BYTES)

    def _range_source(self, place: str) -> ObstoreSource:
        in_memory = self._url.scheme == "memory"
        other = self._boto3_source_for
        return ObstoreSource(self._clients, place, in_memory=in_memory, other_source=other)

    def _boto3_store_for(self, error: Exception) -> BaseStore[Any]:
        """Return the store over boto3 if it reads an answer that obstore cannot; raise if not."""
        if self._over_boto3 is None or not is_unreadable(error):
            raise error
        return self._over_boto3()

    def _boto3_source_for(self, place: str, error: Exception) -> RangeSource:
        """Return a source of an object's ranges that reads what obstore cannot; raise if none."""
        store = self._boto3_store_for(error)
        return store._range_source(store._place(place.removeprefix(self._root)))

    def _put(
        self,
        place: str,
        buffers: Sequence[Buffer],
        precondition: Precondition | None,
        *,
        retry: bool,
    ) -> Version:
        """Send one PUT. Several buffers are copied together by obstore, one is not."""
        import obstore

        body: Any = list(buffers)
        size_bytes = sum(memoryview(buffer).nbytes for buffer in body)
        if self._url.scheme == "memory" or not body:
            # obstore's memory store would keep the caller's memory; an empty list is no body.
            body = b"".join(body)
        elif len(body) == 1:
            (body,) = body
        mode = _mode(precondition, self._url.scheme)

        def send() -> Any:
            client = self._clients.get("small" if size_bytes <= SMALL_BYTES else "write")
            return obstore.put(client, place, body, use_multipart=False, mode=mode)

        # The 404 of a conditional update may mean that the object is gone.
        with _bucket_is_there(unless=isinstance(precondition, IfVersion)):
            if retry:
                tries = self._clients.tries("put", place, size_bytes)
                result = self._clients.run(tries, send, repeatable=precondition is None)
            else:  # sent once, and again only if the store refused the credentials
                result = self._clients.with_fresh_credentials(send)
        self._clients.proven = self._clients.has_put = True
        return _version(result)

    def _put_stream(
        self, place: str, source: WatchedBuffers, part_size_bytes: int, max_concurrency: int
    ) -> Version:
        """Have obstore send the parts, and each part again by itself."""
        import obstore

        try:
            with _bucket_is_there():
                result = obstore.put(
                    self._clients.get("stream"),
                    place,
                    # obstore's memory store would hold all the buffers until the last has come; a
                    # caller with a fixed number of them would wait for ever to get one back.
                    map(bytes, source) if self._url.scheme == "memory" else source,
                    use_multipart=True,
                    chunk_size=part_size_bytes,
                    max_concurrency=max_concurrency,
                )
        except Exception as error:
            source.left_parts = parts_are_left(error)
            failure = judge_obstore(error)
            translated = failure.error
            # obstore sends a part again only if no answer came, or one of these. After another
            # status that may pass, such as S3's RequestTimeout with status 400, it gives up.
            status = failure.details.status
            is_final = status is not None and status < 500 and status not in (408, 429)
            if failure.may_pass and is_final and not source.left_parts:
                # The caller may send the whole object again.
                raise errors.UploadLostError(translated.message) from error
            if self._clients.were_refused(error):
                # The buffers are gone, so the upload cannot be sent again here; the next one asks
                # for fresh credentials.
                self._clients.renew(error)
                translated.message += "; the next try asks for fresh ones"
            raise translated from error
        version = _version(result)
        # Ceph's gateway returns no version when an upload is completed.
        return self._head(place).version if version == Version() else version

    def _copy(
        self,
        place: str,
        sources: Sequence[CopySource],
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        """Have S3 copy ranges, over boto3; have GCS and Azure copy a whole object."""
        if self._over_boto3 is None:  # GCS or Azure: `capabilities` claims no other copies
            clients, target = self._clients, replace(self._url, prefix=place)
            send, remove = partial(clients.ask, place), partial(self._delete, place)
            copy_object(clients.copier, send, sources, target, moved=moved, remove=remove)
            return self._head(place).version
        return self._over_boto3().copy(
            place.removeprefix(self._root),
            sources,
            part_size_bytes=part_size_bytes,
            max_concurrency=max_concurrency,
            moved=moved,
        )

    def _get(self, place: str, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Get an object. Its body is not asked for before its size is known to be small enough."""
        import obstore

        def read() -> tuple[bytes, ObjectMeta]:
            try:
                answer = obstore.get(self._clients.get("read"), place)
            except Exception as error:  # noqa: BLE001  raised again, unless boto3 is to be asked
                store, key = self._boto3_store_for(error), place.removeprefix(self._root)
                return store.get(key, max_size_bytes=max_size_bytes)
            check_no_page(answer.attributes.get("Content-Type"))
            meta = self._check_size(self._meta(answer.meta), max_size_bytes)
            return bytes(answer.bytes()), meta

        return self._clients.run(self._clients.tries("get", place), read)

    def _head(self, place: str) -> ObjectMeta:
        """Ask for the metadata of an object by a HEAD, then by a GET if a failure needs a body."""
        import obstore

        def read() -> ObjectMeta:
            try:
                return self._meta(obstore.head(self._clients.get("read"), place))
            except Exception as error:
                if is_unreadable(error):
                    return self._boto3_store_for(error).head(place.removeprefix(self._root))
                status, _ = http_code(error)
                if status not in UNCLEAR_IN_HEAD:
                    raise
                # An object was put before, so the bucket is there and the key is missing.
                if status == http.client.NOT_FOUND and self._clients.has_put:
                    raise errors.ObjectNotFoundError("there is no such object") from error
                # The answer to a HEAD has no body. The answer to a GET of one byte has one, which
                # says what is wrong.
                answer = obstore.get(self._clients.get("read"), place, options={"range": (0, 1)})
                return self._meta(answer.meta)

        return self._clients.run(self._clients.tries("head", place), read)

    def _delete(self, place: str) -> None:
        import obstore

        tries = self._clients.tries("delete", place)
        self._clients.run(tries, lambda: obstore.delete(self._clients.get("small"), place))

    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        """List over obstore; if it cannot read a page, list over boto3 what was not yielded yet."""
        # Where keys come in order, the last one tells what was yielded: a run may have millions.
        last_key, yielded_keys = "", set[str]()
        try:
            for meta in self._list_pages(folder):
                if self._clients.ordered:
                    last_key = meta.key
                else:
                    yielded_keys.add(meta.key)
                yield meta
        except errors.UnsupportedError as error:
            # `error` is raised again if there is no boto3, or obstore could read the answer.
            for meta in self._boto3_store_for(error).list(folder and f"{folder}/"):
                if meta.key > last_key and meta.key not in yielded_keys:
                    yield meta

    def _list_pages(self, folder: str) -> Iterator[ObjectMeta]:
        """List over obstore, page by page."""
        prefix = (self._root + folder).rstrip("/")
        pages = _Pages(self._clients, prefix)
        while page := self._next_page(pages):
            for meta in page:
                if self._url.scheme == "az":  # obstore drops the quotes of the ETag there
                    meta["e_tag"] = f'"{meta["e_tag"]}"'
                # Consoles make an empty object with the folder's name; obstore has cut off its "/".
                if meta["path"] != prefix:
                    yield self._meta(meta)

    def _next_page(self, pages: _Pages) -> Any:
        """Return the next page of a listing; None after the last one."""
        clients = self._clients
        with self._errors(None), _bucket_is_there():
            page = clients.run(clients.tries("list", ""), pages.next)
            if page:
                clients.proven = True
            # obstore reads a page of HTML as an empty listing on S3 and GCS; on Azure it raises.
            elif not clients.proven and self._url.scheme in ("s3", "gs"):
                self._prove()
            return page

    def _prove(self) -> None:
        """Raise `ConfigError` if a web server stands where a store was meant.

        obstore reads a page of HTML as a listing of nothing, which a caller would believe.
        """
        import obstore

        try:
            meta = obstore.head(self._clients.get("read"), f"{self._root}{_NEVER_THERE}")
        except Exception as error:
            translated = judge_obstore(error).error
            if isinstance(translated, errors.ConfigError):
                raise translated from error
            # A 404, most likely. No other error contradicts the listing.
        else:
            if meta["e_tag"] is None:  # a page of a web server: an object has an ETag
                raise NO_BUCKET.error()
        self._clients.proven = True

    def _place(self, key: str | None) -> str:
        guard_fork()
        return self._root if key is None else self._root + check_key(key)

    def _translate(self, error: Exception) -> errors.DcpObjstoreError:
        return judge_obstore(error).error

    @contextmanager
    def _errors(self, key: str | None) -> Iterator[str]:
        """Do what `BaseStore._errors` does; translate panics, too, which are no `Exception`."""
        with super()._errors(key) as place:
            try:
                yield place
            except BaseException as error:
                translated = translate_panic(error)
                if translated is None:
                    raise
                raise translated from error

    def _meta(self, meta: Any) -> ObjectMeta:
        """Translate what obstore says of an object; its path is the key in the bucket."""
        path: str = meta["path"]
        if not path.startswith(self._root):
            raise errors.StoreUnavailableError(
                f"the store answered with a key outside the root: {path!r}"
            )
        return ObjectMeta(
            path[len(self._root) :], meta["size"], _version(meta), meta["last_modified"]
        )


class _Pages:
    """The pages of a listing. After one that failed, a new listing begins behind the last key.

    Where the store does not list in order, obstore would then drop keys that compare less and were
    not listed yet. So the new listing begins at its start, and keys that came before are left out.
    """

    def __init__(self, clients: Clients, prefix: str) -> None:
        self._clients = clients
        self._prefix = prefix
        self._listing: Iterator[Any] | None = None  # None: it has to be begun, or begun again
        self._key_count = 0
        self._last_key: str | None = None  # None where the store does not list in order
        # The last key before a listing was continued that may have ended too soon.
        self._continued_after: str | None = None
        self._listed_keys: set[str] = set()  # empty where the store lists in order
        # The keys of earlier listings that the present one has not given again yet.
        self._keys_to_leave_out: set[str] = set()

    def next(self) -> Any:
        """Return the next page; None after the last one. After an error, call it again."""
        # While the page is asked for there is no listing: after an error, a new one is begun.
        listing, self._listing = self._listing or self._begin(), None
        page = next(listing, None)
        # A listing that ends after a round number of keys is continued once; see `_ROUND_KEYS`.
        may_have_broken_off = self._key_count % _ROUND_KEYS == 0
        if page is None and may_have_broken_off and self._last_key != self._continued_after:
            self._continued_after = self._last_key
            return self.next()
        self._listing = listing
        for meta in page or ():
            self._key_count += 1
            if self._clients.ordered:
                self._last_key = meta["path"]
            else:
                self._listed_keys.add(meta["path"])
        return page

    def _begin(self) -> Iterator[Any]:
        """Begin a listing behind the last key, or at its start if keys come in no order.

        Keys that came before are left out, and so are pages that are then empty.
        """
        import obstore

        self._keys_to_leave_out.update(self._listed_keys)
        client = self._clients.get("list")
        pages = obstore.list(client, self._prefix, offset=self._last_key, chunk_size=_PAGE_KEYS)
        return filter(None, map(self._without_earlier_keys, pages))

    def _without_earlier_keys(self, page: Any) -> Any:
        new = [meta for meta in page if meta["path"] not in self._keys_to_leave_out]
        self._keys_to_leave_out.difference_update(meta["path"] for meta in page)
        return new


@contextmanager
def _bucket_is_there(*, unless: bool = False) -> Iterator[None]:
    """Translate a 404 that no store sends, of requests that need a bucket and no object.

    Args:
        unless: True translates nothing: the request needs an object.
    """
    try:
        yield
    except Exception as error:
        translated = None if unless else no_store(error)
        if translated is None:
            raise
        raise translated from error


def _version(answer: Any) -> Version:
    """Return the version in what obstore says of an object that it wrote, read or listed."""
    return Version.of(answer["e_tag"], answer["version"])


def _mode(precondition: Precondition | None, scheme: str) -> Any:
    """Return obstore's mode of a PUT with this precondition."""
    if precondition is None:
        return None  # obstore overwrites
    if isinstance(precondition, IfAbsent):
        return "create"
    version = precondition.version
    fields = {"e_tag": precondition.e_tag, "version": version.version}
    # GCS compares generations, which obstore calls versions; the others compare ETags.
    need = "version" if scheme == "gs" else "e_tag"
    if fields[need] is None:
        raise errors.InputError(f"a conditional write to {scheme}:// needs the {need} of {version}")
    # obstore takes the fields of an UpdateVersion only if none is None.
    return {name: value for name, value in fields.items() if value is not None}
