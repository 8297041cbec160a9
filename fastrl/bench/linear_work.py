"""The works that start from hidden states (N, H) and the output head (V, H), and who does them."""

from __future__ import annotations

from functools import partial

import torch

import fastrl

from . import heads, peers, plain
from .heads import Candidate
from .problems import LinearProblem
from .subjects import Outcome, Run, Subject
from .works import COMPILED, EAGER, Work, compiled


def works(problem: LinearProblem) -> list[Work]:
    """Two losses with their gradients, statistics alone."""
    unit = product_flops(problem)
    apple = Candidate("Apple cut-cross-entropy", peers.apple_policy_head, lambda s: 2 * s.gradients)
    return [
        Work(
            "loss and gradients",
            "PPO's clipped loss (off-policy) and its gradients for the hidden states and the weight",
            [heads.subject(problem, c) for c in (*heads.policy_candidates(), apple)],
            problem.loss_truth(),
            work_flops=3 * unit,
        ),
        Work(
            "cross-entropy",
            "the mean cross-entropy of the targets and its gradients for the hidden states and the weight",
            [heads.subject(problem, c) for c in heads.cross_entropy_candidates()],
            problem.cross_entropy_truth(),
            work_flops=3 * unit,
        ),
        Work(
            "statistics",
            "log-probabilities and entropies, forward only",
            _statistics_subjects(problem),
            problem.statistics_truth(),
            work_flops=unit,
        ),
    ]


def product_flops(problem: LinearProblem) -> int:
    """Operations of one matrix product of the problem's size."""
    return 2 * problem.hidden.numel() * problem.weight.shape[0]


def products(hidden: torch.Tensor, weight: torch.Tensor, backward: bool) -> Subject:
    """The bare matrix products: what no method can go below that forms the logits once."""
    name = "the three matrix products alone" if backward else "the matrix product alone"
    return Subject(
        name, partial(_products, hidden, weight, backward), hidden.shape[0] * weight.shape[0] * weight.element_size()
    )


def _products(hidden: torch.Tensor, weight: torch.Tensor, backward: bool) -> Run:
    logits = weight.new_empty(hidden.shape[0], weight.shape[0])
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    @torch.no_grad()
    def call() -> Outcome:
        torch.mm(hidden, weight.t(), out=logits)
        if backward:
            torch.mm(logits, weight, out=d_hidden)
            torch.mm(logits.t(), hidden, out=d_weight)
        return Outcome(None, None, None, {})

    return Run(call)


def _statistics_subjects(problem: LinearProblem) -> list[Subject]:
    size = heads.size_of(problem)
    tile = 1 << 30
    return [
        Subject("fastrl", partial(_statistics, problem), 2 * tile, ours=True),
        Subject(EAGER, partial(_plain_statistics, problem, compile=False), size.once + 3 * size.wide),
        Subject(COMPILED, partial(_plain_statistics, problem, compile=True), size.once + size.wide),
        Subject("TRL chunked head", partial(peers.trl_linear_statistics, problem), tile),
        Subject("Apple cut-cross-entropy", partial(peers.apple_linear_statistics, problem), tile),
    ]


def _statistics(problem: LinearProblem) -> Run:
    def call() -> Outcome:
        found = fastrl.linear_token_logprobs(problem.hidden, problem.weight, problem.tokens.targets, entropy=True)
        return Outcome(None, found.logprobs, found.entropy, {})

    return Run(call)


def _plain_statistics(problem: LinearProblem, compile: bool) -> Run:
    statistics = compiled(plain.linear_statistics) if compile else plain.linear_statistics

    def call() -> Outcome:
        logprobs, entropy = statistics(problem.hidden, problem.weight, problem.tokens.targets)
        return Outcome(None, logprobs, entropy, {})

    return Run(call)
