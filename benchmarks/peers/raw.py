"""The bar: the same bytes moved by obstore alone, no format, no digests, no checks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
import torch
from obstore.store import S3Store

from dcp_objstore.config import at_most

if TYPE_CHECKING:
    from benchmarks.peers import State
    from benchmarks.settings import Settings
    from benchmarks.targets import Place

# In flight if no number is given.
_FIXED = 8

_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def _store(place: Place) -> S3Store:
    config: dict[str, Any] = {}
    if place.endpoint_url is not None:
        config = {
            "endpoint": place.endpoint_url,
            "access_key_id": place.access_key,
            "secret_access_key": place.secret_key,
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
        }
    # Unsigned payloads, as in our adapter: SHA-256 of every body would triple the processor time.
    options: Any = {"allow_http": True, "timeout": "150s"}
    if place.certificate is not None:
        options["root_certificate"] = Path(place.certificate).read_bytes()
    return S3Store(place.bucket, unsigned_payload=True, client_options=options, **config)


def _views(state: State) -> list[_Bytes]:
    return [tensor.view(torch.uint8).view(-1).numpy() for tensor in state.values()]


class Raw:
    """One object; views of the tensors in, ranges out and copied to where they belong."""

    def save(self, state: State, place: Place, settings: Settings) -> None:
        """Write the tensors at a place that is still empty."""
        part = settings.part_size_bytes

        def buffers() -> Iterator[_Bytes]:
            for view in _views(state):
                for start in range(0, len(view), part):
                    yield view[start : start + part]

        obstore.put(
            _store(place),
            f"{place.prefix}/raw",
            buffers(),
            chunk_size=part,
            max_concurrency=at_most(settings.upload_concurrency, _FIXED),
            use_multipart=True,
        )

    def load(self, state: State, place: Place, settings: Settings) -> None:
        """Read the tensors back into the memory of `state`."""
        store, size = _store(place), settings.request_size_bytes

        def fetch(request: tuple[_Bytes, int]) -> None:
            destination, start = request
            body = obstore.get_range(
                store, f"{place.prefix}/raw", start=start, end=start + len(destination)
            )
            destination[:] = np.frombuffer(body, dtype=np.uint8)

        requests, position = [], 0
        for view in _views(state):
            for start in range(0, len(view), size):
                piece = view[start : start + size]
                requests.append((piece, position + start))
            position += len(view)
        with ThreadPoolExecutor(at_most(settings.download_concurrency, _FIXED)) as pool:
            list(pool.map(fetch, requests))


PEER = Raw()
