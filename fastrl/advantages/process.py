"""Advantages from rewards of reasoning steps: GRPO with process supervision."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fastrl.advantages.outcome import group_advantages
from fastrl.base import checks
from fastrl.base.groups import group_numbers
from fastrl.base.responses import INTEGER_DTYPES, check_cu_seqlens


def process_advantages(
    step_rewards: Tensor,
    step_ends: Tensor,
    group_ids: Tensor | Sequence[Hashable],
    lengths: Tensor,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 0,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Per-token advantages: the sum of the normalised rewards of the steps that end at the token or after it.

    GRPO with process supervision (Shao et al., 2024, arXiv:2402.03300, section 4.1.3). All step rewards of a group are
    normalised together, as in `group_advantages`.

    Args:
        step_rewards: `(B, S)`, one per step, any real dtype; NaN means that a step has no reward.
        step_ends: `(B, S)` integers, the index of each step's last token in its response, in any order; negative for
            absent steps, if a response has fewer than S.
        group_ids: (B,), the group of each response, an integer tensor on the device of the rewards or a list of
            anything hashable. Equal ids form a group; they need not be adjacent.
        lengths: (B,) integers, the number of tokens of each response.
        scale: what each reward is divided by: the standard deviation of its "group" or of the whole "batch", or "none".
        ddof: 0 for the population's standard deviation, 1 for the sample's, which is 0 for a single reward.
        eps: at least 0, added to the standard deviation.
        cu_seqlens: (B + 1,) int32, the start of each packed response and the end of the last, `lengths` apart, for a
            result (N,). None: not packed.

    Returns:
        `(B, T)` float32, T the largest length, 0 beyond each response's end; with `cu_seqlens` `(N,)`. No gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value; a step that ends outside its
            response (the message names it).
    """
    step_rewards = checks.in_memory("step_rewards", step_rewards)
    if step_rewards.is_complex() or step_rewards.ndim != 2:
        raise ValueError(f"step_rewards must be real, of shape (responses, steps), got {tuple(step_rewards.shape)}")
    size, steps = step_rewards.shape
    ends = _integers("step_ends", step_ends, step_rewards.shape, "the shape of step_rewards", step_rewards)
    counts = _integers("lengths", lengths, (size,), "one per response", step_rewards)
    packed = None
    if cu_seqlens is not None:
        packed = check_cu_seqlens(cu_seqlens, "the packed tokens", counts.new_empty(int(counts.sum())))
        if packed.shape[0] != size + 1 or not torch.equal(packed.diff().long(), counts):
            raise ValueError(f"cu_seqlens must have the lengths as differences, got {packed.tolist()[:16]}")
    outside = ends >= counts[:, None]
    if bool(outside.any()):
        row, step = outside.nonzero()[0].tolist()
        raise ValueError(
            f"step_ends[{row}, {step}] must be a token of its response, below {int(counts[row])}, got"
            f" {int(ends[row, step])}"
        )

    present = ends >= 0
    groups = group_numbers(group_ids, size, step_rewards.device, "step_rewards").repeat_interleave(steps)
    rewards = step_rewards.detach().double().where(present, torch.nan).reshape(-1)
    advantages = group_advantages(rewards, groups, scale=scale, ddof=ddof, eps=eps).view(size, steps).double()

    # Sort the steps by their ends: those that end at a token or after it are then a suffix.
    ends, order = ends.sort(dim=1, stable=True)
    following = torch.nn.functional.pad(advantages.gather(1, order).flip(1).cumsum(1).flip(1), (0, 1))
    longest = int(counts.max()) if size else 0
    tokens = torch.arange(longest, device=ends.device).expand(size, longest).contiguous()
    per_token = following.gather(1, torch.searchsorted(ends, tokens)).float()
    inside = tokens < counts[:, None]
    return per_token[inside] if packed is not None else per_token.where(inside, 0.0)


def _integers(name: str, value: object, shape: Sequence[int], why: str, like: Tensor) -> Tensor:
    """Checks for an integer tensor of this shape on the device of `like`; returns it as int64."""
    value = checks.tensor(name, value, INTEGER_DTYPES)
    checks.shape(name, value, shape, why)
    checks.same_device(name, value, like, "step_rewards")
    return value.long()
