"""The only module that chooses block sizes, that is, how rows are split; also the strides that the kernels take.

A row's accumulators depend only on `vector`, `block` and `segments`, and these only on V and the dtype. So a row's
statistics are bitwise the same in any batch, at any address, and in both `row_statistics` and `row_forward_gradient`.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import Transform

_MIN_BLOCK = 256
_BLOCK = 4096  # 8 warps, 16 entries per thread: 2048 is issue-bound, 16384 has too few warps per multiprocessor
_ENTRIES_A_THREAD = 16
_WARP = 64 if torch.version.hip else 32


class Configuration(NamedTuple):
    """Sizes for rows of V logits."""

    vector: int  # entries in 16 bytes; each vector has one accumulator
    block: int  # columns per step of `row_statistics` and `row_gradient`
    segments: int  # blocks per step of `row_forward_gradient`; block i belongs to segment i % segments
    warps: int  # of a program that takes one block per step
    forward_gradient_warps: int  # of a program that takes `segments` blocks per step


def configuration(vocab: int, itemsize: int, warp: int = _WARP) -> Configuration:
    """The sizes for rows of `vocab` logits of `itemsize` bytes.

    The second sweep of `row_forward_gradient` should find its rows in L2 (60 MB on an H200). So the longer the row, the
    more warps work on it and the fewer rows are in flight. 16384 columns per step mean one program per multiprocessor,
    or 40 MB of bfloat16 rows of 151,936 logits; shorter rows leave room for 2 or 4 programs.
    """
    block = min(_BLOCK, max(_MIN_BLOCK, 1 << (vocab - 1).bit_length()))
    row_bytes = vocab * itemsize
    segments = 1 if row_bytes <= 1 << 16 else 2 if row_bytes <= 1 << 17 else 4
    warps = max(1, block // (_ENTRIES_A_THREAD * warp))
    return Configuration(16 // itemsize, block, segments, warps, min(warps * segments, 1024 // warp))


def launch_options(warps: int, light: bool, warp: int = _WARP) -> dict[str, Any]:
    """The compiler's options for a program of `warps` warps; `light` means aligned rows and no softcap.

    With 64 registers per thread, 1024 threads fit on a multiprocessor. Given this limit, ptxas reaches it without a
    spill if the kernel is light; without a limit it chooses anything from 48 to 128. The other kernels need up to 120
    and spill under a lower limit. `enable_fp_fusion` is explicit because its default changes.
    """
    options: dict[str, Any] = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    if warp == 32 and light:
        options["maxnreg"] = 64
    elif warp == 32 and warps <= 16:
        options["maxnreg"] = 128
    return options


def multiprocessors(tensor: Tensor) -> int:
    """The number of multiprocessors; 1 in the interpreter."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def row_strides(logits: Tensor) -> tuple[int, int, int]:
    """(B, stride of A, stride of B) in elements; the stride of a dimension of length 1 is 0."""
    a, b, _ = logits.shape
    return b, logits.stride(0) if a > 1 else 0, logits.stride(1) if b > 1 else 0


def is_aligned(tensor: Tensor, vector: int) -> bool:
    """Whether all rows of a tensor (A, B, V) consist of whole 16-byte vectors at 16-byte-aligned addresses."""
    _, stride_a, stride_b = row_strides(tensor)
    return tensor.data_ptr() % 16 == 0 and all(n % vector == 0 for n in (tensor.shape[-1], stride_a, stride_b))


def numbers(transform: Transform) -> tuple[float, float, float]:
    """The transform's scalars as kernels take them: an integer would be specialised on, and compile once more."""
    return float(transform.temperature), float(transform.logit_scale), float(transform.softcap)


def check_unit_strides(**tensors: Tensor | None) -> None:
    """Raises ValueError, with its name, for a tensor whose last dimension is not contiguous."""
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 over its last dimension, got strides {x.stride()}")


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, on which kernels launch."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
