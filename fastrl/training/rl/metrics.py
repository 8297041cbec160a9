"""Metrics of a rollout and of its rewards."""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.losses.problem import effective_share
from fastrl.training.batches.rollout import Rollout
from fastrl.training.parallel.world import World

# How the metrics of several batches are merged; those not listed here are averaged, weighted by the batches' tokens.
COUNTS = ("tokens", "ratio_clamped", "masked_off_policy", "chosen_by_covariance", "ratio_not_one")
# Of a rollout's first update only: there the policy is still the one that sampled.
FIRST = ("mismatch/abs_log_ratio", "mismatch/k3", "ratio_not_one")
# Parts of a minibatch's loss, so they are summed over its micro-batches.
LOSSES = ("loss", "policy_loss", "value_loss")
MAXIMA = ("ratio_max", "rollout_abs_log_weight_max")


def shape_metrics(rollout: Rollout, ended: Tensor) -> dict[str, float]:
    """Lengths of a rollout's completions in tokens, and the share that ended without EOS.

    `length` is of the policy's tokens; with tools `turns` counts its stretches of tokens, and `tool_tokens` the others.
    """
    drawn = rollout.drawn_mask
    numbers = {"length": drawn.sum(1).double().mean().item(), "truncated": 1 - ended.double().mean().item()}
    if rollout.drawn is not None:
        begins = drawn.clone()
        begins[:, 1:] &= ~drawn[:, :-1]
        numbers["turns"] = begins.sum(1).double().mean().item()
        numbers["tool_tokens"] = (rollout.completion_mask & ~drawn).sum(1).double().mean().item()
    return numbers


def reward_metrics(
    rewards: Sequence[float | None], groups: Sequence[int], told_apart: Sequence[Sequence[Hashable]]
) -> dict[str, float]:
    """Metrics of completions' rewards, without the Nones.

    `without_variance` is included if prompts were sampled more than once: the share of groups in which what tells
    completions apart does not differ (a completion without a reward does not count).
    """
    present = [value for value in rewards if value is not None]
    distinct: dict[int, set[Hashable]] = {group: set() for group in groups}
    for value, group, values in zip(rewards, groups, told_apart, strict=True):
        if value is not None:
            distinct[group].update(values)
    numbers = {"reward": average(rewards), "reward_std": statistics.pstdev(present) if present else math.nan}
    numbers["without_reward"] = 1 - len(present) / len(rewards)
    if len(distinct) < len(groups):
        numbers["without_variance"] = sum(len(values) < 2 for values in distinct.values()) / len(distinct)
    return numbers


def average(values: Sequence[float | None]) -> float:
    """The mean of the values that are not None; NaN if there are none."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else math.nan


def batches_of_all_ranks(world: World, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The metrics of all ranks' micro-batches; of several ranks on the CPU."""
    if world.size == 1:
        return batches
    own = [(list(batch), torch.stack([value.double() for value in batch.values()]).cpu()) for batch in batches]
    return [dict(zip(names, values, strict=True)) for rank in world.gathered(own) for names, values in rank]


def merge_metrics(batches: list[dict[str, Tensor]], summed: Iterable[str]) -> dict[str, Any]:
    """Merge the metrics (0-dim tensors) of several batches: sums, maxima, means weighted by tokens, and rollout_ess."""
    if not batches:
        return {}
    weights = torch.stack([batch["tokens"] for batch in batches])
    weights = weights / weights.sum().clamp_min(1)
    merged = {}
    for name in batches[0]:
        values = torch.stack([batch[name].to(weights.device) for batch in batches])
        if name in summed:
            merged[name] = values.sum()
        elif name in MAXIMA:
            merged[name] = values.max()
        else:
            merged[name] = (weights * values).sum()
    if "rollout_ess" in merged:
        means = torch.stack([batch["rollout_weight_mean"] for batch in batches])
        mean_squares = torch.nan_to_num(means.square() / torch.stack([batch["rollout_ess"] for batch in batches]))
        merged["rollout_ess"] = effective_share(merged["rollout_weight_mean"], (weights * mean_squares).sum())
    return merged
