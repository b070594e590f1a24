"""`BaseStore`: the common part of the adapters: one root, and errors that say where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.stores.buffers import check_range
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.ranges import Range, RangeSource
from dcp_objstore.stores.urls import StoreUrl


class BaseStore(ABC):
    """A base of the adapters.

    Args:
        url: the root; keys are relative to it.
    """

    def __init__(self, url: StoreUrl) -> None:
        self._url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a store holds connections and is not pickled; pickle its StoreSpec")

    @property
    def url(self) -> str:
        """The root, without credentials."""
        return str(self._url)

    @property
    def endpoint_url(self) -> str | None:
        """The server; None for the provider's own, and where there is no server."""
        return None

    @property
    def reports_throttling(self) -> Collection[str]:
        """See `ObjectStore.reports_throttling`; none."""
        return ()

    @property
    def range_reading(self) -> RangeReading:
        """See `ObjectStore.range_reading`; not ahead, and without memory."""
        return RangeReading()

    def open_range(self, key: str, start: int, end: int) -> Range:
        """See `ObjectStore.open_range`."""
        check_range(start, end)
        with self._errors(key) as place:
            source = self._range_source(place)
            ahead = source.ask_ahead(start, end) if start < end else None
        return Range(source, start, end, partial(self._errors, key), ahead)

    @abstractmethod
    def _errors(self, key: str | None) -> AbstractContextManager[Any]:
        """Check the key, give the adapter's name of it, and translate what is raised."""

    @abstractmethod
    def _range_source(self, place: Any) -> RangeSource:
        """How ranges of an object are asked for.

        Args:
            place: what `_errors` gave.
        """

    @contextmanager
    def _located(
        self, key: str | None, translate: Callable[[Exception], DcpObjstoreError]
    ) -> Iterator[None]:
        """Translate what the block raises, and add the object and the store that it is about."""
        try:
            yield
        except DcpObjstoreError as error:
            error.at(object_key=key, url=self.url)
            raise
        except Exception as error:
            raise translate(error).at(object_key=key, url=self.url) from error
