"""Preference losses from hidden states and the output head: inputs, float64 results, and who computes them.

Of R responses the first half are chosen, or desirable in KTO, and the second half rejected; each has T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import fastrl
from fastrl.bench import plain
from fastrl.bench.candidates import BOTH
from fastrl.bench.ceilings import products
from fastrl.bench.contenders import (
    COMPILED,
    EAGER,
    Contender,
    Function,
    Result,
    Run,
    Unavailable,
    Workload,
    differentiated,
    without_results,
)
from fastrl.bench.problems import Problem, Size, make_problem, normal_head
from fastrl.planning.budget import BudgetTooSmall

_GIB = 1 << 30
_BUDGET = "64MiB"
_EXO = 1e-3  # EXO's label smoothing
_KL = 0.2  # KTO's, in nats: a trainer estimates it from other pairs of prompt and response
#: The share of noise in the reference's hidden states and head: log-ratios of 0.4 nats a token.
_DISTANCE = 0.1


@dataclass(frozen=True)
class PreferenceProblem:
    """The policy's problem, of whose responses the second half are the rejected ones, and a reference's head."""

    policy: Problem
    reference: tuple[Tensor, Tensor]  # hidden (N, H) and weight (V, H)
    ref_logprobs: Tensor  # (N,) float64

    def responses(self, tensor: Tensor) -> Tensor:
        """A view of (N, ...) as (R, T, ...)."""
        return self.policy.tokens.padded(tensor)


def preference_problem(
    n: int, width: int, vocab: int, length: int, dtype: torch.dtype, device: str
) -> PreferenceProblem:
    """Normal hidden states and heads, uniform targets, n tokens in responses of `length`; deterministic.

    Raises:
        ValueError: they do not make pairs of responses.
    """
    if n % (2 * length):
        raise ValueError(f"N must be a multiple of 2 T, a pair of responses of {length} tokens, got {n}")
    generator = torch.Generator(device).manual_seed(0)
    head, noise = (normal_head(n, width, vocab, dtype, generator) for _ in range(2))
    hidden, weight = ((1 - _DISTANCE**2) ** 0.5 * x + _DISTANCE * y for x, y in zip(head, noise, strict=True))
    targets = torch.randint(vocab, (n,), device=device, generator=generator)
    policy, reference = (
        make_problem({"hidden": x, "weight": w}, targets, generator, n // length) for x, w in (head, (hidden, weight))
    )
    return PreferenceProblem(policy, (hidden, weight), reference.logprobs)


class Loss(NamedTuple):
    """A preference loss by each who computes it."""

    name: str
    objective: fastrl.Preference | None  # fastrl's; None: KTO
    formula: Callable[[Tensor, Tensor], Tensor]  # chosen and rejected scores (pairs,) -> a loss of each pair
    liger: str  # LigerFusedLinear...Loss
    options: dict[str, Any]  # Liger's
    average: bool = False  # a score is a mean over tokens instead of a sum
    reference: bool = True  # the reference's log-probability is taken off it
    nll: bool = False  # plus the chosen responses' negative log-likelihood

    def of(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """The loss of log-probabilities (R, T) under policy and reference, in torch."""
        scores = logprobs - ref_logprobs if self.reference else logprobs
        chosen, rejected = (scores.mean(-1) if self.average else scores.sum(-1)).chunk(2)
        loss = self.formula(chosen, rejected).mean()
        return loss - logprobs.chunk(2)[0].mean() if self.nll else loss


#: (problem, loss) -> a function of the policy's hidden states and weight
_Make = Callable[[PreferenceProblem, Loss], Function]


def _margin(formula: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A formula of beta times the difference of the scores, for beta 0.1."""
    return lambda chosen, rejected: formula(0.1 * (chosen - rejected))


def _kto(desirable: Tensor, undesirable: Tensor) -> Tensor:
    """Half the sum of both losses: their mean over pairs is the mean over responses."""
    return (torch.sigmoid(0.1 * (_KL - desirable)) + torch.sigmoid(0.1 * (undesirable - _KL))) / 2


def _log_odds(logp: Tensor) -> Tensor:
    return logp - torch.log1p(-logp.exp())


def _robust(b: Tensor) -> Tensor:
    return (-0.9 * logsigmoid(b) + 0.1 * logsigmoid(-b)) / 0.8


def _exo(b: Tensor) -> Tensor:
    q = torch.sigmoid(b)
    return q * (logsigmoid(b) - math.log1p(-_EXO)) + (1 - q) * (logsigmoid(-b) - math.log(_EXO))


