"""`Target`: which checkpoint a writer or reader is aimed at, and how it is reached.

DCP re-aims one writer with `reset(checkpoint_id)` and calls everything that belongs to one save
from one thread. So the aim is kept per thread: a save in one thread is not re-aimed by another.

One writer serves many saves, each with a `checkpoint_id` of its own. But the URL that it was made
with is no leftover of an earlier save as long as nothing was saved there: another `checkpoint_id`
then contradicts it, and one of the two is a mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.options.schemes import public_options
from dcp_objstore.stores.spec import StoreSpec


class Target:
    """URL, storage options and settings; pickled without secrets, except to a spawned child.

    A deep copy keeps them.

    Args:
        url: the checkpoint, or None until `aim` gives it.
        storage_options: in fsspec spelling; checked when there is a URL.
        config: settings of the transfers.

    Raises:
        InvalidUrlError, ConfigError: see `StoreSpec`.
    """

    def __init__(
        self,
        url: str | None,
        storage_options: Mapping[str, object] | None,
        config: TransferConfig | None,
    ) -> None:
        if config is not None and not isinstance(config, TransferConfig):
            raise ConfigError(
                f"config must be a TransferConfig, got {type(config).__name__}; write"
                " config=TransferConfig(max_retries=2), for example"
            )
        self.config = config or TransferConfig()
        self._storage_options = storage_options
        self._spec = None if url is None else self._make(url)
        self._unused = url is not None
        self._of_thread = threading.local()

    def _make(self, url: str) -> StoreSpec:
        return StoreSpec(url, self._storage_options, self.config)

    def aim(self, url: str) -> None:
        """Aim this thread, and threads that were never aimed, at another checkpoint.

        Raises:
            ConfigError: it was made with another URL, which has not been used yet.
        """
        spec = self._make(url) if self._spec is None else self._spec.at(url)
        if self._unused and self._spec is not None and spec.url != self._spec.url:
            raise ConfigError(
                f"two URLs: the writer or reader was made with {self._spec.url}, and"
                f" checkpoint_id= is {spec.url}; leave one of them out",
                url=spec.url,
            )
        self._of_thread.spec = self._spec = spec

    @property
    def url(self) -> str | None:
        """The checkpoint that this thread is aimed at."""
        spec = self._aimed()
        return None if spec is None else spec.url

    @property
    def spec(self) -> StoreSpec:
        """The store of that checkpoint.

        Raises:
            ConfigError: no URL was given yet.
        """
        spec = self._aimed()
        if spec is None:
            raise ConfigError(
                "no checkpoint URL: pass one when making the writer or reader, or as"
                " checkpoint_id= to the DCP call"
            )
        return spec

    def begin(self) -> StoreSpec:
        """The store of the checkpoint, of a save or load that begins now."""
        self._unused = False
        return self.spec

    def _aimed(self) -> StoreSpec | None:
        return getattr(self._of_thread, "spec", None) or self._spec

    def __deepcopy__(self, memo: dict[int, Any]) -> Target:
        """With secrets: it stays in this process. Aimed as this thread's is."""
        del memo
        return _restore_target(self._aimed(), self._storage_options, self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        options = self._storage_options
        kept = None if options is None else public_options(options, mask=False)
        return _restore_target, (self._aimed(), kept, self.config)


def _restore_target(
    spec: StoreSpec | None, storage_options: Mapping[str, object] | None, config: TransferConfig
) -> Target:
    target = Target(None, storage_options, config)
    target._spec = spec
    return target


def _reduce_for_child(target: Target) -> tuple[Any, ...]:
    return _restore_target, (target._aimed(), target._storage_options, target.config)


# `multiprocessing` pickles with this class: credentials reach the children that it starts.
ForkingPickler.register(Target, _reduce_for_child)
