"""Support hidden: the hidden states' gradient, out[i] = the sum over the entries k that row i keeps of g_k W[token_k].

This is `support_weight` with the roles swapped: a row's entries are a segment, and rows of the head are summed. A row
with thousands of entries is split like a common token, else its program would run on after all others have ended.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.kernels.support_products import entry_rows
from fastrl.kernels.support_weight import segment_sums


def support_hidden(
    gradient: Tensor,  # (nnz,) float32
    weight: Tensor,  # (V, H), unit stride on H
    token_ids: Tensor,  # (nnz,) int32
    offsets: Tensor,  # (N + 1,) int64
    valid: Tensor,  # (N,) bool
    out: Tensor,  # (N, H), unit stride on H
) -> None:
    """Write the rows of `out` that take part; leave the others."""
    nnz, rows = token_ids.numel(), valid.numel()
    if nnz == 0:
        return
    ids = entry_rows(offsets, valid, nnz)
    segment_sums(gradient, None, token_ids, ids, offsets, rows, weight, out, None, False)
