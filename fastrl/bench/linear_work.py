"""The works that start from hidden states (N, H) and the output head (V, H), and who does them."""

from __future__ import annotations

from functools import partial

import torch

import fastrl

from . import peers, plain
from .measure import Outcome, Run, Subject
from .problems import LinearProblem
from .works import COMPILED, EAGER, Work, compiled


def works(problem: LinearProblem) -> list[Work]:
    """One loss with its gradients, statistics alone."""
    unit = 2 * problem.hidden.numel() * problem.weight.shape[0]  # operations of one matrix product
    return [
        Work(
            "loss and gradients",
            "PPO's clipped loss (off-policy) and its gradients for the hidden states and the weight",
            _loss_subjects(problem), problem.loss_truth(), work_flops=3 * unit,
        ),
        Work(
            "statistics", "log-probabilities and entropies, forward only",
            _statistics_subjects(problem), problem.statistics_truth(), work_flops=unit,
        ),
    ]  # fmt: skip


def products(problem: LinearProblem, backward: bool) -> Subject:
    """The bare matrix products: what no method can go below that forms the logits once."""
    name = "the three matrix products alone" if backward else "the matrix product alone"
    return Subject(name, partial(_products, problem, backward), _logits_bytes(problem))


def _logits_bytes(problem: LinearProblem) -> int:
    return problem.hidden.shape[0] * problem.weight.shape[0] * problem.weight.element_size()


def _products(problem: LinearProblem, backward: bool) -> Run:
    hidden, weight = problem.hidden, problem.weight
    logits = weight.new_empty(hidden.shape[0], weight.shape[0])
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> Outcome:
        torch.mm(hidden, weight.t(), out=logits)
        if backward:
            torch.mm(logits, weight, out=d_hidden)
            torch.mm(logits.t(), hidden, out=d_weight)
        return Outcome(None, None, None, {})

    return Run(call)


def _loss_subjects(problem: LinearProblem) -> list[Subject]:
    once = _logits_bytes(problem)
    wide = 4 * once // problem.weight.element_size()
    gradients = 4 * (problem.hidden.numel() + problem.weight.numel())
    tile = 1 << 30
    return [
        Subject("fastrl", partial(_loss, problem), 2 * gradients + 2 * tile, ours=True),
        Subject(EAGER, partial(_plain_loss, problem, compile=False), once + 5 * wide + gradients),
        Subject(COMPILED, partial(_plain_loss, problem, compile=True), once + 3 * wide + gradients),
        Subject("Liger LigerFusedLinearGRPOLoss", partial(peers.liger_linear_loss, problem), 2 * gradients + tile),
        Subject("TRL chunked head", partial(peers.trl_linear, problem, backward=True), 2 * gradients + tile),
        Subject("Apple cut-cross-entropy", partial(peers.apple_linear, problem, backward=True), 2 * gradients),
    ]


def _statistics_subjects(problem: LinearProblem) -> list[Subject]:
    once = _logits_bytes(problem)
    wide = 4 * once // problem.weight.element_size()
    tile = 1 << 30
    return [
        Subject("fastrl", partial(_statistics, problem), 2 * tile, ours=True),
        Subject(EAGER, partial(_plain_statistics, problem, compile=False), once + 3 * wide),
        Subject(COMPILED, partial(_plain_statistics, problem, compile=True), once + wide),
        Subject("TRL chunked head", partial(peers.trl_linear, problem, backward=False), tile),
        Subject("Apple cut-cross-entropy", partial(peers.apple_linear, problem, backward=False), tile),
    ]


def _loss(problem: LinearProblem) -> Run:
    tokens = problem.tokens
    hidden = tokens.padded(problem.hidden).detach().requires_grad_()
    weight = problem.weight.detach().requires_grad_()
    targets, old = tokens.padded(tokens.targets), tokens.padded(tokens.old)
    objective = fastrl.PPO(clip=plain.CLIP)

    def call() -> Outcome:
        found = fastrl.linear_policy_loss(
            hidden, weight, targets, objective=objective, advantages=tokens.per_response, old_logprobs=old
        )
        d_hidden, d_weight = torch.autograd.grad(found.loss, (hidden, weight))
        return Outcome(found.loss.detach(), found.logprobs, found.entropy, {"hidden": d_hidden, "weight": d_weight})

    return Run(call)


def _plain_loss(problem: LinearProblem, compile: bool) -> Run:
    policy_loss = compiled(plain.linear_policy_loss) if compile else plain.linear_policy_loss
    tokens = problem.tokens
    hidden, weight = (x.detach().requires_grad_() for x in (problem.hidden, problem.weight))

    def call() -> Outcome:
        loss, logprobs, entropy = policy_loss(
            hidden, weight, tokens.targets, tokens.old, tokens.advantages, tokens.count
        )
        d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
        return Outcome(loss.detach(), logprobs.detach(), entropy, {"hidden": d_hidden, "weight": d_weight})

    return Run(call)


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
