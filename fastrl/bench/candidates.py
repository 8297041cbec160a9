"""The candidates for each kind of workload: fastrl's functions, plain torch and the peers, and the memory they need.

A candidate becomes a contender on a problem's inputs. All calls of fastrl's losses that are measured are here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.bench import peers, plain
from fastrl.bench.contenders import COMPILED, EAGER, Contender, Function, Result, Run, Unavailable, differentiated
from fastrl.bench.problems import Problem, Size, Tokens
from fastrl.planning.plans import use_plan

BOTH = ("hidden", "weight")
_GIB = 1 << 30
_AMPLE = 1 << 60  # a budget in bytes that every plan fits
_PPO = fastrl.PPO(clip=plain.CLIP)

Needed = Callable[[Size], int]
#: From logits (N, V) to what a function gets, and what fills it again before each call.
Layout = Callable[[Tokens, Tensor], tuple[Tensor, Callable[[], None]]]


def _flat(tokens: Tokens, logits: Tensor) -> tuple[Tensor, Callable[[], None]]:
    return logits.detach(), lambda: None


def _padded(tokens: Tokens, logits: Tensor) -> tuple[Tensor, Callable[[], None]]:
    return tokens.padded(logits).detach(), lambda: None


def _consumed(tokens: Tokens, logits: Tensor, ignored: int = 0) -> tuple[Tensor, Callable[[], None]]:
    """A copy for a function that overwrites it, with ignored positions after each response."""
    source = tokens.padded(logits)
    responses, length, vocab = source.shape
    copy = source.new_zeros(responses, length + ignored, vocab)

    @torch.no_grad()
    def restore() -> None:
        copy[:, :length] = source

    return copy, restore


@dataclass(frozen=True)
class Candidate:
    """A named function, made for the tokens of a problem."""

    name: str
    make: Callable[[Tokens], Function]  # raises Unavailable or ImportError if it cannot run
    bytes_needed: Needed  # beyond the inputs, roughly
    ours: bool = False
    layout: Layout = _flat  # of logits
    #: names fastrl's plan for these gradients: (problem, gradients, whether memory were ample) -> name
    plan: Callable[[Problem, tuple[str, ...], bool], str] | None = None

    def on(
        self, problem: Problem, gradients: tuple[str, ...] = BOTH, upstream: tuple[Tensor, ...] | None = None
    ) -> Contender:
        """A contender for the function and its gradients for the named inputs, as in `differentiated`."""

        def prepare() -> Run:
            function = self.make(problem.tokens)
            inputs, restore = {name: x.detach() for name, x in problem.inputs.items()}, lambda: None
            if "logits" in inputs:
                inputs["logits"], restore = self.layout(problem.tokens, inputs["logits"])
            for name in gradients:
                inputs[name].requires_grad_()
            shape = next(iter(inputs.values())).shape[:-1]
            shaped = None if upstream is None else tuple(u.view(shape) for u in upstream)
            return differentiated(function, inputs, shaped, restore)

        plan = None if self.plan is None else partial(self.plan, problem, gradients)
        plans = None if plan is None else lambda: (plan(False), plan(True))
        return Contender(self.name, prepare, self.bytes_needed(problem.size), self.ours, plans)


# --- fastrl ---------------------------------------------------------------------------------------------------------


def _logprobs(logprobs_of: Callable[..., fastrl.TokenStats], tokens: Tokens) -> Function:
    """fastrl's function of logits or of hidden states and weight, with entropies."""

    def function(*inputs: Tensor) -> Result:
        result = logprobs_of(*inputs, tokens.targets, entropy=True)
        return Result(None, result.logprobs, result.entropy)

    return function


def _plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Result:
    """What `fastrl.linear_token_logprobs` gives, in plain torch."""
    return Result(None, plain.linear(plain.logprobs)(hidden, weight, targets))


def _mean_logprob(logprobs_of: Callable[..., Any], tokens: Tokens) -> Function:
    """The mean of the log-probabilities from hidden states and weight, with the sign of a loss."""
    return lambda *inputs: Result(-logprobs_of(*inputs, tokens.targets).logprobs.mean())


