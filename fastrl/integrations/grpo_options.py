"""Converts the loss options that TRL's GRPOTrainer and Liger's GRPO losses share to an objective. Imports neither."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from fastrl.objectives.gates import Clip, GammaWeight, Gate, RatioLevel, SoftGate, StopGradientClip
from fastrl.objectives.objective import KL, Aggregation, Objective

#: The divisor of a loss type's sum; "items": the tokens of a whole optimizer step over the number of processes.
Denominator = Literal["tokens", "items", "responses"]

#: loss type -> (aggregation, denominator)
LOSS_TYPES: dict[str, tuple[Aggregation, Denominator]] = {
    "grpo": ("seq-mean-token-mean", "responses"),
    "sapo": ("seq-mean-token-mean", "responses"),
    "dr_grpo": ("seq-mean-token-sum-norm", "responses"),
    "luspo": ("seq-mean-token-sum", "responses"),
    "bnpo": ("token-mean", "tokens"),
    "dapo": ("token-mean", "items"),
    "cispo": ("token-mean", "items"),
    "vespo": ("token-mean", "items"),
}
#: The loss types with PPO's clip, which take `delta`.
CLIPPED = ("grpo", "dr_grpo", "luspo", "bnpo", "dapo")
_SMALLEST_LAMBDA = 1e-4  # the lower bound of VESPO's rates in both packages
#: The arguments of `grpo_objective` that the gate of one loss type reads.
GATE_OPTIONS = (
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
#: The bounds of the engine's log-ratios in VESPO, in both packages.
ENGINE_LOG_RATIOS = (math.log(1e-8), 20.0)


class GRPOChoice(NamedTuple):
    """An objective, and the divisor of its sum."""

    objective: Objective
    denominator: Denominator


def check_loss_type(loss_type: str) -> None:
    """Raise ValueError if the loss type does not exist."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")


def grpo_objective(
    loss_type: str = "dapo",
    *,
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    max_completion_length: int | None = None,
    **fields: Any,
) -> GRPOChoice:
    """The objective for these options; `fields` are further fields of `fastrl.Objective`.

    For "cispo" epsilon_high is the cap itself, not its distance from 1. `delta` is read only by the clipped losses
    (`CLIPPED`). "luspo" sums over each response's tokens at every level.

    Raises:
        TypeError, ValueError: names the option, or the objective's field that holds it.
    """
    check_loss_type(loss_type)
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level must be 'token' or 'sequence', got {importance_sampling_level!r}")
    aggregate, denominator = LOSS_TYPES[loss_type]
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("max_completion_length is needed by loss_type='dr_grpo', got None")
    sequence = importance_sampling_level == "sequence"
    level: RatioLevel = "sequence" if sequence else "token"
    gate: Gate
    if loss_type == "cispo":
        gate = StopGradientClip(epsilon_high)
    elif loss_type == "sapo":
        gate = SoftGate(sapo_temperature_pos, sapo_temperature_neg)
    elif loss_type == "vespo":
        rates = max(vespo_lambda_pos, _SMALLEST_LAMBDA), max(vespo_lambda_neg, _SMALLEST_LAMBDA)
        gate, level = GammaWeight(vespo_k_pos, rates[0], vespo_k_neg, rates[1]), "sequence-product"
    else:
        gate = Clip(epsilon_low, epsilon_high, delta=delta)
    kl = None
    if beta != 0.0 and use_bias_correction_kl:
        if loss_type == "vespo" and sequence:
            raise ValueError("use_bias_correction_kl with loss_type='vespo' needs importance_sampling_level='token'")
        kl = KL("k3-unbiased", beta, ratio="objective" if sequence else "token")
    elif beta != 0.0:
        kl = KL("k3", beta)
    chosen: dict[str, Any] = {"gate": gate, "ratio": level, "kl": kl, "aggregate": aggregate}
    if loss_type == "dr_grpo":
        chosen["max_length"] = max_completion_length
    return GRPOChoice(Objective(**(chosen | fields)), denominator)
