"""Version and time of an object, from what a filesystem's `info` says."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dcp_objstore.stores.protocol import Version

# Under which names filesystems tell what identifies a state, and when it was written.
_TAGS = ("ETag", "etag", "e_tag", "content_hash", "sha")
_TIMES = ("LastModified", "mtime", "last_modified", "modified", "updated", "created", "time")


def version_of(info: Mapping[str, Any]) -> Version:
    """Its generation (of GCS), or its tag; neither where nothing tells."""
    if info.get("generation") is not None:  # GCS
        return Version(None, str(info["generation"]))
    tag = next((str(info[name]) for name in _TAGS if info.get(name) is not None), None)
    if tag is None and "mtime" in info:
        tag = f"{info['mtime']}-{info.get('ino')}-{info['size']}"
    return Version(tag)


def state_of(info: Mapping[str, Any]) -> object:
    """All that tells one state of an object from another; equal for the same state."""
    return info.get("size"), version_of(info), [info.get(name) for name in _TIMES]


def modified_of(info: Mapping[str, Any]) -> datetime:
    """When it was written. Now, where nothing tells, so that it is never taken for old."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = datetime.fromtimestamp(value, tz=UTC)
    if not isinstance(value, datetime):
        return datetime.now(UTC)
    return value if value.tzinfo else value.replace(tzinfo=UTC)
