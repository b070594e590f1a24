"""s3torchconnector's S3StorageWriter and S3StorageReader (AWS CRT), with their default settings.

Their constructors take no endpoint; the client underneath reads AWS's environment variables, which
are set here: the process measures this peer and nothing else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from benchmarks.peers import State
    from benchmarks.settings import Settings
    from benchmarks.targets import Place


def _client_config(place: Place) -> S3ClientConfig:
    if place.endpoint_url is None:
        # A server of one's own has no name for each bucket.
        return S3ClientConfig(force_path_style="AWS_ENDPOINT_URL" in os.environ)
    os.environ["AWS_ENDPOINT_URL"] = place.endpoint_url
    os.environ["AWS_ACCESS_KEY_ID"] = place.access_key or ""
    os.environ["AWS_SECRET_ACCESS_KEY"] = place.secret_key or ""
    if place.certificate is not None:
        os.environ["SSL_CERT_FILE"] = place.certificate
    return S3ClientConfig(force_path_style=True)


def _region() -> str:
    return os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))


class Connector:
    """Part sizes and concurrency are the connector's own; the settings are not for it."""

    def writer(self, place: Place, settings: Settings) -> S3StorageWriter:
        """Return the writer for one save at `place`."""
        del settings
        return S3StorageWriter(_region(), place.url, s3client_config=_client_config(place))

    def save(self, state: State, place: Place, settings: Settings) -> None:
        """Write the tensors at a place that is still empty."""
        save(state, storage_writer=self.writer(place, settings), no_dist=True)

    def reader(self, place: Place, settings: Settings) -> S3StorageReader:
        """Return the reader for one load from `place`."""
        del settings
        return S3StorageReader(_region(), place.url, s3client_config=_client_config(place))

    def load(self, state: State, place: Place, settings: Settings) -> None:
        """Read the tensors back into the memory of `state`."""
        load(state, storage_reader=self.reader(place, settings), no_dist=True)


PEER = Connector()
