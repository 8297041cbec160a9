"""Rows and gradients that change nothing cost no matrix product: operations as counted by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fastrl
from fastrl.planning.plans import use_plan

# Four responses; H is large enough that products dominate, small enough to take no time.
RESPONSES, LENGTH, VOCAB, WIDTH = 4, 16, 48, 32
N = RESPONSES * LENGTH


def operations(call: Callable[[], Any]) -> int:
    """Floating-point operations of the matrix products in a call and its backward."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        call()
    factors = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2)}  # their places among the arguments
    total = 0
    for event in run.events():
        if event.name in factors:
            a, b = (event.input_shapes[i] for i in factors[event.name])
            total += 2 * a[0] * a[1] * b[1]
    return total


def units(rows: int, products: float) -> float:
    return products * 2 * rows * VOCAB * WIDTH


class Call:
    """A loss and its backward on fresh leaves."""

    def __init__(
        self, objective: Any, plan: str, *, weight: bool = True, hidden: bool = True, **arguments: Any
    ) -> None:
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(RESPONSES, LENGTH, WIDTH, generator=g).requires_grad_(hidden)
        self.weight = torch.randn(VOCAB, WIDTH, generator=g).div_(8).requires_grad_(weight)
        self.targets = torch.randint(VOCAB, (RESPONSES, LENGTH), generator=g)
        self.old = fastrl.linear_token_logprobs(self.hidden.detach(), self.weight.detach(), self.targets).logprobs
        self.objective, self.plan = objective, plan
        self.arguments: dict[str, Any] = {
            "advantages": torch.ones(RESPONSES),
            "old_logprobs": self.old + 0.01,
            **arguments,
        }

    def __call__(self) -> None:
        with use_plan(self.plan):
            out = fastrl.linear_policy_loss(
                self.hidden, self.weight, self.targets, objective=self.objective, memory_budget="1GiB", **self.arguments
            )
        if out.loss.requires_grad:
            out.loss.backward()


HALF = torch.arange(N).view(RESPONSES, LENGTH) % 2 == 0
GSPO = fastrl.GSPO(clip_low=0.5, clip_high=0.5)


@pytest.mark.parametrize(
    ("objective", "plan", "products"),
    [
        (fastrl.DAPO(), "forward-gradient", 3),
        (fastrl.DAPO(), "recompute", 4),
        (fastrl.DAPO(), "two-pass", 5),
        (GSPO, "whole-response", 3),
        (GSPO, "recompute", 4),
        (GSPO, "two-pass", 5),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_masked_rows_enter_no_product(objective: Any, plan: str, products: int) -> None:
    assert operations(Call(objective, plan)) == units(N, products)
    assert operations(Call(objective, plan, mask=HALF)) == units(N // 2, products)
    assert operations(Call(objective, plan, mask=HALF, num_tokens=N // 2)) == units(N // 2, products)
    assert operations(Call(objective, plan, mask=torch.zeros_like(HALF))) == 0


@pytest.mark.parametrize(
    ("objective", "plan", "forward", "backward"),
    [
        (fastrl.DAPO(), "forward-gradient", 1, 2),
        (fastrl.DAPO(), "recompute", 1, 3),
        (fastrl.DAPO(), "two-pass", 1, 4),
        (GSPO, "whole-response", 1, 2),
        (GSPO, "recompute", 1, 3),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_rows_without_an_advantage_are_not_differentiated(
    objective: Any, plan: str, forward: int, backward: int
) -> None:
    advantages = torch.tensor([1.0, 0.0, 0.0, -1.0])
    half = units(N, forward) + units(N // 2, backward)
    assert operations(Call(objective, plan, advantages=advantages)) == half
    weights = torch.ones(RESPONSES, LENGTH)
    weights[1:3] = 0
    assert operations(Call(objective, plan, token_weights=weights)) == half
    masked = units(N // 2, forward) + units(N // 4, backward)
    assert operations(Call(objective, plan, advantages=advantages, mask=HALF)) == masked
    # A KL or an entropy term flows back without an advantage.
    for more in ({"kl": fastrl.KL("k3", 0.1)}, {"entropy_coef": 0.01}):
        call = Call(objective.replace(**more), plan, advantages=advantages, ref_logprobs=torch.zeros(RESPONSES, LENGTH))
        assert operations(call) == units(N, forward + backward)


@pytest.mark.parametrize(("plan", "backward"), [("recompute", 3), ("two-pass", 4)])
def test_clipped_rows_turn_out_idle(plan: str, backward: int) -> None:
    """With A > 0 and a ratio above 1 + clip the gradient is 0."""
    call = Call(fastrl.DAPO(), plan)
    call.arguments["old_logprobs"] = call.old - HALF.float()
    assert operations(call) == units(N, 1) + units(N // 2, backward)


@pytest.mark.parametrize(
    ("objective", "plan", "needs", "products"),
    [
        (fastrl.DAPO(), "forward-gradient", (True, False), 2),
        (fastrl.DAPO(), "forward-gradient", (False, True), 2),
        (GSPO, "whole-response", (True, False), 2),
        (GSPO, "whole-response", (False, True), 2),
        (GSPO, "recompute", (True, False), 3),
        (GSPO, "recompute", (False, True), 3),
        (GSPO, "frozen-head", (True, False), 2),
        (GSPO.replace(entropy_coef=0.1), "frozen-head", (True, False), 3),
        (GSPO, "forward", (False, False), 1),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_gradients_that_are_not_needed_cost_nothing(
    objective: Any, plan: str, needs: tuple[bool, bool], products: int
) -> None:
    assert operations(Call(objective, plan, hidden=needs[0], weight=needs[1])) == units(N, products)


def test_rows_without_an_upstream_gradient() -> None:
    """Log-probabilities that the loss does not read cost no backward product."""
    call = Call(None, "recompute")

    def run() -> None:
        out = fastrl.linear_token_logprobs(call.hidden, call.weight, call.targets)
        out.logprobs[0].sum().backward()

    assert operations(run) == units(N, 1) + units(LENGTH, 3)
