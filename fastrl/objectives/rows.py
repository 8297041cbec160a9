"""A row-local objective as data: the arguments of the backends' `row_forward_gradient`, and the terms it returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

#: The rows of a backend's `LossTerms.terms`, in the order in which `fastrl.objectives.formulas.token_terms` returns
#: them.
TERMS = ("loss", "policy", "kl", "ratio", "weight", "side", "approx_kl", "clamped")

#: The tokens that `evaluate.objective_loss` marks, each under the name of the metric that counts them.
MARKS = ("masked_off_policy", "chosen_by_covariance")


class RowObjective(NamedTuple):
    """A row-local objective as kernels take it: the names of its formulas and their parameters."""

    gate: str  # a key of fastrl.objectives.gates.GATE_FORMULAS
    gate_parameters: tuple[float, float, float, float]
    kl: str  # a key of fastrl.objectives.objective.KL_FORMULAS; "none"
    rollout: str  # a key of fastrl.objectives.objective.ROLLOUT_FORMULAS; "none"
    rollout_low: float
    rollout_high: float
    max_log_ratio: float


class RowInputs(NamedTuple):
    """The inputs of a row-local objective, (N,) float32 unless noted; None = absent."""

    advantages: Tensor
    policy_weights: Tensor  # aggregation weight x token weights
    old: Tensor | None = None  # absent: the row's own logprob (on-policy)
    ref: Tensor | None = None  # absent: the row's own logprob
    rollout: Tensor | None = None  # absent: old
    kl_weights: Tensor | None = None  # aggregation weight x KL coefficient; absent: 0
    entropy_weights: Tensor | None = None  # aggregation weight x entropy coefficient; absent: 0
    entropy_threshold: Tensor | None = None  # 0-dim float32; absent: -1e30
