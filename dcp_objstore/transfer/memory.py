"""Memory for bytes: the type of a buffer, and memory that is new to the process."""

from __future__ import annotations

import contextlib
import mmap
from typing import TypeAlias

import numpy as np

# The type of a buffer with a tensor's memory, a frame or a pickled value. Arrays rather than
# memoryviews, because only arrays can be weakly referenced.
ByteArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


def new_memory(size_bytes: int) -> mmap.mmap:
    """Map memory that starts at a page, in huge pages if the system gives them.

    (Linux: madvise(2).) A page is made when it is first written to. That costs as much as copying
    into it, or several times that on a virtual machine, and with huge pages a tenth.
    """
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE)
    with contextlib.suppress(AttributeError, OSError):  # a system or kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
