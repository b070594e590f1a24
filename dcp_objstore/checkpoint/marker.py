"""The marker: what `_COMMIT` holds, as typed data, JSON with a digest of itself, and its evolution.

On the store a marker is one flat JSON object that ends with its digest: see `sealed`.

`format` rises when an older version would misread a marker, or would lose something that matters
by rewriting it (a sweep rewrites). Fields that may be lost are added without raising it, and
unknown ones are ignored. Each marker has the lowest format that says all that it holds: 1, or 2
where it has a claim, without which its step would no longer count. This module makes no request;
`commit` is the only one that puts markers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from dcp_objstore.checkpoint.names import check_object_key
from dcp_objstore.checkpoint.sealed import check_checksum, damaged, with_checksum
from dcp_objstore.errors import ConfigError

FORMAT: Final = 2
MAX_MARKER_SIZE_BYTES: Final = 64 * 1024
MAX_USER_METADATA_SIZE_BYTES: Final = 32 * 1024
LOG_LENGTH: Final = 16
MAX_PINS: Final = 64
MAX_PIN_LENGTH: Final = 200
# Larger numbers of a claim would be damage; a run is taken over some thousand times at most.
MAX_CLAIM: Final = 2**53
ON_NOTHING: Final = "nothing"

# An index of 2 GiB would describe petabytes; a marker that claims more is damaged.
_MAX_INDEX_SIZE_BYTES = 2 * 1024**3
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Pin = Annotated[str, Meta(min_length=1, max_length=MAX_PIN_LENGTH)]
_MAX_DEPTH = 32
_WHAT = "the marker"


class IndexRef(msgspec.Struct, frozen=True, kw_only=True):
    """The index that a marker names.

    Attributes:
        key: relative to the checkpoint.
        size_bytes: its size.
        sha256: of its bytes, hexadecimal.
    """

    key: str
    size_bytes: Annotated[int, Meta(ge=0, le=_MAX_INDEX_SIZE_BYTES)]
    sha256: _Sha256


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds, for listings; the index has the details.

    Attributes:
        tensors: tensors of the state dict.
        blobs: pickled values.
        objects: data objects.
        total_bytes: the sum of the data objects' sizes.
    """

    tensors: _Count = 0
    blobs: _Count = 0
    objects: _Count = 0
    total_bytes: _Count = 0


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `_COMMIT`.

    Attributes:
        format: of the marker; see the module.
        state: `committed`: the checkpoint exists; `deleting`: somebody is removing it and anyone
            may finish that; `deleted`: a tombstone, counts as absent.
        commit_id: random, kept through every rewrite of the same commit.
        write_id: fresh for every new content, so that no two markers have equal ETags.
        generation: 1 for the first marker under this key, one more for each new commit.
        log: the commit_ids that this commit replaced, oldest first, at most 16.
        index: None only in a tombstone that fences a checkpoint that never existed.
        counts: for listings.
        world_size: ranks that saved; 0 in a tombstone that never was a commit.
        created_at: the committing host's clock, timezone-aware. To inform; no rule relies on it.
        user_metadata: the user's own JSON values.
        pins: names under which the commit is protected from deletion and overwriting.
        claim: of the job that wrote it, or that adopted it; 0: no claim. See `claim`.
        put_on: the write_id of the marker that the commit was put against, or `nothing`; empty
            after any rewrite, so that who finds it knows that nothing came in between.
    """

    format: Annotated[int, Meta(ge=1)] = 1
    state: Literal["committed", "deleting", "deleted"]
    commit_id: _Id
    write_id: _Id
    generation: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    log: Annotated[tuple[_Id, ...], Meta(max_length=LOG_LENGTH)] = ()
    index: IndexRef | None
    counts: Counts = Counts()
    world_size: _Count
    created_at: Annotated[datetime, Meta(tz=True)]
    user_metadata: dict[str, Any] = {}
    pins: Annotated[tuple[_Pin, ...], Meta(max_length=MAX_PINS)] = ()
    claim: Annotated[int, Meta(ge=0, le=MAX_CLAIM)] = 0
    put_on: Annotated[str, Meta(pattern=r"^([0-9a-f]{32}|nothing)?\Z")] = ""

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint exists."""
        return self.state == "committed"

    def knows(self, commit_id: str) -> bool:
        """Whether that commit took effect: it is the current one or in the log."""
        return commit_id == self.commit_id or commit_id in self.log


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Marker)


