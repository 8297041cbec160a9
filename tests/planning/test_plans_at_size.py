"""Every plan at a size where it takes several tiles of a real GEMM: against float64 and against torch without chunks.

On a GPU thousands of rows and a whole vocabulary, in bfloat16 on tensor cores; on a CPU a size that takes a second.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl.planning.plans import use_plan

ON_GPU = torch.cuda.is_available()
# Rows' lengths that 16 bytes divide, and not; responses x tokens, H.
SHAPES = [(8, 512, 1024, 65536), (8, 512, 1024, 50257)] if ON_GPU else [(4, 32, 64, 2048), (4, 32, 64, 1999)]
BUDGET = "512MiB" if ON_GPU else "4MiB"
GRPO, GSPO = fastrl.GRPO(entropy_coef=0.01), fastrl.GSPO(clip_low=0.3, clip_high=0.3)
CASES = [
    (None, GRPO, True),
    ("forward-gradient", GRPO, True),
    ("recompute", GRPO, True),
    ("two-pass", GRPO, True),
    ("whole-response", GSPO, True),
    ("recompute", GSPO, True),
    ("frozen-head", GSPO, False),
    ("frozen-head", GRPO, False),
]


class Found(NamedTuple):
    """What a way of computing the loss gives."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor | None


class Problem:
    """Hidden states (B, T, H), a head (V, H) and what a loss reads beside them, off-policy."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
        responses, length, width, vocab = shape
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(responses, length, width, generator=g).to(dtype).to(device)
        self.weight = (2 * torch.randn(vocab, width, generator=g) / width**0.5).to(dtype).to(device)
        self.targets = torch.randint(vocab, (responses, length), generator=g).to(device)
        gaps = 0.2 * torch.randn(responses, length, generator=g)
        with torch.no_grad():
            logits = self.hidden.float() @ self.weight.float().T
            logp = torch.log_softmax(logits, -1).gather(-1, self.targets[..., None])[..., 0]
        self.arguments = {
            "advantages": torch.randn(responses, generator=g).to(device),
            "old_logprobs": logp + gaps.to(device),
            "ref_logprobs": logp - gaps.to(device),
            "mask": (torch.rand(responses, length, generator=g) > 0.2).to(device),
        }

    def leaves(self, dtype: torch.dtype, with_weight: bool) -> tuple[Tensor, Tensor]:
        hidden, weight = (x.to(dtype, copy=True) for x in (self.hidden, self.weight))
        return hidden.requires_grad_(), weight.requires_grad_(with_weight)

    def without_chunks(self, dtype: torch.dtype, wide: torch.dtype, objective: Any, with_weight: bool) -> Found:
        """The logits of one GEMM in `dtype`, statistics and loss in `wide`."""
        leaves = self.leaves(dtype, with_weight)
        log_p = torch.log_softmax((leaves[0] @ leaves[1].T).to(wide), -1)
        logprobs, entropy = log_p.gather(-1, self.targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
        arguments: dict[str, Any] = {k: v.to(wide) if v.is_floating_point() else v for k, v in self.arguments.items()}
        loss = fastrl.policy_loss(logprobs, objective=objective, entropy=entropy, **arguments).loss
        return _found(loss, logprobs, entropy, leaves)

    def by_plan(self, plan: str | None, objective: Any, with_weight: bool) -> Found:
        leaves = self.leaves(self.hidden.dtype, with_weight)
        with nullcontext() if plan is None else use_plan(plan):
            out = fastrl.linear_policy_loss(
                *leaves, self.targets, objective=objective, memory_budget=BUDGET, **self.arguments
            )
        return _found(out.loss, out.logprobs, out.entropy, leaves)


def _found(loss: Tensor, logprobs: Tensor, entropy: Tensor, leaves: tuple[Tensor, Tensor]) -> Found:
    gradients = torch.autograd.grad(loss, [x for x in leaves if x.requires_grad])
    return Found(loss.detach(), logprobs.detach(), entropy.detach(), gradients[0], (*gradients, None)[1])


def relative_error(actual: Tensor, truth: Tensor) -> float:
    return ((actual.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_against_float64_and_an_unchunked_product(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    problem = Problem(shape, dtype, device)
    whole = cache(problem.without_chunks)
    for plan, objective, with_weight in CASES:
        truth = whole(torch.float64, torch.float64, objective, with_weight)
        plain = whole(dtype, torch.float32, objective, with_weight)
        found = problem.by_plan(plan, objective, with_weight)
        mask = problem.arguments["mask"]
        for name in ("logprobs", "entropy"):
            actual, exact, torchs = (getattr(x, name)[mask] for x in (found, truth, plain))
            # A tenth more than torch's: the same rounded logits, from products that are summed in another order.
            assert relative_error(actual, exact) <= 1.1 * relative_error(torchs, exact) + 1e-6, (plan, name)
        for name in ("d_hidden", "d_weight")[: 1 + with_weight]:
            actual, exact, torchs = (getattr(x, name) for x in (found, truth, plain))
            # And the rounding of dL/dlogits and of the sum, which torch has as well. Frozen-head keeps
            # d logp / d hidden, rounded: a further error of at most half a unit, evenly spread.
            further = torch.finfo(dtype).eps / 12**0.5 if plan == "frozen-head" else 0.0
            assert relative_error(actual, exact) <= math.hypot(1.1 * relative_error(torchs, exact), further) + 1e-6, (
                plan,
                name,
            )
        # The loss sums terms that cancel: an eighth of a unit of the logits' dtype, of the terms' size, is in its sum.
        margin = max(torch.finfo(dtype).eps / 8, 1e-6) * problem.arguments["advantages"].abs().mean()
        assert abs(found.loss - truth.loss) <= abs(plain.loss - truth.loss) + margin, plan
