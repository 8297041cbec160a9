"""A row-local objective as data: the arguments of the backends' `row_forward_gradient`, and the terms it returns."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

#: The rows of a backend's `LossTerms.terms`, in the order in which `fastrl.objectives.formulas.token_terms` returns
#: them.
TERMS = ("loss", "policy", "kl", "ratio", "weight", "side", "approx_kl", "clamped")

#: What metrics read of each token beside the terms: marks, under the name of the metric that counts them, and log rho.
MARKS = ("masked_off_policy", "chosen_by_covariance", "log_rho")


class Numbers(NamedTuple):
    """The numbers of an objective's formulas, handed on in this order to where `token_terms` names them again."""

    p0: float = 0.0  # p0..p3: the parameters of the gate
    p1: float = 0.0
    p2: float = 0.0
    p3: float = 0.0
    rollout_low: float = 1.0  # see RolloutCorrection.parameters; without a correction the weight is 1
    rollout_high: float = 1.0
    reject_low: float = 0.0
    reject_high: float = math.inf
    max_log_ratio: float = 20.0


class RowObjective(NamedTuple):
    """A row-local objective as kernels take it: the names of its formulas, and their numbers."""

    gate: str  # a key of fastrl.objectives.gates.GATE_FORMULAS
    kl: str = "none"  # a key of fastrl.objectives.objective.KL_FORMULAS
    numbers: tuple[float, ...] = Numbers()  # its names are lost where it is an operator's argument, a list of floats


class RowInputs(NamedTuple):
    """The inputs of a row-local objective, (N,) float32 unless noted; None = absent. `token_terms` has their order."""

    advantages: Tensor
    policy_weights: Tensor  # aggregation weight x token weights
    old: Tensor | None = None  # absent: the row's own logprob (on-policy)
    ref: Tensor | None = None  # absent: the row's own logprob
    rollout: Tensor | None = None  # absent: old
    kl_weights: Tensor | None = None  # aggregation weight x KL coefficient; absent: 0
    entropy_weights: Tensor | None = None  # aggregation weight x entropy coefficient; absent: 0
    entropy_threshold: Tensor | None = None  # 0-dim float32; absent: -1e30
