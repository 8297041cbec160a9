"""OpenRLHF's PolicyLoss and log_probs_from_logits, with its signatures (0.11), computed by fastrl.

    import openrlhf.models
    from fastrl.integrations.openrlhf import PolicyLoss

    openrlhf.models.PolicyLoss = PolicyLoss     # before openrlhf.trainer.ray.ppo_actor is imported, in each worker

OpenRLHF is not imported and need not be installed. docs/integrations/openrlhf.md lists where its results differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl import Objective, policy_loss, token_logprobs
from fastrl.objectives.gates import Clip

__all__ = ["PolicyLoss", "log_probs_from_logits"]


class PolicyLoss(torch.nn.Module):
    """PPO's clip or GSPO, with OpenRLHF's correction for the inference engine and its class's arguments.

    token_level_loss: the mean over tokens if True, else over responses' means, which "gspo" always uses. The correction
    (is_correction_level other than "off") weights the tokens in "ppo"; in "gspo" the engine's log-probabilities replace
    the old ones.

    Raises:
        ValueError: for an option that does not exist or conflicts with another, as OpenRLHF's class does.
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
    ) -> None:
        super().__init__()
        gspo = policy_loss_type == "gspo"
        known = {
            "policy_loss_type": (policy_loss_type, ("ppo", "gspo")),
            "is_correction_level": (is_correction_level, ("off", "token", "seq")),
            "is_correction_mode": (is_correction_mode, ("mask", "clip")),
            "is_correction_gating": (is_correction_gating, ("ratio", "binary_kl", "tv")),
        }
        for name, (value, options) in known.items():
            if value not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")
        self.level, self.mode, self.gating = is_correction_level, is_correction_mode, is_correction_gating
        self.low, self.high = _band(is_correction_threshold)
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            raise ValueError("is_correction_mode='clip' needs is_correction_level='token' and a gating by 'ratio'")
        if self.gating != "ratio" and self.level != "off" and self.low > 0:
            raise ValueError(f"is_correction_gating={self.gating!r} has an upper bound only, got a lower of {self.low}")
        self.token_level_loss = token_level_loss and not gspo
        self.objective = Objective(
            gate=Clip(clip_eps_low, clip_eps_high, dual=dual_clip),
            ratio="sequence" if gspo else "token",
            aggregate="token-mean" if self.token_level_loss else "seq-mean-token-mean",
        )

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """All but the counts are (B, T). Returns loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio, each 0-dim.

        The last two are None without a correction, and for "gspo"; all but the loss are detached. The loss is
        `sum / batch_num_tokens * dp_size` (over responses: global_batch_size); the default counts are this batch's.
        """
        if self.level != "off" and rollout_log_probs is None:
            raise ValueError(f"rollout_log_probs is needed by is_correction_level={self.level!r}, got None")
        mask = torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask != 0
        count = batch_num_tokens if self.token_level_loss else global_batch_size
        if count is None:
            count = mask.sum() if self.token_level_loss else (mask.sum(-1) > 0).sum()
            dp_size = 1  # as in OpenRLHF: only global counts are scaled
        old, weights, engine_kl, filtered = old_log_probs, None, None, None
        if self.level != "off" and rollout_log_probs is not None:
            if self.objective.ratio == "sequence":
                old = rollout_log_probs
            else:
                weights, filtered = self._engine_weights(old.detach().float(), rollout_log_probs.float(), mask)
                engine_kl = _mean((rollout_log_probs - old).detach().float(), mask)
        inputs: dict[str, Any] = {"advantages": advantages, "mask": mask, "old_logprobs": old}
        denominator = torch.as_tensor(count).clamp(min=1) / dp_size
        result = policy_loss(
            log_probs, objective=self.objective, denominator=denominator, token_weights=weights, **inputs
        )
        clipped, gate = result.metrics["clip_frac"], self.objective.gate
        if isinstance(gate, Clip) and gate.dual is not None:  # OpenRLHF counts the tokens that the first clip stops
            plain = self.objective.replace(gate=dataclasses.replace(gate, dual=None))
            clipped = policy_loss(log_probs.detach(), objective=plain, **inputs).metrics["clip_frac"]
        drift = (old_log_probs - log_probs).detach().float()
        return result.loss, clipped, _mean(drift, mask), engine_kl, filtered

    @torch.no_grad()
    def _engine_weights(self, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Token weights (B, T), and the fraction of tokens (or responses) outside the band, 0-dim."""
        log_rho = (old - rollout).where(mask, 0.0)
        if self.gating == "ratio":
            stat = log_rho
        else:
            p, q = (x.where(mask, 0.0).exp().clamp(1e-6, 1 - 1e-6) for x in (rollout, old))
            stat = (p - q).abs()
            if self.gating == "binary_kl":
                stat = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        if self.level == "seq":
            stat = stat.where(mask, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        stat = stat.exp() if self.gating == "ratio" else stat
        kept = (stat >= self.low) & (stat <= self.high)
        weights = stat.clamp(self.low, self.high) if self.mode == "clip" else log_rho.exp().where(kept, 0.0)
        out = (~kept).float()
        return weights, out.mean() if self.level == "seq" else _mean(out, mask)


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (...) float32 of labels (...) under logits (..., V) / temperature; logits are not changed."""
    return token_logprobs(logits, labels, temperature=float(temperature)).logprobs


def _band(threshold: Sequence[float]) -> tuple[float, float]:
    """The lower and upper bound of the correction."""
    if not isinstance(threshold, list | tuple) or len(threshold) != 2:
        raise ValueError(f"is_correction_threshold must hold a lower and an upper bound, got {threshold!r}")
    low, high = (float(bound) for bound in threshold)
    if not low <= high:
        raise ValueError(f"is_correction_threshold must not have its lower bound above the upper one, got {threshold}")
    return low, high


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over unmasked tokens; 0 if there are none."""
    return values.where(mask, 0.0).sum() / mask.sum().clamp(min=1)
