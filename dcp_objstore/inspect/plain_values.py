"""Values that need no class, such as numbers, text and lists of them, to be shown without torch.

It stands alone because everything else that reads values imports torch, which takes seconds.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_objstore.compat.archive import Archive, ArchiveError
from dcp_objstore.compat.inert_pickle import Dialect, HostilePickleError, opcodes, scan
from dcp_objstore.transfer.digests import block_digest
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, plan_requests

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint
    from dcp_objstore.stores import StoreSpec

# Larger values, and those after so many, are no figures to be read in a list.
_MOST_BYTES = 16 << 10
_MOST_VALUES = 1000
# What pickle writes for None, bool, int, float, str, tuple, list and dict, in protocol 2.
_PLAIN = Dialect(
    opcodes("\x80}])(qrXKJM\x8aG\x88\x89Naesu\x85\x86\x87thj."), max_marks=20, max_key_bits=64
)


class _Value(NamedTuple):
    key: str
    digest: bytes | None


def read_plain_values(
    spec: StoreSpec, stored: StoredCheckpoint, keys: Sequence[str]
) -> dict[str, object]:
    """Read values by their keys, with few requests; leave out those that are not plain.

    Also left out are values of more than 16 KiB, all after the first 1,000, and what differs from
    what was saved: `verify` is there to report that.

    Raises:
        DcpObjstoreError: the store failed.
    """
    values: dict[str, object] = {}
    spans: list[Span[_Value]] = []
    for key in keys[:_MOST_VALUES]:
        place = stored.item(key)
        if 0 < place.payload_length <= _MOST_BYTES and not place.transforms:
            start = place.payload_offset
            end = start + place.payload_length
            spans.append(Span(place.object_number, start, end, _Value(key, place.digests)))

    def decode(request: RangeRequest[_Value], body: Buffer) -> None:
        view = memoryview(body)
        for span in request.spans:
            payload = bytes(view[span.start - request.start : span.end - request.start])
            key, digest = span.tag
            if digest is None or block_digest(payload) == digest:
                values.update(_decoded(key, payload))

    config = spec.config
    requests = plan_requests(spans, request_size_bytes=config.request_size_bytes)
    progress = Progress(config.stall_timeout_seconds)
    store = stored.open_store(spec)
    for _ in fetch_ranges(
        store, stored.object_keys, requests, decode, config=config, progress=progress
    ):
        pass
    return values


def _decoded(key: str, payload: bytes) -> dict[str, object]:
    """Return the value by its key; nothing if it is not plain: JSON can express what is."""
    try:
        archive = Archive(payload)
        if archive.unpacked_bytes > _MOST_BYTES:
            return {}
        pickled = archive.read("data.pkl")
        _, is_whole = scan(pickled, _PLAIN)
        if not is_whole:
            return {}
        value = _Plain(io.BytesIO(pickled)).load()
        json.dumps(value)
    except (ArchiveError, HostilePickleError, pickle.UnpicklingError):
        return {}
    except (TypeError, ValueError, RecursionError):  # keys, cycles, depth
        return {}
    return {key: value}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")
