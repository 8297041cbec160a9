"""Advantages from rewards, which `policy_loss` multiplies log-probabilities by; GAE and the value loss."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fastrl.advantages.groups import centred, check_normalisation, normalised, number_between, rewards_and_groups
from fastrl.base import checks
from fastrl.base.responses import INTEGER_DTYPES, discounted_sum, token_mask
from fastrl.objectives.batch import responses_of


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[Hashable],
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 0,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages `(R - mean) / (std + eps)`, with the mean over the responses to one prompt.

    GRPO (Shao et al., 2024, arXiv:2402.03300) with `scale="group"`; Dr. GRPO (Liu et al., 2025, arXiv:2503.20783) with
    `scale="none"`. A group whose rewards are all equal gets exactly 0, whatever `eps` is.

    Args:
        rewards: (B,), one per response, any real dtype. NaN: the response has no reward, is left out of every mean and
            deviation, and gets advantage 0.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.
        scale: what each reward is divided by: the standard deviation of its "group" or of the whole "batch", or "none".
        ddof: 0 for the population's standard deviation, 1 for the sample's, which is 0 for a single reward.
        eps: at least 0, added to the standard deviation.

    Returns:
        `(B,)` float32, in standard deviations (in the units of the rewards with `scale="none"`); no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    check_normalisation(scale, ddof, eps)
    present, groups = rewards_and_groups(rewards, group_ids)
    return normalised(rewards.detach(), present, groups, scale, ddof, eps).float()


def rloo_advantages(rewards: Tensor, group_ids: Tensor | Sequence[Hashable]) -> Tensor:
    """Leave-one-out advantages: the reward minus the mean of the group's other rewards, `G/(G-1) * (R - mean)`.

    RLOO (Ahmadian et al., 2024, arXiv:2402.14740). A group whose rewards are all equal gets exactly 0, and so does a
    response that is alone in its group: there is nothing to compare it with.

    Args:
        rewards: (B,), one per response, any real dtype. NaN: the response has no reward, is left out of every mean and
            deviation, and gets advantage 0.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.

    Returns:
        `(B,)` float32, in the units of the rewards; no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    present, groups = rewards_and_groups(rewards, group_ids)
    centre, counts = centred(rewards.detach(), present, groups)
    return (centre * counts / (counts - 1).clamp(min=1)).float()


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: `A_t = delta_t + gamma lam A_{t+1}`, `delta_t = r_t + gamma V_{t+1} - V_t`.

    Schulman et al., 2016, arXiv:1506.02438. Masked tokens are skipped: `t+1` is the response's next unmasked token, and
    masked entries of `rewards` and `values` are not read. Whitening is left to the caller.
    The values of a tensor lam are checked on the CPU, and inside `check_inputs()` on a GPU too.

    Args:
        rewards: (B, T) or (N,), floating point: the reward of each token.
        values: (B, T) or (N,), floating point: the critic's value before each token.
        mask: (B, T) or (N,), bool or 0/1: 1 = valid. What is masked is not read.
        gamma: the discount per token, in [0, 1].
        lam: the decay of the estimator, in [0, 1]: a number, or a floating-point tensor (B,), one per response, as from
            `length_adaptive_lambda`.
        bootstrap: (B,), floating point: the value after each response's last valid token, for responses that were cut
            off. None: 0.
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.

    Returns:
        `(advantages, returns)`, float32, shaped like `rewards`, 0 where masked; `returns = advantages + values`.
        Neither carries a gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    checks.tensor("rewards", rewards)
    checks.same_layout("values", values, rewards, "rewards")
    valid = token_mask(mask, "rewards", rewards)
    number_between("gamma", gamma, 0.0, 1.0)
    for name, x in (("rewards", rewards), ("values", values)):
        checks.values(name, x, valid)
    responses = responses_of("rewards", rewards, cu_seqlens, mask)
    numbers = responses.owners(rewards.device)
    if isinstance(lam, Tensor):
        _check_lambdas(lam, responses.count, rewards)
    else:
        number_between("lam", lam, 0.0, 1.0)
    if bootstrap is None:
        final_values = rewards.new_zeros(responses.count, dtype=torch.float64)
    else:
        checks.tensor("bootstrap", bootstrap)
        checks.shape("bootstrap", bootstrap, (responses.count,), "one per response")
        checks.same_device("bootstrap", bootstrap, rewards, "rewards")
        checks.values("bootstrap", bootstrap)
        final_values = bootstrap.detach().double()

    # Each response's unmasked tokens come first, then its masked ones: equal keys become adjacent, in order of time.
    # Tokens stay within their response, so `numbers` is also right for the sorted tokens.
    key, order = torch.sort(2 * numbers + ~valid.reshape(-1), stable=True)
    reward = rewards.detach().reshape(-1)[order].double()
    value = values.detach().reshape(-1)[order].double()
    next_value = final_values[numbers]
    same = key[1:] == key[:-1]
    next_value[:-1] = torch.where(same, value[1:], next_value[:-1])
    delta = reward + gamma * next_value - value
    decay = gamma * (lam.detach().double()[numbers] if isinstance(lam, Tensor) else lam)
    advantage = discounted_sum(delta, key, decay)

    skipped = key % 2 == 1
    advantages = torch.empty_like(advantage)
    returns = torch.empty_like(advantage)
    advantages[order] = advantage.masked_fill(skipped, 0.0)
    returns[order] = (advantage + value).masked_fill(skipped, 0.0)
    advantages, returns = (responses.right(x.float()).reshape(rewards.shape) for x in (advantages, returns))
    return advantages, returns


