"""The loss options that TRL's GRPOTrainer and Liger's GRPO losses share, as an objective. Imports neither."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from fastrl.objectives.objective import (
    KL,
    Aggregation,
    Clip,
    GammaWeight,
    Gate,
    Objective,
    RatioLevel,
    SoftGate,
    StopGradientClip,
)

#: What a loss type's sum is divided by; "items" are the tokens of a whole optimizer step over the number of processes.
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
#: The loss types that have PPO's clip, and with it `delta`.
CLIPPED = ("grpo", "dr_grpo", "luspo", "bnpo", "dapo")
_SMALLEST_LAMBDA = 1e-4  # both packages' own floor of VESPO's rates
#: Both packages' own bounds of the engine's log-ratios in VESPO.
ENGINE_LOG_RATIOS = (math.log(1e-8), 20.0)


class GRPOChoice(NamedTuple):
    """An objective, and by what its sum is divided."""

    objective: Objective
    denominator: Denominator


def check_loss_type(loss_type: str) -> None:
    """ValueError for a loss type that does not exist."""
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
    """The objective of these options; `fields` are further ones of `fastrl.Objective`.

    "cispo" takes epsilon_high as the cap itself, not as its distance from 1. `delta` belongs to the clipped losses
    (`CLIPPED`) and is not read by the others. "luspo" is the sum over each response's tokens at every level.

    Raises:
        TypeError, ValueError: naming the option, or the objective's field that holds it.
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
    own: dict[str, Any] = {"gate": gate, "ratio": level, "kl": kl, "aggregate": aggregate}
    if loss_type == "dr_grpo":
        own["max_length"] = max_completion_length
    return GRPOChoice(Objective(**(own | fields)), denominator)
