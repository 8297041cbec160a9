"""Scale: a tensor times a factor on its device, in place or in another dtype. In place a factor of 1 touches nothing.

The upstream gradient is 1 in almost every step, and reading it on the host would be a sync.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.configuration import launch_options, on_device
from fastrl.kernels.jit import kernel

_BLOCK = 4096
_BLOCKS_A_PROGRAM = 16  # a factor of 1 then costs one small program per 65,536 entries


@kernel(aligned=("tensor_ptr", "out_ptr"))
def scale_kernel(
    tensor_ptr,  # (entries,)
    out_ptr,  # (entries,); may be tensor_ptr
    factor_ptr,  # () float32
    entries: tl.int64,
    INPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (span,): BLOCK * BLOCKS entries."""
    factor = tl.load(factor_ptr)
    if INPLACE:  # noqa: SIM102  (at compile time; the next at run time)
        if factor == 1.0:
            return
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    left = tl.minimum(entries - first, BLOCK * BLOCKS).to(tl.int32)
    tensor_ptr += first
    out_ptr += first
    columns = tl.arange(0, BLOCK)
    whole = (left // BLOCK) * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(tensor_ptr + start + columns, eviction_policy="evict_first").to(tl.float32) * factor
        tl.store(out_ptr + start + columns, x.to(out_ptr.dtype.element_ty), eviction_policy="evict_first")
    if whole < left:
        mask = whole + columns < left
        x = tl.load(tensor_ptr + whole + columns, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(out_ptr + whole + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


def scale(
    tensor: Tensor,  # any shape; float32, bfloat16 or float16
    factor: Tensor,  # () float32
    out: Tensor,  # of the same shape; may be `tensor`
) -> None:
    """See `fastrl.backend.contract`."""
    entries = tensor.numel()
    if entries == 0:
        return
    if not _is_dense(tensor) or out.stride() != tensor.stride():
        # A view with gaps; this does not sync either. Without dimensions the factor would be rounded to its dtype.
        torch.mul(tensor, factor.view((1,) * tensor.dim()), out=out)
        return
    with on_device(tensor):
        scale_kernel[(triton.cdiv(entries, _BLOCK * _BLOCKS_A_PROGRAM),)](
            tensor,
            out,
            factor,
            entries,
            INPLACE=out is tensor,
            BLOCK=_BLOCK,
            BLOCKS=_BLOCKS_A_PROGRAM,
            **launch_options(8),
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills a contiguous piece of memory, in any order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: d[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
