"""More advantages relative to a group: MaxRL, OPO's baseline, the best of k, and several rewards normalised apart."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fastrl.advantages.groups import centred, check_normalisation, divided, normalised, rewards_and_groups
from fastrl.base import checks
from fastrl.base.groups import group_numbers, group_total
from fastrl.base.responses import INTEGER_DTYPES, discounted_sum


def maxrl_advantages(rewards: Tensor, group_ids: Tensor | Sequence[Hashable]) -> Tensor:
    """Maximum-likelihood advantages `(R - mean) / mean`, with the mean over the responses to one prompt.

    MaxRL (Tajwar et al., 2026, arXiv:2602.02710): for rewards of 0 and 1 this gives the gradient of `log p(success)`,
    in which hard prompts weigh more than in the gradient of `p(success)`. The authors' code adds an epsilon to the
    divisor; here it is the mean itself, and the advantages of a group whose mean is 0 are 0.

    Args:
        rewards: (B,), one per response, any real dtype. NaN: the response has no reward, is left out of every mean and
            deviation, and gets advantage 0.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.

    Returns:
        `(B,)` float32, without a unit: from -1 to `group size - 1`. No gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    present, groups = rewards_and_groups(rewards, group_ids)
    centre, counts = centred(rewards.detach(), present, groups)
    mean = group_total(rewards.detach().double().where(present, 0.0), groups) / counts.clamp(min=1)
    return (centre / torch.where(mean != 0, mean, torch.inf)).float()


