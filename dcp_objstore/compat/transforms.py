"""Undo what torch's stream extensions did to an item (zstd), and bound what an item becomes.

`FileSystemWriter(_extensions=[ZStandard()])` sends each item through a stream of its own and names
the extension in the item's `transform_descriptors`, as `stream.zstd/1`
(torch.distributed.checkpoint._extension). The item then has no raw payload: it is fetched whole.

What comes out is an archive, which could be packed once more: torch writes none of its records
compressed, but reads such ones, a thousand times larger than stored.
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
# zstd's own limit for streams; a frame may ask for this much of history to be kept.
_MAX_WINDOW_LOG: Final = 27

# What `torch.save` adds to a tensor's bytes: 1 to 3 KiB of archive. The rest is for long names.
FRAMING_SIZE_BYTES: Final = 1024 * 1024
_VALUE_SIZE_BYTES: Final = 64 * 1024 * 1024
_VALUE_RATIO: Final = 100


def value_limit_bytes(stored_bytes: int) -> int:
    """What a value of this stored size may become; it has no shape that would say.

    100 times what is stored, and always 64 MiB.
    """
    return max(_VALUE_SIZE_BYTES, _VALUE_RATIO * stored_bytes)


def check_transforms(names: Sequence[str], key: str) -> None:
    """Return if `undo` can undo these extensions here, before anything is fetched.

    Raises:
        UnsupportedError: an extension that we do not know, or a missing package; says which.
    """
    for name in names:
        extension, _, version = name.partition("/")
        if extension != _ZSTD or version.partition(".")[0] != "1":
            raise UnsupportedError(
                f"it was written through the torch.distributed.checkpoint extension {name!r}, which"
                " is not known here (only stream.zstd/1 is): load it with stock torch and the code"
                " of that extension, and save it without",
                key=key,
            )
        if importlib.util.find_spec("zstandard") is None and sys.version_info < (3, 14):
            raise UnsupportedError(
                f"it was written with zstd compression: install zstandard to read it, {_INSTALL}",
                key=key,
            )


def undo(body: io.BytesIO, names: Sequence[str], key: str, limit_bytes: int) -> io.BytesIO:
    """The item as it was before the extensions, which are named in the order of undoing them.

    Args:
        body: all of it, as stored. Returned itself where there are no names.
        names: its `transform_descriptors`.
        key: the state-dict key, for errors.
        limit_bytes: it cannot have been larger.

    Memory: at most `limit_bytes`, twice that while the buffer grows, and 128 MiB of history where
    a frame asks for it; however little is stored. The GIL is released while bytes are undone.

    Raises:
        UnsupportedError: see `check_transforms`.
        CheckpointCorruptError: damaged, or larger than the limit. A frame that is cut off passes
            here with what was there; it shows when torch takes the item apart.
    """
    check_transforms(names, key)
    for _ in names:
        body = _unpacked(body, key, limit_bytes)
    return body


def check_archive(body: io.BytesIO, key: str, limit_bytes: int) -> None:
    """Return if `torch.load` allocates no more for its records than `limit_bytes` or its own size.

    (A view that was saved with all of its storage is larger than its shape.) A body that is no
    archive passes: torch refuses it, or reads its old format, which packs nothing.

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
    stream, damage = _open_zstd(body)
    whole = io.BytesIO()
    try:
        while piece := stream.read(_STEP_SIZE_BYTES):
            if whole.tell() + len(piece) > limit_bytes:
                raise _too_large(key, limit_bytes)
            whole.write(piece)
    except damage as error:
        raise CheckpointCorruptError(
            f"the item cannot be unpacked: {type(error).__name__}: {error}", key=key
        ) from error
    whole.seek(0)
    return whole


def _open_zstd(body: io.BytesIO) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """A stream of what was compressed, and what it raises for damage.

    With pyzstd torch ends a frame at every flush, so there may be several.
    """
    if importlib.util.find_spec("zstandard") is not None:
        import zstandard

        unpacker = zstandard.ZstdDecompressor(max_window_size=1 << _MAX_WINDOW_LOG)
        stream = unpacker.stream_reader(body, read_across_frames=True)
        return cast("IO[bytes]", stream), (zstandard.ZstdError,)
    from compression import zstd  # type: ignore[import-not-found]  # Python 3.14

    limit = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    return zstd.ZstdFile(body, options=limit), (zstd.ZstdError, EOFError)
