"""fastrl: fused kernels and losses for reinforcement learning of language models.

It computes token log-probabilities, entropies and whole policy losses, with their gradients, from logits or from hidden
states and the output head, without an (N, V) float32 tensor.
"""

from fastrl.advantages.outcome import gae, group_advantages, length_adaptive_lambda, rloo_advantages, value_loss
from fastrl.advantages.process import process_advantages
from fastrl.advantages.relative import (
    decoupled_group_advantages,
    maxrl_advantages,
    opo_advantages,
    pass_at_k_advantages,
)
from fastrl.advantages.rewards import kl_penalized_rewards, overlong_penalty
from fastrl.advantages.token_baseline import optimal_token_baseline_advantages
from fastrl.backend.choice import backends, use_backend
from fastrl.base.checks import check_inputs
from fastrl.losses.cross_entropy import linear_cross_entropy
from fastrl.losses.divergence import DivergenceLoss, linear_divergence
from fastrl.losses.gathered import gathered_logprobs, linear_gathered_logprobs
from fastrl.losses.kto import KTOLoss, kto_loss, linear_kto_loss
from fastrl.losses.logprobs import TokenStats, linear_token_logprobs, token_logprobs
from fastrl.losses.policy import PolicyLoss, linear_policy_loss, logits_policy_loss, policy_loss
from fastrl.losses.preference import (
    PreferenceLoss,
    dpo_loss,
    linear_dpo_loss,
    linear_preference_loss,
    preference_loss,
    reward_model_loss,
)
from fastrl.losses.topk_divergence import topk_divergence
from fastrl.objectives.evaluate import LossContext
from fastrl.objectives.objective import (
    KL,
    Clip,
    CovarianceClip,
    CovarianceKL,
    FutureKL,
    GammaWeight,
    GeometricMean,
    NoGate,
    Objective,
    RolloutCorrection,
    SoftGate,
    StopGradientClip,
)
from fastrl.objectives.preferences import (
    CPO,
    DPO,
    IPO,
    ORPO,
    PREFERENCES,
    SPPO,
    APODown,
    APOZero,
    BCOPair,
    DiscoPOP,
    EXOPair,
    Hinge,
    NCAPair,
    Preference,
    RobustDPO,
    SimPO,
)
from fastrl.objectives.presets import (
    BNPO,
    CISPO,
    CPI,
    DAPO,
    FIPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    LUSPO,
    PPO,
    PPOKL,
    PRESETS,
    REINFORCE,
    SAPO,
    VESPO,
    ClipCov,
    DeepSeekV32,
    DrGRPO,
    GSPOToken,
    KLCov,
)
from fastrl.planning.table import MemoryPlans, plan_memory
from fastrl.sampling_mask.mask import SamplingMask

__version__ = "0.1.0"

__all__ = [
    "BNPO",
    "CISPO",
    "CPI",
    "CPO",
    "DAPO",
    "DPO",
    "FIPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "IPO",
    "KL",
    "LUSPO",
    "ORPO",
    "PPO",
    "PPOKL",
    "PREFERENCES",
    "PRESETS",
    "REINFORCE",
    "SAPO",
    "SPPO",
    "VESPO",
    "APODown",
    "APOZero",
    "BCOPair",
    "Clip",
    "ClipCov",
    "CovarianceClip",
    "CovarianceKL",
    "DeepSeekV32",
    "DiscoPOP",
    "DivergenceLoss",
    "DrGRPO",
    "EXOPair",
    "FutureKL",
    "GSPOToken",
    "GammaWeight",
    "GeometricMean",
    "Hinge",
    "KLCov",
    "KTOLoss",
    "LossContext",
    "MemoryPlans",
    "NCAPair",
    "NoGate",
    "Objective",
    "PolicyLoss",
    "Preference",
    "PreferenceLoss",
    "RobustDPO",
    "RolloutCorrection",
    "SamplingMask",
    "SimPO",
    "SoftGate",
    "StopGradientClip",
    "TokenStats",
    "backends",
    "check_inputs",
    "decoupled_group_advantages",
    "dpo_loss",
    "gae",
    "gathered_logprobs",
    "group_advantages",
    "kl_penalized_rewards",
    "kto_loss",
    "length_adaptive_lambda",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_dpo_loss",
    "linear_gathered_logprobs",
    "linear_kto_loss",
    "linear_policy_loss",
    "linear_preference_loss",
    "linear_token_logprobs",
    "logits_policy_loss",
    "maxrl_advantages",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "overlong_penalty",
    "pass_at_k_advantages",
    "plan_memory",
    "policy_loss",
    "preference_loss",
    "process_advantages",
    "reward_model_loss",
    "rloo_advantages",
    "token_logprobs",
    "topk_divergence",
    "use_backend",
    "value_loss",
]
