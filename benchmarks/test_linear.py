"""fastrl's paths from hidden states and the head, to compare commits; the bare products show the machine's speed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fastrl.bench import heads
from fastrl.bench.linear_workloads import products, workloads
from fastrl.bench.measure import default_device
from fastrl.bench.memory_workloads import BUDGETS
from fastrl.bench.problems import LinearProblem, linear_problem

DEVICE = default_device()
SIZES = {
    # the size of the CPU target relative to the three products; a narrow head, where row work weighs most
    "cpu": [(2048, 512, 32768, torch.float32), (2048, 128, 32768, torch.float32)],
    # a 7B-shaped and a 1.5B-shaped head with a Qwen vocabulary
    "cuda": [(8192, 4096, 151936, torch.bfloat16), (8192, 2048, 151936, torch.bfloat16)],
}[DEVICE]
WORKLOADS = ["loss and gradients", "cross-entropy", "statistics"]

sizes = pytest.mark.parametrize(
    ("n", "width", "vocab", "dtype"), SIZES, ids=lambda value: str(value).removeprefix("torch.")
)


@cache
def problem(n: int, width: int, vocab: int, dtype: torch.dtype) -> LinearProblem:
    return linear_problem(n, width, vocab, dtype, DEVICE)


@sizes
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("contender", ["fastrl", "products"])
def test_linear(n, width, vocab, dtype, workload, contender, time_run) -> None:
    inputs = problem(n, width, vocab, dtype)
    if contender == "products":
        run = products(inputs.hidden, inputs.weight, backward=workload != "statistics").prepare()
    else:
        chosen = next(w for w in workloads(inputs) if w.name == workload)
        run = next(s for s in chosen.contenders if s.name == contender).prepare()
    time_run(f"linear, {workload}, {n} x {width} x {vocab} {dtype}", run)


@sizes
@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_budget(n, width, vocab, dtype, budget, time_run) -> None:
    """The plan for each budget; a budget too small for any plan is skipped, with the smallest that is enough."""
    contender = heads.contender(problem(n, width, vocab, dtype), heads.ours(budget))
    time_run(f"budgets, {n} x {width} x {vocab} {dtype}", contender.prepare())
