"""What a loss from logits and its backward cost the host: Python, autograd and launches, whatever the GPU then does."""

from __future__ import annotations

from .logits_work import loss_subjects
from .problems import LogitsProblem
from .works import Work


def work(problem: LogitsProblem) -> Work:
    """The logits suite's losses, at a size where the work itself is next to nothing."""
    return Work(
        "issue loss and gradient",
        "the host's time to issue PPO's clipped loss (off-policy) and its backward, without waiting for a GPU",
        loss_subjects(problem),
        problem.loss_truth(),
    )
