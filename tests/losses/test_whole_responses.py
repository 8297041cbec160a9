"""Preference losses and KTO by the plan that keeps whole pairs or responses, against the one that forms logits twice.

The other tests of these losses hold whatever plan is taken to the papers' formulas; here several chunks are forced.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl.losses import linear
from fastrl.losses import whole_responses as module
from fastrl.planning.plans import use_plan

PAIRS, LENGTH, HIDDEN, VOCAB = 24, 7, 16, 300
KEYS = ("hidden", "weight", "bias")


def arguments(device: str, packed: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Leaves, and the rest of a call of 2 * PAIRS responses of 0 to LENGTH tokens after a prompt's token."""
    g = torch.Generator().manual_seed(3)
    ends = torch.randint(1, LENGTH + 1, (2 * PAIRS,), generator=g)
    place = torch.arange(LENGTH)
    mask, kept = (place >= 1) & (place < ends[:, None]), place < ends[:, None]
    head = {
        "hidden": torch.randn(2 * PAIRS, LENGTH, HIDDEN, generator=g),
        "weight": torch.randn(VOCAB, HIDDEN, generator=g) / 4,
        "bias": torch.randn(VOCAB, generator=g) / 9,
    }
    tokens = {"targets": torch.randint(VOCAB, (2 * PAIRS, LENGTH), generator=g), "mask": mask}
    if packed:
        head["hidden"], tokens = head["hidden"][kept], {k: x[kept] for k, x in tokens.items()}
        tokens["cu_seqlens"] = torch.cat([ends.new_zeros(1), ends.cumsum(0)]).int()
    tokens["ref_logprobs"] = -8 * (mask.sum(1) + torch.rand(2 * PAIRS, generator=g))
    leaves = {k: x.to(device).requires_grad_() for k, x in head.items()}
    return leaves, {k: x.to(device) for k, x in tokens.items()}


def losses(device: str) -> dict[str, Any]:
    desirable = torch.arange(2 * PAIRS, device=device) % 3 > 0
    preferences = {"IPO": fastrl.IPO(), "CPO": fastrl.CPO(), "SPPO": fastrl.SPPO(), "SimPO": fastrl.SimPO()}
    return {
        **{
            name: lambda objective=objective, **k: fastrl.linear_preference_loss(objective=objective, **k)
            for name, objective in preferences.items()
        },
        "KTO": lambda **k: fastrl.linear_kto_loss(desirable=desirable, kl=0.3, **k),
    }


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of at most 32 tokens; the numbers of chunks so far."""
    numbers: list[int] = []

    def spans(counts: list[int], most: int) -> list[tuple[int, int]]:
        found = linear.spans_of(counts, min(most, 32))
        numbers.append(len(found))
        return found

    monkeypatch.setattr(module, "spans_of", spans)
    return numbers


@pytest.mark.parametrize(
    ("name", "packed"),
    [("CPO", False), ("KTO", True)]
    + [
        pytest.param(name, packed, marks=pytest.mark.slow)
        for name, packed in (("CPO", True), ("KTO", False), ("IPO", False), ("SPPO", True), ("SimPO", False))
    ],
)
def test_chunks_of_whole_units_give_what_recompute_gives(
    backend: str, backend_device: str, name: str, packed: bool, small_chunks: list[int]
) -> None:
    leaves, tokens = arguments(backend_device, packed)
    loss_of = losses(backend_device)[name]
    found = {}
    for plan in ("recompute", "whole-response"):
        with use_plan(plan):
            out = loss_of(**leaves, **tokens)
        found[plan] = (*(x.detach() for x in out if x is not None), *torch.autograd.grad(out.loss, [*leaves.values()]))
    assert small_chunks[0] > 3
    torch.testing.assert_close(found["whole-response"], found["recompute"], rtol=2e-5, atol=2e-6)


def test_a_second_backward_needs_another_loss() -> None:
    leaves, tokens = arguments("cpu", False)
    with use_plan("whole-response"):
        loss = fastrl.linear_preference_loss(**leaves, **tokens, objective=fastrl.DPO()).loss
    torch.autograd.grad(3 * loss, [*leaves.values()], retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        torch.autograd.grad(loss, [*leaves.values()])


def test_a_pair_that_is_nan_stays_the_only_one(small_chunks: list[int]) -> None:
    leaves, tokens = arguments("cpu", False)
    with torch.no_grad():
        leaves["hidden"][5, 1] = torch.nan
        tokens["mask"][5, 1] = True
    with use_plan("whole-response"):
        out = fastrl.linear_preference_loss(**leaves, **tokens, objective=fastrl.DPO())
    assert small_chunks[0] > 3
    assert out.losses.isnan().nonzero().flatten().tolist() == [5]
    (hidden,) = torch.autograd.grad(out.loss, leaves["hidden"])
    assert sorted(set(hidden.isnan().nonzero()[:, 0].tolist())) == [5, 5 + PAIRS]


def test_one_response_alone() -> None:
    """Its tokens share one coefficient, which autograd gives as one number."""
    leaves, tokens = arguments("cpu", False)
    head, one = {k: leaves[k] for k in ("weight", "bias")}, {k: x[2:3] for k, x in tokens.items()}
    one["mask"] = torch.ones(1, LENGTH)
    gradients = []
    for plan in ("whole-response", "recompute"):
        with use_plan(plan):
            out = fastrl.linear_kto_loss(leaves["hidden"][2:3], **head, **one, desirable=torch.ones(1))
        gradients.append(torch.autograd.grad(out.loss, [*leaves.values()]))
    torch.testing.assert_close(*gradients)


def test_a_budget_for_less_than_a_pair_is_one_for_other_plans_only() -> None:
    leaves, tokens = arguments("cpu", False)
    call = partial(fastrl.linear_preference_loss, **leaves, **tokens, objective=fastrl.DPO())
    with use_plan("whole-response"), pytest.raises(ValueError, match="the smallest possible is") as error:
        call(memory_budget=1000)
    least = int(re.search(r"smallest possible is (\d+)", str(error.value))[1])
    with use_plan("whole-response"):
        call(memory_budget=least)
    with pytest.raises(ValueError, match="the smallest possible is") as error:
        call(memory_budget=1000)
    assert int(re.search(r"smallest possible is (\d+)", str(error.value))[1]) < least


def test_it_is_the_plan_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names, planned = [], module.planned

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = planned(*args, **kwargs)
        names.append(result[1].name)
        return result

    monkeypatch.setattr(module, "planned", spy)
    leaves, tokens = arguments("cpu", False)
    fastrl.linear_preference_loss(**leaves, **tokens, objective=fastrl.DPO())
    with torch.no_grad():
        fastrl.linear_preference_loss(**leaves, **tokens, objective=fastrl.DPO())
    half = {k: x.half() for k, x in leaves.items()}
    fastrl.linear_preference_loss(**half, **tokens, objective=fastrl.DPO())
    assert (names[0], names[1], names[-1]) == ("whole-response", "forward", "recompute")
