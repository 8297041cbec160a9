"""Rewards in groups, one for each prompt: the checks, and the sums over a group, that all its advantages share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.groups import group_numbers, group_total


def rewards_and_groups(rewards: object, group_ids: object) -> tuple[Tensor, Tensor]:
    """Checks both; returns which rewards are present, `(B,)` bool, and their groups in [0, B), `(B,)` int64."""
    rewards = checks.in_memory("rewards", rewards)
    if rewards.is_complex():
        raise TypeError(f"rewards must be real, got {rewards.dtype}")
    if rewards.ndim != 1:
        raise ValueError(f"rewards must have shape (responses,), got {tuple(rewards.shape)}")
    return ~torch.isnan(rewards), group_numbers(group_ids, rewards.numel(), rewards.device, "rewards")


def centred(rewards: Tensor, present: Tensor, groups: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rewards minus their group's mean, float64, 0 if absent; and the number of present rewards of each one's group.

    weights: `(B,)` float64, finite and >= 0, of each reward in the mean; equal where a group's are all 0.
    """
    exact = rewards.double()
    lowest = torch.full_like(exact, math.inf).scatter_reduce(0, groups, exact.where(present, math.inf), "amin")[groups]
    # Subtracting a member first makes equal rewards exactly 0; subtracting only their rounded mean would not.
    shifted = (exact - lowest).where(present, 0.0)
    counts = group_total(present.double(), groups)
    if weights is None:
        mean = group_total(shifted, groups) / counts.clamp(min=1)
    else:
        counted = weights.where(present, 0.0)
        counted = counted.where(group_total(counted, groups) > 0, present.double())
        total = group_total(counted, groups)
        mean = group_total(counted * shifted, groups) / torch.where(total > 0, total, 1.0)
    return (shifted - mean).where(present, 0.0), counts


def normalised(rewards: Tensor, present: Tensor, groups: Tensor, scale: str, ddof: int, eps: float) -> Tensor:
    """`(R - mean) / (std + eps)` as `group_advantages` says it, `(B,)` float64."""
    centre, counts = centred(rewards, present, groups)
    if scale == "none":
        return centre
    deviation = centre
    if scale == "batch":
        # One group for the whole batch: the spread between prompts counts too.
        groups = torch.zeros_like(groups)
        deviation, counts = centred(rewards, present, groups)
    return divided(centre, group_total(deviation.square(), groups), counts, ddof, eps)


def divided(x: Tensor, squares: Tensor, counts: Tensor, ddof: int, eps: float) -> Tensor:
    """x over `sqrt(squares / (counts - ddof)) + eps`; x is 0 where that is 0."""
    divisor = (squares / (counts - ddof).clamp(min=1)).sqrt() + eps
    return x / torch.where(divisor > 0, divisor, 1.0)


def check_normalisation(scale: object, ddof: object, eps: object) -> None:
    """Raise for a value that `normalised` does not take."""
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
    if isinstance(ddof, bool) or ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof!r}")
    number_between("eps", eps, 0.0)


def number_between(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise unless `value` is a finite number in [low, high]."""
    if not low <= checks.number(name, value) <= high:
        raise ValueError(f"{name} must be >= {low:g}{'' if high == math.inf else f' and <= {high:g}'}, got {value!r}")
