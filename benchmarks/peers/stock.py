"""torch's own FsspecWriter and FsspecReader over s3fs, with their default settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from benchmarks.peers import State
    from benchmarks.settings import Settings
    from benchmarks.targets import Place


def _options(place: Place) -> dict[str, Any]:
    options = place.storage_options
    verify = options.pop("verify", None)  # s3fs hands it to its client
    return options if verify is None else {**options, "client_kwargs": {"verify": verify}}


class Stock:
    """Part sizes and concurrency are s3fs's own; the settings are not for it."""

    def writer(self, place: Place, settings: Settings) -> FsspecWriter:
        """Return the writer for one save at `place`."""
        del settings
        return FsspecWriter(place.url, **_options(place))

    def save(self, state: State, place: Place, settings: Settings) -> None:
        """Write the tensors at a place that is still empty."""
        save(state, storage_writer=self.writer(place, settings), no_dist=True)

    def reader(self, place: Place, settings: Settings) -> FsspecReader:
        """Return the reader for one load from `place`."""
        del settings
        return FsspecReader(place.url, **_options(place))

    def load(self, state: State, place: Place, settings: Settings) -> None:
        """Read the tensors back into the memory of `state`."""
        load(state, storage_reader=self.reader(place, settings), no_dist=True)


PEER = Stock()
