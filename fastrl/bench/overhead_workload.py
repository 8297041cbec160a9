"""The host's time for a loss from logits and its backward: Python, autograd and launches, without the GPU's work."""

from __future__ import annotations

from fastrl.bench.logits_workloads import loss_contenders
from fastrl.bench.problems import LogitsProblem
from fastrl.bench.workloads import Workload


def workload(problem: LogitsProblem) -> Workload:
    """The logits suite's losses, at a size where the work itself is negligible."""
    return Workload(
        "issue loss and gradient",
        "the host's time to issue PPO's clipped loss (off-policy) and its backward, without waiting for a GPU",
        loss_contenders(problem),
        problem.expected_loss(),
    )
