"""What `.metadata` has to hold for an index, and whether one does. See `checkpoint.publishing`.

torch is imported when that is asked, not with this module: most upkeep never does.
"""

from __future__ import annotations

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.names import parse_data_key
from dcp_objstore.errors import CorruptDataError, InputError


class StockDotMetadata:
    """`.metadata` as stock torch reads it. See `checkpoint.publishing.DotMetadata`."""

    def derive(self, index: bytes) -> bytes:
        """The pickle for an index."""
        from dcp_objstore.compat.dot_metadata import encode_metadata

        return encode_metadata(ix.decode(index))

    def describes(self, body: bytes, index: bytes) -> bool:
        """Whether stock torch finds the same items in the same places by it."""
        from dcp_objstore.compat.foreign import decode_metadata

        derived = self.derive(index)
        if body == derived:
            return True
        try:
            found, wanted = decode_metadata(body), decode_metadata(derived)
        except (CorruptDataError, InputError):
            return False
        return (
            found.storage_data == wanted.storage_data
            and found.state_dict_metadata == wanted.state_dict_metadata
            and found.planner_data == wanted.planner_data
        )

    def is_ours(self, body: bytes) -> bool:
        """Whether it names only objects that this library named; stock writers never do."""
        from dcp_objstore.compat.foreign import decode_metadata

        try:
            places = decode_metadata(body).storage_data.values()
        except (CorruptDataError, InputError):
            return False
        return all(parse_data_key(place.relative_path) is not None for place in places)
