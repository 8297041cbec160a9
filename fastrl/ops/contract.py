"""What every backend implements: three row functions over logits, and the plain data that they exchange.

A backend is a module with these three functions (`fastrl.reference.rows` is the readable one):

    row_statistics(logits, targets, mask, transform) -> Statistics
    row_gradient(logits, targets, mask, transform, statistics, c, h, out) -> None
    row_visit(logits, targets, mask, transform, objective, inputs) -> Visit         logits become their gradient

and two helpers: `scale_(tensor, factor)`, in place, factor 0-dim and on the device; `advise(tensor)`, told of a large
fresh tensor that is about to be filled.

It may also have `linear_statistics(hidden, weight, bias, targets, transform) -> Statistics`, of logits that it never
stores; nothing needs it.

Shapes. `logits` is (A, B, V), float32, bfloat16 or float16, any strides on the first two dimensions and stride 1 on the
last; N = A * B rows in row-major order. Everything per row is (N,) and contiguous: `targets` int64, `mask` bool or None
(all count), the rest float32. Where the mask is False nothing is read: statistics are 0, gradient rows are 0.

Logits may be a slice of the vocabulary, with targets counted from its first column. A target outside [0, V) makes
`row_statistics` give a NaN log-probability and leaves the other statistics as they are; `row_gradient` then finds no
target in the row. There a NaN log-probability makes the whole row NaN, so that no invalid target trains silently. A row
of -inf alone has maximum -inf, a row with a NaN the maximum NaN.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

#: The rows of `Visit.terms`, in the order in which `fastrl.formulas.token_terms` returns them.
TERMS = ("loss", "policy", "kl", "ratio", "weight", "side", "approx_kl", "clamped")


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
    maximum: Tensor  # max_j z_j
    log_sum: Tensor  # log sum_j exp(z_j - maximum), formed as log1p of the others' sum where the target is the maximum


class RowObjective(NamedTuple):
    """A row-local objective as kernels take it: the names of its formulas and their numbers."""

    gate: str  # a key of fastrl.objectives.GATE_FORMULAS
    gate_parameters: tuple[float, float, float, float]
    kl: str  # a key of fastrl.objectives.KL_FORMULAS; "none"
    rollout: str  # a key of fastrl.objectives.ROLLOUT_FORMULAS; "none"
    rollout_low: float
    rollout_high: float
    max_log_ratio: float


class RowInputs(NamedTuple):
    """What a row-local objective reads, each (N,) float32 unless said otherwise; None = absent."""

    advantages: Tensor
    policy_weights: Tensor  # aggregation weight x token weights
    old: Tensor | None = None  # absent: the row's own logprob (on-policy)
    ref: Tensor | None = None  # absent: the row's own logprob
    rollout: Tensor | None = None  # absent: old
    kl_weights: Tensor | None = None  # aggregation weight x KL coefficient; absent: 0
    entropy_weights: Tensor | None = None  # aggregation weight x entropy coefficient; absent: 0
    entropy_threshold: Tensor | None = None  # 0-dim float32; absent: -1e30


class Visit(NamedTuple):
    """What a visit returns beside the gradient that it leaves in the logits."""

    logprobs: Tensor  # (N,) float32
    entropy: Tensor  # (N,) float32
    terms: Tensor  # (len(TERMS), N) float32
