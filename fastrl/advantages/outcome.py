"""Advantages from rewards, which `policy_loss` multiplies log-probabilities by, and the value loss."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.responses import INTEGER_DTYPES, response_numbers, same_layout, token_mask


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
        rewards: `(B,)`, one per response, any real dtype. NaN means that the response has no reward: it is left out of
            every mean and standard deviation, and its advantage is 0.
        group_ids: `(B,)`, an integer tensor on the device of `rewards`, or a list of anything hashable. Responses with
            equal ids form a group; they need not be adjacent.
        scale: the divisor: the standard deviation of the group or of the whole batch, or none.
        ddof: 0 for the population's standard deviation, 1 for the sample's. With `ddof=1` a single reward has standard
            deviation 0.
        eps: added to the standard deviation, >= 0.

    Returns:
        `(B,)` float32, in standard deviations (in the units of the rewards with `scale="none"`); no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
    if isinstance(ddof, bool) or ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof!r}")
    _number_between("eps", eps, 0.0)
    present, groups = _rewards_and_groups(rewards, group_ids)
    centred, counts = _centred(rewards.detach(), present, groups)
    if scale == "none":
        return centred.float()
    deviation = centred
    if scale == "batch":
        # One group for the whole batch: the spread between prompts counts too.
        groups = torch.zeros_like(groups)
        deviation, counts = _centred(rewards.detach(), present, groups)
    variance = _group_sum(deviation.square(), groups) / (counts - ddof).clamp(min=1)
    divisor = variance.sqrt() + eps
    # With eps=0 a zero divisor means that all of its numerators are zero as well.
    return (centred / torch.where(divisor > 0, divisor, 1.0)).float()


def rloo_advantages(rewards: Tensor, group_ids: Tensor | Sequence[Hashable]) -> Tensor:
    """Leave-one-out advantages: the reward minus the mean of the group's other rewards, `G/(G-1) * (R - mean)`.

    RLOO (Ahmadian et al., 2024, arXiv:2402.14740). A group whose rewards are all equal gets exactly 0, and so does a
    response that is alone in its group: there is nothing to compare it with.

    Args:
        rewards: `(B,)`, one per response, any real dtype. NaN means that the response has no reward: it is left out of
            its group, and its advantage is 0.
        group_ids: `(B,)`, as in `group_advantages`.

    Returns:
        `(B,)` float32, in the units of the rewards; no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    present, groups = _rewards_and_groups(rewards, group_ids)
    centred, counts = _centred(rewards.detach(), present, groups)
    return (centred * counts / (counts - 1).clamp(min=1)).float()


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: `A_t = delta_t + gamma lam A_{t+1}`, `delta_t = r_t + gamma V_{t+1} - V_t`.

    Schulman et al., 2016, arXiv:1506.02438. Masked tokens are skipped: `t+1` is the response's next unmasked token, and
    masked entries of `rewards` and `values` are not read. Whitening is left to the caller.

    Args:
        rewards: the reward of each token, floating point: `(B, T)`, or `(N,)` for packed responses or a single one.
        values: the critic's value before each token, shaped like `rewards`.
        mask: bool or 0/1, shaped like `rewards`, 1 = valid.
        gamma: the discount per token, in [0, 1].
        lam: the decay of the estimator, in [0, 1].
        bootstrap: `(B,)`, the value after each response's last unmasked token, for responses that were cut off;
            0 for all of them by default.
        cu_seqlens: int32 `(B+1,)`, the start of each packed response and the end of the last.

    Returns:
        `(advantages, returns)`, float32, shaped like `rewards`, 0 where masked; `returns = advantages + values`.
        Neither carries a gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    checks.tensor("rewards", rewards)
    same_layout("values", values, "rewards", rewards)
    valid = token_mask(mask, "rewards", rewards)
    _number_between("gamma", gamma, 0.0, 1.0)
    _number_between("lam", lam, 0.0, 1.0)
    numbers, responses = response_numbers("rewards", rewards, cu_seqlens)
    if bootstrap is None:
        final_values = rewards.new_zeros(responses, dtype=torch.float64)
    else:
        checks.tensor("bootstrap", bootstrap)
        checks.shape("bootstrap", bootstrap, (responses,), "one per response")
        checks.same_device("bootstrap", bootstrap, rewards, "rewards")
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
    advantage = _discounted_sum(delta, key, gamma * lam)

    skipped = key % 2 == 1
    advantages = torch.empty_like(advantage)
    returns = torch.empty_like(advantage)
    advantages[order] = advantage.masked_fill(skipped, 0.0)
    returns[order] = (advantage + value).masked_fill(skipped, 0.0)
    return advantages.float().reshape(rewards.shape), returns.float().reshape(rewards.shape)


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
        values: the critic's value before each token, a floating-point tensor: `(B, T)` or `(N,)`. Differentiable.
        returns: the regression targets, shaped like `values`; no gradient flows into them.
        mask: bool or 0/1, shaped like `values`, 1 = valid. Masked entries are not read; their gradient is 0.
        old_values: the values of the rollout, shaped like `values`; required with `clip`, not read without it.
        clip: how far a value may move from its old value, > 0, in the units of the values.
        denominator: replaces the local number of unmasked tokens (a number > 0 or a 0-dim tensor), so that
            micro-batches and ranks add up to the whole batch's loss.
        cu_seqlens: int32 `(B+1,)` of a packed batch; only checked, as the mean over tokens does not need it.

    Returns:
        A scalar, float64 for float64 values, else float32. It is 0 with gradients of 0 if no token is unmasked.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    checks.tensor("values", values)
    same_layout("returns", returns, "values", values)
    valid = token_mask(mask, "values", values)
    if clip is not None:
        checks.number("clip", clip, positive=True)
        if old_values is None:
            raise ValueError("old_values must be a tensor shaped like values beside clip, got None")
    if old_values is not None:
        same_layout("old_values", old_values, "values", values)
    response_numbers("values", values, cu_seqlens)
    total = _denominator(denominator, valid)

    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    # Fill before the arithmetic: a NaN in a masked entry would otherwise reach the gradient as 0 * NaN.
    value = values.to(dtype).masked_fill(~valid, 0.0)
    target = returns.detach().to(dtype).masked_fill(~valid, 0.0)
    squared = (value - target).square()
    if clip is not None and old_values is not None:
        old = old_values.detach().to(dtype).masked_fill(~valid, 0.0)
        moved = old + (value - old).clamp(-clip, clip)
        squared = torch.maximum(squared, (moved - target).square())
    return 0.5 * squared.sum() / total


