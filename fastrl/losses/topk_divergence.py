"""Divergences of which each row knows a few log-probabilities, such as those of a teacher's top-k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.backend.contract import Divergence
from fastrl.base import checks
from fastrl.losses.divergence import checked_divergence


def topk_divergence(
    logprobs: Tensor,  # (..., K)
    teacher_logprobs: Tensor,  # (..., K)
    *,
    kind: str,
    beta: float = 0.5,
    tail: bool = True,
    mask: Tensor | None = None,  # (..., K)
) -> Tensor:
    """Computes each row's divergence between two distributions that are known on K vocabulary entries.

    With `tail`, all other entries count as one more, whose probability is 1 minus the sum of the K. The divergence of
    these distributions over K + 1 entries is at most that over the vocabulary. Without it, the result is the sum of the
    K entries' terms in the formulas of `linear_divergence`, which may be negative; for distributions that are
    renormalised over the K, pass log_softmax of both.

    Args:
        logprobs: (..., K) float32, float64, bfloat16 or float16, the student's log-probabilities of K distinct entries,
            for example from `linear_gathered_logprobs`. Differentiable.
        teacher_logprobs: (..., K), the teacher's, of the same entries; detached.
        kind: "forward_kl", "reverse_kl" or "jsd".
        beta: for "jsd", the teacher's weight in the mixture, between 0 and 1, both excluded; otherwise not read.
        tail: whether the other entries count, as one. Its probability has the digits that the K log-probabilities
            carry; a rest below the rounding error of 1 - p of the likeliest of them is taken as that.
        mask: (..., K) bool or 0/1: 1 = there is an entry; None: all are there (ids of -1 are not).

    Returns:
        (...), in nats, float64 for float64 logprobs and float32 for others. NaN for a row with a NaN on either side.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    divergence = checked_divergence(kind, beta)
    logprobs = checks.tensor("logprobs", logprobs)
    if logprobs.dim() < 1:
        raise ValueError("logprobs must have shape (..., K), got a 0-dim tensor")
    teacher = checks.same_layout("teacher_logprobs", teacher_logprobs, logprobs, "logprobs")
    if not isinstance(tail, bool):
        raise TypeError(f"tail must be a bool, got {type(tail).__name__}")
    valid = checks.mask(mask, logprobs, "logprobs")
    for name, value in (("logprobs", logprobs), ("teacher_logprobs", teacher)):
        checks.values(name, value, valid, logprob=True)
    # float64, so that 1 - sum p does not cancel
    log_p, log_q = logprobs.double(), checks.nan_where_wrong(teacher.detach().double(), mask)
    if valid is not None:
        log_p, log_q = (x.masked_fill(~valid, -torch.inf) for x in (log_p, log_q))
    # A NaN on one side alone might not show in the value, or not in the gradient.
    has_nan = (log_p + log_q).isnan().any(-1, keepdim=True)
    log_p = log_p * torch.ones_like(log_q[..., :1]).masked_fill(has_nan, torch.nan)
    if tail:
        log_p, log_q = (
            torch.cat([x, _log_of_rest(x, torch.finfo(given.dtype).eps)], -1)
            for x, given in ((log_p, logprobs), (log_q, teacher))
        )
    result = _divergence(log_p, log_q, divergence)
    return result if logprobs.dtype == torch.float64 else result.float()


def _divergence(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """From the log-probabilities (..., n) of all entries of two distributions."""
    if divergence.kind == "forward_kl":
        return _expected(log_q, log_q, log_p)
    if divergence.kind == "reverse_kl":
        return _expected(log_p, log_p, log_q)
    beta = divergence.beta
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * _expected(log_q, log_q, log_m) + (1 - beta) * _expected(log_p, log_p, log_m)


def _log_of_rest(logprobs: Tensor, eps: float) -> Tensor:
    """log(1 - sum exp(logprobs)) over the last dimension, which stays, of length 1; eps: of the dtype they come in.

    1 - p of the likeliest entry comes from its log-probability, with all digits of that, and the others are taken away.
    """
    if not logprobs.shape[-1]:
        return logprobs.new_zeros(*logprobs.shape[:-1], 1)
    place = logprobs.detach().argmax(-1, keepdim=True)
    best = logprobs.gather(-1, place)
    others = logprobs.exp().scatter(-1, place, 0.0).sum(-1, keepdim=True)
    left = -torch.expm1(best)
    floor = (eps * left.detach()).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.log(torch.maximum(left - others, floor))


def _expected(log_weights: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """The sum of e^log_weights (log_a - log_b) over the last dimension; an entry of weight 0 counts 0."""
    some = log_weights != -torch.inf
    log_a, log_b = log_a.where(some, 0.0), log_b.where(some, 0.0)
    return (log_weights.where(some, 0.0).exp() * (log_a - log_b)).where(some, 0.0).sum(-1)
