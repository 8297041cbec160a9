"""The workloads that start from hidden states (N, H) and the output head (V, H), and their contenders."""

from __future__ import annotations

from functools import partial

import torch

import fastrl
from fastrl.bench import heads, peers, plain
from fastrl.bench.contenders import Contender, Outcome, Run
from fastrl.bench.heads import Candidate
from fastrl.bench.problems import LinearProblem
from fastrl.bench.workloads import COMPILED, EAGER, Workload, compiled


def workloads(problem: LinearProblem) -> list[Workload]:
    """Two losses with their gradients, and statistics alone."""
    unit = product_flops(problem)
    apple = Candidate("Apple cut-cross-entropy", peers.apple_policy_head, lambda s: 2 * s.gradients)
    return [
        Workload(
            "loss and gradients",
            "PPO's clipped loss (off-policy) and its gradients for the hidden states and the weight",
            [heads.contender(problem, c) for c in (*heads.policy_candidates(), apple)],
            problem.expected_loss(),
            workload_flops=3 * unit,
        ),
        Workload(
            "cross-entropy",
            "the mean cross-entropy of the targets and its gradients for the hidden states and the weight",
            [heads.contender(problem, c) for c in heads.cross_entropy_candidates()],
            problem.expected_cross_entropy(),
            workload_flops=3 * unit,
        ),
        Workload(
            "statistics",
            "log-probabilities and entropies, forward only",
            _statistics_contenders(problem),
            problem.expected_statistics(),
            workload_flops=unit,
        ),
    ]


def product_flops(problem: LinearProblem) -> int:
    """The floating-point operations of one matrix product of the problem's size."""
    return 2 * problem.hidden.numel() * problem.weight.shape[0]


def products(hidden: torch.Tensor, weight: torch.Tensor, backward: bool) -> Contender:
    """The bare matrix products: the least time of any method that computes the logits once."""
    name = "the three matrix products alone" if backward else "the matrix product alone"
    return Contender(
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


def _statistics_contenders(problem: LinearProblem) -> list[Contender]:
    size = heads.size_of(problem)
    tile = 1 << 30
    return [
        Contender("fastrl", partial(_statistics, problem), 2 * tile, ours=True),
        Contender(EAGER, partial(_plain_statistics, problem, compile=False), size.once + 3 * size.wide),
        Contender(COMPILED, partial(_plain_statistics, problem, compile=True), size.once + size.wide),
        Contender("TRL chunked head", partial(peers.trl_linear_statistics, problem), tile),
        Contender("Apple cut-cross-entropy", partial(peers.apple_linear_statistics, problem), tile),
    ]


def _statistics(problem: LinearProblem) -> Run:
    def call() -> Outcome:
        result = fastrl.linear_token_logprobs(problem.hidden, problem.weight, problem.tokens.targets, entropy=True)
        return Outcome(None, result.logprobs, result.entropy, {})

    return Run(call)


def _plain_statistics(problem: LinearProblem, compile: bool) -> Run:
    statistics = compiled(plain.linear_statistics) if compile else plain.linear_statistics

    def call() -> Outcome:
        logprobs, entropy = statistics(problem.hidden, problem.weight, problem.tokens.targets)
        return Outcome(None, logprobs, entropy, {})

    return Run(call)