def _number_between(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise unless `value` is a finite number in [low, high]."""
    if not low <= checks.number(name, value) <= high:
        raise ValueError(f"{name} must be >= {low:g}{'' if high == math.inf else f' and <= {high:g}'}, got {value!r}")


def _denominator(denominator: float | Tensor | None, valid: Tensor) -> Tensor | float:
    """The divisor of a sum over tokens; never 0."""
    if denominator is None:
        return valid.sum().clamp(min=1)
    denominator = checks.scalar("denominator", denominator, positive=True)
    if not isinstance(denominator, Tensor):
        return denominator
    # Reading the value would wait for the device. A count of 0 means that there are no tokens to divide.
    return torch.where(denominator > 0, denominator, 1).detach()


def _rewards_and_groups(rewards: object, group_ids: object) -> tuple[Tensor, Tensor]:
    """Checks both; returns which rewards are present, `(B,)` bool, and their groups in [0, B), `(B,)` int64."""
    rewards = checks.in_memory("rewards", rewards)
    if rewards.is_complex():
        raise TypeError(f"rewards must be real, got {rewards.dtype}")
    if rewards.ndim != 1:
        raise ValueError(f"rewards must have shape (responses,), got {tuple(rewards.shape)}")
    return ~torch.isnan(rewards), group_numbers(group_ids, rewards.numel(), rewards.device)


def group_numbers(group_ids: object, count: int, device: torch.device) -> Tensor:
    """Checks the ids; returns each response's group as a number in [0, count), `(count,)` int64 on `device`."""
    if not isinstance(group_ids, Tensor):
        return _number_hashables(group_ids, count).to(device)
    checks.tensor("group_ids", group_ids, INTEGER_DTYPES)
    checks.shape("group_ids", group_ids, (count,), "one per response")
    if group_ids.device != device:
        raise ValueError(f"group_ids must be on {device} like rewards, got {group_ids.device}")
    # The same numbers as from torch.unique, but without sending the number of groups to the host.
    ids, order = torch.sort(group_ids, stable=True)
    is_new = torch.zeros_like(order)
    is_new[1:] = ids[1:] != ids[:-1]
    groups = torch.empty_like(order)
    groups[order] = is_new.cumsum(0)
    return groups


def _number_hashables(group_ids: object, count: int) -> Tensor:
    """Numbers the ids of a list in order of appearance."""
    if not isinstance(group_ids, Sequence) or isinstance(group_ids, str | bytes):
        raise TypeError(f"group_ids must be an integer tensor or a list, got {type(group_ids).__name__}")
    if len(group_ids) != count:
        raise ValueError(f"group_ids must hold {count} ids, one a reward, got {len(group_ids)}")
    seen: dict[Hashable, int] = {}
    for position, group in enumerate(group_ids):
        if not isinstance(group, Hashable):
            raise TypeError(f"group_ids[{position}] must be hashable, got {type(group).__name__}")
        seen.setdefault(group, len(seen))
    return torch.tensor([seen[group] for group in group_ids], dtype=torch.int64)


def _group_sum(x: Tensor, groups: Tensor) -> Tensor:
    """The sum over each element's group, per element."""
    return torch.zeros_like(x).index_add_(0, groups, x)[groups]


def _centred(rewards: Tensor, present: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards minus their group's mean, float64, 0 if absent; and the number of present rewards of each one's group."""
    exact = rewards.double()
    lowest = torch.full_like(exact, math.inf).scatter_reduce(0, groups, exact.where(present, math.inf), "amin")[groups]
    # Subtracting a member first makes equal rewards exactly 0; subtracting only their rounded mean would not.
    shifted = (exact - lowest).where(present, 0.0)
    counts = _group_sum(present.double(), groups)
    return (shifted - _group_sum(shifted, groups) / counts.clamp(min=1)).where(present, 0.0), counts


def _discounted_sum(x: Tensor, key: Tensor, decay: float) -> Tensor:
    """`y_t = x_t + decay * y_{t+1}` within each run of equal keys, `(N,)`, by doubling: log2(N) steps instead of N."""
    total = x
    step = 1
    # After k rounds total_t holds the first 2^k terms. A decay of 0 ends the loop: 0 * NaN would reach other tokens.
    while step < x.numel() and decay > 0.0:
        same = key[step:] == key[:-step]
        total = torch.cat([total[:-step] + torch.where(same, decay * total[step:], 0.0), total[-step:]])
        decay, step = decay * decay, 2 * step
    return total
