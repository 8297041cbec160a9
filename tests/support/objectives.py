"""Every objective, as the tests of losses go through them."""

from __future__ import annotations

from typing import Any

import fastrl
from fastrl.objectives.objective import AGGREGATIONS, KL_FORMULAS, RATIO_LEVELS, Objective

PRESET_ARGUMENTS: dict[str, dict[str, Any]] = {
    "PPOKL": {"coef": 0.3},
    "DrGRPO": {"max_length": 7},
    "DeepSeekV32": {"kl_coef": 0.3, "off_policy_delta": 0.05},
    "FIPO": {"half_life": 2.0, "dual_clip": 1.5, "safe_ratio": 1.2},
    # Every candidate, so that which of them are drawn does not matter.
    "ClipCov": {"fraction": 1.0, "cov_low": 0.05, "cov_high": 2.0},
    "KLCov": {"fraction": 0.3, "coef": 0.7},
    "DPPO": {"low": 0.04, "high": 0.06, "cap": 1.3},
    "IcePop": {"low": 0.7, "high": 1.4},
    "DRO": {"beta": 0.5},
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
    "MIS": fastrl.GRPO(rollout_correction=fastrl.RolloutCorrection(mode="mask", low=0.9, high=1.2)),
    "sequence TIS": fastrl.GRPO(rollout_correction=fastrl.RolloutCorrection("sequence", high=1.1)),
    "geometric TIS": fastrl.GRPO(rollout_correction=fastrl.RolloutCorrection("sequence-mean", high=1.05)),
    "TIS with rejection": fastrl.GRPO(rollout_correction=fastrl.RolloutCorrection(high=1.1, reject=(0.8, 1.5))),
    "off-policy mask": fastrl.GRPO(off_policy_delta=0.0),
    "FIPO, both sides": fastrl.FIPO(half_life=0.7, low=0.9, high=1.1, dual_clip=None, safe_ratio=None),
    "FIPO of a response's ratio": fastrl.GSPO(future_kl=fastrl.FutureKL(4.0, 0.5, 3.0, max_ratio=1.3)),
    "Clip-Cov of a response's ratio": fastrl.GSPO(covariance=fastrl.CovarianceClip(1.0, 0.0, 3.0)),
    "KL-Cov beside PPO's clip": fastrl.KLCov(0.5, -0.4, gate=fastrl.Clip(), kl=fastrl.KL("k3", 0.1)),
    "DPPO by its KL": fastrl.DPPO("kl", low=0.01, high=0.02, kl=fastrl.KL("k3-unbiased", 0.3)),
    "IcePop of responses": fastrl.IcePop(low=0.7, high=1.4, ratio="sequence"),
    "IcePop and TIS": fastrl.IcePop(low=0.7, high=1.4, rollout_correction=fastrl.RolloutCorrection(high=1.1)),
    "TOPR of tokens": fastrl.TOPR(low=0.8, ratio="token"),
    "DRO and TIS": fastrl.DRO(0.5, rollout_correction=fastrl.RolloutCorrection(high=1.1)),
    "weighted KL": fastrl.GRPO(kl=fastrl.KL("k3", 0.5, weighted=True)),
    "tight clamp, IcePop": fastrl.IcePop(low=0.9, high=1.2, max_log_ratio=0.2),
    "tight clamp": Objective(gate=fastrl.NoGate(), kl=fastrl.KL("forward", 0.5), max_log_ratio=0.2),
    "tight clamp, CISPO": fastrl.CISPO(max_log_ratio=0.2),
    "tight clamp, FIPO": fastrl.FIPO(half_life=3.0, low=0.1, high=9.0, max_log_ratio=0.2),
    "tight clamp, KL-Cov": fastrl.KLCov(0.6, 0.5, max_log_ratio=0.2),
    "tight clamp, sequence": fastrl.GSPO(clip_low=0.5, clip_high=0.5, max_log_ratio=0.05),
}
assert all(OBJECTIVES[x] == make(**PRESET_ARGUMENTS.get(x, {})) for x, make in fastrl.PRESETS.items()), "a name twice"
