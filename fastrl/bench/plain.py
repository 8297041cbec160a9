"""Vocabulary statistics and PPO's clipped loss as a trainer writes them in torch, for eager and torch.compile.

In float64 the same functions compute the results expected of every contender.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLIP = 0.2


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


def _statistics(log_p: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets (...) and entropies (...) of logits (..., V), both differentiable."""
    return _statistics(_log_softmax(logits), targets)


def clipped_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, denominator: int) -> Tensor:
    """PPO's clipped surrogate over tokens (N,), summed and divided by the denominator."""
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain.sum() / denominator


def sequence_clipped_loss(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """GSPO's loss, clipped on the geometric mean of each response's ratios; log-ratios (B, T), advantages (B,)."""
    ratio = log_ratio.mean(-1).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def policy_loss(
    logits: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, denominator: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, log-probabilities and, only for the trainer's log, entropies."""
    log_p = _log_softmax(logits)
    logprobs = log_p.gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return clipped_loss(logprobs, old, advantages, denominator), logprobs, entropy


def linear_statistics(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`statistics` of the logits hidden (N, H) weight^T (H, V)."""
    return statistics(torch.nn.functional.linear(hidden, weight), targets)


def linear_policy_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, denominator: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`policy_loss` of the logits hidden (N, H) weight^T (H, V)."""
    return policy_loss(torch.nn.functional.linear(hidden, weight), targets, old, advantages, denominator)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of the logits hidden (N, H) weight^T (H, V), in float32 as trainers compute it."""
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), targets)
