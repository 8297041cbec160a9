"""fastrl's paths from logits, to compare commits; eager torch shows the machine's speed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fastrl.bench.measure import default_device
from fastrl.bench.problems import Problem, logits_problem
from fastrl.bench.workloads import LOGITS

DEVICE = default_device()
SIZES = {
    # the size of the CPU speed target: rows stay in a core's cache, the whole does not
    "cpu": [(2048, 32768, torch.float32), (2048, 32768, torch.bfloat16), (512, 151936, torch.float32)],
    # a Qwen vocabulary, where a row no longer fits an SM, and a small one, where launches and reductions weigh more
    "cuda": [(8192, 151936, torch.bfloat16), (32768, 32768, torch.bfloat16)],
}[DEVICE]
WORKLOADS = {
    "statistics and gradients": ["fastrl", "eager torch"],
    "loss and gradient": ["fastrl, in place", "fastrl", "eager torch"],
    "statistics": ["fastrl", "eager torch"],
}


@cache
def problem(n: int, vocab: int, dtype: torch.dtype) -> Problem:
    return logits_problem(n, vocab, dtype, DEVICE)


@pytest.mark.parametrize(("n", "vocab", "dtype"), SIZES, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize(
    ("workload", "contender"), [(workload, contender) for workload in WORKLOADS for contender in WORKLOADS[workload]]
)
def test_logits(n, vocab, dtype, workload, contender, time_run) -> None:
    definition = next(w for w in LOGITS if w.name == workload).on(problem(n, vocab, dtype))
    run = next(s for s in definition.contenders if s.name == contender)
    time_run(f"logits, {workload}, {n} x {vocab} {dtype}", run.prepare())