def _logits_cross_entropy(tokens: Tokens) -> Function:
    """The mean cross-entropy from logits (B, T, V), which its backward overwrites with the gradient."""
    targets = tokens.padded(tokens.targets)
    return lambda logits: Result(-fastrl.token_logprobs(logits, targets, inplace=True).logprobs.mean())


def _logits_policy_loss(inplace: bool, tokens: Tokens) -> Function:
    """From logits (B, T, V)."""
    targets, old = tokens.padded(tokens.targets), tokens.padded(tokens.old)

    def function(logits: Tensor) -> Result:
        result = fastrl.logits_policy_loss(
            logits, targets, objective=_PPO, advantages=tokens.per_response, old_logprobs=old, inplace=inplace
        )
        return Result(result.loss, result.logprobs, result.entropy)

    return function


def _linear_cross_entropy(tokens: Tokens) -> Function:
    return lambda hidden, weight: Result(fastrl.linear_cross_entropy(hidden, weight, tokens.targets))


def _head_and_logits_policy_loss(tokens: Tokens) -> Function:
    """The plain head, followed by the loss from logits, which are overwritten."""
    loss_of, head = _logits_policy_loss(True, tokens), torch.nn.functional.linear
    return lambda hidden, weight: loss_of(head(tokens.padded(hidden), weight))


@dataclass(frozen=True)
class PolicyHead:
    """`fastrl.linear_policy_loss` of an objective, by the plan that it chooses, within a budget or by a forced plan."""

    budget: str | None = None
    forced: str | None = None
    objective: fastrl.Objective | None = _PPO  # None: log-probabilities and entropies, without a loss

    def __call__(self, tokens: Tokens) -> Function:
        """The function; it raises Unavailable if no plan fits the budget, or the forced one does not fit or apply."""
        objective = self.objective
        if objective is None:
            return _logprobs(fastrl.linear_token_logprobs, tokens)
        targets, old = tokens.padded(tokens.targets), tokens.padded(tokens.old)
        reasons = ["too small", "cannot be followed"] if self.forced else ["memory_budget"] if self.budget else []

        def function(hidden: Tensor, weight: Tensor) -> Result:
            try:
                with nullcontext() if self.forced is None else use_plan(self.forced):
                    result = fastrl.linear_policy_loss(
                        tokens.padded(hidden),
                        weight,
                        targets,
                        objective=objective,
                        advantages=tokens.per_response,
                        old_logprobs=old,
                        memory_budget=self.budget,
                        sampling_mask=tokens.sets,
                    )
            except ValueError as error:
                if not any(reason in str(error) for reason in reasons):
                    raise
                raise Unavailable(str(error)) from None  # a valid result, not an error
            return Result(result.loss, result.logprobs, result.entropy)

        return function

    def plan(self, problem: Problem, gradients: tuple[str, ...] = BOTH, ample: bool = False) -> str:
        """The name of the plan that a call with these gradients takes.

        `ample`: the cheapest at the shape, which it would take without a budget if the device had all the memory.
        """
        if self.forced is not None:
            return self.forced
        size, weight = problem.size, problem.inputs["weight"]
        plans = fastrl.plan_memory(
            size.tokens,
            size.hidden,
            size.vocab,
            weight.dtype,
            _AMPLE if ample and self.budget is None else self.budget,
            objective=self.objective,
            gradients=gradients,
            device=weight.device.type,
        )
        return plans.chosen.name


def ours(name: str, **head: Any) -> Candidate:
    """fastrl's loss from hidden states, with the fields of a `PolicyHead`."""
    policy = PolicyHead(**head)
    return Candidate(name, policy, lambda s: 2 * s.gradients + 2 * _GIB, ours=True, plan=policy.plan)


# --- plain torch ----------------------------------------------------------------------------------------------------


