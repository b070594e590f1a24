"""The names of a checkpoint's objects, and the check of a key that was read from a store.

    <checkpoint>/__{rank}_{n}.{nonce}.distcp   data of one rank
    <checkpoint>/index.{nonce}.msgpack         the index
    <checkpoint>/_COMMIT                       the marker
    <checkpoint>/.metadata                     for stock torch readers
    <checkpoint>/.save-{nonce}                 only while a save is under way: its beacon
    <checkpoint>/.probe-{nonce}[-race]         only while `probe` tests the store
    <run>/_CLAIM                               the claim of the job that owns the run (`claim`)

A nonce is random and new for every rank and save, so no two writers ever share a key. In the names
of a copy's data, digits that identify the source follow it (`convert.copy`).
"""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple

from dcp_objstore.errors import CheckpointCorruptError

MARKER_KEY: Final = "_COMMIT"
DOT_METADATA_KEY: Final = ".metadata"
CLAIM_KEY: Final = "_CLAIM"
# The endings of the names of files of `torch.save`, which are no checkpoints of ours.
TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")

# S3 and GCS allow 1024 bytes of UTF-8 for a whole key ("Object key naming guidelines").
MAX_KEY_SIZE_BYTES: Final = 1024

_NONCE_BYTES = 12
_DATA = re.compile(r"__(0|[1-9][0-9]{0,8})_(0|[1-9][0-9]{0,8})\.([0-9a-f]{16,64})\.distcp\Z")
_INDEX = re.compile(r"index\.[0-9a-f]{16,64}\.msgpack\Z")
_BEACON = re.compile(r"\.save-[0-9a-f]{16,64}\Z")
_PROBE = re.compile(r"\.probe-[0-9a-f]{16,64}(-race)?\Z")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")


class DataName(NamedTuple):
    """The parts of a data object's key: the rank that wrote it, and its number in that save."""

    rank: int
    number: int
    nonce: str


def new_nonce() -> str:
    """Return 96 random bits as 24 hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def data_key(rank: int, number: int, nonce: str) -> str:
    """Return the key of a data object."""
    return f"__{rank}_{number}.{nonce}.distcp"


def index_key(nonce: str) -> str:
    """Return the key of an index."""
    return f"index.{nonce}.msgpack"


def beacon_key(nonce: str) -> str:
    """Return the key of the beacon of a save (rule 2 of `commit`)."""
    return f".save-{nonce}"


def parse_data_key(key: str) -> DataName | None:
    """Split a data object's key into its parts; return None for any other key."""
    match = _DATA.match(key)
    return DataName(int(match[1]), int(match[2]), match[3]) if match else None


def is_index_key(key: str) -> bool:
    """Return whether a key is that of an index."""
    return _INDEX.match(key) is not None


def is_ours(key: str) -> bool:
    """Return whether a key is that of a data object or an index, a form that only we use."""
    return _DATA.match(key) is not None or is_index_key(key)


def is_upload_key(key: str) -> bool:
    """Return whether this package makes uploads to a key; a sweep aborts unfinished ones."""
    has_fixed_name = key in (MARKER_KEY, DOT_METADATA_KEY, CLAIM_KEY)
    return has_fixed_name or is_ours(key) or is_beacon_key(key) or is_probe_key(key)


def is_beacon_key(key: str) -> bool:
    """Return whether a key is that of a beacon, which shows that a save is under way."""
    return _BEACON.match(key) is not None


def is_probe_key(key: str) -> bool:
    """Return whether a key is that of a short-lived object of `probe`."""
    return _PROBE.match(key) is not None


def natural_order(text: str) -> list[str | int]:
    """Return a sort key under which step-9 comes before step-10."""
    # "step-10" becomes ["step-", 10, ""]: texts and numbers in turn, so that two sort keys have the
    # same type at each position and can be compared.
    parts = re.split(r"([0-9]+)", text)
    return [int(part) if position % 2 else part for position, part in enumerate(parts)]


def check_object_key(key: str) -> str:
    """Check a key that was read from a marker or an index, and return it.

    A good key is relative to the checkpoint and stays inside it: `/`-separated segments, none of
    them empty (so that no URL is one), `.` or `..`; no control characters, no backslash; at most
    1024 bytes.

    Raises:
        CheckpointCorruptError: the key does not have that form.
    """
    wrong = _what_is_wrong(key)
    if wrong is not None:
        raise CheckpointCorruptError(f"the object key {key[:200]!r} {wrong}")
    return key


def _what_is_wrong(key: str) -> str | None:
    """Return why a key does not have the right form, in words; None if it has."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if size > MAX_KEY_SIZE_BYTES:
        return f"is longer than {MAX_KEY_SIZE_BYTES} bytes"
    if _FORBIDDEN.search(key):
        return "contains a control character or a backslash"
    if any(part in ("", ".", "..") for part in key.split("/")):
        return "has an empty or dotted segment"
    return None
