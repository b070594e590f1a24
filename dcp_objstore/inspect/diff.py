"""`diff`: what differs between two checkpoints, by their digests where these can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dcp_objstore.checkpoint.index import Index
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import UnsupportedError, UntrustedPickleError, printable
from dcp_objstore.inspect.checkpoint import Checkpoint, TensorEntry, open as open_checkpoint
from dcp_objstore.inspect.selection import Patterns, matching
from dcp_objstore.inspect.slabs import Slab, read_ahead
from dcp_objstore.observe.bar import Bar
from dcp_objstore.observe.report import counted, first_few, size_text
from dcp_objstore.stores.spec import options_of_other


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that is in both checkpoints and not the same.

    Attributes:
        key: name of the tensor.
        what: "reshaped": it has another shape (and maybe another dtype); "retyped": another dtype;
            "changed": other elements.
        shape: its shape in the first checkpoint.
        other_shape: its shape in the second.
        dtype: torch's name of its dtype in the first checkpoint, such as "bfloat16".
        other_dtype: name of its dtype in the second.
    """

    key: str
    what: Literal["reshaped", "retyped", "changed"]
    shape: tuple[int, ...]
    other_shape: tuple[int, ...]
    dtype: str
    other_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A pickled value that is in both checkpoints and not the same.

    Attributes:
        key: name of the value.
        is_known: whether both values were read. False if one needs `trust_pickle=True`; then their
            digests differ.
        value: the value in the first checkpoint.
        other_value: the value in the second.
    """

    key: str
    is_known: bool
    value: Any = None
    other_value: Any = None


@dataclass(frozen=True, kw_only=True)
class DiffReport:
    """The differences of two checkpoints, in the order of their keys.

    Attributes:
        url: URL of the first checkpoint.
        other_url: URL of the second.
        added: keys that only the second has. A tensor that became a value, or the reverse, is
            removed and added.
        removed: keys that only the first has.
        tensors: the tensors that differ.
        values: the values that differ.
        equal: number of tensors and values that are the same in both.
        read_bytes: bytes of tensors that were read from both to find out; 0 if digests were enough.
    """

    url: str
    other_url: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    equal: int
    read_bytes: int

    def __str__(self) -> str:
        """Return what differs, and how much of it, on a few lines."""
        lines = [f"from  {self.url}", f"to    {self.other_url}"]
        tensors = [tensor.key for tensor in self.tensors]
        kinds = {"removed": self.removed, "added": self.added, "tensors": tensors}
        kinds["values"] = [value.key for value in self.values]
        lines += [f"{what}: {first_few(keys, 3)}" for what, keys in kinds.items() if keys]
        differences = counted(sum(map(len, kinds.values())), "difference")
        read = f"{size_text(self.read_bytes)} read" if self.read_bytes else "no tensor read"
        lines.append(f"{differences}, {self.equal} equal ({read})")
        return "\n".join(map(printable, lines))

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.removed or self.tensors or self.values)


def diff(
    url: str,
    other_url: str,
    keys: Patterns = None,
    *,
    storage_options: Mapping[str, object] | None = None,
    other_storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    verify: bool = True,
    trust_pickle: bool = False,
    progress: bool = True,
) -> DiffReport:
    """Compare two checkpoints: keys, shapes, dtypes, and contents bit for bit.

        report = dos.diff("s3://bucket/run/step-1000", "s3://bucket/run/step-2000")
        [tensor.key for tensor in report.tensors]  # those that differ

    A tensor that both have with digests, cut into the same chunks, is compared by its digests: only
    markers and indices are read. Others are read, and so are values whose digests differ. That
    takes some 600 MiB of memory, however large the tensors are (if another library wrote one of
    the checkpoints, that of a few of its chunks). For values, the types, dtypes and shapes in them
    count, too. Where tensors lie in the nested dict, properties such as `requires_grad`, and the
    order of dicts are not compared.

    Args:
        url: URL of a checkpoint, which this or another library wrote.
        other_url: URL of the checkpoint to compare it with.
        keys: one or several shell patterns such as `"model.*"`, or exact keys, of either of them.
            Default: all keys.
        storage_options: credentials and endpoint of the first, in fsspec's spelling. Default: taken
            from the environment.
        other_storage_options: the same for the second. Default: `storage_options` if both URLs have
            the same scheme.
        config: sizes, concurrency, time-outs and the memory budget.
        verify: compare no unverified byte. Default True.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that a checkpoint's author chose. Default False.
        progress: show a progress bar if standard error is a terminal. Default True.

    Raises:
        StateMismatchError: a pattern matches nothing.
        UntrustedPickleError: a value without digests needs `trust_pickle=True`.
        UnsupportedError: a tensor has to be read, but cannot be read into a new one, or a value
            cannot be compared.
        DcpObjstoreError: any other error of `dcp_objstore.open` or `Checkpoint.read`.
    """
    other_options = options_of_other(other_storage_options, url, storage_options, other_url)
    first, other = (
        open_checkpoint(
            checkpoint_url,
            storage_options=options,
            config=config,
            verify=verify,
            trust_pickle=trust_pickle,
        )
        for checkpoint_url, options in ((url, storage_options), (other_url, other_options))
    )
    comparison = _Comparison(first, other)
    added, removed = [], []
    for key in matching(dict.fromkeys([*first, *other]), keys):
        if key in first and key in other and _is_tensor(first, key) == _is_tensor(other, key):
            comparison.compare(key)
            continue
        # A key that is a tensor in one and a value in the other counts as removed and as added.
        if key in first:
            removed.append(key)
        if key in other:
            added.append(key)
    comparison.read_tensors(progress=progress)
    comparison.read_values()
    return DiffReport(
        url=first.url,
        other_url=other.url,
        added=tuple(added),
        removed=tuple(removed),
        tensors=tuple(
            comparison.tensors[key] for key in comparison.keys if key in comparison.tensors
        ),
        values=tuple(comparison.values),
        equal=len(comparison.keys) - len(comparison.tensors) - len(comparison.values),
        read_bytes=2 * comparison.read_bytes,
    )


def _is_tensor(checkpoint: Checkpoint, key: str) -> bool:
    return checkpoint._stored.items.tensor(key) is not None


def _shape_and_dtype(checkpoint: Checkpoint, key: str) -> tuple[tuple[int, ...], str]:
    saved = checkpoint._stored.items.tensor(key)
    assert saved is not None
    return saved.shape, saved.dtype  # also the name of a dtype that is unknown here


class _Comparison:
    """Compares keys that both checkpoints have, with the same kind of entry.

    Attributes:
        keys: the keys that were looked at.
        tensors: the tensors that differ.
        values: the values that differ.
        read_bytes: bytes of tensors that were read from each of the checkpoints.
    """

    def __init__(self, first: Checkpoint, other: Checkpoint) -> None:
        self.keys: list[str] = []
        self.tensors: dict[str, TensorDifference] = {}
        self.values: list[ValueDifference] = []
        self.read_bytes = 0
        self._pair = first, other
        self._tensors_to_read: list[str] = []
        # For each value to read, whether its digests differ; None if the digests cannot tell.
        self._values_to_read: dict[str, bool | None] = {}

    def compare(self, key: str) -> None:
        """Compare what the indices have of a key; note whether it has to be read."""
        self.keys.append(key)
        first, other = self._pair
        differs = _differs(first._stored.index, other._stored.index, key)
        if not _is_tensor(first, key):
            # Pickles of equal values may have different bytes, so the values are read.
            if differs is not False:
                self._values_to_read[key] = differs
            return
        (shape, dtype), (other_shape, other_dtype) = (
            _shape_and_dtype(checkpoint, key) for checkpoint in self._pair
        )
        if shape != other_shape:
            self._note(key, "reshaped")
        elif dtype != other_dtype:
            self._note(key, "retyped")
        elif differs is None:
            self._tensors_to_read.append(key)
        elif differs:
            self._note(key, "changed")

    def _note(self, key: str, what: Literal["reshaped", "retyped", "changed"]) -> None:
        """Note that a tensor differs, and how."""
        (shape, dtype), (other_shape, other_dtype) = (
            _shape_and_dtype(checkpoint, key) for checkpoint in self._pair
        )
        self.tensors[key] = TensorDifference(
            key=key,
            what=what,
            shape=shape,
            other_shape=other_shape,
            dtype=dtype,
            other_dtype=other_dtype,
        )

    def read_tensors(self, *, progress: bool) -> None:
        """Read the tensors that have to be read, and compare them, in slabs."""
        if not self._tensors_to_read:
            return
        from dcp_objstore.inspect.compare import same_bits

        slabs: list[Slab] = []
        for checkpoint in self._pair:
            checkpoint._check_whole(self._tensors_to_read)
        # The chunks of a checkpoint by another library can only be read as a whole. So if another
        # library wrote one of the two (it has no commit), its chunks are the slabs; if one wrote
        # both, those of the first are.
        first, other = self._pair
        gives_slabs = other if first.commit_id is not None and other.commit_id is None else first
        for key in self._tensors_to_read:
            entry = gives_slabs[key]
            assert isinstance(entry, TensorEntry)
            slabs += entry.slabs()
        self.read_bytes = sum(slab.size_bytes for slab in slabs)
        bar = Bar("diff")
        if progress and bar.is_seen():
            bar.begin(2 * self.read_bytes)
        parts, other_parts = (read_ahead(slabs, one._read_slabs) for one in self._pair)
        try:
            with closing(parts), closing(other_parts):
                for slab, part, other_part in zip(slabs, parts, other_parts, strict=True):
                    if slab.key not in self.tensors and not same_bits(part, other_part):
                        self._note(slab.key, "changed")
                    bar.advance(2 * slab.size_bytes)
        finally:
            bar.flush()

    def read_values(self) -> None:
        """Read the values that have to be read, and compare them."""
        if not self._values_to_read:
            return
        from dcp_objstore.inspect.compare import same

        first, other = (
            _trusted(checkpoint, list(self._values_to_read)) for checkpoint in self._pair
        )
        for key, digests_differ in self._values_to_read.items():
            if key in first and key in other:
                try:
                    is_same = same(first[key], other[key])
                except UnsupportedError as error:
                    raise error.at(key=key) from error.__cause__
                if not is_same:
                    difference = ValueDifference(
                        key=key, is_known=True, value=first[key], other_value=other[key]
                    )
                    self.values.append(difference)
            elif digests_differ:  # at least one is not trusted, and so is not unpickled
                self.values.append(ValueDifference(key=key, is_known=False))
            else:
                # There are no digests, so only a read could tell. This read raises the error of the
                # value that is not trusted.
                untrusted = self._pair[1] if key in first else self._pair[0]
                untrusted.read(key, progress=False)


def _differs(first: Index | None, other: Index | None, key: str) -> bool | None:
    """Whether the digests of a key differ; None if they cannot tell."""
    if first is None or other is None:  # another library's, without digests
        return None
    if key in first.tensors:
        # Equal tensors have other digests if they are cut into other chunks, or if only one of them
        # is stored as a pickle.
        boxes = zip(first.boxes(key), other.boxes(key), strict=True)
        if not all(np.array_equal(numbers, other_numbers) for numbers, other_numbers in boxes):
            return None
        if _is_pickled(first, key) != _is_pickled(other, key):
            return None
    return first.digests(key) != other.digests(key)


def _is_pickled(index: Index | None, key: str) -> bool:
    """Return whether the chunks of a tensor are stored as pickles; all are or none is."""
    assert index is not None
    return any(index.item(row).pickled for row in index.rows(key)[:1])


def _trusted(checkpoint: Checkpoint, keys: Sequence[str]) -> dict[str, Any]:
    """Read values, but not those that `weights_only=True` refuses.

    A read of several values fails if one of them is refused. So this reads them in halves, and each
    half in halves, until the refused value is alone.
    """
    if not keys:
        return {}
    try:
        return checkpoint.read(keys, progress=False)
    except UntrustedPickleError:
        half = len(keys) // 2
        if not half:
            return {}
        return {**_trusted(checkpoint, keys[:half]), **_trusted(checkpoint, keys[half:])}
