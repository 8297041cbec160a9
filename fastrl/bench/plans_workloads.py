"""The loss from hidden states (N, H) and the head (V, H) by each plan, and each plan's floor: its bare products.

U is one product of N x V x H. A plan's floor is the sum of its products, each measured alone in the same run: the
logits (once; twice in recompute, three times in two-pass), and the gradients that are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

import fastrl
from fastrl.bench import heads, plain
from fastrl.bench.contenders import Contender, Outcome, Run, Unavailable
from fastrl.bench.measure import Limit
from fastrl.bench.problems import LinearProblem
from fastrl.bench.workloads import Workload
from fastrl.planning.plans import use_plan

_BOTH = ("hidden", "weight")
_PRODUCTS = ("logits = hidden x weight^T", "d_hidden = d_logits x weight", "d_weight = d_logits^T x hidden")
#: The number of times that a plan computes the logits, if more than once.
_FORWARDS = {"recompute": 2, "two-pass": 3}
#: From this number of tokens on a call takes a second: measure only the choices without and with the largest budget.
_MANY_TOKENS = 65536
_LARGEST_BUDGET = "1GiB"
_PPO = fastrl.PPO(clip=plain.CLIP)


@dataclass(frozen=True)
class Way:
    """One kind of call: the gradients it needs, and the plan or budget it sets."""

    name: str
    gradients: tuple[str, ...] = _BOTH
    forced: str | None = None  # the plan to take; None: the planner chooses
    budget: str | None = None
    objective: fastrl.Objective | None = _PPO  # None: log-probabilities and entropies, without a loss

    def taken(self, problem: LinearProblem) -> str:
        """The name of the plan that the call takes."""
        if self.forced is not None:
            return self.forced
        size = heads.size_of(problem)
        plans = fastrl.plan_memory(
            size.tokens,
            size.hidden,
            size.vocab,
            problem.weight.dtype,
            self.budget,
            objective=self.objective,
            gradients=self.gradients,
            device=problem.weight.device.type,
        )
        return plans.chosen.name

    @contextmanager
    def plan(self) -> Iterator[None]:
        """Forces the plan, if one is set; raises Unavailable if it does not fit or does not apply to these inputs."""
        if self.forced is None:
            yield
            return
        try:
            with use_plan(self.forced):
                yield
        except ValueError as error:
            if "too small" not in str(error) and "cannot be followed" not in str(error):
                raise
            raise Unavailable(str(error)) from None


def ways(tokens: int) -> dict[str, list[Way]]:
    """The calls of each workload."""
    unlimited, largest = Way("fastrl, no budget"), _within(_LARGEST_BUDGET)
    if tokens >= _MANY_TOKENS:
        return {"loss and gradients": [unlimited, largest]}
    by_plan = [Way(f"fastrl, {plan}", forced=plan) for plan in ("recompute", "two-pass")]
    return {
        "loss and gradients": [unlimited, *by_plan, _within("512MiB"), largest],
        "loss of sequence ratios and gradients": [
            # a response's gradient needs the log-probabilities of the whole response first
            Way("fastrl, whole-response", forced="whole-response", objective=fastrl.GSPO(plain.CLIP, plain.CLIP))
        ],
        "loss, frozen head": [
            Way("fastrl, frozen head, no budget", ("hidden",)),
            Way("fastrl, frozen head, frozen-head", ("hidden",), forced="frozen-head"),
        ],
        "forward only": [
            Way("fastrl, loss under no_grad", ()),
            Way("fastrl, linear_token_logprobs with entropy", (), objective=None),
        ],
    }


def workloads(problem: LinearProblem) -> list[tuple[Workload, list[Way]]]:
    """The workloads, each with the way of each of its contenders."""
    token_level, unit = problem.expected_loss(), _unit(problem)
    descriptions = {
        "loss and gradients": "PPO's clipped loss (off-policy, nothing clipped) and its gradients for hidden states and"
        " weight",
        "loss of sequence ratios and gradients": "GSPO's clipped loss and the same gradients",
        "loss, frozen head": "PPO's clipped loss and its gradient for the hidden states alone",
        "forward only": "PPO's clipped loss without gradients, and log-probabilities and entropies alone",
    }
    result = []
    for name, calls in ways(problem.tokens.count).items():
        expected = problem.expected_sequence_loss() if "sequence" in name else token_level
        contenders = [_contender(problem, way) for way in calls]
        flops = unit * (1 + len(calls[0].gradients))
        result.append((Workload(name, descriptions[name], contenders, expected, workload_flops=flops), calls))
    return result


def products(problem: LinearProblem) -> Workload:
    """The three bare products."""
    size = heads.size_of(problem)
    contenders = [
        Contender(name, partial(_product, problem, place), size.once + size.gradients)
        for place, name in enumerate(_PRODUCTS)
    ]
    description = "each matrix product alone, into a buffer that is there already: what the floors are put together of"
    return Workload("bare products", description, contenders, None, workload_flops=_unit(problem))


def floor(plan: str, way: Way, times: list[float | None]) -> Limit | None:
    """The seconds of the products that a call with the plan computes, given each one's; None if one is missing."""
    counts = (_FORWARDS.get(plan, 1), "hidden" in way.gradients, "weight" in way.gradients)
    total = 0.0
    for count, seconds in zip(counts, times, strict=True):
        if count and seconds is None:
            return None
        total += count * (seconds or 0.0)
    return Limit(total, f"{sum(counts)}U")


