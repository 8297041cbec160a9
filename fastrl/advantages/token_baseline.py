"""The optimal token baseline: a baseline at each token, the group's reward-to-go weighted by squared score norms."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fastrl.advantages.groups import centred
from fastrl.base import checks
from fastrl.base.groups import group_numbers
from fastrl.base.responses import discounted_sum, token_mask
from fastrl.objectives.batch import responses_of


def optimal_token_baseline_advantages(
    rewards: Tensor,
    logprobs: Tensor,
    log_sum_sq_probs: Tensor,
    mask: Tensor,
    group_ids: Tensor | Sequence[Hashable],
    *,
    zero_tail: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Per-token advantages `G_t - sum(W_t G_t) / sum(W_t)`, the sums over the responses to the prompt with a token t.

    The optimal token baseline (Li et al., 2026, arXiv:2602.07078). `G_t` is the reward-to-go, the sum of the rewards
    at the token and after it. `W_t` is the sum, over the response's tokens up to t, of `1 - 2 p + sum_j p_j^2`: the
    squared norm of `grad log p` with respect to the token's logits, for which the forward pass has all that is needed.
    A temperature would only multiply every norm. Masked tokens are skipped: t counts a response's unmasked tokens, as
    in verl's `tir_optimal_token_baseline`; its `optimal_token_baseline` counts columns instead, which is the same for a
    mask without gaps. Where a reward-to-go is NaN the response has none: it is left out of the sums, and its advantage
    is 0.

    Args:
        rewards: (B, T) or (N,), floating point: the reward of each token.
        logprobs: (B, T) or (N,), floating point, in nats: of the policy that drew the tokens.
        log_sum_sq_probs: (B, T) or (N,), floating point: the logarithm of `sum_j p_j^2`, as from
            `linear_token_logprobs(..., extras=("log_sum_sq_probs",))`.
        mask: (B, T) or (N,), bool or 0/1: 1 = valid. What is masked is not read.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.
        zero_tail: where one response is the only one of its group with a token t, there is nothing to compare it with,
            and its advantage is 0. True gives such tokens the baseline 0, so that their advantage is the reward-to-go;
            verl does so by default, and always for a response that is alone in its group.
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.

    Returns:
        Float32, shaped like `rewards`, in their units, 0 where masked; no gradient. Exactly 0 where the rewards-to-go
        of a group are equal; the plain mean is the baseline where all its norms are 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    checks.tensor("rewards", rewards)
    checks.same_layout("logprobs", logprobs, rewards, "rewards")
    checks.same_layout("log_sum_sq_probs", log_sum_sq_probs, rewards, "rewards")
    valid = token_mask(mask, "rewards", rewards).reshape(-1)
    for name, x in (("logprobs", logprobs), ("log_sum_sq_probs", log_sum_sq_probs)):
        checks.values(name, x, valid, logprob=True)
    if not isinstance(zero_tail, bool):
        raise TypeError(f"zero_tail must be a bool, got {type(zero_tail).__name__}")
    responses = responses_of("rewards", rewards, cu_seqlens, mask)
    numbers = responses.owners(rewards.device)
    groups = group_numbers(group_ids, responses.count, rewards.device, "rewards")

    reward, logp, squares = (
        x.detach().reshape(-1).double().masked_fill(~valid, 0.0) for x in (rewards, logprobs, log_sum_sq_probs)
    )
    to_go = discounted_sum(reward, numbers, 1.0)
    # (1 - p)^2 + sum of the others' p^2: near p = 1 the difference 1 - 2 p + sum p^2 would be rounding alone.
    norm = torch.expm1(logp).square() + (torch.expm1(squares) - torch.expm1(2 * logp)).clamp(min=0.0)
    weight = discounted_sum(norm.flip(0), numbers.flip(0), 1.0).flip(0)

    counts = torch.zeros(responses.count, dtype=torch.int64, device=valid.device).index_add_(0, numbers, valid.long())
    earlier = counts.cumsum(0) - counts
    step = valid.cumsum(0) - 1 - earlier[numbers]
    at_step = group_numbers(groups[numbers] * valid.numel() + step, valid.numel(), valid.device, "mask")
    present = valid & ~torch.isnan(to_go)
    advantages, compared = centred(to_go, present, at_step, weight)
    if zero_tail:
        advantages = torch.where(present & (compared == 1), to_go, advantages)
    return responses.right(advantages.float()).reshape(rewards.shape)
