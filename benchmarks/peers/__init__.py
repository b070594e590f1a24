"""The libraries that are measured: each saves and loads one flat dict of tensors."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.storage import StorageWriter

    from benchmarks.settings import Settings
    from benchmarks.targets import Place

State = dict[str, "torch.Tensor"]


class Peer(Protocol):
    """What the measured process asks of a library."""

    def save(self, state: State, place: Place, settings: Settings) -> None:
        """Write the tensors at a place that is still empty."""
        ...

    def load(self, state: State, place: Place, settings: Settings) -> None:
        """Read them back into the memory of `state`."""
        ...


class WriterPeer(Peer, Protocol):
    """A peer that is a storage writer of torch.distributed.checkpoint."""

    def writer(self, place: Place, settings: Settings) -> StorageWriter:
        """The writer for one save at `place`."""
        ...


@dataclass(frozen=True)
class PeerInfo:
    """A peer by name, without importing it.

    Attributes:
        name: as in `--peers`.
        module: the module here with its `PEER`.
        needs: the top-level modules that must be installed.
        label: what the table says.
    """

    name: str
    module: str
    needs: tuple[str, ...]
    label: str

    @property
    def missing(self) -> str | None:
        """The first module that is not installed, or None."""
        return next((n for n in self.needs if importlib.util.find_spec(n) is None), None)

    def load(self) -> Peer:
        """Import the peer."""
        peer: Peer = importlib.import_module(self.module).PEER
        return peer


RAW = "raw"
PEERS = {
    info.name: info
    for info in (
        PeerInfo(RAW, "benchmarks.peers.raw", ("obstore",), "raw obstore loop"),
        PeerInfo("dcp_objstore", "benchmarks.peers.ours", ("dcp_objstore",), "dcp_objstore"),
        PeerInfo(
            "s3torchconnector",
            "benchmarks.peers.connector",
            ("s3torchconnector",),
            "s3torchconnector",
        ),
        PeerInfo("fsspec", "benchmarks.peers.stock", ("fsspec", "s3fs"), "torch Fsspec + s3fs"),
    )
}
