"""A whole training step of a language model, with each contender for head and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fastrl.bench import heads
from fastrl.bench.contenders import Contender, Outcome, Run
from fastrl.bench.heads import Candidate, Size
from fastrl.bench.linear_workloads import products
from fastrl.bench.measure import Row
from fastrl.bench.problems import Tokens
from fastrl.bench.step_problem import StepProblem, hidden_states
from fastrl.bench.workloads import Head, HeadLoss, Workload

#: The step without head and loss: it determines the share of head and loss in the others' steps.
BODY = "the model's body alone (loss: the mean of its hidden states)"
#: So small that the weights, and with them the workload, stay the same from step to step.
_LEARNING_RATE = 1e-6


def workload(problem: StepProblem) -> Workload:
    """One step: forward, PPO's clipped loss, backward, AdamW."""
    first, *others = heads.policy_candidates()
    candidates = [replace(first, name="fastrl, linear_policy_loss"), heads.ours_from_logits(), *others]
    checkpointed = "with" if problem.architecture.checkpointed else "no"
    return Workload(
        "step",
        f"forward, PPO's clipped loss (off-policy), backward, AdamW; Qwen3's layers, {problem.weights / 1e6:,.4g} M"
        f" weights, {checkpointed} gradient checkpointing",
        [_contender(problem, candidate) for candidate in candidates],
        problem.expected,
    )


def body(problem: StepProblem) -> Contender:
    """The same step with the body alone; the loss is the mean of its hidden states."""

    def head(tokens: Tokens) -> Head:
        return lambda hidden, weight: HeadLoss(hidden.float().mean())

    return Contender(BODY, partial(_step, problem, head), problem.bytes_needed())


def head_products(problem: StepProblem) -> Contender:
    """The head's three matrix products alone, at the step's size."""
    arch, size = problem.architecture, _size(problem)

    def prepare() -> Run:
        # Random, because a GPU multiplies constants faster than data.
        hidden, weight = (
            torch.randn(n, arch.width, dtype=arch.dtype, device=arch.device) for n in (size.tokens, size.vocab)
        )
        return products(hidden, weight, backward=True).prepare()

    return Contender("the head's three matrix products alone", prepare, size.once + size.gradients)


def add_shares(rows: list[Row], body: Row) -> None:
    """Fill the share of head and loss in each step's time: all but the body's."""
    for row in rows:
        if body.milliseconds_median is not None and row.milliseconds_median is not None:
            row.share_of_step = max(0.0, 1 - body.milliseconds_median / row.milliseconds_median)


def _contender(problem: StepProblem, candidate: Candidate) -> Contender:
    needed = problem.bytes_needed() + candidate.bytes_needed(_size(problem))
    return Contender(candidate.name, partial(_step, problem, candidate.make), needed, candidate.ours)


def _size(problem: StepProblem) -> Size:
    architecture = problem.architecture
    return Size(problem.tokens.count, architecture.width, architecture.vocab, architecture.dtype.itemsize)


def _step(problem: StepProblem, make: Callable[[Tokens], Head]) -> Run:
    head = make(problem.tokens)
    # Each contender makes its own model, with the same weights as the others: a copy would need the original in memory.
    model = problem.architecture.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    def call() -> Outcome:
        optimizer.zero_grad(set_to_none=True)
        hidden = hidden_states(model, problem.inputs)
        result = head(hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight)
        result.loss.backward()
        optimizer.step()
        # Gradients are kept until the next step, so that they count as results, not as temporary memory.
        gradients = {"norm": model.model.norm.weight.grad, "weight": model.lm_head.weight.grad}
        return Outcome(result.loss.detach(), result.logprobs, result.entropy, gradients)

    return Run(call)
