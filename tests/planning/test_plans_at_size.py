"""Every plan at a size where it takes several tiles of a real GEMM: against float64 and against torch without chunks.

On a GPU thousands of rows and a whole vocabulary, in bfloat16 on tensor cores; on a CPU a size that takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from problem import Problem
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


@pytest.fixture(autouse=True)
def float32_between_parts() -> Iterator[None]:
    """A GPU's library may round what it adds between the parts of a long sum to bfloat16: not a plan's doing."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_bf16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction, False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


def off_policy(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Problem:
    mask = torch.rand(shape[:2], generator=torch.Generator().manual_seed(0)) > 0.2
    problem = Problem(device, size=shape, mask=mask, dtype=dtype)
    del problem.head["bias"], problem.arguments["rollout_logprobs"]
    return problem


def relative_error(actual: Tensor, truth: Tensor) -> float:
    return ((actual.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_against_float64_and_an_unchunked_product(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    problem = off_policy(shape, dtype, device)
    whole = cache(problem.plain)
    mask = problem.arguments["mask"]
    for plan, objective, with_weight in CASES:
        truth, truth_gradients = whole(objective, torch.float64, not with_weight)
        plain, plain_gradients = whole(objective, dtype, not with_weight)
        with nullcontext() if plan is None else use_plan(plan):
            found, gradients = problem.by_hidden(objective, frozen=not with_weight, memory_budget=BUDGET)
        for name in ("logprobs", "entropy"):
            actual, exact, torchs = (getattr(x, name)[mask] for x in (found, truth, plain))
            # A tenth more than torch's: the same rounded logits, from products that are summed in another order.
            assert relative_error(actual, exact) <= 1.1 * relative_error(torchs, exact) + 1e-6, (plan, name)
        assert len(gradients) == 1 + with_weight
        for name in gradients:
            actual, exact, torchs = (x[name] for x in (gradients, truth_gradients, plain_gradients))
            # And the rounding of dL/dlogits and of the sum, which torch has as well. Frozen-head keeps
            # d logp / d hidden, rounded: a further error of at most half a unit, evenly spread.
            further = torch.finfo(dtype).eps / 12**0.5 if plan == "frozen-head" else 0.0
            allowed = math.hypot(1.1 * relative_error(torchs, exact), further) + 1e-6
            assert relative_error(actual, exact) <= allowed, (plan, name)
        # The loss sums terms that cancel: an eighth of a unit of the logits' dtype, of the terms' size, is in its sum.
        margin = max(torch.finfo(dtype).eps / 8, 1e-6) * problem.arguments["advantages"].abs().mean()
        assert abs(found.loss - truth.loss) <= abs(plain.loss - truth.loss) + margin, plan
