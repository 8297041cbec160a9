"""What every backend implements: three row functions over logits, and the plain data that they exchange.

A backend is a module with these three functions (`fastrl.backends.torch.rows` is the readable one):

    row_statistics(logits, targets, mask, transform) -> Statistics
    row_gradient(logits, targets, mask, transform, statistics, c, h, out) -> None
    row_forward_gradient(logits, targets, mask, transform, objective, inputs, out=None) -> LossTerms

(`out` of the last is contiguous; None means the logits) and two helpers: `scale_(tensor, factor)`, in place, factor
0-dim and on the device; `advise(tensor)`, told of a large fresh tensor that is about to be filled.

The same for rows over a support of a few vocabulary entries each (`Support`), whose logits lie one after the other:

    support_products(hidden, weight, bias, support) -> values                              their logits
    support_statistics(values, targets, support, transform) -> Statistics
    support_gradient(values, targets, support, transform, statistics, c, h, out) -> None   out may be values
    support_hidden(gradient, weight, support, out) -> None                                 dL/dhidden
    support_weight(gradient, hidden, by_token, out, out_bias, add) -> None                 dL/dweight and dL/dbias
    support_restrict(logits, first, rows, token_ids, offsets) -> None                      -inf outside the support

and `find_support(logits, temperature, top_k, top_p, min_p)`, which finds the entries that a sampler would keep.

Shapes. `logits` is (A, B, V), float32, bfloat16 or float16, any strides on the first two dimensions and stride 1 on the
last; N = A * B rows in row-major order. Everything per row is (N,) and contiguous: `targets` int64, `mask` bool or None
(all count), the rest float32. Where the mask is False nothing is read: statistics are 0, gradient rows are 0.

Logits may be a slice of the vocabulary, with targets counted from its first column. A target outside [0, V) makes
`row_statistics` give a NaN log-probability and leaves the other statistics as they are; `row_gradient` then finds no
target in the row. There a NaN log-probability makes the whole row NaN, so that no invalid target trains silently. A row
of -inf alone has maximum -inf, a row with a NaN the maximum NaN.

Support entries. `values`, `gradient` and their `out` are (nnz,) float32, in the order of `support.token_ids`; hidden
(N, H), weight (V, H) and bias (V,) have one dtype, unit stride on H, any stride on N and V; sums are float32 or wider.
Rows that take no part are not read: their values and gradients are 0, their statistics 0. A target outside its row's
support gives a NaN log-probability, and that a row of NaN. `support_hidden` writes the rows of `out` (N, H), in
hidden's dtype, that take part, and leaves the others; `support_weight` writes the rows of `out` (V, H) (None: not
wanted) and entries of `out_bias` (V,) (likewise) that some entry names: adds to what is there if `add`, else it may
take them for zeros. Both sum in a fixed order, a token's entries in the order of `by_token`, without atomics. Entries
have float32 logits where a matrix product rounds them to the factors' dtype.

`support_restrict` is for rows whose support is too wide to gather: in a contiguous tile logits (n, v), entries [first,
first + v) of the vocabulary and the given rows (n,) int64, what lies outside a row's support becomes -inf; a row
without ids stays.

`find_support` takes logits (A, B, V) and returns the CSR `(token_ids, offsets)` of the A * B rows: entries > -inf of
z = logits / temperature that pass top-k (0 = off; all entries tied with the k-th largest pass), then top-p (1 = off;
entries are dropped from the smallest up, of equal ones the lowest index first, while the probability of those dropped
is at most 1 - top_p; the last is never dropped), then min-p (0 = off; probability at least min_p times the largest). A
row with a NaN or +inf, or of -inf alone, has no distribution: ValueError that names it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Transform(NamedTuple):
    """From a raw logit x to z = softcap * tanh(logit_scale * x / softcap) / temperature; an x of -inf stays -inf."""

    temperature: float = 1.0
    temperatures: Tensor | None = None  # (N,) float32; where given, it is used instead of the scalar
    logit_scale: float = 1.0  # > 0: the largest x has the largest z
    softcap: float = 0.0  # 0 means none


class Statistics(NamedTuple):
    """A row's numbers, each (N,) float32. p_j = exp(z_j - maximum - log_sum)."""

    logprobs: Tensor  # log-probability of the target; NaN for an unmasked target outside [0, V)
    entropy: Tensor  # nats
    maximum: Tensor  # max_j z_j, rounded; log_sum is relative to what it was rounded to
    log_sum: Tensor  # log sum_j exp(z_j - maximum), formed as log1p of the others' sum where the target is the maximum


def entry_rows(offsets: Tensor, nnz: int) -> Tensor:
    """(nnz,) int64: the row of each entry of a CSR; without asking the device how many there are."""
    rows = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return rows.repeat_interleave(offsets.diff(), output_size=nnz)


class Support(NamedTuple):
    """Each row's support, its vocabulary entries, in CSR. A row takes part if its `valid` is True and it has any."""

    token_ids: Tensor  # (nnz,) int32, rising within a row
    offsets: Tensor  # (N + 1,) int64
    valid: Tensor  # (N,) bool

    def rows(self) -> Tensor:
        """(nnz,) int64: the row of each entry."""
        return entry_rows(self.offsets, self.token_ids.shape[0])


class ByToken(NamedTuple):
    """The support entries sorted by token, those of one token in their own order; those of rows without a part last."""

    token_ids: Tensor  # (nnz,) int32, V for entries of rows that take no part
    entries: Tensor  # (nnz,) int64: where each lies in the CSR
    rows: Tensor  # (nnz,) int32


class LossTerms(NamedTuple):
    """What `row_forward_gradient` returns beside the gradient that it writes."""

    logprobs: Tensor  # (N,) float32
    entropy: Tensor  # (N,) float32
    terms: Tensor  # (len(TERMS), N) float32
