"""What the measurements are made with: sizes and the transfer settings that peers share."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_objstore.config import Concurrency, TransferConfig

GIB = 1024**3
MIB = 1024**2

_DEFAULT = TransferConfig()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the state, and of the requests of those peers that let us choose.

    Attributes:
        gib: bytes of all tensors together, in GiB.
        tensors: float32 tensors of equal size.
        part_size_bytes, upload_concurrency, request_size_bytes, download_concurrency: as in
            `TransferConfig`, with its defaults; for dcp_objstore and the raw loop, which takes
            "auto" as 8.
    """

    gib: float = 1.0
    tensors: int = 32
    part_size_bytes: int = _DEFAULT.part_size_bytes
    upload_concurrency: Concurrency = _DEFAULT.upload_concurrency
    request_size_bytes: int = _DEFAULT.request_size_bytes
    download_concurrency: Concurrency = _DEFAULT.download_concurrency

    @property
    def tensor_elements(self) -> int:
        """Elements of one tensor."""
        return max(1, int(self.gib * GIB) // self.tensors // 4)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return 4 * self.tensor_elements * self.tensors
