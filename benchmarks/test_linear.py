"""fastrl's paths from hidden states and the head, to compare commits; the bare products show the machine's speed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fastrl.bench.candidates import ours
from fastrl.bench.ceilings import products
from fastrl.bench.measure import default_device
from fastrl.bench.problems import Problem, linear_problem
from fastrl.bench.workloads import BUDGETS, LINEAR

DEVICE = default_device()
SIZES = {
    # the size of the CPU target relative to the three products; a narrow head, where row work weighs most
    "cpu": [(2048, 512, 32768, torch.float32), (2048, 128, 32768, torch.float32)],
    # a 7B-shaped and a 1.5B-shaped head with a Qwen vocabulary
    "cuda": [(8192, 4096, 151936, torch.bfloat16), (8192, 2048, 151936, torch.bfloat16)],
}[DEVICE]

sizes = pytest.mark.parametrize(
    ("n", "width", "vocab", "dtype"), SIZES, ids=lambda value: str(value).removeprefix("torch.")
)


@cache
def problem(n: int, width: int, vocab: int, dtype: torch.dtype) -> Problem:
    return linear_problem(n, width, vocab, dtype, DEVICE)


@sizes
@pytest.mark.parametrize("definition", LINEAR, ids=lambda definition: definition.name)
@pytest.mark.parametrize("contender", ["fastrl", "products"])
def test_linear(n, width, vocab, dtype, definition, contender, time_run) -> None:
    given = problem(n, width, vocab, dtype)
    if contender == "products":
        run = products(*given.inputs.values(), range(1 + len(definition.gradients)))
    else:
        chosen = next(c for c in definition.candidates if c.name == contender)
        run = chosen.on(given, definition.gradients).prepare()
    time_run(f"linear, {definition.name}, {n} x {width} x {vocab} {dtype}", run)


@sizes
@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_budget(n, width, vocab, dtype, budget, time_run) -> None:
    """The plan for each budget; a budget too small for any plan is skipped, with the smallest that is enough."""
    contender = ours("fastrl", budget=budget).on(problem(n, width, vocab, dtype))
    time_run(f"budgets, {n} x {width} x {vocab} {dtype}", contender.prepare())
