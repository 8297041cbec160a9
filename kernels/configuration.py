"""How rows are cut: the one place where block sizes are chosen, and the strides that the kernels take.

A row's accumulators depend on `vector`, `block` and `segments` only, and these on V and the dtype only: so a row's
statistics are bitwise the same in any batch, at any address, and in `row_statistics` and `row_forward_gradient` alike.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MIN_BLOCK = 256
_BLOCK = 4096  # 8 warps, 16 entries a thread: 2048 is issue-bound, 16384 has too few warps a multiprocessor
_ENTRIES_A_THREAD = 16
_WARP = 64 if torch.version.hip else 32


class Configuration(NamedTuple):
    """Sizes for rows of V logits."""

    vector: int  # entries in 16 bytes: one accumulator each
    block: int  # columns that `row_statistics` and `row_gradient` take in a step
    segments: int  # blocks that `row_forward_gradient` takes in a step; block i is of segment i % segments
    warps: int  # of a program that takes a block a step
    forward_gradient_warps: int  # of a program that takes `segments` blocks a step


def configuration(vocab: int, itemsize: int, warp: int = _WARP) -> Configuration:
    """The sizes for rows of `vocab` logits of `itemsize` bytes.

    The second sweep of `row_forward_gradient` should find its rows in L2 (60 MB on an H200): the longer the row, the
    more warps work on it and the fewer rows are in flight. 16384 columns a step mean one program a multiprocessor, or
    40 MB of bfloat16 rows of 151,936; shorter rows leave room for 2 or 4 programs.
    """
    block = min(_BLOCK, max(_MIN_BLOCK, 1 << (vocab - 1).bit_length()))
    row_bytes = vocab * itemsize
    segments = 1 if row_bytes <= 1 << 16 else 2 if row_bytes <= 1 << 17 else 4
    warps = max(1, block // (_ENTRIES_A_THREAD * warp))
    return Configuration(16 // itemsize, block, segments, warps, min(warps * segments, 1024 // warp))


def launch_options(warps: int, light: bool, warp: int = _WARP) -> dict[str, Any]:
    """The compiler's options for a program of so many warps; `light`: aligned rows and no softcap.

    64 registers a thread keep 1024 threads on a multiprocessor: told so, ptxas reaches it without a spill where the
    kernel is light, while left to itself it stops anywhere from 48 to 128. The others need up to 120, and spill when
    squeezed. `enable_fp_fusion` is explicit, for its default changes.
    """
    options: dict[str, Any] = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    if warp == 32 and light:
        options["maxnreg"] = 64
    elif warp == 32 and warps <= 16:
        options["maxnreg"] = 128
    return options


def multiprocessors(tensor: Tensor) -> int:
    """How many programs run at once where each fills a multiprocessor; 1 in the interpreter."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def row_strides(logits: Tensor) -> tuple[int, int, int]:
    """(B, stride of A, stride of B) in elements, the stride of a dimension of length 1 being 0."""
    a, b, _ = logits.shape
    return b, logits.stride(0) if a > 1 else 0, logits.stride(1) if b > 1 else 0


def is_aligned(tensor: Tensor, vector: int) -> bool:
    """Whether all rows (A, B, V) are whole 16-byte vectors at 16-byte addresses."""
    _, stride_a, stride_b = row_strides(tensor)
    return tensor.data_ptr() % 16 == 0 and all(n % vector == 0 for n in (tensor.shape[-1], stride_a, stride_b))


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
