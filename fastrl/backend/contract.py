"""What every backend implements: functions over rows of logits, of a few entries or of two logits, and their tuples.

A backend is a module with the functions below; `fastrl.backend.torch` is the most readable. Three are over logits:

    row_statistics(logits, targets, mask, transform) -> Statistics
    row_gradient(logits, targets, mask, transform, statistics, c, h, out) -> None
    row_forward_gradient(logits, targets, mask, transform, objective, inputs, out=None) -> LossTerms

`logits` is (A, B, V), float32, bfloat16 or float16, with stride 1 on V and any strides on A and B; its N = A * B rows
are in row-major order. Everything per row is (N,) and contiguous: `targets` is int64, `mask` is bool or None (all rows
are valid), the rest is float32. Where the mask is False nothing is read: statistics and gradient rows are 0. `out` may
be the logits; beside float32 logits it may also be bfloat16 or float16, and each entry is rounded once, as it is
stored. In `row_forward_gradient` its rows are equally far apart, and None means the logits.

Logits may be a slice of the vocabulary, with targets counted from its first column. For a target outside [0, V),
`row_statistics` returns a NaN log-probability; the other statistics do not change. `row_gradient` treats the row as one
without its target, and writes NaN to the row of a NaN log-probability, so that no invalid target trains silently. A row
of only -inf has maximum -inf; a row with a NaN has maximum NaN.

`advise(tensor)` is called with a large new tensor that is about to be filled. The Triton backend also has
`scale(tensor, factor, out)`, which `fastrl.passes.operator` has for the others.

The same for rows over a support of a few vocabulary entries each (`Support`), whose logits are stored one after the
other; `out` may be `values`:

    support_products(hidden, weight, bias, support) -> values                              the support logits
    support_statistics(values, targets, support, transform) -> Statistics
    support_gradient(values, targets, support, transform, statistics, c, h, out) -> None
    support_forward_gradient(values, targets, support, transform, objective, inputs, out) -> LossTerms
    by_token(support, vocab) -> ByToken                                                    the entries sorted by token
    blank(shape, dtype, like) -> Tensor                                                    a gradient to be written
    support_hidden(gradient, weight, support, out, keep) -> None                           dL/dhidden
    support_weight(gradient, hidden, by_token, out, out_bias, add) -> None                 dL/dweight and dL/dbias
    support_restrict(logits, first, rows, token_ids, offsets) -> None                      -inf outside the support

`values`, `gradient` and their `out` are (nnz,) float32, in the order of `support.token_ids`: a matrix product would
round them to the dtype of its factors. `hidden` (N, H), `weight` (V, H) and `bias` (V,) have one dtype, unit stride on
H, any stride on N and V. Rows that take no part are not read: their values, gradients and statistics are 0. A target
outside its row's support gives a NaN log-probability.

`support_hidden` writes the rows of `out` (N, H) that take part; with `keep` it leaves the others. `support_weight`
writes the rows of `out` (V, H) and the entries of `out_bias` (V,) whose token has an entry, and with `add` adds to
them; either may be None (not wanted). Without `keep` and `add` they are new tensors of `blank`, whose rest is zero
afterwards: `blank` gives zeros, or the function writes them. Sums are float32 or wider, in a fixed order without
atomics: that of `by_token` for a token's entries.

`support_restrict` is for rows whose support is too wide to gather. Its logits are a tile (n, v) with stride 1 on v:
entries [first, first + v) of the vocabulary for the given rows (n,) int64. Entries outside a row's support become -inf;
a row without token ids is left as it is.

`find_support(logits, temperature, top_k, top_p, min_p)` finds the entries that a sampler would keep: the CSR
`(token_ids, offsets)` of the rows of logits (A, B, V). A row keeps the entries > -inf of z = logits / temperature that
pass, in this order:

- top-k (0 = off): all entries tied with the k-th largest pass;
- top-p (1 = off): entries are dropped from the smallest up, of equal ones the lowest index first, while the probability
  of the dropped entries is at most 1 - top_p; the last entry is never dropped;
- min-p (0 = off): the probability is at least min_p times the largest.

A row with a NaN or +inf, or of only -inf, has no distribution: ValueError names it.

Several entries per row (`Entries`), whose logits are those of the tile from which the statistics are formed:

    gather_entries(logits, first, rows, entries, values, best) -> targets
    scatter_entries(gradient, first, rows, entries, out) -> None

The logits (A, B, V) may be a slice, of entries [first, first + V) of the vocabulary; `rows` (A * B,) int64 says which
row of `entries` each of theirs is, no two the same. `gather_entries` writes the logits of the entries in the slice to
`values` (nnz,), in float32, and updates `best`; `targets` (A * B,) int64 is the column of the best entry so far, -1 if
that is not in this slice. A NaN is never the best. `scatter_entries` writes `gradient` (nnz,) float32 to the columns of
the entries in `out`, in its dtype.

A divergence is between two logits of each row, the student's and the teacher's (`Pair`):

    pair_statistics(pair) -> PairStatistics
    pair_gradient(pair, statistics, c, out) -> None
    pair_forward_gradient(pair, c, out=None) -> PairStatistics                      both in one visit of the row

Both logits are contiguous (N, V), each float32, bfloat16 or float16; there is no mask. `out` = c dD/dlogits, with c
(N,) float32, is contiguous, of the logits' dtype or a narrower one; it may be the logits, and None means them. The
logits of `pair_gradient` may be a slice of the vocabulary, whereas the statistics are of whole rows. With p =
softmax(z) of the student, q = softmax(z) of the teacher and m = beta q + (1 - beta) p, a row's divergence D and dD/dz
of the student are:

    kind          D                                     dD/dz
    forward_kl    KL(q||p) = sum q log(q / p)           p - q
    reverse_kl    KL(p||q)                              p (log(p / q) - D)
    jsd           beta KL(q||m) + (1 - beta) KL(p||m)   (1 - beta) p (log(p / m) - KL(p||m))

A term whose factor in front of the logarithm is 0 (an -inf, or too small for float32) counts 0, so that -inf logits are
ordinary. Entries that p lacks and q has make the forward KL +inf, with a finite gradient; entries that q lacks and p
has make the reverse KL +inf, and its gradient row NaN. The JSD is always finite. D is never below 0, and exactly 0 if
both logits and both transforms are equal. A row with a NaN or +inf, or of only -inf, on either side has a NaN
divergence and a gradient row of NaN. Where c is 0 the gradient row is 0 whatever the row is: a weight of 0 takes it out
of the loss. Float32 sums have a fixed order: the results of a row are bitwise the same in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Transform(NamedTuple):
    """From a raw logit x to z = softcap * tanh(logit_scale * x / softcap) / temperature; an x of -inf stays -inf."""

    temperature: float = 1.0
    temperatures: Tensor | None = None  # (N,) float32; used instead of the scalar unless None
    logit_scale: float = 1.0  # > 0: the largest x has the largest z
    softcap: float = 0.0  # 0 means no softcap

    def of(self, rows: Tensor | slice) -> Transform:
        """That of some of the rows."""
        t = self.temperatures
        return self if t is None else self._replace(temperatures=t[rows])


class Statistics(NamedTuple):
    """Statistics of the rows, each (N,) float32. p_j = exp(z_j - maximum - log_sum)."""

    logprobs: Tensor  # log-probability of the target; NaN for an unmasked target outside [0, V)
    entropy: Tensor  # nats
    maximum: Tensor  # max_j z_j, rounded; log_sum is relative to the rounded value
    log_sum: Tensor  # log sum_j exp(z_j - maximum): log1p of the others' sum if the target is the maximum


def entry_rows(offsets: Tensor, nnz: int) -> Tensor:
    """(nnz,) int64: the row of each entry of a CSR. Given `nnz`, it needs no device-to-host sync."""
    rows = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return rows.repeat_interleave(offsets.diff(), output_size=nnz)


def offsets_of(lengths: Tensor) -> Tensor:
    """(N + 1,) int64: the start of each row of these lengths, and the end of the last."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