def _dpo(name: str, formula: Callable[[Tensor, Tensor], Tensor], objective: fastrl.Preference, **options: Any) -> Loss:
    return Loss(name, objective, formula, "DPO", {"beta": 0.1, "loss_type": name} | options)


LOSSES = [
    _dpo("sigmoid", _margin(lambda b: -logsigmoid(b)), fastrl.DPO(0.1))._replace(name="DPO"),
    Loss(
        "SimPO",
        fastrl.SimPO(2.0, 1.0),
        lambda chosen, rejected: -logsigmoid(2 * (chosen - rejected) - 1),
        "SimPO",
        {"beta": 2.0, "gamma": 1.0, "compute_nll_loss": False},
        average=True,
        reference=False,
    ),
    Loss("CPO", fastrl.CPO(0.1), _margin(lambda b: -logsigmoid(b)), "CPO", {"beta": 0.1}, reference=False, nll=True),
    Loss(
        "ORPO",
        fastrl.ORPO(0.1),
        lambda chosen, rejected: -0.1 * logsigmoid(_log_odds(chosen) - _log_odds(rejected)),
        "ORPO",
        {"beta": 0.1},
        average=True,
        reference=False,
        nll=True,
    ),
    Loss("KTO", None, _kto, "KTO", {"beta": 0.1, "use_ref_model": True}),
]
DPO_LOSSES = [
    _dpo("hinge", _margin(lambda b: torch.relu(1 - b)), fastrl.Hinge(0.1)),
    _dpo("robust", _margin(_robust), fastrl.RobustDPO(0.1, 0.1), label_smoothing=0.1),
    _dpo("exo_pair", _margin(_exo), fastrl.EXOPair(0.1, _EXO), label_smoothing=_EXO),
    _dpo(
        "nca_pair",
        lambda c, r: -logsigmoid(0.1 * c) - (logsigmoid(-0.1 * c) + logsigmoid(-0.1 * r)) / 2,
        fastrl.NCAPair(0.1),
    ),
    _dpo("bco_pair", lambda c, r: -logsigmoid(0.1 * c) - logsigmoid(-0.1 * r), fastrl.BCOPair(0.1)),
    _dpo("sppo_hard", lambda c, r: (c - 5) ** 2 + (r + 5) ** 2, fastrl.SPPO(0.1)),
    _dpo("apo_zero", lambda c, r: torch.sigmoid(-0.1 * c) + torch.sigmoid(0.1 * r), fastrl.APOZero(0.1)),
    _dpo("apo_down", lambda c, r: torch.sigmoid(0.1 * c) + torch.sigmoid(0.1 * (r - c)), fastrl.APODown(0.1)),
    _dpo(
        "discopop",
        _margin(lambda b: -logsigmoid(b) * torch.sigmoid(-b / 0.05) + torch.exp(-b) * torch.sigmoid(b / 0.05)),
        fastrl.DiscoPOP(0.1, 0.05),
    ),
]


def workload(problem: PreferenceProblem, loss: Loss) -> Workload:
    """The loss and its gradients for the policy, by every contender."""
    return _workload(problem, loss, f"the mean {loss.name} loss", _CONTENDERS)


def variants(problem: PreferenceProblem) -> list[Workload]:
    """DPO's other losses, by fastrl and Liger, as one workload with several results; a contender's name says which."""
    description = "the mean of each of Liger's other DPO losses"
    whole = [_workload(problem, loss, description, _VARIANT_CONTENDERS) for loss in DPO_LOSSES]
    return [
        replace(
            one,
            name="DPO's other losses",
            contenders=[replace(contender, name=f"{one.name}: {contender.name}") for contender in one.contenders],
        )
        for one in whole
    ]


def _workload(
    problem: PreferenceProblem, loss: Loss, what: str, contenders: Sequence[tuple[str, _Make, Callable[[Size], int]]]
) -> Workload:
    reference = problem.responses(problem.ref_logprobs)
    scored = ", the reference's log-probabilities computed in the call" if loss.reference else ""
    return Workload(
        loss.name,
        f"{what} and its gradients for the policy's hidden states and weight{scored}",
        [_contender(problem, loss, *one) for one in contenders],
        problem.policy.expected(lambda logp: loss.of(problem.responses(logp), reference)),
        BOTH,
        workload_flops=(4 if loss.reference else 3) * problem.policy.size.product_flops,
    )


def head_products(problem: PreferenceProblem, reference: bool) -> Contender:
    """The policy's three matrix products and, with a reference, its one alone."""
    size, inputs = problem.policy.size, problem.policy.inputs

    def prepare() -> Run:
        runs = [products(inputs["hidden"], inputs["weight"], range(3))]
        if reference:
            runs.append(products(*problem.reference, [0]))
        return without_results(lambda: [run.call() for run in runs])

    name = f"the {'four' if reference else 'three'} matrix products alone"
    return Contender(name, prepare, 2 * size.once + 2 * size.gradients)


