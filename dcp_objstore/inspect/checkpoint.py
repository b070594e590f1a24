"""`open`: a checkpoint to look into, without a process group and without downloading it.

    ckpt = dos.open("s3://bucket/run/step-1000")
    ckpt["model.embed.weight"].shape, ckpt["model.embed.weight"][:100]
    ckpt.read("model.*")

Only marker and index are read to open it; then the blocks that are asked for, verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcp_objstore.distributed.groups import rank_and_world_size
from dcp_objstore.errors import (
    AbsentKeyError,
    CheckpointCorruptError,
    ConfigError,
    StateMismatchError,
)
from dcp_objstore.inspect.entries import TensorEntry, ValueEntry
from dcp_objstore.inspect.fill import fill, new_tensor, whole
from dcp_objstore.inspect.selection import Patterns, matching, nested
from dcp_objstore.inspect.verify import VerifyReport, verify_source
from dcp_objstore.observe.events import Opened
from dcp_objstore.observe.hooks import Hooks, show
from dcp_objstore.observe.report import size_text
from dcp_objstore.read.planner import nearest
from dcp_objstore.read.stored_checkpoint import open_stored_checkpoint
from dcp_objstore.stores.target import Target

if TYPE_CHECKING:
    import os
    from datetime import datetime

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.observe.events import OnEvent
    from dcp_objstore.observe.report import LoadReport
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint
    from dcp_objstore.state.geometry import Box


class Checkpoint(Mapping[str, TensorEntry | ValueEntry]):
    """A checkpoint that was opened: its keys, and what is behind them. Made by `open`.

    It stays with the commit that it has opened: when that was replaced or deleted, and its objects
    removed, reading raises CheckpointGoneError. Safe to use from many threads; each process of a
    job reads for itself. Nothing needs to be closed. Pickled without the credentials that were
    given in `storage_options`, as readers are.

    Attributes:
        url: where it is.
        last_read: report of the last read that ended, or None.
    """

    def __init__(
        self,
        target: Target,
        source: StoredCheckpoint,
        *,
        verify: bool,
        trust_pickle: bool,
        hooks: Hooks,
    ) -> None:
        self.url = target.spec.url
        self.last_read: LoadReport | None = None
        self._target = target
        self._source = source
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._hooks = hooks

    def __repr__(self) -> str:
        tensors = sum(isinstance(entry, TensorEntry) for entry in self.values())
        return (
            f"<Checkpoint {self.url}: {tensors} tensors, {len(self) - tensors} values,"
            f" {size_text(self.total_bytes)}, commit {self.commit_id}>"
        )

    # By identity: a Mapping compares contents, which would have to be read.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def commit_id(self) -> str | None:
        """Of the commit; None if another library wrote it, as are the properties that follow."""
        return self._source.commit_id

    @property
    def created_at(self) -> datetime | None:
        """When it was committed, by the clock of the host that did."""
        return None if self._source.marker is None else self._source.marker.created_at

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it."""
        return None if self._source.marker is None else self._source.marker.world_size

    @property
    def user_metadata(self) -> dict[str, Any] | None:
        """What was given to `save` with it."""
        return None if self._source.marker is None else dict(self._source.marker.user_metadata)

    @property
    def objects(self) -> tuple[str, ...]:
        """Keys of its data objects, relative to the checkpoint."""
        return self._source.object_keys

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors and pickled values, without framing."""
        return sum(stored.payload_length for stored in self._source.items.values())

    def __len__(self) -> int:
        return len(self._source.metadata.state_dict_metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.metadata.state_dict_metadata)

    def __contains__(self, key: object) -> bool:
        return key in self._source.metadata.state_dict_metadata

    def __getitem__(self, key: str) -> TensorEntry | ValueEntry:
        saved = self._source.metadata.state_dict_metadata.get(key)
        if saved is None:
            near = nearest(key, list(self)) if isinstance(key, str) else []
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise AbsentKeyError(f"the checkpoint has no key {key!r}{hint}", url=self.url)
        if isinstance(saved, TensorStorageMetadata):
            chunks = tuple((tuple(c.offsets), tuple(c.sizes)) for c in saved.chunks)
            dtype = saved.properties.dtype
            return TensorEntry(self, key, tuple(saved.size), dtype, chunks)
        return ValueEntry(self, key, self._source.item(MetadataIndex(key)).payload_length)

    def matching(self, patterns: Patterns = None) -> list[str]:
        """The keys that match any of the patterns, in the order of the checkpoint.

        Args:
            patterns: as in a shell, on whole keys, case-sensitive: `"model.*"`, or several; or
                keys as they are. Default: all keys.

        Raises:
            StateMismatchError: a pattern matches nothing; names what is near.
            ConfigError: a pattern is no `str`.
        """
        try:
            return matching(self, patterns)
        except (ConfigError, StateMismatchError) as error:
            raise error.at(url=self.url) from None

    def read(
        self,
        patterns: Patterns = None,
        *,
        device: torch.device | str = "cpu",
        progress: bool = True,
    ) -> dict[str, Any]:
        """Tensors and values by key, in one parallel read.

        Args:
            patterns: see `matching`.
            device: where the tensors are made; what arrives is copied there block by block, so no
                copy of the whole is made in CPU memory.
            progress: show a bar where standard error is a terminal. Default True.

        Raises:
            StateMismatchError: a pattern matches nothing.
            CheckpointCorruptError: objects are missing or differ from what was saved.
            CheckpointGoneError: the checkpoint was deleted or replaced meanwhile.
            UntrustedPickleError: a value needs `trust_pickle=True`.
            UnsupportedError: it holds what this version cannot read.
            StoreUnavailableError: the store did not answer, after all retries.
            PermissionDeniedError: the credentials do not allow it.
        """
        tensors: dict[str, tuple[Box, torch.Tensor]] = {}
        values: list[str] = []
        keys = self.matching(patterns)
        self._source.check_whole(keys)  # before memory is taken for what is not there
        for key in keys:
            entry = self[key]
            if isinstance(entry, TensorEntry):
                made = new_tensor(key, entry.shape, entry.dtype, device)
                tensors[key] = whole(entry.shape), made
            else:
                values.append(key)
        found = self._fill(tensors, values, progress=progress)
        return {key: tensors[key][1] if key in tensors else found[key] for key in keys}

    def verify(self, *, deep: bool = False, progress: bool = True) -> VerifyReport:
        """Read everything and compare it with its digests; see `VerifyReport`.

        All damage is reported, not the first alone; nothing is raised for it. Nothing of what is
        read is kept: it takes the memory of a load (see `TransferConfig`). ETags are not
        compared: they change when a checkpoint is copied, and the digests cover every byte.

        Args:
            deep: also the bytes around the payloads (framing and padding), which only stock
                torch's readers use, and whether the marker's counts are those of the index.
                Default False.
            progress: show a bar where standard error is a terminal. Default True.

        Raises:
            UnsupportedError: another library wrote it, without digests.
            CheckpointGoneError: it was replaced or deleted meanwhile.
            StoreUnavailableError: the store did not answer, after all retries.
            PermissionDeniedError: the credentials do not allow it.
        """
        channel = self._hooks.channel("verify", self.url, *rank_and_world_size())
        show(channel, bar=progress, summary=False)
        with channel.watching():
            return verify_source(
                self._target.spec.open(),
                self._source,
                self._target.config,
                channel,
                deep=deep,
            )

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """What `read` gave, as the nested dict that was saved.

        A list of which only some entries were read has None for the others.

        Raises:
            CheckpointCorruptError: the places that the checkpoint gives contradict each other.
        """
        try:
            return nested(flat, self._source.metadata.planner_data)
        except CheckpointCorruptError as error:
            raise error.at(url=self.url) from None

    def _fill(
        self,
        tensors: Mapping[str, tuple[Box, torch.Tensor]],
        values: Iterable[str],
        *,
        progress: bool,
    ) -> dict[str, Any]:
        """Read boxes into tensors; returns the values."""
        channel = self._hooks.channel("read", self.url, *rank_and_world_size())
        show(channel, bar=progress, summary=False)
        with channel.watching():
            self.last_read, found = fill(
                self._target,
                self._source,
                tensors,
                values,
                verify=self._verify,
                trust_pickle=self._trust_pickle,
                channel=channel,
            )
        return found


def open(  # noqa: A001 - `dos.open`, as gzip.open
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: Literal["strict", "off"] = "strict",
    trust_pickle: bool = False,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open a checkpoint to look into: two requests, no process group.

    Args:
        url: the checkpoint, ours or another library's.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: from the environment.
        config: sizes, concurrency, time-outs and the memory budget.
        verify: "strict" (default): no unverified byte reaches a tensor. "off": only what is needed
            is read, and not checked.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses, which may run
            code that the checkpoint's author chose. Default False.
        on_event: called with each event of a read or verification, in a thread of its own; see
            `ObjectStoreWriter`.
        trace: name of a local file that gets each read and verification as a trace; see
            `ObjectStoreWriter`.

    Raises:
        CheckpointNotFoundError: nothing is committed at this URL.
        CheckpointCorruptError: the marker or the index is damaged.
        CheckpointGoneError: it was deleted or replaced meanwhile.
        UnsupportedError: a newer version wrote it, or it holds what this version cannot read.
        UntrustedPickleError: its `.metadata` asks for a type that stock torch does not write.
        StoreUnavailableError: the store did not answer, after all retries.
        CredentialsError: there are no credentials, or they are wrong or expired.
        PermissionDeniedError: the credentials do not allow it.
        BucketNotFoundError: there is no such bucket.
        InvalidUrlError: the URL has no known scheme, no bucket, or a form that cannot be used.
        ConfigError: an argument has a wrong type or value.
    """
    if verify not in ("strict", "off"):
        raise ConfigError(f"verify must be 'strict' or 'off', got {verify!r}")
    target = Target(url, storage_options, config)
    hooks = Hooks(on_event, trace)
    channel = hooks.channel("open", target.spec.url, *rank_and_world_size())
    with channel.watching():
        source = open_stored_checkpoint(target.spec)
        channel.emit(Opened, channel.began_at, commit_id=source.commit_id)
    return Checkpoint(
        target, source, verify=verify == "strict", trust_pickle=trust_pickle, hooks=hooks
    )


