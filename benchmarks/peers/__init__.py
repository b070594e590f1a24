"""The libraries that are measured: each saves and loads one flat dict of tensors."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

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


class DcpPeer(Peer, Protocol):
    """A peer that is a storage writer and reader of torch.distributed.checkpoint."""

    def writer(self, place: Place, settings: Settings) -> StorageWriter:
        """The writer for one save at `place`."""
        ...

    def reader(self, place: Place, settings: Settings) -> StorageReader:
        """The reader for one load from `place`."""
        ...


@runtime_checkable
class AsyncPeer(Protocol):
    """A peer that saves in the background by a call of its own, not by `dcp.async_save`."""

    def async_save(self, state: State, place: Place, settings: Settings) -> Callable[[], object]:
        """Begin a save at `place`; what is returned waits for its end."""
        ...


@dataclass(frozen=True)
class PeerInfo:
    """A peer by name, without importing it.

    Attributes:
        name: as in `--peers`.
        module: the module here with its `PEER`.
        needs: the distributions that must be installed, with their least versions.
        label: what the table says.
    """

    name: str
    module: str
    needs: tuple[tuple[str, str], ...]
    label: str

    @property
    def missing(self) -> str | None:
        """Why the peer cannot be measured here, or None."""
        for name, least in self.needs:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                return f"{name} is not installed"
            if _numbers(version) < _numbers(least):
                return f"{name} {version} is installed, {least} is needed"
        return None

    def load(self) -> Peer:
        """Import the peer."""
        peer: Peer = importlib.import_module(self.module).PEER
        return peer

    def load_dcp(self) -> DcpPeer:
        """Import a peer that is one of DCP's."""
        peer: DcpPeer = importlib.import_module(self.module).PEER
        return peer


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing releases."""
    return tuple(int(text) for text in re.findall(r"\d+", version)[:2])


RAW = "raw"
# The versions are those of the `bench` extra: older ones have another interface.
PEERS = {
    info.name: info
    for info in (
        PeerInfo(RAW, "benchmarks.peers.raw", (("obstore", "0.12"),), "raw obstore loop"),
        PeerInfo(
            "dcp_objstore", "benchmarks.peers.ours", (("dcp-objstore", "0.1"),), "dcp_objstore"
        ),
        PeerInfo(
            "dcp_objstore-told",
            "benchmarks.peers.ours_told",
            (("dcp-objstore", "0.1"),),
            "dcp_objstore, on_event and trace",
        ),
        PeerInfo(
            "dcp_objstore-boto3",
            "benchmarks.peers.ours_boto3",
            (("dcp-objstore", "0.1"), ("boto3", "1.40")),
            "dcp_objstore over boto3",
        ),
        PeerInfo(
            "s3torchconnector",
            "benchmarks.peers.connector",
            (("s3torchconnector", "1.5"),),
            "s3torchconnector",
        ),
        PeerInfo(
            "multi-storage-client",
            "benchmarks.peers.multi_storage",
            (("multi-storage-client", "0.30"), ("boto3", "1.40")),
            "multi-storage-client",
        ),
        PeerInfo(
            "fsspec",
            "benchmarks.peers.stock",
            (("fsspec", "2026.9"), ("s3fs", "2026.9")),
            "torch Fsspec + s3fs",
        ),
    )
}
# Measured only where they are asked for.
OPTIONAL = frozenset({"dcp_objstore-told"})
# Those that several ranks can load with; ours in two ways.
RESUME_PEERS = {
    "dcp_objstore": PEERS["dcp_objstore"],
    "dcp_objstore-alone": PeerInfo(
        "dcp_objstore-alone",
        "benchmarks.peers.ours_alone",
        PEERS["dcp_objstore"].needs,
        "dcp_objstore, read_once=False",
    ),
    "s3torchconnector": PEERS["s3torchconnector"],
    "fsspec": PEERS["fsspec"],
}


def absent(names: Iterable[str]) -> dict[str, str]:
    """Of the named peers, those that cannot be measured here, and why."""
    known = PEERS | RESUME_PEERS
    reasons = {name: known[name].missing for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}
