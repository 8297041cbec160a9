"""Metrics of a rollout and of its rewards."""

import math
import statistics
from collections.abc import Hashable, Sequence

from torch import Tensor

from fastrl.training.batches.rollout import Rollout


def describe(
    rollout: Rollout,
    ended: Tensor,
    rewards: Sequence[float | None] | None,
    by_scorer: dict[str, list[float | None]],
    groups: Sequence[int],
    compared: Sequence[Sequence[Hashable]] | None = None,
) -> dict[str, float]:
    """A rollout's metrics: rewards (without the Nones), lengths in tokens, the share that ended without EOS.

    `length` is of the policy's tokens; with tools `turns` counts its stretches of tokens, and `tool_tokens` the others.

    `rewards` is None if there is nothing that gives any; then there are no metrics of them.
    `without_variance` is included if prompts were sampled more than once: the share of groups whose rewards do not
    differ (None does not count), or what `compared` has of each completion in place of its reward.
    """
    drawn = rollout.drawn_mask
    shape = {"length": drawn.sum(1).double().mean().item(), "truncated": 1 - ended.double().mean().item()}
    if rollout.drawn is not None:
        begins = drawn.clone()
        begins[:, 1:] &= ~drawn[:, :-1]
        shape["turns"] = begins.sum(1).double().mean().item()
        shape["tool_tokens"] = (rollout.completion_mask & ~drawn).sum(1).double().mean().item()
    if rewards is None:
        return shape
    present = [value for value in rewards if value is not None]
    parts = {f"reward/{name}": average(values) for name, values in by_scorer.items() if len(by_scorer) > 1}
    distinct: dict[int, set[Hashable]] = {group: set() for group in groups}
    for row, (value, group) in enumerate(zip(rewards, groups, strict=True)):
        if value is not None:
            distinct[group].update([value] if compared is None else compared[row])
    deviation = statistics.pstdev(present) if present else math.nan
    numbers = {"reward": average(rewards), "reward_std": deviation, **parts}
    numbers["without_reward"] = 1 - len(present) / len(rewards)
    if len(distinct) < len(groups):
        numbers["without_variance"] = sum(len(values) < 2 for values in distinct.values()) / len(distinct)
    return numbers | shape


def average(values: Sequence[float | None]) -> float:
    """The mean of the values that are not None; NaN if there are none."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else math.nan
