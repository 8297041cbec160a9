"""The contenders from hidden states (N, H) and the output head (V, H) to a loss, and the memory that each needs.

The linear, memory and step suites run the same heads: fastrl's and plain torch's, listed here with the peers'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl.bench import peers, plain
from fastrl.bench.contenders import Contender, Outcome, Run, Unavailable
from fastrl.bench.problems import LinearProblem, Tokens
from fastrl.bench.workloads import COMPILED, EAGER, Head, HeadLoss, compiled

_GIB = 1 << 30


class Size(NamedTuple):
    """A problem's size, and numbers of bytes that follow from it."""

    tokens: int
    hidden: int
    vocab: int
    element_size: int

    @property
    def once(self) -> int:
        """One tensor of the logits' shape in the problem's dtype."""
        return self.tokens * self.vocab * self.element_size

    @property
    def wide(self) -> int:
        """One tensor of the logits' shape in float32."""
        return self.tokens * self.vocab * 4

    @property
    def gradients(self) -> int:
        """The gradients of hidden states and weight, in float32."""
        return 4 * self.hidden * (self.tokens + self.vocab)


@dataclass(frozen=True)
class Candidate:
    """A named head."""

    name: str
    make: Callable[[Tokens], Head]  # raises Unavailable or ImportError if it cannot run
    bytes_needed: Callable[[Size], int]  # beyond hidden states and weight, roughly
    ours: bool = False


def policy_candidates() -> list[Candidate]:
    """PPO's clipped loss, off-policy."""
    return [
        ours(),
        Candidate(EAGER, partial(_plain_policy, compile=False), lambda s: s.once + 5 * s.wide + s.gradients),
        Candidate(COMPILED, partial(_plain_policy, compile=True), lambda s: s.once + 3 * s.wide + s.gradients),
        Candidate("Liger LigerFusedLinearGRPOLoss", peers.liger_policy_head, lambda s: 2 * s.gradients + _GIB),
        Candidate("TRL chunked head", peers.trl_policy_head, lambda s: 2 * s.gradients + _GIB),
    ]


def cross_entropy_candidates() -> list[Candidate]:
    """The mean cross-entropy of the targets."""
    return [
        Candidate("fastrl", _cross_entropy, lambda s: 2 * s.gradients + 2 * _GIB, ours=True),
        Candidate(EAGER, partial(_plain_cross_entropy, compile=False), lambda s: s.once + 4 * s.wide + s.gradients),
        Candidate(COMPILED, partial(_plain_cross_entropy, compile=True), lambda s: s.once + 3 * s.wide + s.gradients),
        Candidate("torch linear_cross_entropy", peers.torch_cross_entropy_head, lambda s: 2 * s.gradients + 2 * _GIB),
        Candidate(
            "Liger LigerFusedLinearCrossEntropyLoss", peers.liger_cross_entropy_head, lambda s: 2 * s.gradients + _GIB
        ),
        Candidate("Apple cut-cross-entropy", peers.apple_cross_entropy_head, lambda s: 2 * s.gradients),
        Candidate(
            "Apple torch_compile", peers.apple_compiled_cross_entropy_head, lambda s: s.once + 3 * s.wide + s.gradients
        ),
    ]


def ours(memory_budget: str | None = None) -> Candidate:
    """`fastrl.linear_policy_loss`, with the plan that it chooses, or within a budget."""
    name = "fastrl" if memory_budget is None else f"fastrl, {memory_budget}"
    make = partial(policy_head, memory_budget, fastrl.PPO(clip=plain.CLIP))
    return Candidate(name, make, lambda s: 2 * s.gradients + 2 * _GIB, ours=True)


def ours_from_logits() -> Candidate:
    """The plain head, followed by `fastrl.logits_policy_loss(inplace=True)`."""
    return Candidate("fastrl, logits in place", _policy_from_logits, lambda s: s.once + s.gradients, ours=True)


def size_of(problem: LinearProblem) -> Size:
    """The problem's size."""
    (tokens, width), vocab = problem.hidden.shape, problem.weight.shape[0]
    return Size(tokens, width, vocab, problem.weight.element_size())


def contender(problem: LinearProblem, candidate: Candidate) -> Contender:
    """A contender for the candidate's loss and gradients on a problem's inputs."""
    run = partial(_loss_and_gradients, problem, candidate.make)
    return Contender(candidate.name, run, candidate.bytes_needed(size_of(problem)), candidate.ours)


def _loss_and_gradients(problem: LinearProblem, make: Callable[[Tokens], Head]) -> Run:
    head = make(problem.tokens)
    hidden, weight = (x.detach().requires_grad_() for x in (problem.hidden, problem.weight))

    def call() -> Outcome:
        result = head(hidden, weight)
        d_hidden, d_weight = torch.autograd.grad(result.loss, (hidden, weight))
        gradients = {"hidden": d_hidden, "weight": d_weight}
        return Outcome(result.loss.detach(), result.logprobs, result.entropy, gradients)

    return Run(call)


def policy_head(memory_budget: str | None, objective: fastrl.Objective, tokens: Tokens) -> Head:
    """`fastrl.linear_policy_loss` of an objective; Unavailable if no plan fits the budget."""
    targets, old = tokens.padded(tokens.targets), tokens.padded(tokens.old)

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        try:
            result = fastrl.linear_policy_loss(
                tokens.padded(hidden),
                weight,
                targets,
                objective=objective,
                advantages=tokens.per_response,
                old_logprobs=old,
                memory_budget=memory_budget,
            )
        except ValueError as error:
            if memory_budget is None or "memory_budget" not in str(error):
                raise
            raise Unavailable(str(error)) from None  # no plan fits: a valid result, not an error
        return HeadLoss(result.loss, result.logprobs, result.entropy)

    return head


def _policy_from_logits(tokens: Tokens) -> Head:
    targets, old = tokens.padded(tokens.targets), tokens.padded(tokens.old)
    objective = fastrl.PPO(clip=plain.CLIP)

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        logits = torch.nn.functional.linear(tokens.padded(hidden), weight)
        result = fastrl.logits_policy_loss(
            logits, targets, objective=objective, advantages=tokens.per_response, old_logprobs=old, inplace=True
        )
        return HeadLoss(result.loss, result.logprobs, result.entropy)

    return head


def _plain_policy(tokens: Tokens, compile: bool) -> Head:
    policy_loss = compiled(plain.linear_policy_loss) if compile else plain.linear_policy_loss

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        loss, logprobs, entropy = policy_loss(
            hidden, weight, tokens.targets, tokens.old, tokens.advantages, tokens.count
        )
        return HeadLoss(loss, logprobs.detach(), entropy)

    return head


def _cross_entropy(tokens: Tokens) -> Head:
    return lambda hidden, weight: HeadLoss(fastrl.linear_cross_entropy(hidden, weight, tokens.targets))


def _plain_cross_entropy(tokens: Tokens, compile: bool) -> Head:
    cross_entropy = compiled(plain.linear_cross_entropy) if compile else plain.linear_cross_entropy
    return lambda hidden, weight: HeadLoss(cross_entropy(hidden, weight, tokens.targets))