def _plain(
    function: Callable[..., Any],
    result: Callable[[Any], Result],
    arguments: tuple[str, ...],
    compile: bool,
    tokens: Tokens,
) -> Function:
    if compile:
        torch.compiler.reset()  # earlier shapes would count towards the recompilation limit
        function = torch.compile(function, fullgraph=True, dynamic=False)
    given = [getattr(tokens, name) for name in arguments]
    return lambda *inputs: result(function(*inputs, *given))


def _both(
    function: Callable[..., Any], result: Callable[[Any], Result], eager: Needed, compiled: Needed, *arguments: str
) -> list[Candidate]:
    """Eager torch, and torch.compile specialized to the shapes: a function of inputs, targets and other arguments."""
    make = partial(_plain, function, result, ("targets", *arguments))
    return [Candidate(EAGER, partial(make, False), eager), Candidate(COMPILED, partial(make, True), compiled)]


def _statistics(found: tuple[Tensor, Tensor]) -> Result:
    return Result(None, *found)


def _plain_loss_over_sets(tokens: Tokens) -> Function:
    """As trainers compute it: full logits, -inf outside the sets."""

    def function(hidden: Tensor, weight: Tensor) -> Result:
        assert tokens.sets is not None
        logits = torch.nn.functional.linear(hidden, weight)
        logits = logits.masked_fill(~tokens.sets.to_dense(weight.shape[0]), -torch.inf)
        logp = torch.log_softmax(logits.float(), -1).gather(-1, tokens.targets[:, None])[:, 0]
        return Result(plain.clipped_loss(logp, tokens.old, tokens.advantages, tokens.count), logp)

    return function


# --- the tables -----------------------------------------------------------------------------------------------------