def new_id() -> str:
    """128 random bits as 32 hexadecimal digits, for commit_id and write_id."""
    return secrets.token_hex(16)


def format_of(claim: int) -> int:
    """The lowest format of a marker of this claim; see the module."""
    return 2 if claim else 1


def encode_marker(marker: Marker) -> bytes:
    """The marker as it lies on the store.

    Raises:
        ConfigError: `user_metadata` or `pins` make it larger than 64 KiB, or hold what JSON
            cannot.
    """
    try:
        body = _encoder.encode(marker)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the marker cannot be written as JSON: {error}") from error
    encoded = with_checksum(body)
    if len(encoded) > MAX_MARKER_SIZE_BYTES:
        raise ConfigError(
            f"the marker would have {len(encoded)} bytes, at most {MAX_MARKER_SIZE_BYTES} are"
            " allowed: shorten user_metadata"
        )
    return encoded


def decode_marker(body: bytes) -> Marker:
    """A marker from the bytes on the store, checked.

    Raises:
        CheckpointCorruptError: too large, not JSON, digest or a field wrong.
        UnsupportedError: written by a newer version in a format that this one does not know.
    """
    check_checksum(body, what=_WHAT, newest_format=FORMAT, max_size_bytes=MAX_MARKER_SIZE_BYTES)
    try:
        marker = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise damaged(_WHAT, f"{error}") from error
    if marker.index is not None:
        check_object_key(marker.index.key)
    elif marker.state != "deleted":
        raise damaged(_WHAT, "it names no index")
    return marker


def check_user_metadata(values: Mapping[str, object] | None) -> dict[str, Any]:
    """The user's metadata as plain JSON values that come back equal.

    Args:
        values: `str` keys; None, bool, 64-bit int, finite float, str, list and dict with `str`
            keys as values; at most 32 KiB of JSON, nested at most 32 deep.

    Raises:
        ConfigError: anything else; the message names what.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"user_metadata must be a mapping, got {type(values).__name__}")
    plain = {name: _plain(value, f"user_metadata[{name!r}]", 1) for name, value in values.items()}
    for name in plain:
        _check_text(name, "user_metadata")
    size = len(_encoder.encode(plain))
    if size > MAX_USER_METADATA_SIZE_BYTES:
        raise ConfigError(
            f"user_metadata has {size} bytes as JSON, at most {MAX_USER_METADATA_SIZE_BYTES} are"
            " allowed; save larger values as part of the state"
        )
    return plain


def next_marker(
    old: Marker | None,
    *,
    commit_id: str,
    index: IndexRef,
    counts: Counts,
    world_size: int,
    user_metadata: Mapping[str, Any],
    created_at: datetime,
    claim: int = 0,
) -> Marker:
    """The marker of a new commit on top of what the begin token saw (None: no marker).

    Its generation is one higher, and the replaced commit_id, a tombstone's too, joins the log.
    Pins belong to the commit that they protect and are not carried over. The write_id is fresh.
    """
    return Marker(
        format=format_of(claim),
        state="committed",
        commit_id=commit_id,
        write_id=new_id(),
        generation=old.generation + 1 if old else 1,
        log=(*old.log, old.commit_id)[-LOG_LENGTH:] if old else (),
        index=index,
        counts=counts,
        world_size=world_size,
        created_at=created_at,
        user_metadata=dict(user_metadata),
        claim=claim,
        put_on=old.write_id if old else ON_NOTHING,
    )


def _plain(value: object, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{where[:200]} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        return _check_text(value, where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ConfigError(f"{where} does not fit in 64 bits; pass it as a str")
        return int(value)
    if isinstance(value, float):
        if value - value != 0:  # an infinity or not a number
            raise ConfigError(f"{where} is {value}, which JSON cannot hold; pass it as a str")
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _check_text(name, where): _plain(item, f"{where}[{name!r}]", depth + 1)
            for name, item in value.items()
        }
    raise ConfigError(f"{where} is of type {type(value).__name__}, which JSON cannot hold")


def _check_text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"{where} has a key of type {type(text).__name__}; only str is allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds {json.dumps(text)}, which is not Unicode") from error
    return str(text)