class Support(NamedTuple):
    """Each row's support, its vocabulary entries, in CSR. A row takes part if it is `valid` and has any entry."""

    token_ids: Tensor  # (nnz,) int32, ascending within a row
    offsets: Tensor  # (N + 1,) int64
    valid: Tensor  # (N,) bool

    def rows(self) -> Tensor:
        """(nnz,) int64: the row of each entry."""
        return entry_rows(self.offsets, self.token_ids.shape[0])


class Entries(NamedTuple):
    """The vocabulary entries that are asked for in each row, in CSR, distinct within a row and in any order."""

    token_ids: Tensor  # (nnz,) int32; one outside the vocabulary is in no slice of it, so that nothing is read
    offsets: Tensor  # (N + 1,) int64

    def rows(self) -> Tensor:
        """(nnz,) int64: the row of each entry."""
        return entry_rows(self.offsets, self.token_ids.shape[0])


class Best(NamedTuple):
    """Of the entries that are asked for in each row: the one with the largest logit, of equal ones the lowest id."""

    ids: Tensor  # (N,) int64, -1 if there is none
    values: Tensor  # (N,) float32: its logit, -inf if there is none


class ByToken(NamedTuple):
    """The support entries sorted by token, in a stable order; those of rows that take no part come last."""

    token_ids: Tensor  # (nnz,) int32, V for entries of rows that take no part
    entries: Tensor  # (nnz,) int64: the position of each in the CSR
    rows: Tensor  # (nnz,) int32
    heads: Tensor | None = None  # (V,) int64: the first position of each token that has one; or None


class LossTerms(NamedTuple):
    """What `row_forward_gradient` and `support_forward_gradient` return, besides the gradient that they write."""

    logprobs: Tensor  # (N,) float32
    entropy: Tensor  # (N,) float32
    terms: Tensor  # (len(TERMS), N) float32


class Divergence(NamedTuple):
    """Which divergence is between the student's distribution and the teacher's."""

    kind: str  # "forward_kl", "reverse_kl" or "jsd"
    beta: float = 0.5  # the teacher's weight in the mixture of "jsd", 0 < beta < 1; otherwise unused


class Pair(NamedTuple):
    """Two logits of each row, and what is between them."""

    logits: Tensor  # (N, V), the student's
    teacher_logits: Tensor  # (N, V)
    transform: Transform
    teacher_transform: Transform
    divergence: Divergence


class PairStatistics(NamedTuple):
    """Statistics of the rows of a pair, each (N,) float32. p_j = exp(z_j - maximum - log_sum), q_j likewise."""

    divergence: Tensor  # nats
    student_kl: Tensor  # what the gradient needs: KL(p||q) for reverse_kl, KL(p||m) for jsd, 0 for forward_kl
    maximum: Tensor  # max_j z_j of the student, rounded; log_sum is relative to the rounded value
    log_sum: Tensor  # log sum_j exp(z_j - maximum)
    teacher_maximum: Tensor
    teacher_log_sum: Tensor