_LOSS_ARGUMENTS = ("old", "advantages", "count")
STATISTICS = [
    Candidate("fastrl", partial(_logprobs, fastrl.token_logprobs), lambda s: s.once, ours=True),
    *_both(plain.statistics, _statistics, lambda s: 5 * s.wide, lambda s: 3 * s.wide),
    Candidate("TRL kernel", partial(peers.trl_statistics, True), lambda s: s.once, layout=_padded),
    Candidate("TRL torch", partial(peers.trl_statistics, False), lambda s: 5 * s.wide, layout=_padded),
]
#: PPO's clipped loss, off-policy, here as from hidden states.
LOSS = [
    Candidate("fastrl, in place", partial(_logits_policy_loss, True), lambda s: s.once, ours=True, layout=_consumed),
    Candidate("fastrl", partial(_logits_policy_loss, False), lambda s: s.once, ours=True, layout=_padded),
    *_both(plain.policy_loss, Result._make, lambda s: 5 * s.wide, lambda s: 3 * s.wide, *_LOSS_ARGUMENTS),
    Candidate(  # it requires T + 1 positions and ignores the last one
        "Liger triton_grpo_loss", peers.liger_logits_loss, lambda s: s.once, layout=partial(_consumed, ignored=1)
    ),
    *(replace(c, make=partial(peers.clipped, c.make)) for c in STATISTICS if c.name.startswith("TRL")),
]
#: The mean cross-entropy of the targets, no policy loss: what supervised training computes, and these peers too.
LOGITS_CROSS_ENTROPY = [
    Candidate("fastrl, in place", _logits_cross_entropy, lambda s: s.once, ours=True, layout=_consumed),
    *_both(plain.cross_entropy, Result, lambda s: 4 * s.wide, lambda s: 3 * s.wide),
    Candidate(
        "quack cross_entropy (plain cross-entropy)",
        peers.quack_logits_cross_entropy,
        lambda s: s.once,
        layout=_consumed,
    ),
    Candidate(
        "Liger LigerCrossEntropyLoss (plain cross-entropy)",
        peers.liger_logits_cross_entropy,
        lambda s: s.once,
        layout=_consumed,
    ),
]
_LIGER_HOPPER_HEAD = "Liger scaled cross-entropy (Hopper)"
LINEAR_STATISTICS = [
    Candidate("fastrl", partial(_logprobs, fastrl.linear_token_logprobs), lambda s: 2 * _GIB, ours=True),
    *_both(plain.linear(plain.statistics), _statistics, lambda s: s.once + 3 * s.wide, lambda s: s.once + s.wide),
    Candidate("TRL chunked head", peers.trl_head, lambda s: _GIB),
    Candidate("Apple cut-cross-entropy", peers.apple_head, lambda s: _GIB),
    Candidate(_LIGER_HOPPER_HEAD, partial(peers.liger_hopper_head, True), lambda s: _GIB),
]
LINEAR_LOGPROBS = [
    Candidate("fastrl", partial(_mean_logprob, fastrl.linear_token_logprobs), lambda s: 2 * s.gradients, ours=True),
    Candidate(EAGER, partial(_mean_logprob, _plain_logprobs), lambda s: s.once + 3 * s.wide + s.gradients),
]
POLICY = [
    ours("fastrl"),
    *_both(
        plain.linear(plain.policy_loss),
        Result._make,
        lambda s: s.once + 5 * s.wide + s.gradients,
        lambda s: s.once + 3 * s.wide + s.gradients,
        *_LOSS_ARGUMENTS,
    ),
    Candidate("Liger LigerFusedLinearGRPOLoss", peers.liger_policy_head, lambda s: 2 * s.gradients + _GIB),
    Candidate("TRL chunked head", partial(peers.clipped, peers.trl_head), lambda s: 2 * s.gradients + _GIB),
]
#: Not among the contenders of the memory suite, like Apple's.
LIGER_HOPPER_POLICY = Candidate(
    _LIGER_HOPPER_HEAD, partial(peers.clipped, partial(peers.liger_hopper_head, True)), lambda s: 2 * s.gradients + _GIB
)
#: With its default gradient filter.
APPLE_POLICY = Candidate("Apple cut-cross-entropy", partial(peers.clipped, peers.apple_head), lambda s: 2 * s.gradients)
POLICY_FROM_LOGITS = Candidate(
    "fastrl, logits in place", _head_and_logits_policy_loss, lambda s: s.once + s.gradients, ours=True
)
#: Over recorded sets.
SETS_POLICY = [
    replace(ours("fastrl"), bytes_needed=lambda s: s.gradients),
    Candidate(EAGER, _plain_loss_over_sets, lambda s: 2 * s.once + 6 * s.wide + s.gradients),
]
#: The mean cross-entropy of the targets.
CROSS_ENTROPY = [
    Candidate("fastrl", _linear_cross_entropy, lambda s: 2 * s.gradients + 2 * _GIB, ours=True),
    *_both(
        plain.linear(plain.cross_entropy),
        Result,
        lambda s: s.once + 4 * s.wide + s.gradients,
        lambda s: s.once + 3 * s.wide + s.gradients,
    ),
    Candidate("torch linear_cross_entropy", peers.torch_cross_entropy, lambda s: 2 * s.gradients + 2 * _GIB),
    Candidate("Liger LigerFusedLinearCrossEntropyLoss", peers.liger_cross_entropy, lambda s: 2 * s.gradients + _GIB),
    Candidate(
        "Liger linear cross-entropy (Hopper)", peers.liger_hopper_cross_entropy, lambda s: 2 * s.gradients + _GIB
    ),
    Candidate(
        _LIGER_HOPPER_HEAD,
        partial(peers.mean_cross_entropy, partial(peers.liger_hopper_head, False)),
        lambda s: 2 * s.gradients + _GIB,
    ),
    Candidate(
        "quack chunked_linear_cross_entropy (plain cross-entropy)",
        peers.quack_cross_entropy,
        lambda s: 2 * s.gradients + 2 * _GIB,
    ),
    Candidate("Apple cut-cross-entropy", partial(peers.apple_cross_entropy, True), lambda s: 2 * s.gradients),
    Candidate(
        "Apple torch_compile", partial(peers.apple_cross_entropy, False), lambda s: s.once + 3 * s.wide + s.gradients
    ),
]
