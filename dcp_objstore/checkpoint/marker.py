"""The marker: the content of `_COMMIT` as typed data, and its encoding.

On the store a marker is one flat JSON object that ends with a digest of itself. A run's `_CLAIM`
is stored in the same way. The last field is `digest`: the SHA-256, in hexadecimal, of the bytes of
the same object without that field. So the digest covers the bytes as they are stored, unknown
fields included, and two encoders need not agree.

`format` rises when an older version would misread a marker, or would lose something that matters
when it rewrites the marker, as a sweep does. A field that may be lost is added without a new
format, and unknown fields are ignored. Each marker has the lowest format that can express it: 1,
or 2 if it has a claim, because its step would no longer count without that. This module makes no
requests; only `commit` puts markers.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypedDict, TypeGuard, TypeVar

import msgspec
from msgspec import Meta

from dcp_objstore.checkpoint.names import check_object_key
from dcp_objstore.errors import CheckpointCorruptError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.index import Index

T = TypeVar("T")

FORMAT: Final = 2
MAX_MARKER_SIZE_BYTES: Final = 64 * 1024
MAX_USER_METADATA_SIZE_BYTES: Final = 32 * 1024
LOG_LENGTH: Final = 16
MAX_PINS: Final = 64
MAX_PIN_LENGTH: Final = 200
# A claim with a larger number is damage; a run is claimed some thousand times at most.
MAX_CLAIM: Final = 2**53
# In `put_on` of a marker that replaced none.
ON_NOTHING: Final = "nothing"
MARKER_NAME: Final = "the marker"  # in errors

# An index of 2 GiB would describe petabytes; a marker that claims more is damaged.
_MAX_INDEX_SIZE_BYTES = 2 * 1024**3
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Pin = Annotated[str, Meta(min_length=1, max_length=MAX_PIN_LENGTH)]
_MAX_DEPTH = 32
_DIGEST_FIELD_SIZE_BYTES = len(',"digest":""}') + 64


class IndexRef(msgspec.Struct, frozen=True, kw_only=True):
    """The index that a marker names."""

    key: str
    size_bytes: Annotated[int, Meta(ge=0, le=_MAX_INDEX_SIZE_BYTES)]
    sha256: _Sha256


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of a checkpoint, for listings; the index has the details."""

    tensors: _Count = 0
    blobs: _Count = 0
    objects: _Count = 0
    total_bytes: _Count = 0

    @classmethod
    def of(cls, index: Index) -> Counts:
        """Sum up an index."""
        return cls(
            tensors=len(index.tensors),
            blobs=len(index.blobs),
            objects=len(index.objects),
            total_bytes=sum(entry.size_bytes for entry in index.objects),
        )


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `_COMMIT`.

    Attributes:
        format: number of the marker's format; a version that does not know it refuses the marker.
        state: `committed`: the checkpoint exists. `deleting`: a deletion has begun, and any job may
            finish it. `deleted`: a tombstone, which counts as absent.
        commit_id: random; kept through every rewrite of the same commit.
        write_id: an id that is new for every content, so that no two markers have equal ETags.
        generation: 1 for the first marker under this key, one more for each new commit.
        log: the commit_ids that this commit replaced, oldest first, at most 16.
        index: the index of the checkpoint. None only in a tombstone that fences a checkpoint that
            never existed.
        counts: a summary, for listings.
        world_size: number of ranks that saved; 0 in a tombstone that never was a commit.
        created_at: time of the commit by the committing host's clock, timezone-aware. For
            information only; no rule relies on it.
        pins: names that protect the commit from deletion and from being overwritten.
        claim: number of the claim of the job that wrote or adopted this marker; 0 for none.
        base: the number of the claim with which this was committed, if its job had gone back (rule
            C2 of `claim`): then steps of earlier claims do not count. Or of one that has fenced
            this step since. Otherwise 0. It stays when `claim` rises.
        put_on: the write_id of the marker that the commit replaced, or `nothing`. Empty after any
            rewrite, so a value here proves that nothing came in between.
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
    base: Annotated[int, Meta(ge=0, le=MAX_CLAIM)] = 0
    put_on: Annotated[str, Meta(pattern=r"^([0-9a-f]{32}|nothing)?\Z")] = ""

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint exists."""
        return self.state == "committed"

    def knows(self, commit_id: str) -> bool:
        """Return whether that commit took effect: it is the current one, or it is in the log."""
        return commit_id == self.commit_id or commit_id in self.log


class _Format(msgspec.Struct):
    format: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Marker)
_format_decoder = msgspec.json.Decoder(_Format)


def new_id() -> str:
    """Return 128 random bits as 32 hexadecimal digits, for commit_id and write_id."""
    return secrets.token_hex(16)


def format_of(claim: int) -> int:
    """Return the lowest format that can hold this claim."""
    return 2 if claim else 1


def encode_marker(marker: Marker) -> bytes:
    """Encode a marker as it is stored.

    Raises:
        ConfigError: `user_metadata` or `pins` make it larger than 64 KiB, or a pin is not Unicode.
    """
    try:
        body = _encoder.encode(marker)
    except ValueError as error:  # a pin that is not Unicode
        raise ConfigError(f"the marker cannot be written as JSON: {error}") from error
    encoded = with_checksum(body)
    if len(encoded) > MAX_MARKER_SIZE_BYTES:
        raise ConfigError(
            f"the marker would have {len(encoded)} bytes, at most {MAX_MARKER_SIZE_BYTES} are"
            " allowed: shorten user_metadata"
        )
    return encoded


def decode_marker(body: bytes) -> Marker:
    """Decode and check a stored marker, with the errors of `decode_record`."""
    marker = decode_record(
        body,
        _decoder,
        what=MARKER_NAME,
        newest_format=FORMAT,
        max_size_bytes=MAX_MARKER_SIZE_BYTES,
    )
    if marker.index is not None:
        check_object_key(marker.index.key)
    elif marker.state != "deleted":
        raise damaged(MARKER_NAME, "it names no index")
    return marker


def check_user_metadata(values: Mapping[str, object] | None) -> dict[str, Any]:
    """Return the user's metadata as plain JSON values that compare equal when they are read back.

    Args:
        values: keys are `str`; values are None, bool, 64-bit int, finite float, str, list, or dict
            with `str` keys; at most 32 KiB of JSON, nested at most 32 deep.

    Raises:
        ConfigError: a value is of another kind or too large; the message names it.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"user_metadata must be a mapping, got {type(values).__name__}")
    plain: dict[str, Any] = _plain(values, "user_metadata", 0)
    size = len(_encoder.encode(plain))
    if size > MAX_USER_METADATA_SIZE_BYTES:
        raise ConfigError(
            f"user_metadata has {size} bytes as JSON, at most {MAX_USER_METADATA_SIZE_BYTES} are"
            " allowed; save larger values as part of the state"
        )
    return plain


