"""Support products: the logits of a few vocabulary entries per row, hidden states times rows of the output head.

A program owns ENTRIES consecutive entries of the CSR, of one row or of several. Rows keep from one entry to thousands,
so with one program per row the widest row would set the time of all. Products are added column by column; threads
combine their sums once, at the end. An entry's sum has the same order at any position, so its logit is bitwise the same
in any batch and in any support. The row of each entry is computed first, by one program per row (`entry_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import Support
from fastrl.kernels.configuration import _WARP, check_unit_strides, on_device
from fastrl.kernels.jit import kernel

ENTRIES = 4  # 8 KB of the head in flight per program in bfloat16, 32 registers of sums per thread
_THREADS = 128
ROW_BLOCK = 256
ROW_OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True}


def chunk(vec: int) -> int:
    """Columns per step: a bfloat16 vector per thread, or half of it if each entry has its own address and mask."""
    return 1024 if vec > 1 else 512


def launch_options(warp: int = _WARP) -> dict[str, Any]:
    """The compiler's options for programs of 128 threads."""
    return {"num_warps": _THREADS // warp, "num_stages": 1, "enable_fp_fusion": True}


@kernel()
def entry_rows_kernel(
    token_ids_ptr,  # (nnz,) int32; None with keys_ptr
    offsets_ptr,  # (N + 1,) int64
    valid_ptr,  # (N,) uint8
    rows_ptr,  # (nnz,) int32, output
    keys_ptr,  # (nnz,) int32, output; or None
    rows: tl.int32,  # N
    vocab: tl.int32,  # V
    BLOCK: tl.constexpr,
):
    """Program (row,)."""
    row = tl.program_id(0)
    first = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + row + 1) - first).to(tl.int32)
    valid = tl.load(valid_ptr + row) != 0
    value = tl.where(valid, row, rows)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < count
        tl.store(rows_ptr + first + place, tl.zeros([BLOCK], tl.int32) + value, mask=mask)
        if keys_ptr is not None:
            token = tl.load(token_ids_ptr + first + place, mask=mask, other=0)
            tl.store(keys_ptr + first + place, tl.where(valid, token, vocab), mask=mask)


def entry_rows(support: Support, keys: Tensor | None = None, vocab: int = 0) -> Tensor:
    """The row of each entry, (nnz,) int32; N for the entries of rows that take no part.

    `keys` (nnz,) int32 receives the entries' tokens; `vocab` for the entries of rows that take no part.
    """
    out = torch.empty_like(support.token_ids)
    if out.numel() == 0:
        return out
    rows, valid = support.valid.numel(), support.valid.view(torch.uint8)
    token_ids = None if keys is None else support.token_ids
    with on_device(out):
        entry_rows_kernel[(rows,)](
            token_ids, support.offsets, valid, out, keys, rows, vocab, BLOCK=ROW_BLOCK, **ROW_OPTIONS
        )
    return out


def vector(*matrices: Tensor) -> int:
    """Entries per load: 16 bytes' worth if each matrix's rows are aligned and consist of whole vectors, else 1."""
    entries = 16 // matrices[0].element_size()
    aligned = all(m.data_ptr() % 16 == 0 and m.stride(0) % entries == 0 and m.shape[1] % entries == 0 for m in matrices)
    return entries if aligned else 1


@kernel(aligned=("hidden_ptr", "weight_ptr"))
def support_products_kernel(
    hidden_ptr,  # (N, H), unit stride on H
    weight_ptr,  # (V, H), of the same dtype, unit stride on H
    bias_ptr,  # (V,), or None
    token_ids_ptr,  # (nnz,) int32
    rows_ptr,  # (nnz,) int32; N if the row takes no part
    values_ptr,  # (nnz,) float32: out
    nnz: tl.int64,
    rows: tl.int32,  # N
    hidden_size: tl.int32,  # H
    stride_hidden: tl.int64,
    stride_weight: tl.int64,
    VEC: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (entry block,)."""
    # Load: the row of each matrix that each entry needs.
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    exists = entry < nnz
    row = tl.load(rows_ptr + entry, mask=exists, other=2147483647)
    part = row < rows
    token = tl.load(token_ids_ptr + entry, mask=part, other=0)
    # Aligned matrices have strides and lengths of whole vectors; `// VEC * VEC` shows that, so loads are 16 bytes wide.
    hidden_rows = hidden_ptr + tl.where(part, row, 0).to(tl.int64) * (stride_hidden // VEC * VEC)
    weight_rows = weight_ptr + token.to(tl.int64) * (stride_weight // VEC * VEC)
    length = hidden_size // VEC * VEC

    # Loop: the columns. Entries with the same hidden state read it again from L1.
    products = tl.zeros([ENTRIES, CHUNK], tl.float32)
    for start in range(0, hidden_size, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        mask = part[:, None] & (columns < length)[None, :]
        a = tl.load(hidden_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(weight_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        products = tl.fma(a, b, products)

    # Epilogue.
    value = tl.sum(products, axis=1)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + token, mask=part, other=0.0).to(tl.float32)

    # Store.
    tl.store(values_ptr + entry, tl.where(part, value, 0.0), mask=exists)


def constants(vec: int) -> dict[str, Any]:
    """The kernel's compile-time constants for loads of `vec` entries."""
    return {"VEC": vec, "ENTRIES": ENTRIES, "CHUNK": chunk(vec)}


def support_products(
    hidden: Tensor,  # (N, H), unit stride on H
    weight: Tensor,  # (V, H), of the same dtype, unit stride on H
    bias: Tensor | None,  # (V,)
    support: Support,
) -> Tensor:
    """See `fastrl.backend.contract`."""
    check_unit_strides(hidden=hidden, weight=weight, bias=bias)
    nnz, (rows, hidden_size) = support.token_ids.numel(), hidden.shape
    values = torch.empty(nnz, dtype=torch.float32, device=hidden.device)
    if nnz == 0:
        return values
    with on_device(hidden):
        support_products_kernel[(triton.cdiv(nnz, ENTRIES),)](
            hidden,
            weight,
            bias,
            support.token_ids,
            entry_rows(support),
            values,
            nnz,
            rows,
            hidden_size,
            hidden.stride(0),
            weight.stride(0),
            **constants(vector(hidden, weight)),
            **launch_options(),
        )
    return values
