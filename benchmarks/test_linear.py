"""Our paths from hidden states and the head, between commits; the bare products tell how fast the machine was."""

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
    # the size of the project's target against the three products on a CPU; a narrow head, where row work weighs most
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
    given = problem(n, width, vocab, dtype)
    if contender == "products":
        run = products(given.hidden, given.weight, backward=workload != "statistics").prepare()
    else:
        found = next(w for w in workloads(given) if w.name == workload)
        run = next(s for s in found.contenders if s.name == contender).prepare()
    time_run(f"linear, {workload}, {n} x {width} x {vocab} {dtype}", run)


@sizes
@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_budget(n, width, vocab, dtype, budget, time_run) -> None:
    """The plan that each budget gets; one that no plan fits is skipped, with the smallest that one does."""
    contender = heads.contender(problem(n, width, vocab, dtype), heads.ours(budget))
    time_run(f"budgets, {n} x {width} x {vocab} {dtype}", contender.prepare())