def limits(times: list[float | None]) -> dict[str, float | None]:
    """The floors in milliseconds, 1U to 5U, by the products that each sums."""
    named = {
        "1U, forward": ("forward", ()),
        "2U, frozen head": ("frozen-head", ("hidden",)),
        "3U, forward-gradient and whole-response": ("whole-response", _BOTH),
        "4U, recompute": ("recompute", _BOTH),
        "5U, two-pass": ("two-pass", _BOTH),
    }
    milliseconds: dict[str, float | None] = {}
    for name, (plan, gradients) in named.items():
        limit = floor(plan, Way("", gradients), times)
        milliseconds[f"milliseconds: {name}"] = None if limit is None else 1e3 * limit.seconds
    return milliseconds


def _within(budget: str) -> Way:
    return Way(f"fastrl, budget {budget}", budget=budget)


def _unit(problem: LinearProblem) -> int:
    return 2 * problem.hidden.numel() * problem.weight.shape[0]


def _product(problem: LinearProblem, place: int) -> Run:
    hidden, weight = problem.hidden, problem.weight
    logits = torch.mm(hidden, weight.t())
    left, right, out = (
        (hidden, weight.t(), logits),
        (logits, weight, torch.empty_like(hidden)),
        (logits.t(), hidden, torch.empty_like(weight)),
    )[place]

    def call() -> Outcome:
        torch.mm(left, right, out=out)
        return Outcome(None, None, None, {})

    return Run(call)


def _contender(problem: LinearProblem, way: Way) -> Contender:
    size = heads.size_of(problem)
    run = partial(_statistics if way.objective is None else _loss, problem, way)
    return Contender(way.name, run, 2 * size.gradients + (2 << 30), ours=True)


def _loss(problem: LinearProblem, way: Way) -> Run:
    assert way.objective is not None
    leaves = {"hidden": problem.hidden, "weight": problem.weight}
    leaves = {name: x.detach().requires_grad_(name in way.gradients) for name, x in leaves.items()}
    head = heads.policy_head(way.budget, way.objective, problem.tokens)
    wanted = [leaves[name] for name in way.gradients]

    def call() -> Outcome:
        with way.plan(), torch.set_grad_enabled(bool(wanted)):
            result = head(leaves["hidden"], leaves["weight"])
            gradients = torch.autograd.grad(result.loss, wanted) if wanted else ()
        named = dict(zip(way.gradients, gradients, strict=True))
        return Outcome(result.loss.detach(), result.logprobs, result.entropy, named)

    return Run(call)


def _statistics(problem: LinearProblem, way: Way) -> Run:
    @torch.no_grad()
    def call() -> Outcome:
        result = fastrl.linear_token_logprobs(problem.hidden, problem.weight, problem.tokens.targets, entropy=True)
        return Outcome(None, result.logprobs, result.entropy, {})

    return Run(call)
