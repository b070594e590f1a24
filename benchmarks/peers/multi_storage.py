"""NVIDIA's multi-storage-client, its writer and reader for DCP, with their default settings.

It takes endpoint and credentials from a configuration file alone, which is written here: the
process measures this peer and nothing else.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from benchmarks.peers import State
    from benchmarks.settings import Settings
    from benchmarks.targets import Place

_PROFILE = "bench"


def _url(place: Place) -> str:
    """Write the configuration; return the URL of the place in it."""
    region = os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
    options: dict[str, Any] = {"base_path": "", "region_name": region}
    profile: dict[str, Any] = {"storage_provider": {"type": "s3", "options": options}}
    if place.endpoint_url is not None:
        options["endpoint_url"] = place.endpoint_url
        keys = {"access_key": place.access_key, "secret_key": place.secret_key}
        profile["credentials_provider"] = {"type": "S3Credentials", "options": keys}
    if place.certificate is not None:
        os.environ["AWS_CA_BUNDLE"] = place.certificate
    path = Path(tempfile.mkdtemp()) / "msc.json"
    path.write_text(json.dumps({"profiles": {_PROFILE: profile}}))
    os.environ["MSC_CONFIG"] = str(path)
    return f"msc://{_PROFILE}/{place.bucket}/{place.prefix}"


class MultiStorage:
    """Part sizes and concurrency are the client's own; the settings are not for it."""

    def writer(self, place: Place, settings: Settings) -> Any:
        """Return the writer for one save at `place`."""
        del settings
        url = _url(place)
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter

        return MultiStorageFileSystemWriter(path=url)

    def save(self, state: State, place: Place, settings: Settings) -> None:
        """Write the tensors at a place that is still empty."""
        save(state, storage_writer=self.writer(place, settings), no_dist=True)

    def reader(self, place: Place, settings: Settings) -> Any:
        """Return the reader for one load from `place`."""
        del settings
        url = _url(place)
        from multistorageclient.contrib.torch import MultiStorageFileSystemReader

        return MultiStorageFileSystemReader(path=url)

    def load(self, state: State, place: Place, settings: Settings) -> None:
        """Read the tensors back into the memory of `state`."""
        load(state, storage_reader=self.reader(place, settings), no_dist=True)


PEER = MultiStorage()