def opo_advantages(rewards: Tensor, group_ids: Tensor | Sequence[Hashable], lengths: Tensor) -> Tensor:
    """The reward minus the group's mean reward weighted by length, `R - sum(length R) / sum(length)`.

    OPO (Hao et al., 2025, arXiv:2505.23585): the baseline of least variance if a response's squared gradient grows
    with its length. Meant for one update per rollout. A response that is alone in its group gets 0; in verl, where the
    authors' code is, it has no baseline and gets its reward.

    Args:
        rewards: (B,), one per response, any real dtype. NaN: the response has no reward, is left out of every mean and
            deviation, and gets advantage 0.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.
        lengths: (B,) integers, the number of tokens of each response.

    Returns:
        `(B,)` float32, in the units of the rewards; no gradient. Exactly 0 in a group whose rewards are all equal.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    present, groups = rewards_and_groups(rewards, group_ids)
    checks.tensor("lengths", lengths, INTEGER_DTYPES)
    checks.shape("lengths", lengths, rewards.shape, "one per response")
    checks.same_device("lengths", lengths, rewards, "rewards")
    return centred(rewards.detach(), present, groups, lengths.double())[0].float()


def pass_at_k_advantages(rewards: Tensor, group_ids: Tensor | Sequence[Hashable], *, k: int | None = None) -> Tensor:
    """What a response adds to the best of k: its reward's excess over the best of the others, 0 for all but the best.

    With k the size of the group (the default) its best response gets `R_best - R_second`, the others 0: the k-sample
    objective with a leave-one-out baseline of Tang et al., 2025, arXiv:2503.19595. verl's `grpo_passk` divides it by
    the group's standard deviation, unless told not to; this form does not. With a smaller k it is the mean of that over
    all subsets of k responses that hold the response, with a sort instead of the subsets, as in PKPO (Walder and
    Karkhanis, 2025, arXiv:2505.15201: its estimates differ by a constant factor, `k / size`).

    Args:
        rewards: (B,), one per response, any real dtype. NaN: the response has no reward, is left out of every mean and
            deviation, and gets advantage 0.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.
        k: how many responses the objective takes the best of, >= 2. A group of fewer takes the best of all; None means
            that all groups do.

    Returns:
        `(B,)` float32 >= 0, in the units of the rewards; no gradient. Equal rewards of a group get equal advantages, a
        tie at the top of the whole group and a response that is alone get exactly 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    present, groups = rewards_and_groups(rewards, group_ids)
    if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
        raise TypeError(f"k must be an integer or None, got {type(k).__name__}")
    if k is not None and k < 2:
        raise ValueError(f"k must be >= 2, got {k}")
    # Within each group by ascending reward, absent ones last.
    exact = rewards.detach().double().where(present, torch.inf)
    order = torch.argsort(exact, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    value, key, there = exact[order], groups[order], present[order]
    position = torch.arange(len(order), device=order.device)
    first = torch.ones_like(there)
    first[1:] = key[1:] != key[:-1]
    below = (position - torch.where(first, position, 0).cummax(0).values).double()  # how many are not larger
    size = group_total(present.double(), groups)[order]
    chosen = size if k is None else size.clamp(max=k)
    # The best of a subset beats its second best by the steps between them. A step with m responses below it is one of
    # these in a share C(m, k - 1) / C(size - 1, k - 1) of the subsets that hold a given response above it.
    step = torch.where(there & ~first, value - value.roll(1), 0.0)
    subsets = (below + 1).lgamma() - size.clamp(min=1).lgamma()
    subsets = subsets + ((size - chosen + 1).lgamma() - (below - chosen + 2).clamp(min=1).lgamma())
    share = torch.where(below >= chosen - 1, subsets.exp(), 0.0)
    advantages = torch.empty_like(value)
    advantages[order] = discounted_sum((step * share).flip(0), key.flip(0), 1.0).flip(0)
    return advantages.where(present, 0.0).float()


def decoupled_group_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[Hashable],
    *,
    weights: Sequence[float] | Tensor | None = None,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 0,
    eps: float = 1e-6,
) -> Tensor:
    """Several rewards, each normalised within its group by itself, weighted, added, and scaled over the batch.

    GDPO (Liu et al., 2026, arXiv:2601.05242): sums of different rewards that are equal stay apart. The last step
    divides by the standard deviation of the sum over the batch's responses, plus `eps`; its mean is 0 already, because
    every group's is. verl takes both over the tokens instead, so that longer responses count more.

    Args:
        rewards: (B, R), a column for each reward, any real dtype. NaN: the response does not have this reward, which is
            left out of the column's means and deviations, and adds 0.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.
        weights: R numbers, or a tensor `(R,)`; 1 each by default. They are applied after each reward's normalisation,
            so that they weigh preferences and not units.
        scale: what each reward is divided by: the standard deviation of its "group" or of the whole "batch", or "none".
        ddof: 0 for the population's standard deviation, 1 for the sample's, which is 0 for a single reward.
        eps: at least 0, added to the standard deviation.

    Returns:
        `(B,)` float32, in standard deviations; no gradient. Exactly 0 in a group in which every reward is equal.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    rewards = checks.in_memory("rewards", rewards).detach()
    if rewards.is_complex():
        raise TypeError(f"rewards must be real, got {rewards.dtype}")
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape (responses, rewards), got {tuple(rewards.shape)}")
    check_normalisation(scale, ddof, eps)
    size, columns = rewards.shape
    groups = group_numbers(group_ids, size, rewards.device, "rewards")
    present = ~torch.isnan(rewards)
    total = rewards.new_zeros(size, dtype=torch.float64)
    for column, weight in enumerate(_weights(weights, columns, rewards)):
        one = normalised(rewards[:, column], present[:, column], groups, scale, ddof, eps)
        total = total + weight * one
    counted = present.any(1).double()
    return divided(total, total.square().sum(), counted.sum(), ddof, eps).float()


def _weights(weights: object, columns: int, like: Tensor) -> Sequence[float | Tensor]:
    """The weight of each column, checked."""
    if weights is None:
        return [1.0] * columns
    if isinstance(weights, Tensor):
        checks.tensor("weights", weights)
        checks.shape("weights", weights, (columns,), "one per reward")
        checks.same_device("weights", weights, like, "rewards")
        checks.values("weights", weights)
        return list(weights.detach().double().unbind())
    if not isinstance(weights, Sequence) or isinstance(weights, str | bytes):
        raise TypeError(f"weights must be a sequence of numbers or a tensor, got {type(weights).__name__}")
    if len(weights) != columns:
        raise ValueError(f"weights must hold {columns} numbers, one a reward, got {len(weights)}")
    return [checks.number(f"weights[{i}]", weight) for i, weight in enumerate(weights)]