def next_marker(old: Marker | None, *, claim: int, base: int = 0, **fields: Any) -> Marker:
    """Make the marker of a new commit, with these other fields.

    Its generation is one higher than that of the marker it replaces, even if that is a tombstone,
    and the log gets that marker's commit_id. Its write_id is new. Its base is never below that of
    the old marker. Pins belong to the commit that they protect and are not carried over.

    Args:
        old: the marker that it replaces; None if there is none, or if it cannot be read.
    """
    return Marker(
        format=format_of(claim),
        state="committed",
        write_id=new_id(),
        generation=old.generation + 1 if old else 1,
        log=(*old.log, old.commit_id)[-LOG_LENGTH:] if old else (),
        claim=claim,
        base=max(base, old.base if old else 0),
        put_on=old.write_id if old else ON_NOTHING,
        **fields,
    )


def with_checksum(body: bytes) -> bytes:
    """Return a JSON object, which must not be empty, with its digest as the last field."""
    return body[:-1] + b',"digest":"%s"}' % hashlib.sha256(body).hexdigest().encode()


def decode_record(
    body: bytes,
    decoder: msgspec.json.Decoder[T],
    *,
    what: str,
    newest_format: int,
    max_size_bytes: int,
) -> T:
    """Decode a marker or `_CLAIM`, after its size, format and digest were checked.

    Raises:
        CheckpointCorruptError: it is too large or not JSON, or its digest or a field is wrong.
        UnsupportedError: a newer version wrote it in a format that this one does not know.
    """
    if len(body) > max_size_bytes:
        raise damaged(what, f"it has {len(body)} bytes, at most {max_size_bytes} are allowed")
    own_format = _decoded(body, _format_decoder, what).format
    # Before the digest, because a newer format may have another rule for it.
    if own_format > newest_format:
        raise UnsupportedError(
            f"{what} has format {own_format}, this version of dcp_objstore knows up to"
            f" {newest_format}; upgrade dcp_objstore"
        )
    if body != with_checksum(body[:-_DIGEST_FIELD_SIZE_BYTES] + b"}"):
        raise damaged(what, "it differs from its own digest")
    return _decoded(body, decoder, what)


def _decoded(body: bytes, decoder: msgspec.json.Decoder[T], what: str) -> T:
    """Decode JSON; raise CheckpointCorruptError if it has another form than the decoder's type."""
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # JSON, fields or Unicode; too deep
        raise damaged(what, f"{error}") from error


def damaged(what: str, reason: str) -> CheckpointCorruptError:
    """Make the error for a marker or `_CLAIM` that cannot be what was written."""
    return CheckpointCorruptError(f"{what} is damaged: {reason}")


def _plain(value: object, where: str, depth: int) -> Any:
    """Return a value of the user's metadata as JSON holds it; raise ConfigError if JSON cannot."""
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
        if not math.isfinite(value):
            raise ConfigError(f"{where} is {value}, which JSON cannot hold; pass it as a str")
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _check_text(name, where): _plain(item, f"{where}[{name!r}]", depth + 1)
            for name, item in value.items()
        }
    raise ConfigError(f"{where} is of type {type(value).__name__}, which JSON cannot hold")


def _check_text(text: object, where: str) -> str:
    """Return a key or value that is Unicode as a plain `str`; raise ConfigError for any other."""
    if not isinstance(text, str):
        raise ConfigError(f"{where} has a key of type {type(text).__name__}; only str is allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds {json.dumps(text)}, which is not Unicode") from error
    return str(text)


# --- what a save has left out of a module, among the user's values

# The entry of `user_metadata` that says what a save has left out.
LEFT_OUT = "left_out"


class LeftOut(TypedDict):
    """The parts of a module that a save left out: tensors, and elements in all ranks."""

    tensors: int
    elements: int


def left_out_of(user_metadata: Mapping[str, object]) -> dict[str, LeftOut]:
    """Return what a save has left out of its modules, by their names in the state."""
    entries = user_metadata.get(LEFT_OUT)
    if not isinstance(entries, dict):
        return {}
    return {name: entry for name, entry in entries.items() if _is_left_out(entry)}


def _is_left_out(entry: object) -> TypeGuard[LeftOut]:
    """Whether an entry of `left_out` is one of a save's, not a value that a user has put there."""
    return (
        isinstance(entry, dict)
        and entry.keys() == LeftOut.__annotations__.keys()
        and all(isinstance(number, int) for number in entry.values())
    )
