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
_BLOCK = 4096
_ENTRIES_A_WARP = 1024  # 32 per thread: with 16, barriers and addresses cost one instruction per entry more
_WARP = 64 if torch.version.hip else 32


class Configuration(NamedTuple):
    """Sizes for rows of V logits."""

    vector: int  # entries in 16 bytes; each vector has one accumulator
    block: int  # columns per step of `row_statistics` and `row_gradient`
    segments: int  # blocks per step of `row_forward_gradient`; block i belongs to segment i % segments
    warps: int  # of a program that takes one block per step
    forward_gradient_warps: int  # of a program that takes `segments` blocks per step
    stages: int  # steps at a time: one is computed while the entries of stages - 1 are on their way to shared memory


def configuration(vocab: int, itemsize: int, warp: int = _WARP) -> Configuration:
    """The sizes for rows of `vocab` logits of `itemsize` bytes.

    The second sweep of `row_forward_gradient` should find its rows in L2. So the longer the row, the more warps work on
    it and the fewer rows are in flight. 16384 columns per step mean a program per multiprocessor, or 40 MB of bfloat16
    rows of 151,936 logits, of which an H200 found half again; shorter rows leave room for 2 or 4 programs.

    A step of a multiprocessor's programs is 32 KiB of a 2-byte type, 64 KiB of a 4-byte one. The stages keep 64 KiB on
    the way during the computation: at 4.3 TB/s, 33 KB arrive at a multiprocessor in a microsecond, about a load's time.
    More would not fit the shared memory of every GPU (99 KiB). On AMD the loop waits for its loads.
    """
    block = min(_BLOCK, max(_MIN_BLOCK, 1 << (vocab - 1).bit_length()))
    row_bytes = vocab * itemsize
    segments = 1 if row_bytes <= 1 << 16 else 2 if row_bytes <= 1 << 17 else 4
    warps = max(1, block // _ENTRIES_A_WARP)
    stages = 1 + 4 // itemsize if warp == 32 else 1
    return Configuration(16 // itemsize, block, segments, warps, warps * segments, stages)


def registers(itemsize: int, light: bool) -> int:
    """Registers per thread in which no kernel of one sweep spills; `light` means aligned rows and no softcap."""
    return 168 if not light else 96 if itemsize == 2 else 128


def launch_options(warps: int, registers: int = 128, warp: int = _WARP) -> dict[str, Any]:
    """The compiler's options for a program of `warps` warps with at most `registers` registers per thread.

    With 168, 12 warps fit on a multiprocessor, with 128 16, with 96 20. Without a limit ptxas chooses anything from 48
    to 128. A loop says itself how many stages it has. `enable_fp_fusion` is explicit because its default changes.
    """
    options: dict[str, Any] = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    return options | ({"maxnreg": registers} if warp == 32 else {})


def multiprocessors(tensor: Tensor) -> int:
    """The number of multiprocessors; 1 in the interpreter."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def row_strides(logits: Tensor) -> tuple[int, int, int]:
    """(B, stride of A, stride of B) in elements; the stride of a dimension of length 1 is 0."""
    a, b, _ = logits.shape
    return b, logits.stride(0) if a > 1 else 0, logits.stride(1) if b > 1 else 0


def row_distance(rows: Tensor) -> int:
    """The elements from a row of (A, B, V) to the next, of rows that are equally far apart."""
    b, stride_a, stride_b = row_strides(rows)
    if stride_a and stride_b and stride_a != b * stride_b:
        raise ValueError(f"rows must be equally far apart, got shape {tuple(rows.shape)} with strides {rows.stride()}")
    return stride_b or stride_a


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
