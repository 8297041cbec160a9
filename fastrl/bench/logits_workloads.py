"""The workloads that start from logits (N, V), and their contenders."""

from __future__ import annotations

from functools import partial

import torch

import fastrl
from fastrl.bench import peers, plain
from fastrl.bench.contenders import Contender, Outcome, Run
from fastrl.bench.problems import LogitsProblem
from fastrl.bench.workloads import COMPILED, EAGER, Workload, compiled

#: The workload that writes no logits-sized output.
FORWARD = "statistics"


def workloads(problem: LogitsProblem) -> list[Workload]:
    """Statistics with gradients, one loss with its gradient, and statistics alone."""
    once = problem.logits.numel() * problem.logits.element_size()  # reading or writing the logits once
    expected = problem.expected_statistics()
    return [
        Workload(
            "statistics and gradients",
            "log-probabilities and entropies, and the gradient of both (arbitrary upstream) in a fresh buffer",
            _statistics_contenders(problem, backward=True),
            expected,
            workload_bytes=3 * once,
        ),
        Workload(
            "loss and gradient",
            "PPO's clipped loss (off-policy) and its gradient",
            loss_contenders(problem),
            problem.expected_loss(),
            workload_bytes=2 * once,
        ),
        Workload(
            FORWARD,
            "log-probabilities and entropies, forward only",
            _statistics_contenders(problem, backward=False),
            expected,
            workload_bytes=once,
        ),
    ]


def _sizes(problem: LogitsProblem) -> tuple[int, int]:
    """Bytes of one tensor of the logits' shape: in their dtype, in float32."""
    return problem.logits.numel() * problem.logits.element_size(), problem.logits.numel() * 4


def _statistics_contenders(problem: LogitsProblem, backward: bool) -> list[Contender]:
    once, wide = _sizes(problem)
    plain_run = partial(_plain_statistics, problem, backward)
    trl_run = partial(peers.trl_statistics, problem, backward=backward)
    return [
        Contender("fastrl", partial(_statistics, problem, backward), once, ours=True),
        Contender(EAGER, partial(plain_run, compile=False), 5 * wide),
        Contender(COMPILED, partial(plain_run, compile=True), 3 * wide),
        Contender("TRL kernel", partial(trl_run, kernel=True), once),
        Contender("TRL torch", partial(trl_run, kernel=False), 5 * wide),
    ]


def loss_contenders(problem: LogitsProblem) -> list[Contender]:
    """PPO's clipped loss with its gradient: fastrl in place and not in place, plain torch, peers."""
    once, wide = _sizes(problem)
    return [
        Contender("fastrl, in place", partial(_loss, problem, inplace=True), once, ours=True),
        Contender("fastrl", partial(_loss, problem, inplace=False), once, ours=True),
        Contender(EAGER, partial(_plain_loss, problem, compile=False), 5 * wide),
        Contender(COMPILED, partial(_plain_loss, problem, compile=True), 3 * wide),
        Contender("Liger triton_grpo_loss", partial(peers.liger_logits_loss, problem), once),
        Contender("TRL kernel", partial(peers.trl_logits_loss, problem, kernel=True), once),
        Contender("TRL torch", partial(peers.trl_logits_loss, problem, kernel=False), 5 * wide),
    ]


def _statistics(problem: LogitsProblem, backward: bool) -> Run:
    tokens = problem.tokens
    logits = problem.logits.detach().requires_grad_(backward)

    def call() -> Outcome:
        result = fastrl.token_logprobs(logits, tokens.targets, entropy=True)
        assert result.entropy is not None
        outputs = (result.logprobs, result.entropy)
        gradients = {"logits": torch.autograd.grad(outputs, logits, tokens.upstream)[0]} if backward else {}
        return Outcome(None, outputs[0].detach(), outputs[1].detach(), gradients)

    return Run(call)


def _plain_statistics(problem: LogitsProblem, backward: bool, compile: bool) -> Run:
    statistics = compiled(plain.statistics) if compile else plain.statistics
    tokens = problem.tokens
    logits = problem.logits.detach().requires_grad_(backward)

    def call() -> Outcome:
        outputs = statistics(logits, tokens.targets)
        gradients = {"logits": torch.autograd.grad(outputs, logits, tokens.upstream)[0]} if backward else {}
        return Outcome(None, outputs[0].detach(), outputs[1].detach(), gradients)

    return Run(call)


def _loss(problem: LogitsProblem, inplace: bool) -> Run:
    tokens = problem.tokens
    source = tokens.padded(problem.logits)
    logits = (source.clone() if inplace else source.detach()).requires_grad_()
    targets, old = tokens.padded(tokens.targets), tokens.padded(tokens.old)
    objective = fastrl.PPO(clip=plain.CLIP)

    @torch.no_grad()
    def restore() -> None:
        if inplace:
            logits.copy_(source)

    def call() -> Outcome:
        result = fastrl.logits_policy_loss(
            logits, targets, objective=objective, advantages=tokens.per_response, old_logprobs=old, inplace=inplace
        )
        (gradient,) = torch.autograd.grad(result.loss, logits)
        return Outcome(result.loss.detach(), result.logprobs, result.entropy, {"logits": gradient})

    return Run(call, restore)


def _plain_loss(problem: LogitsProblem, compile: bool) -> Run:
    policy_loss = compiled(plain.policy_loss) if compile else plain.policy_loss
    tokens = problem.tokens
    logits = problem.logits.detach().requires_grad_()

    def call() -> Outcome:
        loss, logprobs, entropy = policy_loss(logits, tokens.targets, tokens.old, tokens.advantages, tokens.count)
        (gradient,) = torch.autograd.grad(loss, logits)
        return Outcome(loss.detach(), logprobs.detach(), entropy, {"logits": gradient})

    return Run(call)
