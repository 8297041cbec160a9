"""Preference losses against formulas written out pair by pair in float64."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problem import Problem
from random_calls.exact_advantages import log_sigmoid
from refused import refused

import fastrl

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def test_dpo_is_the_mean_over_pairs() -> None:
    numbers = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen, rejected, ref_chosen, ref_rejected = ((x - 9).requires_grad_() for x in 3 * numbers)
    loss = fastrl.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)
    deltas = [0.3 * ((a - c) - (b - d)) for a, b, c, d in (3 * numbers).t().tolist()]
    torch.testing.assert_close(loss.item(), -sum(map(log_sigmoid, deltas)) / 5, **EXACT)
    loss.backward()
    expected = torch.tensor([-0.3 / (1 + math.exp(x)) / 5 for x in deltas], dtype=torch.float64)
    torch.testing.assert_close(chosen.grad, expected, **EXACT)
    torch.testing.assert_close(rejected.grad, -expected, **EXACT)
    assert ref_chosen.grad is None and ref_rejected.grad is None
    huge = torch.tensor([-1e4], requires_grad=True)  # a hopeless pair: the slope is beta, not 0 or NaN
    fastrl.dpo_loss(huge, 0 * huge.detach(), 0 * huge.detach(), 0 * huge.detach()).backward()
    assert huge.grad is not None and huge.grad.item() == pytest.approx(-0.1)
    nothing = torch.zeros(0, requires_grad=True)
    assert fastrl.dpo_loss(nothing, nothing, nothing, nothing).item() == 0


@pytest.mark.parametrize("packed", [False, True])
def test_linear_dpo_equals_whole_logits(backend: str, backend_device: str, packed: bool) -> None:
    """Two pairs of responses of 3, 1, 4 and 2 tokens after prompts; 40 entries, as small as a vocabulary goes."""
    place, ends = torch.arange(5), torch.tensor([4, 2, 5, 3])
    mask = (place >= 1) & (place < ends[:, None])
    problem = Problem(backend_device, size=(4, 5, 8, 40), mask=mask)
    ref = torch.randn(4, generator=torch.Generator().manual_seed(1)) - 5
    options: dict[str, Any] = {"beta": 0.2, "temperature": 0.9}

    wide = problem.leaves(torch.float64)
    logp, _ = problem.stats(wide, temperature=0.9)
    sums = (logp * problem.arguments["mask"]).sum(-1).cpu()
    truth = fastrl.dpo_loss(*sums.chunk(2), *ref.double().chunk(2), beta=0.2)
    expected = dict(zip(wide, torch.autograd.grad(truth, list(wide.values())), strict=True))

    head, tokens = problem.head, {k: problem.arguments[k] for k in ("targets", "mask")}
    if packed:  # the same without the padding behind each response
        kept = (place < ends[:, None]).to(backend_device)
        tokens = {k: x[kept] for k, x in tokens.items()}
        options["cu_seqlens"] = torch.tensor([0, *ends]).cumsum(0).int().to(backend_device)
        head, expected = ({**x, "hidden": x["hidden"][kept]} for x in (head, expected))
    leaves = {k: x.clone().requires_grad_() for k, x in head.items()}
    out = fastrl.linear_dpo_loss(**leaves, **tokens, ref_logprobs=ref.to(backend_device), **options)
    found = dict(zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True))
    # float32 sums of a dozen terms
    close = {"rtol": 2e-5, "atol": 2e-6, "check_dtype": False, "check_device": False}
    rewards = 0.2 * (sums - ref)
    torch.testing.assert_close(torch.cat([out.chosen_rewards, out.rejected_rewards]), rewards.detach(), **close)
    torch.testing.assert_close(out.margins, out.chosen_rewards - out.rejected_rewards)
    torch.testing.assert_close((out.loss, found), (truth, expected), **close)
    loss, chosen, rejected, margins = out  # as callers have taken it since before there were other preferences
    assert loss is out.loss and chosen is out.chosen_rewards and rejected is out.rejected_rewards
    assert margins is out.margins


@given(rows=st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4), st.integers(0, 2)), max_size=9))
def test_reward_model_loss_counts_pairs_within_prompts(rows: list[tuple[float, int, int]]) -> None:
    """Mean over the pairs of a prompt, then over prompts; ties make no pair."""
    scores = torch.tensor([r[0] for r in rows], dtype=torch.float64, requires_grad=True)
    ranks, prompts = torch.tensor([r[1] for r in rows]), torch.tensor([r[2] for r in rows])
    loss = fastrl.reward_model_loss(scores, ranks.reshape(-1), prompts.reshape(-1).long())
    means = []
    for prompt in {r[2] for r in rows}:
        group = [r for r in rows if r[2] == prompt]
        pairs = [sorted((a, b), key=lambda r: r[1]) for a, b in combinations(group, 2) if a[1] != b[1]]
        if pairs:
            means.append(-sum(log_sigmoid(best[0] - worst[0]) for best, worst in pairs) / len(pairs))
    expected = sum(means) / len(means) if means else 0.0
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-13)
    loss.backward()
    assert scores.grad is not None and scores.grad.isfinite().all()
    assert abs(scores.grad.sum().item()) < 1e-12  # a common shift changes nothing


ONE = torch.ones(2)


def linear_dpo(count: int = 2, **changes: Any) -> Any:
    """A call for responses of two tokens each."""
    tokens = {"targets": torch.ones(count, 2).long(), "mask": torch.ones(count, 2), "ref_logprobs": torch.ones(count)}
    return fastrl.linear_dpo_loss(torch.ones(count, 2, 4), torch.ones(5, 4), **(tokens | changes))


@refused(
    (lambda: fastrl.dpo_loss(torch.ones(2, 2), ONE, ONE, ONE), ValueError, "must have shape (pairs,), got (2, 2)"),
    (lambda: fastrl.dpo_loss(ONE, torch.ones(3), ONE, ONE), ValueError, "rejected_logprobs must have shape (2,)"),
    (lambda: fastrl.dpo_loss(ONE, ONE, [1], ONE), TypeError, "ref_chosen must be a tensor, got list"),
    (lambda: fastrl.dpo_loss(ONE, ONE, ONE, ONE, beta=0), ValueError, "beta must be finite and > 0, got 0"),
    (lambda: fastrl.reward_model_loss(ONE, torch.ones(3), ONE.long()), ValueError, "ranks must have shape (2,)"),
    (lambda: fastrl.reward_model_loss(ONE, [1, 2], ONE.long()), TypeError, "ranks must be a tensor, got list"),
    (lambda: fastrl.reward_model_loss(ONE, ONE, ONE), TypeError, "prompt_ids must be one of"),
    (lambda: linear_dpo(3), ValueError, "an even number, got 3"),
    (
        lambda: linear_dpo(ref_logprobs=torch.ones(2, 2)),
        ValueError,
        "ref_logprobs must have shape (2,) (one per response, summed), got (2, 2)",
    ),
    (lambda: linear_dpo(mask=None), TypeError, "mask must be a bool or 0/1 tensor, got NoneType"),
    literally=True,
)
def test_bad_input(call: Any) -> None:
    call()
