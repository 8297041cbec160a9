"""How rows and products are cut: the one place where block sizes are chosen, and the strides that the kernels take.

A row's accumulators depend on `vector`, `block` and `segments` only, and these on V and the dtype only: so a row's
statistics are bitwise the same in any batch, at any address, and in `row_statistics` and `row_visit` alike. Those of a
row of a product depend on `split`, `columns`, `depth` and `piece`, and these on the device, the dtype, the alignment
and whether there is a softcap.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import cache
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
    segments: int  # blocks that `row_visit` takes in a step; block i of a row belongs to segment i % segments
    warps: int  # of a program that takes a block a step
    visit_warps: int  # of a program that takes `segments` blocks a step


def configuration(vocab: int, itemsize: int, warp: int = _WARP) -> Configuration:
    """The sizes for rows of `vocab` logits of `itemsize` bytes.

    A visit's second sweep should find its rows in L2 (60 MB on an H200): the longer the row, the more warps work on it
    and the fewer rows are in flight. 16384 columns a step mean one program a multiprocessor, or 40 MB of bfloat16 rows
    of 151,936; shorter rows leave room for 2 or 4 programs.
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


class TileConfiguration(NamedTuple):
    """Sizes for hidden states (N, H) times a head (V, H), tile by tile."""

    rows: int  # of a tile
    columns: int  # of a tile: vocabulary entries
    depth: int  # entries of H that a step of a tile's sum takes
    piece: int  # columns of a tile that are folded into a row's accumulators at once
    stages: int  # steps that are loaded ahead, the present one included
    vector: int  # entries that a load by address takes at once; 1 where tma
    tma: bool  # loads by the tensor memory accelerator, from descriptors
    registers: int | None = None  # the most for a thread; None: the compiler's own choice
    warps: int = 8
    split: int = 2048  # columns of a work item, a multiple of `columns`


def tile_sizes(itemsize: int, aligned: bool, tma: bool, softcap: bool, warp: int = _WARP) -> TileConfiguration:
    """The sizes for entries of `itemsize` bytes; aligned: whole vectors, in length and address.

    Each was compiled for its targets without a spill or a stack. 8 warps hold 128 x 256 sums in half of their
    registers; loads by address take the rest, so there it is 128 x 128, and half the depth where they are narrow and
    pass through registers. 256 columns folded at once spill with a softcap on sm_90 and always on sm_100, 64 spill with
    a softcap on sm_90.

    2048 columns a work item: 4800 of them at N = 8192 and V = 151,936, a third of a millisecond each on an H200 if all
    goes well, so that programs end within 3 % of each other; and 900 bytes of partial sums a row.
    """
    vector = 16 // itemsize if aligned else 1
    if itemsize == 4:
        # Exact products, on CUDA without tensor cores. Left alone, ptxas stops at 128 registers and spills.
        return TileConfiguration(64, 64, 16, 32, 2, vector, False, 255 if warp == 32 else None)
    piece = 32 if softcap or warp == 64 else 64
    if tma:
        return TileConfiguration(128, 256, 64, piece, 4, 1, True)
    return TileConfiguration(128, 128, 64 if aligned else 32, piece, 2 if warp == 64 else 3, vector, False)


def tile_launch_options(sizes: TileConfiguration) -> dict[str, Any]:
    """The compiler's options for these sizes."""
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True}
    return options | ({} if sizes.registers is None else {"maxnreg": sizes.registers})


def tile_configuration(hidden: Tensor, weight: Tensor, softcap: bool) -> TileConfiguration:
    """The sizes for these matrices on their device."""
    vector = 16 // hidden.element_size()
    aligned, tma = True, _has_tma(hidden.device)
    for matrix in (hidden, weight):
        strides = matrix.stride(0) % vector == 0 and matrix.data_ptr() % 16 == 0
        aligned &= strides and matrix.shape[1] % vector == 0
        tma &= strides and matrix.stride(0) >= matrix.shape[1]  # a descriptor's rows do not overlap
    return tile_sizes(hidden.element_size(), aligned, tma, softcap)


@cache
def _has_tma(device: torch.device) -> bool:
    """Hopper and the Blackwells of data centres; others have none, or too little shared memory for the tiles."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] in (9, 10)


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
