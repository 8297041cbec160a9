"""Every objective, as the tests of losses go through them."""

from __future__ import annotations

from typing import Any

import fastrl
from fastrl.objectives.objective import AGGREGATIONS, KL_FORMULAS, RATIO_LEVELS, Objective

PRESET_ARGUMENTS: dict[str, dict[str, Any]] = {
    "PPOKL": {"coef": 0.3},
    "DrGRPO": {"max_length": 7},
    "DeepSeekV32": {"kl_coef": 0.3, "off_policy_delta": 0.05},
}


OBJECTIVES = {
    **{name: make(**PRESET_ARGUMENTS.get(name, {})) for name, make in fastrl.PRESETS.items()},
    **{f"ratio {level}": Objective(ratio=level) for level in RATIO_LEVELS},
    **{f"kl {k}": Objective(kl=fastrl.KL(k, 0.7)) for k in KL_FORMULAS if k != "none"},
    **{f"aggregate {a}": Objective(aggregate=a, max_length=9) for a in AGGREGATIONS},
    "dual": fastrl.PPO(dual_clip=1.5),
    "delta": Objective(gate=fastrl.Clip(0.2, 0.2, delta=1.6)),
    "delta inside the clip": Objective(gate=fastrl.Clip(0.2, 0.5, delta=1.2)),
    "dual and delta": Objective(gate=fastrl.Clip(0.2, 0.2, dual=1.3, delta=1.5)),
    "CISPO with a lower bound": fastrl.CISPO(cap=1.2, low=0.8),
    "objective's own ratio in the KL": fastrl.GSPO(kl=fastrl.KL("k3-unbiased", 0.4, ratio="objective")),
    "TIS": fastrl.GRPO(rollout_correction=fastrl.RolloutCorrection(high=1.1)),
    "IcePop": fastrl.GRPO(rollout_correction=fastrl.RolloutCorrection(mode="mask", low=0.9, high=1.2)),
    "sequence TIS": fastrl.GRPO(rollout_correction=fastrl.RolloutCorrection("sequence", high=1.1)),
    "off-policy mask": fastrl.GRPO(off_policy_delta=0.0),
    "tight clamp": Objective(gate=fastrl.NoGate(), kl=fastrl.KL("forward", 0.5), max_log_ratio=0.2),
    "tight clamp, CISPO": fastrl.CISPO(max_log_ratio=0.2),
    "tight clamp, sequence": fastrl.GSPO(clip_low=0.5, clip_high=0.5, max_log_ratio=0.05),
}
