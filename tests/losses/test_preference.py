"""Preference losses against formulas written out pair by pair in float64."""

from __future__ import annotations

import math
import re
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


def test_dpo_is_the_mean_over_pairs() -> None:
    numbers = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen, rejected, ref_chosen, ref_rejected = (x.clone().requires_grad_() for x in 3 * numbers)
    loss = fastrl.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)
    deltas = [0.3 * ((a - c) - (b - d)) for a, b, c, d in (3 * numbers).t().tolist()]
    torch.testing.assert_close(loss.item(), -sum(map(log_sigmoid, deltas)) / 5, **EXACT)
    loss.backward()
    expected = torch.tensor([-0.3 / (1 + math.exp(x)) / 5 for x in deltas], dtype=torch.float64)
    torch.testing.assert_close(chosen.grad, expected, **EXACT)
    torch.testing.assert_close(rejected.grad, -expected, **EXACT)
    assert ref_chosen.grad is None and ref_rejected.grad is None
    huge = torch.tensor([-1e4], requires_grad=True)  # a hopeless pair: the slope is beta, not 0 or NaN
    fastrl.dpo_loss(huge, -huge.detach(), 0 * huge.detach(), 0 * huge.detach()).backward()
    assert huge.grad is not None and huge.grad.item() == pytest.approx(-0.1)
    nothing = torch.zeros(0, requires_grad=True)
    assert fastrl.dpo_loss(nothing, nothing, nothing, nothing).item() == 0


@pytest.mark.parametrize("packed", [False, True])
def test_linear_dpo_equals_whole_logits(backend: str, backend_device: str, packed: bool) -> None:
    """Two pairs of responses of 3, 1, 4 and 2 tokens after prompts; 40 entries, as small as a vocabulary goes."""
    g = torch.Generator().manual_seed(1)
    lengths, time = [3, 1, 4, 2], 5
    hidden = torch.randn(4, time, 8, generator=g)
    weight, bias = torch.randn(40, 8, generator=g), torch.randn(40, generator=g)
    targets = torch.randint(40, (4, time), generator=g)
    mask = torch.zeros(4, time, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, 1 : 1 + length] = True
    ref = torch.randn(4, generator=g) - 5
    options: dict[str, Any] = {"beta": 0.2, "temperature": 0.9}
    if packed:  # the same without the padding behind each response
        kept = torch.arange(time) < 1 + torch.tensor(lengths)[:, None]
        options["cu_seqlens"] = torch.tensor([0, *(1 + torch.tensor(lengths)).cumsum(0)], dtype=torch.int32).to(
            backend_device
        )
    else:
        kept = torch.ones(4, time, dtype=torch.bool)

    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    log_p = torch.log_softmax((leaves[0] @ leaves[1].T + leaves[2]) / 0.9, -1)
    sums = (log_p.gather(-1, targets[..., None])[..., 0] * mask).sum(-1)
    truth = fastrl.dpo_loss(*sums.chunk(2), *ref.double().chunk(2), beta=0.2)
    expected = torch.autograd.grad(truth, leaves)

    shaped = [hidden[kept] if packed else hidden, weight, bias]
    h, w, b = (x.to(backend_device).clone().requires_grad_() for x in shaped)
    y, m = ((x[kept] if packed else x).to(backend_device) for x in (targets, mask))
    out = fastrl.linear_dpo_loss(h, w, y, m, ref.to(backend_device), bias=b, **options)
    found = torch.autograd.grad(out.loss, (h, w, b))
    # float32 sums of a dozen terms
    close = {"rtol": 2e-5, "atol": 2e-6, "check_dtype": False, "check_device": False}
    torch.testing.assert_close(out.loss, truth, **close)
    rewards = 0.2 * (sums - ref)
    torch.testing.assert_close(torch.cat([out.chosen_rewards, out.rejected_rewards]), rewards.detach(), **close)
    torch.testing.assert_close(out.margins, out.chosen_rewards - out.rejected_rewards)
    for actual, truth_gradient in zip(found, expected, strict=True):
        reference = truth_gradient[kept] if packed and truth_gradient.ndim == 3 else truth_gradient
        torch.testing.assert_close(actual, reference, **close)


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


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fastrl.dpo_loss(torch.ones(2, 2), ONE, ONE, ONE), ValueError, "must have shape (pairs,), got (2, 2)"),
        (lambda: fastrl.dpo_loss(ONE, torch.ones(3), ONE, ONE), ValueError, "rejected_logprobs must have shape (2,)"),
        (lambda: fastrl.dpo_loss(ONE, ONE, [1], ONE), TypeError, "ref_chosen must be a tensor, got list"),
        (lambda: fastrl.dpo_loss(ONE, ONE, ONE, ONE, beta=0), ValueError, "beta must be finite and > 0, got 0"),
        (lambda: fastrl.reward_model_loss(ONE, torch.ones(3), ONE.long()), ValueError, "ranks must have shape (2,)"),
        (lambda: fastrl.reward_model_loss(ONE, [1, 2], ONE.long()), TypeError, "ranks must be a tensor, got list"),
        (lambda: fastrl.reward_model_loss(ONE, ONE, ONE), TypeError, "prompt_ids must be one of"),
        (
            lambda: fastrl.linear_dpo_loss(
                torch.ones(3, 2, 4), torch.ones(5, 4), torch.ones(3, 2).long(), torch.ones(3, 2), torch.ones(3)
            ),
            ValueError,
            "an even number, got 3",
        ),
        (
            lambda: fastrl.linear_dpo_loss(
                torch.ones(2, 2, 4), torch.ones(5, 4), torch.ones(2, 2).long(), torch.ones(2, 2), torch.ones(2, 2)
            ),
            ValueError,
            "ref_logprobs must have shape (2,) (one per response, summed), got (2, 2)",
        ),
        (
            lambda: fastrl.linear_dpo_loss(
                torch.ones(2, 2, 4), torch.ones(5, 4), torch.ones(2, 2).long(), None, torch.ones(2)
            ),
            TypeError,
            "mask must be a bool or 0/1 tensor, got NoneType",
        ),
    ],
)
def test_bad_input(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()
