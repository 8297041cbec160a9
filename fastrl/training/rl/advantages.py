"""Rewards become advantages."""

import bisect
import math
from dataclasses import replace

import torch
from torch import Tensor

from fastrl import (
    decoupled_group_advantages,
    gae,
    group_advantages,
    kl_penalized_rewards,
    length_adaptive_lambda,
    maxrl_advantages,
    opo_advantages,
    optimal_token_baseline_advantages,
    pass_at_k_advantages,
    process_advantages,
    rloo_advantages,
)
from fastrl.base.errors import UserError
from fastrl.rewards.calls import Steps
from fastrl.training.batches.rollout import Rollout
from fastrl.training.models.policy import Policy
from fastrl.training.rl.run import Run


def add_advantages(run: Run, rollout: Rollout, steps: list[Steps]) -> Rollout:
    """The rollout with the advantages of the config's estimator, and with the returns, a critic's targets."""
    settings, mask = run.config.advantages, rollout.mask
    rewards, groups = rollout.rewards, rollout.groups
    assert rewards is not None and groups is not None  # set by _sample
    estimator = settings.estimator
    if estimator == "process":
        ends, values = _step_tensors(run.models.policy, rollout, steps)
        lengths = rollout.completion_mask.sum(1)
        advantages = process_advantages(values, ends, groups, lengths, scale=settings.scale, ddof=settings.ddof)
        return replace(
            rollout, token_advantages=torch.nn.functional.pad(advantages, (0, mask.shape[1] - advantages.shape[1]))
        )
    if settings.grouped and not settings.per_token:
        # A response that does not count has no token to carry its score, but its group's baseline still includes it.
        scores = _token_rewards(run, rollout).sum(1).where(mask.any(1), rewards) if run.config.kl_in_reward else rewards
        return replace(rollout, response_advantages=_compared(run, rollout, scores, groups))
    token_rewards = _token_rewards(run, rollout)
    if estimator == "optimal_token_baseline":
        old, squares = rollout.old_logprobs, rollout.log_sum_sq_probs
        assert old is not None and squares is not None  # set by collect
        advantages = optimal_token_baseline_advantages(token_rewards, old, squares, mask, groups)
        return replace(rollout, token_advantages=advantages)
    values = torch.zeros_like(token_rewards) if rollout.old_values is None else rollout.old_values
    lam: float | Tensor = settings.lam if estimator == "gae" else 1.0
    if settings.lam_alpha is not None:
        lam = length_adaptive_lambda(mask.sum(1), alpha=settings.lam_alpha)
    advantages, returns = gae(token_rewards, values, mask, gamma=settings.gamma, lam=lam)
    if settings.lam_critic is not None:
        _, returns = gae(token_rewards, values, mask, gamma=settings.gamma, lam=settings.lam_critic)
    if settings.whiten or estimator == "batch":
        advantages = whitened(advantages, mask)
    return replace(rollout, token_advantages=advantages, returns=returns)


def _compared(run: Run, rollout: Rollout, scores: Tensor, groups: Tensor) -> Tensor:
    """Each response's advantage (B,) from the scores (B,) of its group."""
    settings = run.config.advantages
    match settings.estimator:
        case "rloo":
            return rloo_advantages(scores, groups)
        case "maxrl":
            if bool((scores < 0).any()):
                raise UserError(
                    'advantages.estimator = "maxrl" divides by the mean reward, so rewards must be >= 0; one is '
                    f"{float(scores.nan_to_num(0).min()):.6g}"
                )
            return maxrl_advantages(scores, groups)
        case "opo":
            return opo_advantages(scores, groups, rollout.drawn_mask.sum(1))
        case "pass_at_k":
            return pass_at_k_advantages(scores, groups, k=settings.k)
        case "decoupled":
            assert rollout.parts is not None  # set by _sample
            weights = [weight for _, weight in run.rewards.scorers]
            return decoupled_group_advantages(
                rollout.parts, groups, weights=weights, scale=settings.scale, ddof=settings.ddof
            )
    return group_advantages(scores, groups, scale=settings.scale, ddof=settings.ddof)


def add_distillation(run: Run, rollout: Rollout, old: Tensor, taught: Tensor) -> Rollout:
    """The rollout with the advantage `coef (log p_teacher - log p_old)` at each token, beside those of rewards.

    Its mean is the gradient of the reverse KL of the next token, estimated at the one that was sampled. Both
    log-probabilities are (B, T).
    """
    assert run.config.distillation is not None  # the caller's check
    settings = run.config.distillation
    advantages = settings.coef * (taught - old)
    if rollout.response_advantages is not None:
        advantages = advantages + settings.policy_coef * rollout.response_advantages[:, None]
    elif rollout.token_advantages is not None:
        advantages = advantages + settings.policy_coef * rollout.token_advantages
    return replace(rollout, response_advantages=None, token_advantages=advantages)


def _token_rewards(run: Run, rollout: Rollout) -> Tensor:
    """Each response's reward at its last token, less the KL penalty at each token if it is in the reward: (B, T)."""
    rewards, mask, old, ref = rollout.rewards, rollout.mask, rollout.old_logprobs, rollout.ref_logprobs
    assert rewards is not None  # set by _sample
    if run.config.kl_in_reward and run.loss.kl and old is not None and ref is not None:
        return kl_penalized_rewards(rewards, old, ref, mask, beta=run.loss.kl.coef.cpu(), kind=run.loss.kl.config.kind)
    zeros = torch.zeros(mask.shape)
    return kl_penalized_rewards(rewards, zeros, zeros, mask, beta=0.0)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """The values shifted and scaled to mean 0 and standard deviation 1 over the unmasked entries; 0 where masked."""
    counted = values[mask].double()
    if counted.numel() == 0:
        return values
    mean, deviation = counted.mean(), counted.std(correction=0)
    return ((values - mean) / (deviation + 1e-8)).where(mask, 0).float()


def _step_tensors(policy: Policy, rollout: Rollout, steps: list[Steps]) -> tuple[Tensor, Tensor]:
    """Steps as (B, S) tensors: the index of each step's last token (-1 if there is none), and its reward."""
    most = max([1, *map(len, steps)])
    ends = torch.full((len(steps), most), -1)
    values = torch.full((len(steps), most), math.nan)
    rows = [tokens[mask].tolist() for tokens, mask in zip(rollout.targets, rollout.completion_mask, strict=True)]
    for row, (tokens, pairs) in enumerate(zip(rows, steps, strict=True)):

        def characters(count: int, tokens: list[int] = tokens) -> int:
            # A character whose last byte is still missing is decoded as U+FFFD.
            return len(policy.text(tokens[:count]).rstrip("\ufffd"))

        for step, (end, reward) in enumerate(pairs):
            ends[row, step] = bisect.bisect_left(range(1, len(tokens)), end, key=characters)
            values[row, step] = reward
    return ends, values
