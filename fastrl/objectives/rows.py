"""A row-local objective as data: what the backends' `row_forward_gradient` takes, and the terms that it returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

#: The rows of a backend's `LossTerms.terms`, in the order in which `fastrl.objectives.formulas.token_terms` returns
#: them.
TERMS = ("loss", "policy", "kl", "ratio", "weight", "side", "approx_kl", "clamped")


class RowObjective(NamedTuple):
    """A row-local objective as kernels take it: the names of its formulas and their numbers."""

    gate: str  # a key of fastrl.objectives.objective.GATE_FORMULAS
    gate_parameters: tuple[float, float, float, float]
    kl: str  # a key of fastrl.objectives.objective.KL_FORMULAS; "none"
    rollout: str  # a key of fastrl.objectives.objective.ROLLOUT_FORMULAS; "none"
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
