"""Clip-Cov's random choice: once per call, from the generator that is given, whatever computes the call."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from exact_policy import Batch, exact_policy
from problem import CLOSE, Problem, assert_same

import fastrl
from fastrl.planning.plans import PLANS, use_plan

SIZE = B, T, H, V = 6, 12, 8, 37
MASK = (torch.arange(T)[None] < torch.tensor([12, 9, 5, 12, 0, 7])[:, None]).int()
FRACTION = 0.2


def clip_cov(seed: int | None = 3) -> fastrl.Objective:
    """Between bounds that admit about half of the tokens."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return fastrl.ClipCov(fraction=FRACTION, cov_low=-0.1, cov_high=9.0, generator=generator)


def posed(**options: Any) -> Problem:
    return Problem("cpu", **{"size": SIZE, "mask": MASK} | options)


def by(problem: Problem, seed: int | None = 3, entry: str = "hidden", **more: Any) -> Any:
    return getattr(problem, f"by_{entry}")(clip_cov(seed), **more)


def test_against_the_oracle() -> None:
    problem = posed()
    given = problem.of_policy_loss()
    logp = problem.stats(problem.leaves(torch.float64))[0].detach().requires_grad_()
    floats = {k: x.double() if x.is_floating_point() else x for k, x in given.items()}
    out = fastrl.policy_loss(logp, objective=clip_cov(), **floats)
    out.loss.backward()
    names = {"advantages": floats["advantages"][:, None], "old": floats["old_logprobs"]}
    batch = Batch.padded(MASK, **names)
    batch.draws = torch.rand(MASK.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    exact = exact_policy(clip_cov(), batch, logp.detach().flatten(), None)
    torch.testing.assert_close((out.loss.detach(), logp.grad.flatten()), (exact.loss, exact.c))
    assert out.metrics["chosen_by_covariance"] == int(FRACTION * MASK.sum()) == exact.metrics["chosen_by_covariance"]


def test_every_plan_and_entry_point_draws_once_and_alike() -> None:
    problem = posed()
    expected = by(problem, entry="logprobs")
    for entry in ("logits", "hidden"):
        assert_same(by(problem, entry=entry), expected, entry)
    made = set()
    for plan in PLANS:
        for frozen in (False, True):
            with use_plan(plan), suppress(ValueError):  # a plan that cannot be followed here
                found = by(problem, frozen=frozen)
                made.add(plan)
            if plan not in made:
                continue
            gradients = {k: x for k, x in expected[1].items() if k in found[1]}
            assert_same(found, (expected[0], gradients), plan)
    assert made == {"whole-response", "frozen-head", "recompute", "two-pass"}


@pytest.mark.parametrize("entry", ["logprobs", "logits", "hidden"])
def test_a_call_takes_one_number_per_token(entry: str) -> None:
    problem, objective, expected = posed(), clip_cov(), torch.Generator().manual_seed(3)
    for _ in range(2):  # a call after the other draws anew
        getattr(problem, f"by_{entry}")(objective)
        torch.rand(MASK.numel(), dtype=torch.float64, generator=expected)
        assert torch.equal(objective.covariance.generator.get_state(), expected.get_state())
    with torch.no_grad():
        fastrl.linear_policy_loss(**problem.leaves(), objective=objective, **problem.arguments)
    torch.rand(MASK.numel(), dtype=torch.float64, generator=expected)
    assert torch.equal(objective.covariance.generator.get_state(), expected.get_state())


def test_a_refused_call_draws_nothing() -> None:
    problem, objective = posed(), clip_cov()
    before = objective.covariance.generator.get_state()
    with pytest.raises(ValueError, match="the smallest possible is"):
        problem.by_hidden(objective, memory_budget=1)
    assert torch.equal(objective.covariance.generator.get_state(), before)


def test_a_second_backward_has_the_same_tokens() -> None:
    problem = posed()
    expected = by(problem)[1]
    leaves = problem.leaves()
    with use_plan("recompute"):
        loss = fastrl.linear_policy_loss(**leaves, objective=clip_cov(), **problem.arguments).loss
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close({k: x.grad / 2 for k, x in leaves.items()}, expected, **CLOSE)


def test_without_a_generator_the_default_one_draws() -> None:
    problem = posed()
    torch.manual_seed(3)
    assert_same(by(problem, None), by(problem), "the default generator in the same state")


def test_every_candidate_is_drawn_as_often() -> None:
    problem, objective = posed(), clip_cov()
    given = problem.of_policy_loss()
    logp = problem.stats(problem.leaves(torch.float64))[0].detach()
    drawn = torch.zeros(B, T)
    calls, number = 2000, int(FRACTION * MASK.sum())
    for _ in range(calls):
        leaf = logp.clone().requires_grad_()
        fastrl.policy_loss(leaf, objective=objective, **given).loss.backward()
        drawn += (leaf.grad == 0) & MASK.bool()
    counts = drawn[(drawn > 0) & (drawn < calls)]  # the gate clips the others, always
    share = number / len(counts)
    assert counts.numel() > 2 * number
    assert ((counts / calls - share).abs() < 5 * (share * (1 - share) / calls) ** 0.5).all()


@pytest.mark.parametrize("number", [1, 7, 30])
def test_kl_cov_takes_the_largest(number: int) -> None:
    """At least one, and of equal ones the first; a token without an advantage is moved too, by every plan."""
    problem = posed(per_token=True)
    problem.arguments["advantages"][0] = 0.0
    fraction = number / int(MASK.sum()) + 1e-6
    objective = fastrl.KLCov(fraction, 0.5)
    expected = problem.by_logprobs(objective)
    assert expected[0].metrics["chosen_by_covariance"] == number
    assert_same(problem.by_hidden(objective), expected, "hidden")
    same = fastrl.policy_loss(
        torch.full((4,), -1.0), objective=objective, advantages=torch.ones(4), old_logprobs=torch.full((4,), -2.0)
    )
    assert same.metrics["chosen_by_covariance"] == max(int(4 * fraction), 1)


def test_compiled() -> None:
    """By the default generator in one graph; one that is given does not go into a graph."""
    problem, given = posed(), posed().of_policy_loss()
    logp = problem.stats(problem.leaves())[0].detach()

    def loss(logp: torch.Tensor) -> torch.Tensor:
        return fastrl.policy_loss(logp, objective=clip_cov(None), **given).loss

    torch.manual_seed(3)
    expected = loss(logp)
    torch.manual_seed(3)
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(logp), expected)
    objective = clip_cov()

    def by_generator(logp: torch.Tensor) -> torch.Tensor:
        return fastrl.policy_loss(logp, objective=objective, **given).loss

    with pytest.raises(torch._dynamo.exc.Unsupported, match="generator of a CovarianceClip cannot be part of a graph"):
        torch.compile(by_generator, backend="eager", fullgraph=True)(logp)
    torch.testing.assert_close(torch.compile(by_generator, backend="eager")(logp), expected)
