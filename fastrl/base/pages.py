"""Memory of zero pages: on a CPU, a large tensor of which little is written costs nothing where nothing is."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LARGE = 8 << 20  # bytes from which allocators take fresh memory from the system anyway


def zeros(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Zeros on the device of `like`, for tensors of which few rows will be written.

    On a CPU these are zero pages of the system, and only the written ones take time: filling a gradient of 300 MB costs
    more than the products with a hundred entries.
    """
    tensor = mapped(shape, dtype, like, _LARGE)
    return torch.zeros(shape, dtype=dtype, device=like.device) if tensor is None else tensor


def mapped(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, least: int) -> Tensor | None:
    """A tensor of zero pages mapped from the system; None below `least` bytes, or if they cannot be mapped."""
    size = dtype.itemsize * math.prod(shape)
    if like.device.type != "cpu" or size < least or not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory, which an allocator says in words that are known
        return None
    return torch.frombuffer(pages, dtype=dtype).view(shape)