def length_adaptive_lambda(lengths: Tensor, *, alpha: float = 0.05) -> Tensor:
    """A lambda for each response, `1 - 1 / (alpha length)`: longer responses look further ahead.

    Length-adaptive GAE (VAPO, Yue et al., 2025, arXiv:2504.05118), where alpha is 0.05: the weights
    `lambda^l` of GAE then sum to about `alpha length`. The paper's lambda is negative below `1 / alpha` tokens; here it
    is 0 there. VAPO's critic learns from returns with lambda 1, which a second call of `gae` gives.

    Args:
        lengths: (B,) integers, the number of tokens of each response.
        alpha: the horizon as a share of the length, > 0.

    Returns:
        `(B,)` float32 in [0, 1), the `lam` of `gae`.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or value.
    """
    checks.tensor("lengths", lengths, INTEGER_DTYPES)
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have shape (responses,), got {tuple(lengths.shape)}")
    checks.number("alpha", alpha, positive=True)
    return (1 - 1 / (alpha * lengths.double().clamp(min=0))).clamp(min=0.0).float()


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    denominator: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The critic's loss `0.5 (V - R)^2`, or its form clipped around the old values, averaged over unmasked tokens.

    Clipped as in PPO's public code (Schulman et al., 2017, arXiv:1707.06347):
    `0.5 max( (V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2 )`.

    Args:
        values: (B, T) or (N,), floating point, differentiable: the critic's value before each token.
        returns: (B, T) or (N,), floating point, detached: the regression targets.
        mask: (B, T) or (N,), bool or 0/1: 1 = valid. What is masked is not read.
        old_values: (B, T) or (N,), floating point: the values of the rollout; required with `clip`, otherwise not read.
        clip: how far a value may move from its old value, > 0, in the units of the values.
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of valid tokens, so that
            micro-batches and ranks add up.
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.

    Returns:
        A scalar, float64 for float64 values, else float32. It is 0 with gradients of 0 if no token is unmasked.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    checks.tensor("values", values)
    checks.same_layout("returns", returns, values, "values")
    valid = token_mask(mask, "values", values)
    if clip is not None:
        checks.number("clip", clip, positive=True)
        if old_values is None:
            raise ValueError("old_values must be a tensor shaped like values beside clip, got None")
    if old_values is not None:
        checks.same_layout("old_values", old_values, values, "values")
    for name, x in (("values", values), ("returns", returns), ("old_values", old_values)):
        if x is not None and (clip is not None or name != "old_values"):
            checks.values(name, x, valid)
    responses = responses_of("values", values, cu_seqlens, mask)
    total = checks.divisor("denominator", denominator, valid.sum())

    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    # Fill before the arithmetic: a NaN in a masked entry would otherwise reach the gradient as 0 * NaN.
    value = values.to(dtype).masked_fill(~valid, 0.0)
    target = returns.detach().to(dtype).masked_fill(~valid, 0.0)
    squared = (value - target).square()
    if clip is not None and old_values is not None:
        old = old_values.detach().to(dtype).masked_fill(~valid, 0.0)
        moved = old + (value - old).clamp(-clip, clip)
        squared = torch.maximum(squared, (moved - target).square())
    return responses.right(0.5 * squared.sum() / total)


def _check_lambdas(lam: Tensor, responses: int, like: Tensor) -> None:
    """Check a lambda for each response: its shape, its device, and where they may be read, its values."""
    checks.tensor("lam", lam)
    checks.shape("lam", lam, (responses,), "one per response")
    checks.same_device("lam", lam, like, "rewards")
    if checks.values_are_checked(lam) and not bool(((lam >= 0) & (lam <= 1)).all()):
        raise ValueError(f"lam must be >= 0 and <= 1, got {lam.tolist()[:16]}")
