"""Undo torch's stream extensions (zstd), and limit the size to which an item may unpack.

`FileSystemWriter(_extensions=[ZStandard()])` compresses each item and names the extension in the
item's `transform_descriptors`, as `stream.zstd/1` (torch.distributed.checkpoint._extension). Such
an item has no raw payload, so it is fetched whole.

The result is an archive, whose records may be compressed as well: torch does not write such
records, but reads them, and they may become a thousand times larger.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Sequence
from typing import IO, Final, cast

from dcp_objstore.compat.archive import ZIP_START, Archive, ArchiveError
from dcp_objstore.errors import CheckpointCorruptError, UnsupportedError

_ZSTD: Final = "stream.zstd"
_INSTALL: Final = "pip install 'dcp-objstore[zstd]'"
_STEP_SIZE_BYTES: Final = 1024 * 1024
# zstd's own limit for streams: a frame may ask for this much history.
_MAX_WINDOW_LOG: Final = 27

# What `torch.save` adds to a tensor's bytes: 1 to 3 KiB of archive. The rest is for long names.
FRAMING_SIZE_BYTES: Final = 1024 * 1024


def check_transforms(names: Sequence[str], key: str) -> None:
    """Check, before anything is fetched, that `undo` can undo these extensions.

    Args:
        names: the extensions and their versions, such as "stream.zstd/1".
        key: the state-dict key, for the error.

    Raises:
        UnsupportedError: an extension is unknown, or a package is missing; the message names it.
    """
    for name in names:
        extension, _, version = name.partition("/")
        if extension != _ZSTD or version.partition(".")[0] != "1":
            raise UnsupportedError(
                "it was written through the torch.distributed.checkpoint extension"
                f" {name[:200]!r}, which is not known here: load it with stock torch, and save it"
                " without",
                key=key,
            )
        # Python 3.14 has zstd in its standard library.
        if importlib.util.find_spec("zstandard") is None and sys.version_info < (3, 14):
            raise UnsupportedError(
                f"it was written with zstd compression: install zstandard to read it, {_INSTALL}",
                key=key,
            )


def undo(body: io.BytesIO, names: Sequence[str], key: str, limit_bytes: int) -> io.BytesIO:
    """Return an item as it was before its stream extensions.

    This takes at most `limit_bytes` of memory, twice as much while the buffer grows, and 128 MiB
    for history if a frame asks for it. The GIL is released during that.

    Args:
        body: the whole item as stored; returned unchanged if there are no names.
        names: the item's `transform_descriptors`, in the order in which they are undone.
        key: the state-dict key, for errors.
        limit_bytes: size of the largest item.

    Raises:
        UnsupportedError: an extension is unknown, or a package is missing.
        CheckpointCorruptError: the item is damaged, or larger than the limit. A frame that is cut
            off is not an error here; torch finds it when it decodes the item.
    """
    check_transforms(names, key)
    for _ in names:
        body = _unpacked(body, key, limit_bytes)
    return body


def check_archive(body: io.BytesIO, key: str, limit_bytes: int) -> None:
    """Check that the records of an archive unpack to at most `limit_bytes`.

    If the archive itself is larger than that, they may unpack to its size: a view that was saved
    with all of its storage is larger than its shape. A body that is not an archive is accepted:
    torch refuses it, or reads it in its old format, which is not compressed.

    Raises:
        CheckpointCorruptError: the records are larger, or cannot be listed.
    """
    with body.getbuffer() as view:
        size_bytes = view.nbytes
        if bytes(view[: len(ZIP_START)]) != ZIP_START:
            return
        try:
            unpacked_bytes = Archive(view).unpacked_bytes
        except ArchiveError as error:
            raise CheckpointCorruptError(
                f"the item is a damaged archive: {error}", key=key
            ) from error
    if unpacked_bytes > max(limit_bytes, size_bytes):
        raise _too_large(key, limit_bytes)


def _too_large(key: str, limit_bytes: int) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"the item unpacks to more than {limit_bytes} bytes, which is more than its shape has room"
        " for, or than a value is allowed",
        key=key,
    )


def _unpacked(body: io.BytesIO, key: str, limit_bytes: int) -> io.BytesIO:
    """Return a body that was packed with zstd, unpacked to at most `limit_bytes`."""
    stream, damage_errors = _open_zstd(body)
    whole = io.BytesIO()
    try:
        while piece := stream.read(_STEP_SIZE_BYTES):
            if whole.tell() + len(piece) > limit_bytes:
                raise _too_large(key, limit_bytes)
            whole.write(piece)
    except damage_errors as error:
        raise CheckpointCorruptError(
            f"the item cannot be unpacked: {type(error).__name__}: {error}", key=key
        ) from error
    whole.seek(0)
    return whole


def _open_zstd(body: io.BytesIO) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """Return a stream of the decompressed bytes, and the errors that it raises for damage.

    There may be several frames: with pyzstd, torch ends a frame at every flush.
    """
    if importlib.util.find_spec("zstandard") is not None:
        import zstandard

        unpacker = zstandard.ZstdDecompressor(max_window_size=1 << _MAX_WINDOW_LOG)
        stream = unpacker.stream_reader(body, read_across_frames=True)
        return cast("IO[bytes]", stream), (zstandard.ZstdError,)
    from compression import zstd  # type: ignore[import-not-found]  # Python 3.14

    limit = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    return zstd.ZstdFile(body, options=limit), (zstd.ZstdError, EOFError)
