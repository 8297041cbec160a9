"""Linear statistics: hidden states and the output head -> the statistics of the rows of logits, none of them stored.

A work item is a block of rows times a split of the vocabulary. It walks the split's tiles: a tile of logits is formed
in registers, and folded at once into one running (maximum, sum, entropy sum) a row, the target left out. A split's
numbers are stored, and a second, small kernel, `combine_splits`, makes them one. Programs are persistent and take
work items in groups of 16 row blocks times 8 splits, about one group at a time on an H200: its hidden states stay in
the L2 cache and each tile of the head is read from memory once a group.

How a row's columns are grouped depends on V and the tile only: its statistics are bitwise the same in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastrl.kernels.combine_splits import combine_splits
from fastrl.kernels.configuration import (
    TileConfiguration,
    multiprocessors,
    on_device,
    tile_configuration,
    tile_launch_options,
)
from fastrl.kernels.device_functions import LOG2E, LOWEST, capped, load_target, scales, update

_GROUP_ROW_BLOCKS = 16
_GROUP_SPLITS = 8


@triton.jit
def work_item(item, row_blocks, splits, GROUP_ROW_BLOCKS: tl.constexpr, GROUP_SPLITS: tl.constexpr):
    """The row block and the split of a work item.

    Group by group: all splits of a group's row blocks before the next row blocks; in a group, a split's row blocks
    first.
    """
    group = item // (splits * GROUP_ROW_BLOCKS)
    blocks = tl.minimum(row_blocks - group * GROUP_ROW_BLOCKS, GROUP_ROW_BLOCKS)
    rest = item % (splits * GROUP_ROW_BLOCKS)
    within = rest % (blocks * GROUP_SPLITS)
    split = rest // (blocks * GROUP_SPLITS) * GROUP_SPLITS + within // blocks
    return group * GROUP_ROW_BLOCKS + within % blocks, split


@triton.jit
def load_operand(
    source, first, k, count, hidden_size, stride,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, VEC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows first ... first + ROWS, columns k ... k + DEPTH of a matrix (count, hidden_size); 0 in columns beyond it.

    Rows beyond the matrix are 0 or its last row again: what becomes of them is masked or not stored.
    """
    if TMA:
        return source.load([first, k])
    else:
        rows = tl.minimum(first + tl.arange(0, ROWS), count - 1).to(tl.int64)
        columns = k + tl.arange(0, DEPTH)
        # Aligned matrices have strides and lengths of whole vectors: said so, their loads are 16 bytes wide.
        offsets = rows * (stride // VEC * VEC)
        mask = columns < hidden_size // VEC * VEC
        return tl.load(source + offsets[:, None] + columns[None, :], mask=mask[None, :], other=0.0)


@triton.jit
def add_tile(
    m, s, w, at_target, x, start, special, target, bias_ptr, vocab, outer2, inner2,
    SOFTCAP: tl.constexpr, PIECE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Fold a tile x (ROWS, COLUMNS) of products into the accumulators, PIECE columns at a time, to spare registers.

    Bit i of `special` says that a target lies in piece i, FIRST being the first; at_target becomes its z / outer.
    """
    COLUMNS: tl.constexpr = x.shape[1]
    if COLUMNS > PIECE:
        left, right = x.reshape(x.shape[0], 2, COLUMNS // 2).permute(0, 2, 1).split()
        m, s, w, at_target = add_tile(
            m, s, w, at_target, left, start, special, target, bias_ptr, vocab, outer2, inner2,
            SOFTCAP, PIECE, FIRST,
        )  # fmt: skip
        m, s, w, at_target = add_tile(
            m, s, w, at_target, right, start + COLUMNS // 2, special, target, bias_ptr, vocab, outer2, inner2,
            SOFTCAP, PIECE, FIRST + COLUMNS // 2 // PIECE,
        )  # fmt: skip
    else:
        # The pieces one after the other: begun early, the next one's loads take registers that there are not.
        tl.debug_barrier()
        columns = start + tl.arange(0, COLUMNS)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32)[None, :]
        x = capped(x, inner2, SOFTCAP)
        if ((special >> FIRST) & 1 != 0) | (start + COLUMNS > vocab):
            hit = columns[None, :] == target[:, None]
            at_target += tl.sum(tl.where(hit, x, 0.0), axis=1)  # a sum, for it keeps a NaN; the others are 0
            x = tl.where(hit | (columns >= vocab)[None, :], -float("inf"), x)
        m, s, w = update(m, s, w, x, outer2)
    return m, s, w, at_target


@triton.jit(
    do_not_specialize=["rows", "vocab", "hidden_size", "stride_hidden", "stride_weight"],
    do_not_specialize_on_alignment=[
        "bias_ptr", "targets_ptr", "temperatures_ptr", "partials_ptr", "target_logits_ptr"
    ],
)  # fmt: skip
def linear_statistics_kernel(
    hidden,  # (N, H), unit stride on H: a descriptor of (ROWS, DEPTH) blocks where TMA, else a pointer
    weight,  # (V, H), likewise: a descriptor of (COLUMNS, DEPTH) blocks, or a pointer
    bias_ptr,  # (V,), or None
    targets_ptr,  # (N,) int64
    temperatures_ptr,  # (N,) float32, or None
    partials_ptr,  # (3, S, N) float32: out: maximum (of z / outer), sum, entropy sum of each split without the target
    target_logits_ptr,  # (N,) float32: out: the target's z / outer; not written where the target is outside [0, V)
    rows: tl.int32,  # N
    vocab: tl.int32,  # V
    hidden_size: tl.int32,  # H
    stride_hidden: tl.int64,
    stride_weight: tl.int64,
    temperature: tl.float32,
    logit_scale: tl.float32,
    softcap: tl.float32,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,  # columns a split, a multiple of COLUMNS; S = ceil(V / SPLIT)
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECE: tl.constexpr,
    VEC: tl.constexpr,
    TMA: tl.constexpr,
    GROUP_ROW_BLOCKS: tl.constexpr,
    GROUP_SPLITS: tl.constexpr,
):
    """Program (p,) takes the work items p, p + programs, ..."""
    row_blocks = tl.cdiv(rows, ROWS)
    splits = tl.cdiv(vocab, SPLIT)
    for item in range(tl.program_id(0), row_blocks * splits, tl.num_programs(0)):
        # Load: the rows' scalars; rows beyond the last are the last again.
        row_block, split = work_item(item, row_blocks, splits, GROUP_ROW_BLOCKS, GROUP_SPLITS)
        first_row = row_block * ROWS
        row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1)
        outer, inner2, _ = scales(row, temperature, temperatures_ptr, logit_scale, softcap, SOFTCAP)
        outer2 = outer * LOG2E
        target = load_target(targets_ptr + row, vocab)

        # Loop: the split's tiles.
        first_column = split * SPLIT
        last_column = tl.minimum(first_column + SPLIT, vocab)
        m = tl.full([ROWS], LOWEST, tl.float32)
        s = tl.zeros([ROWS], tl.float32)
        w = tl.zeros([ROWS], tl.float32)
        at_target = tl.zeros([ROWS], tl.float32)
        for start in range(first_column, last_column, COLUMNS):
            x = tl.zeros([ROWS, COLUMNS], tl.float32)
            for k in range(0, hidden_size, DEPTH):
                a = load_operand(hidden, first_row, k, rows, hidden_size, stride_hidden, ROWS, DEPTH, VEC, TMA)
                b = load_operand(weight, start, k, vocab, hidden_size, stride_weight, COLUMNS, DEPTH, VEC, TMA)
                x = tl.dot(a, b.T, x, input_precision="ieee")
            # Few pieces have a target: asked once a tile, for all rows, and the others are spared the comparisons.
            here = (target >= start) & (target < start + COLUMNS)
            special = tl.reduce_or(here.to(tl.int32) << tl.where(here, (target - start) // PIECE, 0), 0)
            m, s, w, at_target = add_tile(
                m, s, w, at_target, x, start, special, target, bias_ptr, vocab, outer2, inner2, SOFTCAP, PIECE, 0
            )

        # Store: the split's numbers, and the target's logit by the one split that has it.
        row = first_row + tl.arange(0, ROWS)
        size = splits.to(tl.int64) * rows
        pointers = partials_ptr + split.to(tl.int64) * rows + row
        tl.store(pointers, m, mask=row < rows)
        tl.store(pointers + size, s, mask=row < rows)
        tl.store(pointers + 2 * size, w, mask=row < rows)
        owned = (target >= first_column) & (target < last_column)
        tl.store(target_logits_ptr + row, at_target, mask=owned & (row < rows))


def constants(sizes: TileConfiguration) -> dict[str, Any]:
    """The first kernel's compile-time constants that come from its sizes."""
    return {
        "SPLIT": sizes.split,
        "ROWS": sizes.rows,
        "COLUMNS": sizes.columns,
        "DEPTH": sizes.depth,
        "PIECE": sizes.piece,
        "VEC": sizes.vector,
        "TMA": sizes.tma,
        "GROUP_ROW_BLOCKS": _GROUP_ROW_BLOCKS,
        "GROUP_SPLITS": _GROUP_SPLITS,
    }


def launch(
    sizes: TileConfiguration,
    programs: int,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
) -> Tensor:
    """`linear_statistics` with sizes of the caller's choice, by at most so many programs."""
    (rows, hidden_size), vocab = hidden.shape, weight.shape[0]
    if rows == 0:
        return torch.empty(4, 0, dtype=torch.float32, device=hidden.device)
    splits = triton.cdiv(vocab, sizes.split)
    partials = torch.empty(3, splits, rows, dtype=torch.float32, device=hidden.device)
    target_logits = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    a: Tensor | TensorDescriptor = hidden
    b: Tensor | TensorDescriptor = weight
    if sizes.tma:
        a = TensorDescriptor.from_tensor(hidden, [sizes.rows, sizes.depth])
        b = TensorDescriptor.from_tensor(weight, [sizes.columns, sizes.depth])
    with on_device(hidden):
        linear_statistics_kernel[(min(programs, triton.cdiv(rows, sizes.rows) * splits),)](
            a,
            b,
            bias,
            targets,
            temperatures,
            partials,
            target_logits,
            rows,
            vocab,
            hidden_size,
            hidden.stride(0),
            weight.stride(0),
            float(temperature),
            float(logit_scale),
            float(softcap),
            SOFTCAP=softcap != 0,
            **constants(sizes),
            **tile_launch_options(sizes),
        )
    return combine_splits(
        partials, target_logits, targets, None, vocab, temperature, temperatures, logit_scale, softcap
    )


def linear_statistics(
    hidden: Tensor,  # (N, H), unit stride on H
    weight: Tensor,  # (V, H), of the same dtype, unit stride on H
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) int64
    temperature: float,
    temperatures: Tensor | None,  # (N,) float32
    logit_scale: float,
    softcap: float,
) -> Tensor:
    """Logprobs, entropy, maximum and log_sum of the N rows of hidden weight^T + bias, (4, N) float32."""
    sizes = tile_configuration(hidden, weight, softcap != 0)
    return launch(
        sizes, multiprocessors(hidden), hidden, weight, bias, targets, temperature, temperatures, logit_scale, softcap
    )
