"""`StockDotMetadata`: makes the `.metadata` of an index, and compares one with an index.

A `.metadata` that differs from what this package writes is decoded, which imports torch.
"""

from __future__ import annotations

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.names import parse_data_key
from dcp_objstore.compat.dot_metadata import encode_metadata
from dcp_objstore.errors import CorruptDataError, InputError


class StockDotMetadata:
    """The content of `.metadata` as stock torch reads it, for `checkpoint.publish`."""

    def derive(self, index: bytes) -> bytes:
        """Return the `.metadata` of an encoded index."""
        return encode_metadata(ix.decode(index))

    def describes(self, body: bytes, index: bytes) -> bool:
        """Return whether a `.metadata` leads stock torch to the items of an encoded index."""
        derived = self.derive(index)
        if body == derived:
            return True
        from dcp_objstore.compat.foreign import decode_metadata

        try:
            present, wanted = decode_metadata(body), decode_metadata(derived)
        except (CorruptDataError, InputError):
            return False
        return (
            present.storage_data == wanted.storage_data
            and present.state_dict_metadata == wanted.state_dict_metadata
            and present.planner_data == wanted.planner_data
        )

    def is_ours(self, body: bytes) -> bool:
        """Return whether all objects that a `.metadata` names have names that we write."""
        from dcp_objstore.compat.foreign import decode_metadata

        try:
            places = decode_metadata(body).storage_data.values()
        except (CorruptDataError, InputError):
            return False
        return all(parse_data_key(place.relative_path) is not None for place in places)
