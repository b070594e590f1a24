"""dcp_objstore through DCP, as a user calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import dcp_objstore as dos

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.peers import State
    from benchmarks.settings import Settings
    from benchmarks.targets import Place
    from dcp_objstore.observe.events import OnEvent

Transport = Literal["native", "boto3"]


def _config(settings: Settings, transport: Transport) -> dos.TransferConfig:
    return dos.TransferConfig(
        transport=transport,
        part_size_bytes=settings.part_size_bytes,
        upload_concurrency=settings.upload_concurrency,
        request_size_bytes=settings.request_size_bytes,
        download_concurrency=settings.download_concurrency,
    )


class Ours:
    """Checksums on, as by default.

    Args:
        read_once: see `ObjectStoreReader`.
        on_event, trace: see `ObjectStoreWriter`.
        transport: see `TransferConfig`.
    """

    def __init__(
        self,
        *,
        read_once: bool = True,
        on_event: OnEvent | None = None,
        trace: Path | None = None,
        transport: Transport = "native",
    ) -> None:
        self._read_once = read_once
        self._on_event = on_event
        self._trace = trace
        self._transport: Transport = transport

    def writer(self, place: Place, settings: Settings) -> dos.ObjectStoreWriter:
        """Return the writer for one save at `place`."""
        return dos.ObjectStoreWriter(
            place.url,
            storage_options=place.storage_options,
            config=_config(settings, self._transport),
            progress=False,
            on_event=self._on_event,
            trace=self._trace,
        )

    def save(self, state: State, place: Place, settings: Settings) -> None:
        """Write the tensors at a place that is still empty."""
        save(state, storage_writer=self.writer(place, settings), no_dist=True)

    def async_save(self, state: State, place: Place, settings: Settings) -> Callable[[], object]:
        """Begin a save at `place`; what is returned waits for its end."""
        return dos.async_save(
            state,
            place.url,
            storage_options=place.storage_options,
            config=_config(settings, self._transport),
            on_event=self._on_event,
            trace=self._trace,
        ).result

    def reader(self, place: Place, settings: Settings) -> dos.ObjectStoreReader:
        """Return the reader for one load from `place`."""
        return dos.ObjectStoreReader(
            place.url,
            storage_options=place.storage_options,
            config=_config(settings, self._transport),
            progress=False,
            on_event=self._on_event,
            trace=self._trace,
            read_once=self._read_once,
        )

    def load(self, state: State, place: Place, settings: Settings) -> None:
        """Read the tensors back into the memory of `state`."""
        load(state, storage_reader=self.reader(place, settings), no_dist=True)


PEER = Ours()
