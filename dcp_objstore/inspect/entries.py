"""Entries of an opened checkpoint: tensors and values that are not read yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from dcp_objstore.inspect.fill import new_tensor, whole
from dcp_objstore.inspect.selection import box_of

if TYPE_CHECKING:
    from dcp_objstore.inspect.checkpoint import Checkpoint
    from dcp_objstore.state.geometry import Box

_Chunk: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint that is not read yet.

    Attributes:
        checkpoint: the opened checkpoint.
        key: name of the tensor, as DCP flattens state dicts ("model.embed.weight").
        shape: shape of the whole tensor.
        dtype: dtype of the saved tensor; None if this version or this torch does not know it, and
            the tensor cannot be read.
        chunks: (offsets, sizes) of the boxes in which the tensor is stored.
    """

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    chunks: tuple[_Chunk, ...]

    # Without these, Python would iterate by indices, with a request for each row.
    __iter__: ClassVar[None] = None
    __contains__: ClassVar[None] = None

    def __repr__(self) -> str:
        return f"<TensorEntry {self.key} {self.shape} {self.dtype}>"

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole tensor; 0 if its dtype is unknown."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype is not None else 0)

    def read(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read the whole tensor.

        Args:
            device: device to make the tensor on. Default: CPU.

        Raises:
            DcpObjstoreError: any error that `Checkpoint.read` raises.
        """
        return self._read(whole(self.shape), device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part into CPU memory: `entry[10:20]`, `entry[..., 0]`, `entry[-1, :, 5:]`.

        An index may have integers, slices without a step, and one Ellipsis, with the same meaning
        as for tensors. Only the 4 MiB blocks that hold the part are fetched (with `verify="off"`
        only its bytes). If another library wrote the checkpoint, whole chunks are fetched, because
        torch has to decode them.

        Raises:
            IndexError: an index is of another kind or out of range, or there are too many.
            DcpObjstoreError: any error that `Checkpoint.read` raises.
        """
        box, sizes = box_of(index, self.shape)
        return self._read(box, "cpu").reshape(sizes)

    def _read(self, box: Box, device: torch.device | str) -> torch.Tensor:
        tensor = new_tensor(self.key, box.sizes, self.dtype, device)
        self.checkpoint._fill({self.key: (box, tensor)}, (), progress=False)
        return tensor


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A pickled value of a checkpoint (a step, a learning rate) that is not read yet.

    Attributes:
        checkpoint: the opened checkpoint.
        key: name of the value.
        nbytes: size of the pickle.
    """

    checkpoint: Checkpoint
    key: str
    nbytes: int

    def __repr__(self) -> str:
        return f"<ValueEntry {self.key}, {self.nbytes} bytes>"

    def read(self) -> Any:
        """Read the value.

        Raises:
            DcpObjstoreError: any error that `Checkpoint.read` raises.
        """
        return self.checkpoint._fill({}, [self.key], progress=False)[self.key]
