"""Rewards in addition to the task's own: the KL to the reference per token, DAPO's length penalty per response."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.responses import INTEGER_DTYPES, token_mask
from fastrl.objectives.batch import responses_of
from fastrl.objectives.objective import KL_FORMULAS

_REWARD_KINDS = ("k1", "k2", "k3")
_MAX_LOG_RATIO = 20.0  # like Objective.max_log_ratio: exp(20) is far beyond any use and far from overflow


def kl_penalized_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    beta: float | Tensor,
    kind: str = "k1",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Token rewards `-beta * kl_t`, plus the response's score at its last unmasked token.

    PPO for language models (Ziegler et al., 2019, arXiv:1909.08593; Ouyang et al., 2022, arXiv:2203.02155). The
    estimators are those of `KL` with `d = ref - logp`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - 1 - d`
    (where d is clamped to +-20, so that exp stays finite). Add any other penalty, such as `overlong_penalty`, to
    `scores` beforehand.

    Args:
        scores: `(B,)`, one per response, a floating-point tensor. The score of a response without unmasked tokens is
            dropped; a NaN score makes only the token that gets it NaN.
        logprobs: (B, T) or (N,), floating point, in nats: of the policy that drew the tokens.
        ref_logprobs: (B, T) or (N,), floating point, in nats: of the reference policy.
        mask: (B, T) or (N,), bool or 0/1: 1 = valid. What is masked is not read.
        beta: the weight of the KL, a number or a 0-dim tensor, in reward per nat.
        kind: "k1" (unbiased, the usual one), "k2" or "k3".
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.

    Returns:
        Float32, shaped like `logprobs`, 0 where masked; no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    checks.tensor("logprobs", logprobs)
    checks.same_layout("ref_logprobs", ref_logprobs, logprobs, "logprobs")
    valid = token_mask(mask, "logprobs", logprobs).reshape(-1)
    if kind not in _REWARD_KINDS:
        raise ValueError(f"kind must be one of {', '.join(_REWARD_KINDS)} in a reward, got {kind!r}")
    beta = checks.scalar("beta", beta)
    if not isinstance(beta, Tensor) and beta < 0:
        raise ValueError(f"beta must be >= 0, got {beta!r}")
    responses = responses_of("logprobs", logprobs, cu_seqlens, mask)
    numbers = responses.owners(logprobs.device)
    checks.tensor("scores", scores)
    checks.shape("scores", scores, (responses.count,), "one per response")
    checks.same_device("scores", scores, logprobs, "logprobs")
    for name, x in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        checks.values(name, x, valid, logprob=True)

    with torch.no_grad():
        d = ref_logprobs.reshape(-1).double() - logprobs.reshape(-1).double()
        if kind == "k3":
            d = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        value, _ = KL_FORMULAS[kind]
        rewards = (-beta * value(d, torch.zeros_like(d))).masked_fill(~valid, 0.0)
        # The last unmasked token of each response, -1 if there is none.
        position = torch.arange(d.numel(), device=d.device)
        last = position.new_full((responses.count,), -1)
        last = last.scatter_reduce(0, numbers, position.masked_fill(~valid, -1), "amax")
        is_last = last[numbers] == position
        rewards = torch.where(is_last, rewards + scores.double()[numbers], rewards)
        return responses.right(rewards.float()).reshape(logprobs.shape)


def overlong_penalty(lengths: Tensor, *, max_length: int, cache: int) -> Tensor:
    """DAPO's soft overlong punishment: 0 up to `max_length - cache`, falling linearly to -1 at `max_length` and beyond.

    `((max_length - cache) - length) / cache` in between (Yu et al., 2025, arXiv:2503.14476, equation 13; there
    `max_length` is 20480, the generation limit, and `cache` 4096). Add it to the scores.

    Args:
        lengths: (B,) integers, the number of tokens of each response.
        max_length: the generation limit in tokens, > 0.
        cache: the number of tokens before the limit over which the penalty grows, from 0 (-1 beyond the limit only) to
            `max_length`.

    Returns:
        `(B,)` float32 in [-1, 0].

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or value.
    """
    checks.tensor("lengths", lengths, INTEGER_DTYPES)
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have shape (responses,), got {tuple(lengths.shape)}")
    for name, number in (("max_length", max_length), ("cache", cache)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an integer, got {type(number).__name__}")
    if max_length <= 0:
        raise ValueError(f"max_length must be > 0, got {max_length}")
    if not 0 <= cache <= max_length:
        raise ValueError(f"cache must be from 0 to max_length = {max_length}, got {cache}")
    beyond = (max_length - cache) - lengths.to(torch.int64)
    # Lengths are integers, so a cache of 1 already gives the step that a cache of 0 means.
    return (beyond.double() / max(cache, 1)).clamp(-1.0, 0.0).float()
