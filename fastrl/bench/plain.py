"""Vocabulary statistics and PPO's clipped loss as a trainer writes them in torch, for eager and torch.compile.

In float64 the same functions compute the results expected of every contender.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CLIP = 0.2


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


def _logprobs(log_p: Tensor, targets: Tensor) -> Tensor:
    return log_p.gather(-1, targets[..., None])[..., 0]


def logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of targets (...) of logits (..., V)."""
    return _logprobs(_log_softmax(logits), targets)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets (...) and entropies (...) of logits (..., V), both differentiable."""
    log_p = _log_softmax(logits)
    return _logprobs(log_p, targets), _entropy(log_p)


def _clipped_gain(ratio: Tensor, advantages: Tensor) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def clipped_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, denominator: int) -> Tensor:
    """PPO's clipped surrogate over tokens (N,), summed and divided by the denominator."""
    return -_clipped_gain(torch.exp(logprobs - old), advantages).sum() / denominator


def sequence_clipped_loss(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """GSPO's loss, clipped on the geometric mean of each response's ratios; log-ratios (B, T), advantages (B,)."""
    return -_clipped_gain(log_ratio.mean(-1).exp(), advantages).mean()


def policy_loss(
    logits: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, denominator: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, log-probabilities and, only for the trainer's log, entropies."""
    log_p = _log_softmax(logits)
    logprobs = _logprobs(log_p, targets)
    with torch.no_grad():
        entropy = _entropy(log_p)
    return clipped_loss(logprobs, old, advantages, denominator), logprobs, entropy


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, in float32 as trainers compute it."""
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def divergence(logits: Tensor, teacher_logits: Tensor, kind: str, beta: float) -> Tensor:
    """The divergence of each row of logits (N, V), of a kind of `fastrl.linear_divergence`."""
    log_p, log_q = _log_softmax(logits), _log_softmax(teacher_logits)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if kind == "forward_kl":
        return kl(log_q, log_p)
    if kind == "reverse_kl":
        return kl(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def linear(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the logits hidden (N, H) weight^T (H, V), instead of logits."""

    def from_hidden(hidden: Tensor, weight: Tensor, *arguments: Any) -> Any:
        return function(torch.nn.functional.linear(hidden, weight), *arguments)

    return from_hidden
