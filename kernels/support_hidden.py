"""Support hidden: the hidden states' gradient, out[i] = the sum over the entries k that row i keeps of g_k W[token_k].

This is `support_weight` with the roles swapped: a row's entries are a segment, and rows of the head are summed. A row
with thousands of entries is split like a common token, else its program would run on after all others have ended.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.backend.contract import Support
from fastrl.kernels.configuration import check_unit_strides
from fastrl.kernels.support_products import entry_rows
from fastrl.kernels.support_weight import segment_sums


def support_hidden(
    gradient: Tensor,  # (nnz,) float32
    weight: Tensor,  # (V, H), unit stride on H
    support: Support,
    out: Tensor,  # (N, H), unit stride on H
    keep: bool,
) -> None:
    """See `fastrl.backend.contract`."""
    check_unit_strides(weight=weight, out=out)
    ids, rows = entry_rows(support), support.valid.numel()
    segment_sums(
        gradient, None, support.token_ids, ids, support.offsets, rows, weight, out, None, add=False, fill=not keep
    )
