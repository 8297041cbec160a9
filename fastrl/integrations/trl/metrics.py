"""The metrics that TRL's GRPOTrainer logs with its loss, from a fused loss's log-probabilities and entropies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer.utils import nanmax, nanmin

from fastrl.integrations.trl.objective import Batch
from fastrl.objectives.formulas import kl_k3_value


class Scores(NamedTuple):
    """The detached (B, T) results of a loss call."""

    logprobs: Tensor
    entropy: Tensor
    high_entropy: Tensor | None  # bool: the tokens of the policy term


@torch.no_grad()
def log_policy(trainer: Any, batch: Batch, scores: Scores, inputs: dict[str, Any]) -> None:
    """Append kl, entropy and the loss type's metrics to the trainer's, reduced over processes as in TRL."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    means = _Means(trainer.accelerator, batch.mask)
    log_ratio = (scores.logprobs - (scores.logprobs if batch.old is None else batch.old)).where(batch.mask, 0.0)
    level = log_ratio
    if trainer.importance_sampling_level == "sequence":
        level = log_ratio.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = level.exp()
    if batch.ref is not None:
        d = (batch.ref - scores.logprobs).where(batch.mask, 0.0)
        kl = kl_k3_value(d, log_ratio)
        metrics["kl"].append(means.overall(kl * ratio if trainer.args.use_bias_correction_kl else kl))
    metrics["entropy"].append(means.overall(scores.entropy))
    if trainer.loss_type == "cispo":
        metrics["cispo_clip_ratio"].append(means.overall((ratio > trainer.epsilon_high) & (batch.advantages > 0)))
    elif trainer.loss_type == "vespo":
        phi = trainer.get_gamma_weights(
            advantages=batch.advantages,
            log_ratio_per_token=log_ratio,
            mask=batch.mask.to(log_ratio.dtype),
            importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
            **{name: getattr(trainer.args, f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
        )
        metrics["vespo/phi_seq_mean"].append(means.overall(phi))
    elif trainer.loss_type != "sapo":
        delta = trainer.args.delta
        _log_clipping(trainer, metrics, means, ratio if delta is None else ratio.clamp(max=delta), batch.advantages)


class _Means(NamedTuple):
    """Means over tokens, for values (B, T), or over responses, for values (B, 1)."""

    accelerator: Any
    mask: Tensor

    def overall(self, x: Tensor) -> float:
        """The mean over all processes."""
        x = x.float()
        if x.shape[1] == 1:
            total, count = x.sum(), x.new_tensor(float(x.shape[0]))
        else:
            total, count = x.where(self.mask, 0.0).sum(), self.mask.sum().to(x.dtype)
        both = self.accelerator.reduce(torch.stack([total, count]), reduction="sum")
        return float((both[0] / both[1].clamp(min=1.0)).item())

    def gathered(self, x: Tensor) -> Tensor:
        """One mean per response, from all processes; NaN for a response without tokens."""
        x = x.float()
        local_means = x[:, 0] if x.shape[1] == 1 else x.where(self.mask, 0.0).sum(-1) / self.mask.sum(-1)
        means: Tensor = self.accelerator.gather(local_means)
        return means


def _log_clipping(trainer: Any, metrics: Any, means: _Means, ratio: Tensor, advantages: Tensor) -> None:
    low = (ratio < 1 - trainer.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + trainer.epsilon_high) & (advantages > 0)
    for name, clipped in (("low", low), ("high", high), ("region", low | high)):
        metrics[f"clip_ratio/{name}_mean"].append(means.overall(clipped))
    metrics["clip_ratio/low_min"].append(nanmin(means.gathered(low)).item())
    metrics["clip_ratio/high_max"].append(nanmax(means.gathered(high)).item())


def log_auxiliary(trainer: Any, aux_loss: Tensor) -> None:
    """Append a mixture's load balancing loss (), unweighted, as the mean over all processes."""
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode]["aux_loss"].append(trainer.accelerator.gather_for_metrics(aux_loss).mean().item())


def log_entropy_bonus(trainer: Any, policy_loss: Tensor, entropy: Tensor, on: Tensor) -> None:
    """Log policy_loss and entropy_coef, and take the adaptive controller's step; entropy (B, T), on the tokens `on`.

    The controller measures the entropy of a whole optimizer step, over all processes, and moves the coefficient by a
    constant towards the target. The new coefficient applies from the next step.
    """
    accelerator, args = trainer.accelerator, trainer.args
    training = trainer.model.training
    metrics = trainer._metrics["train" if training else "eval"]
    metrics["policy_loss"].append(accelerator.gather(policy_loss).nanmean().item())
    if trainer.use_adaptive_entropy and training:
        window = torch.stack([entropy.where(on, 0.0).sum(), on.sum().to(entropy.dtype)]).detach()
        previous = trainer._entropy_window_stats
        trainer._entropy_window_stats = window if previous is None else previous + window
        if accelerator.sync_gradients:
            total, count = accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
            world_entropy = (total / count.clamp(min=1.0)).item()
            if world_entropy <= args.entropy_target:
                trainer.entropy_coef = min(trainer.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
            else:
                trainer.entropy_coef = max(trainer.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
            trainer._last_world_entropy, trainer._entropy_window_stats = world_entropy, None
    if training and accelerator.sync_gradients:
        metrics["entropy_coef"].append(trainer.entropy_coef)
