"""A kernel that reads a tensor once by 16-byte loads and stores one word per program: the least time to read it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: 8 warps with four 16-byte loads in flight per thread.
BLOCK, WARPS = 4096, 8


@triton.jit(do_not_specialize=["count"])
def fold_kernel(  # type: ignore[no-untyped-def]  # Triton's values have no static types
    words_ptr,  # (count,) int32
    folded_ptr,  # (programs,) int32
    count: tl.int64,
    BLOCK: tl.constexpr,
):
    """Program (p,) of P: folds every P-th block into one word, so that the compiler cannot remove a load."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    folded = tl.zeros([BLOCK], tl.int32)
    whole = count // BLOCK
    for block in range(program, whole, tl.num_programs(0)):
        folded ^= tl.load(words_ptr + block * BLOCK + columns)
    if program == 0:
        rest = whole * BLOCK + columns
        folded ^= tl.load(words_ptr + rest, mask=rest < count, other=0)
    tl.store(folded_ptr + program, tl.xor_sum(folded, 0))


def words_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as int32, without bytes at its end that do not fill a word."""
    flat = tensor.detach().view(-1)
    return flat[: flat.numel() * flat.element_size() // 4 * 4 // flat.element_size()].view(torch.int32)


def fold(words: Tensor, folded: Tensor) -> None:
    """Read all words with one program per entry of `folded`, whose exclusive or is then that of all words."""
    fold_kernel[(folded.numel(),)](words, folded, words.numel(), BLOCK=BLOCK, num_warps=WARPS)
