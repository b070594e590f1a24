"""The base of writer and reader as DCP plug-ins: target, errors, and DCP's calls around them."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from dcp_objstore.config import TransferConfig
from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import (
    ConfigError,
    DcpObjstoreError,
    InvalidUrlError,
    RankFailedError,
    UnsupportedError,
)
from dcp_objstore.stores.schemes import are_known, public_options
from dcp_objstore.stores.spec import StoreSpec, checked_config

_NO_GROUP_TEXT = "torch.distributed is disabled"
# The entry of `warnings.filters` for that warning.
_NO_GROUP_WARNING = ("ignore", re.compile(_NO_GROUP_TEXT, re.IGNORECASE), UserWarning, None, 0)


@contextmanager
def plugin_errors(rank: int | None, url: str | None) -> Iterator[None]:
    """Turn every error of the block into a DcpObjstoreError, and fill in rank and URL.

    DCP pickles the error that a method raises and sends it to every rank. If an exception cannot be
    unpickled there, the ranks are left in different collectives and the job hangs.
    """
    try:
        yield
    except DcpObjstoreError as error:
        error.at(rank=rank, url=url)
        raise
    except Exception as error:
        raise typed(error, rank, url) from error


def typed(error: BaseException, rank: int | None, url: str | None) -> DcpObjstoreError:
    """Return the error, or a RankFailedError with its text, with rank and URL filled in."""
    if not isinstance(error, DcpObjstoreError):
        error = RankFailedError(f"{type(error).__name__}: {error}")
    return error.at(rank=rank, url=url)


_PLAIN_DATA = (
    "save plain data in its place, or an object with state_dict and load_state_dict, or leave it"
    " out of the state"
)


def by_cause(
    error: Exception, doing: str, key: str | None, advice: str = _PLAIN_DATA
) -> DcpObjstoreError:
    """Return the error to raise for a foreign one that came up with a value of the state.

    A lack of memory or of files, and what torch reports (RuntimeError), need not be due to the
    value: they become a RankFailedError, without advice. Anything else becomes an UnsupportedError,
    which advises the user to change something. So do two RuntimeErrors: a value is nested too deep,
    or torch has not implemented something for it.

    Args:
        doing: what could not be done.
        key: the key of the value, if it is known.
        advice: what the user may do.
    """
    text = f"{doing} ({type(error).__name__}: {error})"
    is_of_value = isinstance(error, RecursionError | NotImplementedError)
    if isinstance(error, MemoryError | OSError | RuntimeError) and not is_of_value:
        return RankFailedError(text, key=key)
    return UnsupportedError(f"{text}: {advice}", key=key)


def same_url(urls: Sequence[Any]) -> None:
    """Refuse ranks that pass different URLs.

    Args:
        urls: the URL of each rank, in their order.
    """
    for rank, url in enumerate(urls):
        if url != urls[0]:
            raise InvalidUrlError(
                f"every rank must pass the same URL, but rank 0 has {urls[0]} and rank {rank} {url}"
            )


class Plugin(Protocol):
    """The common part of `ObjectStoreWriter` and `ObjectStoreReader`."""

    @property
    def checkpoint_id(self) -> str | None:
        """The URL of the checkpoint."""

    def _report_failure(self, error: BaseException) -> None: ...


@contextmanager
def reporting_failures(plugin: Plugin | None) -> Iterator[None]:
    """Report an error that leaves the block, unless the plug-in has already reported it."""
    try:
        yield
    except BaseException as error:
        if plugin is not None:
            plugin._report_failure(error)
        raise


def url_of(plugin: Plugin | None) -> str | None:
    """Return the checkpoint's URL for errors; None if an argument was refused."""
    return None if plugin is None else plugin.checkpoint_id


def single_process_is_fine() -> None:
    """Ignore torch's warning that there is no process group; none is needed here.

    The filter stays in place after the call. `warnings.catch_warnings` would restore the filters of
    all threads to an earlier state, and a save runs at the same time as the program.
    """
    if _NO_GROUP_WARNING not in warnings.filters:
        warnings.filterwarnings("ignore", message=_NO_GROUP_TEXT, category=UserWarning)