def load_state_dict(
    url: str,
    keys: Patterns = None,
    *,
    nested: bool = True,
    device: torch.device | str = "cpu",
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: Literal["strict", "off"] = "strict",
    trust_pickle: bool = False,
    progress: bool = True,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """A state dict, or a part of one, as new tensors; no state to load into is needed.

    Not a collective: every process that calls it reads what it asks for. To load into a sharded
    model use `load`, which reads each byte once for all ranks.

    Args:
        url: the checkpoint, of this or another library.
        keys: patterns of keys, as `"model.*"`; see `Checkpoint.matching`. Default: everything.
        nested: as the nested dict that was saved (default); otherwise flat, by key.
        device: where the tensors are made. Default: CPU memory.
        progress: show a bar where standard error is a terminal. Default True.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: from the environment.
        config: sizes, concurrency, time-outs and the memory budget.
        verify: "strict" (default): no unverified byte reaches a tensor. "off": only what is needed
            is read, and not checked.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses, which may run
            code that the checkpoint's author chose. Default False.
        on_event: called with each event of the read, in a thread of its own; see
            `ObjectStoreWriter`.
        trace: name of a local file for a trace of the read; see `ObjectStoreWriter`.

    Raises:
        DcpObjstoreError: what `open` and `Checkpoint.read` raise.
    """
    checkpoint = open(
        url,
        storage_options=storage_options,
        config=config,
        verify=verify,
        trust_pickle=trust_pickle,
        on_event=on_event,
        trace=trace,
    )
    found = checkpoint.read(keys, device=device, progress=progress)
    return checkpoint.nested(found) if nested else found
