"""A whole training step of a language model, and whose head and loss it goes through."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from . import heads
from .heads import Candidate, Size
from .linear_work import products
from .measure import Outcome, Row, Run, Subject
from .problems import Tokens
from .step_problem import StepProblem, hidden_states
from .works import Head, HeadLoss, Work

#: The step without head and loss: what the others' share of the step is told by.
BODY = "the model's body alone (loss: the mean of its hidden states)"
#: So small that the weights, and with them the work, stay the same from step to step.
_LEARNING_RATE = 1e-6


def work(problem: StepProblem) -> Work:
    """One step: forward, PPO's clipped loss, backward, AdamW."""
    first, *others = heads.policy_candidates()
    candidates = [replace(first, name="fastrl, linear_policy_loss"), heads.ours_from_logits(), *others]
    weights = sum(p.numel() for p in problem.model.parameters()) / 1e6
    checkpointed = "with" if problem.checkpointed else "no"
    return Work(
        "step",
        f"forward, PPO's clipped loss (off-policy), backward, AdamW; Qwen3's layers, {weights:,.4g} M weights,"
        f" {checkpointed} gradient checkpointing",
        [_subject(problem, candidate) for candidate in candidates],
        problem.truth,
    )


def body(problem: StepProblem) -> Subject:
    """The same step through the body alone, whose hidden states' mean is the loss."""

    def head(tokens: Tokens) -> Head:
        return lambda hidden, weight: HeadLoss(hidden.float().mean())

    return Subject(BODY, partial(_step, problem, head), problem.bytes_needed())


def head_products(problem: StepProblem) -> Subject:
    """The head's three matrix products alone, at the step's size."""
    weight = problem.weight.detach()
    # Random: a GPU multiplies constants faster than data.
    hidden = torch.randn(problem.tokens.count, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return products(hidden, weight, backward=True)


def add_shares(rows: list[Row], body: Row) -> None:
    """What of each step's time is head and loss: all but the body's."""
    for row in rows:
        if body.milliseconds_median is not None and row.milliseconds_median is not None:
            row.share_of_step = max(0.0, 1 - body.milliseconds_median / row.milliseconds_median)


def _subject(problem: StepProblem, candidate: Candidate) -> Subject:
    vocab, width = problem.weight.shape
    size = Size(problem.tokens.count, width, vocab, problem.weight.element_size())
    needed = problem.bytes_needed() + candidate.bytes_needed(size)
    return Subject(candidate.name, partial(_step, problem, candidate.make), needed, candidate.ours)


def _step(problem: StepProblem, make: Callable[[Tokens], Head]) -> Run:
    head = make(problem.tokens)
    model = copy.deepcopy(problem.model)  # every subject's first step starts from the same weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    def call() -> Outcome:
        optimizer.zero_grad(set_to_none=True)
        hidden = hidden_states(model, problem.inputs)
        found = head(hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight)
        found.loss.backward()
        optimizer.step()
        # Gradients stay until the next step, so that they count as results, not as temporary memory.
        gradients = {"norm": model.model.norm.weight.grad, "weight": model.lm_head.weight.grad}
        return Outcome(found.loss.detach(), found.logprobs, found.entropy, gradients)

    return Run(call)