class Target:
    """The checkpoint that a writer or reader is aimed at: URL, storage options and settings.

    DCP re-aims one writer with `reset(checkpoint_id)` and makes all calls of one save from one
    thread. So the aim is kept per thread: a save in one thread is not re-aimed by another.

    It is pickled without secrets, except for a child that `multiprocessing` starts. A deep copy
    keeps them.

    Args:
        url: the checkpoint, or None until `aim` gives it.
        storage_options: the options in fsspec's spelling, which are checked when there is a URL.

    Raises:
        InvalidUrlError, ConfigError: see `StoreSpec`.
    """

    def __init__(
        self,
        url: str | None,
        storage_options: Mapping[str, object] | None,
        config: TransferConfig | None,
    ) -> None:
        self.config = checked_config(config)
        self._storage_options = storage_options
        self._spec = None if url is None else StoreSpec(url, storage_options, self.config)
        # The URL given here until a save or load has used it: `aim` refuses another one.
        self._unused_url = None if self._spec is None else self._spec.url
        self._of_thread = threading.local()

    def aim(self, url: str) -> None:
        """Aim this thread, and threads that were never aimed, at another checkpoint.

        Raises:
            ConfigError: it was made with another URL, which has not been used yet.
        """
        before = self._spec
        spec = before.at(url) if before else StoreSpec(url, self._storage_options, self.config)
        if self._unused_url not in (None, spec.url):
            raise ConfigError(
                f"two URLs: of the writer or reader {self._unused_url}, checkpoint_id={spec.url}",
                advice="leave one of them out",
                url=spec.url,
            )
        self._of_thread.spec = self._spec = spec

    @property
    def url(self) -> str | None:
        """The checkpoint that this thread is aimed at."""
        spec = self._current()
        return None if spec is None else spec.url

    @property
    def spec(self) -> StoreSpec:
        """The store of the checkpoint that this thread is aimed at.

        Raises:
            ConfigError: no URL was given yet.
        """
        spec = self._current()
        if spec is None:
            raise ConfigError(
                "no checkpoint URL: pass one when making the writer or reader, or as checkpoint_id="
                " to the DCP call"
            )
        return spec

    def used_now(self) -> StoreSpec:
        """Return the store of the checkpoint; note that a save or load has begun there."""
        self._unused_url = None
        return self.spec

    def _current(self) -> StoreSpec | None:
        """Return the store of this thread's checkpoint; None if no URL was given yet.

        A thread that was never aimed takes the latest aim of any thread.
        """
        return getattr(self._of_thread, "spec", None) or self._spec

    def __deepcopy__(self, _memo: dict[int, Any]) -> Target:
        """Return a target aimed as this thread's is, with secrets: it stays in this process."""
        return _restore_target(self._current(), self._storage_options, self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as this thread is aimed, without secrets."""
        spec, options = self._current(), self._storage_options
        if spec is not None or options is None:
            return _restore_target, (spec, None, self.config)  # a spec pickles its own options
        # If a name is in no schema, every option that is not well known may be a secret.
        without_secrets = public_options(options, mask=False, foreign=not are_known(options))
        return _restore_target, (None, without_secrets, self.config)


def _restore_target(
    spec: StoreSpec | None, storage_options: Mapping[str, object] | None, config: TransferConfig
) -> Target:
    """Return a target with a store that was made, and so checked, before."""
    target = Target(None, storage_options, config)
    target._spec = spec
    return target


def _reduce_for_child(target: Target) -> tuple[Any, ...]:
    """Pickle a target with its secrets."""
    return _restore_target, (target._current(), target._storage_options, target.config)


# `multiprocessing` pickles with this class: credentials reach the children that it starts.
ForkingPickler.register(Target, _reduce_for_child)
