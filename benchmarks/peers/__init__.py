"""The libraries that are measured: each saves and loads one flat dict of tensors."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    from benchmarks.settings import Settings
    from benchmarks.targets import Place

State = dict[str, "torch.Tensor"]
_MAKE_ENVIRONMENTS = "python -m benchmarks environments"


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
        label: what the table says.
        requirements: what pip installs for it, each with its least version. It has an environment
            of its own then (`python -m benchmarks environments`).
    """

    name: str
    module: str
    label: str
    requirements: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        """The Python that measures it: its own environment's, or this one."""
        own = environment_of(self.name) / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def versions(self, *, here: bool = False) -> dict[str, str | None]:
        """Return the version of each thing that it requires; None: not installed.

        Args:
            here: in this environment. By default where it is measured.
        """
        # What is installed there comes before what is seen of this environment.
        path = [*sys.path] if here else [str(site_packages(environment_of(self.name))), *sys.path]
        found = {}
        for text in self.requirements:
            name = re.split(r"[\[>]", text)[0]
            found[name] = next((one.version for one in distributions(name=name, path=path)), None)
        return found

    def missing(self, *, here: bool = False) -> str | None:
        """Return why the peer cannot be measured, or None; `here` as in `versions`."""
        for text, (name, version) in zip(
            self.requirements, self.versions(here=here).items(), strict=True
        ):
            if version is None:
                command = "pip install -e '.[peers]'" if here else _MAKE_ENVIRONMENTS
                return f"{name} is not installed: {command}"
            if _numbers(version) < _numbers(text.partition(">=")[2]):
                return f"{name} {version} is installed, {text} is needed"
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


def environment_of(name: str) -> Path:
    """The folder of a peer's own environment, whether it is there or not."""
    return Path(sys.prefix) / "peers" / name


def site_packages(environment: Path) -> Path:
    """Where an environment of this Python keeps its packages."""
    scheme = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", scheme))


RAW = "raw"
PEERS = {
    info.name: info
    for info in (
        PeerInfo(RAW, "benchmarks.peers.raw", "raw obstore loop"),
        PeerInfo("dcp_objstore", "benchmarks.peers.ours", "dcp_objstore"),
        PeerInfo(
            "dcp_objstore-told", "benchmarks.peers.ours_told", "dcp_objstore, on_event and trace"
        ),
        PeerInfo(
            "dcp_objstore-boto3",
            "benchmarks.peers.ours_boto3",
            "dcp_objstore over boto3",
            ("boto3>=1.40",),
        ),
        PeerInfo(
            "s3torchconnector",
            "benchmarks.peers.connector",
            "s3torchconnector",
            ("s3torchconnector[dcp]>=1.5",),
        ),
        PeerInfo(
            "multi-storage-client",
            "benchmarks.peers.multi_storage",
            "multi-storage-client",
            ("multi-storage-client[boto3]>=0.30",),
        ),
        PeerInfo("fsspec", "benchmarks.peers.stock", "torch Fsspec + s3fs", ("s3fs>=2026.9",)),
    )
}
# Measured only where they are asked for.
OPTIONAL = frozenset({"dcp_objstore-told"})
# Those that several ranks can load with; ours in two ways.
RESUME_PEERS = {
    "dcp_objstore": PEERS["dcp_objstore"],
    "dcp_objstore-alone": PeerInfo(
        "dcp_objstore-alone", "benchmarks.peers.ours_alone", "dcp_objstore, read_once=False"
    ),
    "s3torchconnector": PEERS["s3torchconnector"],
    "fsspec": PEERS["fsspec"],
}


def absent(names: Iterable[str], *, here: bool = False) -> dict[str, str]:
    """Of the named peers, those that cannot be measured, and why; `here` as in `versions`."""
    known = PEERS | RESUME_PEERS
    reasons = {name: known[name].missing(here=here) for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}