def _contender(
    problem: PreferenceProblem, loss: Loss, name: str, make: _Make, needed: Callable[[Size], int]
) -> Contender:
    def prepare() -> Run:
        inputs = {name: x.detach().requires_grad_() for name, x in problem.policy.inputs.items()}
        return differentiated(make(problem, loss), inputs)

    return Contender(name, prepare, needed(problem.policy.size), ours=name.startswith("fastrl"))


def _plain(compile: bool, problem: PreferenceProblem, loss: Loss) -> Function:
    targets = problem.policy.tokens.targets

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        return problem.responses(plain.logprobs(torch.nn.functional.linear(hidden, weight), targets))

    def loss_of(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        reference = hidden.new_zeros(())
        if loss.reference:
            with torch.no_grad():
                reference = logprobs(ref_hidden, ref_weight)
        return loss.of(logprobs(hidden, weight), reference)

    function: Callable[..., Tensor] = loss_of
    if compile:
        torch.compiler.reset()  # earlier shapes would count towards the recompilation limit
        function = torch.compile(loss_of, fullgraph=True, dynamic=False)
    return lambda hidden, weight: Result(function(hidden, weight, *problem.reference))


def _liger(compile: bool, problem: PreferenceProblem, loss: Loss) -> Function:
    """Liger's chunked losses, a pair or, for KTO, a response per chunk, which are their defaults."""
    kind: Any = getattr(import_module("liger_kernel.chunked_loss"), f"LigerFusedLinear{loss.liger}Loss")
    if compile:
        torch.compiler.reset()
    loss_of = kind(compiled=compile, **loss.options)
    targets = problem.responses(problem.policy.tokens.targets)
    ref_hidden, ref_weight = problem.reference
    reference = {"ref_input": problem.responses(ref_hidden), "ref_weight": ref_weight} if loss.reference else {}
    if loss.liger == "KTO":
        kto = {"preference_labels": _desirable(problem), "kl": torch.tensor(_KL, device=targets.device)}
        return lambda hidden, weight: Result(loss_of(problem.responses(hidden), weight, targets, **kto, **reference)[0])
    return lambda hidden, weight: Result(loss_of(weight, problem.responses(hidden), targets, **reference)[0])


def _desirable(problem: PreferenceProblem) -> Tensor:
    count = problem.policy.tokens.responses
    return torch.arange(count, device=problem.policy.tokens.targets.device) < count // 2


def _ours(budget: str | None, problem: PreferenceProblem, loss: Loss) -> Function:
    targets = problem.responses(problem.policy.tokens.targets)
    mask, desirable = torch.ones_like(targets), _desirable(problem)
    ref_hidden, ref_weight = problem.reference
    options: dict[str, Any] = {"memory_budget": budget}

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        given = (problem.responses(hidden), weight, targets, mask)
        reference = None
        if loss.reference:
            with torch.no_grad():
                scored = fastrl.linear_token_logprobs(problem.responses(ref_hidden), ref_weight, targets, **options)
            reference = scored.logprobs.sum(-1)
        if loss.objective is not None:
            return fastrl.linear_preference_loss(*given, reference, objective=loss.objective, **options).loss
        assert reference is not None
        return fastrl.linear_kto_loss(*given, reference, desirable, beta=0.1, kl=_KL, **options).loss

    def function(hidden: Tensor, weight: Tensor) -> Result:
        try:
            return Result(loss_of(hidden, weight))
        except BudgetTooSmall as error:
            raise Unavailable(str(error)) from None  # a valid result, not an error

    return function


_CONTENDERS: list[tuple[str, _Make, Callable[[Size], int]]] = [
    ("fastrl", partial(_ours, None), lambda s: 2 * s.gradients + 2 * _GIB),
    (f"fastrl, {_BUDGET}", partial(_ours, _BUDGET), lambda s: 2 * s.gradients),
    (EAGER, partial(_plain, False), lambda s: 2 * s.once + 4 * s.wide + s.gradients),
    (COMPILED, partial(_plain, True), lambda s: 2 * s.once + 4 * s.wide + s.gradients),
    ("Liger", partial(_liger, True), lambda s: 3 * s.gradients + _GIB),
    ("Liger, compiled=False", partial(_liger, False), lambda s: 3 * s.gradients + _GIB),
]
_VARIANT_CONTENDERS = [_CONTENDERS[0], _CONTENDERS[-1]]
