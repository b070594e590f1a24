"""torch's own FsspecWriter and FsspecReader over s3fs, with their default settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from benchmarks.peers import State
    from benchmarks.settings import Settings
    from benchmarks.targets import Place


class Stock:
    """Part sizes and concurrency are s3fs's own; the settings are not for it."""

    def writer(self, place: Place, settings: Settings) -> FsspecWriter:
        """See `DcpPeer`."""
        del settings
        return FsspecWriter(place.url, **place.storage_options)

    def save(self, state: State, place: Place, settings: Settings) -> None:
        """See `Peer`."""
        save(state, storage_writer=self.writer(place, settings), no_dist=True)

    def reader(self, place: Place, settings: Settings) -> FsspecReader:
        """See `DcpPeer`."""
        del settings
        return FsspecReader(place.url, **place.storage_options)

    def load(self, state: State, place: Place, settings: Settings) -> None:
        """See `Peer`."""
        load(state, storage_reader=self.reader(place, settings), no_dist=True)


PEER = Stock()
