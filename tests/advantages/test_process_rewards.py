"""Advantages of reasoning steps against the formula written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_calls import exact_advantages as exact
from refused import refused

import fastrl

NONE = math.nan


def test_an_example_by_hand() -> None:
    """Group 7: step rewards 1, 3, 5 (mean 3, deviation sqrt(8/3)); group 9: one step, whose advantage is 0."""
    found = fastrl.process_advantages(
        torch.tensor([[1.0, 3.0], [5.0, NONE], [2.0, NONE]]),
        torch.tensor([[0, 2], [1, -1], [2, -1]]),
        torch.tensor([7, 7, 9]),
        torch.tensor([4, 2, 3]),
        eps=0.0,
    )
    s = math.sqrt(8 / 3)
    expected = [[-2 / s, 0, 0, 0], [2 / s, 2 / s, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, ...]:
    size, steps = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    ends = [[draw(st.integers(-1, n - 1)) for _ in range(steps)] for n in lengths]
    rewards = [[draw(st.sampled_from([0.0, 0.5, -2.0, 3.0, NONE])) for _ in range(steps)] for _ in lengths]
    groups = draw(st.lists(st.sampled_from("ab"), min_size=size, max_size=size))
    return rewards, ends, groups, lengths, steps


@given(batch=batches(), scale=st.sampled_from(["group", "batch", "none"]), ddof=st.sampled_from([0, 1]))
def test_every_token_sums_the_steps_that_end_at_it_or_later(batch: tuple[Any, ...], scale: Any, ddof: int) -> None:
    rewards, ends, groups, lengths, steps = batch
    size = len(lengths)
    tensors = (
        torch.tensor(rewards).reshape(size, steps),
        torch.tensor(ends, dtype=torch.int64).reshape(size, steps),
        groups,
        torch.tensor(lengths, dtype=torch.int64),
    )
    padded = fastrl.process_advantages(*tensors, scale=scale, ddof=ddof)
    expected, _ = exact.process(rewards, ends, groups, lengths, scale, ddof, eps=1e-6)
    assert padded.shape == (size, max(lengths, default=0))
    for row, wanted in zip(padded, expected, strict=True):
        zeros = [0.0] * (len(row) - len(wanted))
        assert row.tolist() == pytest.approx([*wanted, *zeros], rel=1e-5, abs=1e-5)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)] if lengths else [0], dtype=torch.int32)
    packed = fastrl.process_advantages(*tensors, scale=scale, ddof=ddof, cu_seqlens=offsets)
    assert torch.equal(packed, torch.cat([padded[b, :n] for b, n in enumerate(lengths)] or [packed]))


@refused(
    ({"step_rewards": [1.0]}, TypeError, "step_rewards must be a tensor, got list"),
    ({"step_rewards": torch.ones(2)}, ValueError, "must be real, of shape (responses, steps), got (2,)"),
    ({"step_ends": torch.ones(2, 2)}, TypeError, "step_ends must be one of"),
    (
        {"step_ends": torch.tensor([[0, 1], [0, 3]])},
        ValueError,
        "step_ends[1, 1] must be a token of its response, below 3, got 3",
    ),
    ({"lengths": torch.tensor([2])}, ValueError, "lengths must have shape (2,) (one per response), got (1,)"),
    ({"group_ids": [1]}, ValueError, "group_ids must hold 2 ids"),
    ({"scale": "all"}, ValueError, "scale must be 'group', 'batch' or 'none', got 'all'"),
    ({"cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32)}, ValueError, "cu_seqlens must have the lengths"),
    literally=True,
)
def test_bad_input(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "step_rewards": torch.ones(2, 2),
        "step_ends": torch.tensor([[0, 1], [0, 2]]),
        "group_ids": [0, 0],
        "lengths": torch.tensor([2, 3]),
    }
    fastrl.process_advantages(**(good | change))
