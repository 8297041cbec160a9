"""What a loss from logits and its backward cost the host: Python, autograd and launches, whatever the GPU then does."""

from __future__ import annotations

from fastrl.bench.logits_workloads import loss_contenders
from fastrl.bench.problems import LogitsProblem
from fastrl.bench.workloads import Workload


def workload(problem: LogitsProblem) -> Workload:
    """The logits suite's losses, at a size where the work itself is next to nothing."""
    return Workload(
        "issue loss and gradient",
        "the host's time to issue PPO's clipped loss (off-policy) and its backward, without waiting for a GPU",
        loss_contenders(problem),
        problem.expected_loss(),
    )
