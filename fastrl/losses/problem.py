"""The checked problem that every entry point of a policy loss builds, and the result that every plan returns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms
from fastrl.base import checks
from fastrl.objectives.batch import Batch, make_batch
from fastrl.objectives.evaluate import (
    CustomObjective,
    check_requirements,
    loss_and_metrics,
    objective_loss,
    settings_of,
)
from fastrl.objectives.objective import Objective


class PolicyLoss(NamedTuple):
    """A policy loss and its metrics."""

    loss: Tensor
    """0-dim; call backward() on it."""
    metrics: dict[str, Tensor]
    """Detached float32 scalars on the inputs' device: reading one synchronises, computing them does not.

    policy_loss (the weighted sum of the gate's losses); kl and entropy (nats), ratio_mean, gate_mean (the effective
    weight on grad log pi, 1 on-policy), approx_kl (k3, old to new), clip_frac, clip_frac_low, clip_frac_high: means
    over valid tokens; ratio_max; ratio_clamped, masked_off_policy, tokens, and for Clip-Cov and KL-Cov
    chosen_by_covariance: numbers of tokens.

    With a rollout correction also statistics of rho before any bound (its logarithm from -30 to 30) over valid tokens,
    each with its own rho or its response's: rollout_weight_mean and rollout_log_weight_mean; rollout_ess, the effective
    sample size `(sum rho)^2 / (n sum rho^2)` as a share of the tokens; rollout_frac_low, rollout_frac_high and
    rollout_frac_rejected, the shares below low, above high, and whose weight is 0. rollout_abs_log_weight_max is the
    largest size of log rho, wherever it lies.
    """
    logprobs: Tensor
    """Detached float32, shaped like targets; 0 where masked."""
    entropy: Tensor | None
    """Detached float32 nats, shaped like targets; None if it was not given to `policy_loss`."""


class Problem(NamedTuple):
    """A checked policy loss: the objective, the batch and the aggregation's weights (N,)."""

    objective: Objective | CustomObjective
    batch: Batch
    weights: Tensor
    cu_seqlens: Tensor | None
    has_entropy: bool


def make_problem(
    objective: Objective | CustomObjective,
    targets: Tensor,
    targets_name: str,
    has_entropy: bool,
    denominator: float | Tensor | None,
    dtype: torch.dtype,
    **inputs: Any,
) -> Problem:
    """Checks the arguments that all entry points share."""
    settings = settings_of(objective)
    batch = make_batch(targets, targets_name, dtype=dtype, **inputs)
    if isinstance(denominator, Tensor) and denominator.dim():
        _check_denominators(denominator, batch, targets, targets_name)
    elif denominator is not None:
        denominator = checks.scalar("denominator", denominator, positive=True)
    check_requirements(settings, batch, has_entropy)
    weights = batch.aggregation_weights(settings, denominator).to(dtype)
    return Problem(objective, batch, weights, inputs["cu_seqlens"], has_entropy)


def _check_denominators(denominator: Tensor, batch: Batch, targets: Tensor, targets_name: str) -> None:
    """Checks a denominator for each response; it may be 0 where a response has no valid token."""
    checks.in_memory("denominator", denominator)
    if denominator.is_complex() or denominator.dtype == torch.bool:
        raise TypeError(f"denominator must be real, got {denominator.dtype}")
    checks.shape("denominator", denominator, (batch.responses.count,), "one per response, or be 0-dim")
    checks.same_device("denominator", denominator, targets, targets_name)
    if checks.values_are_checked(denominator):
        wrong = ~((denominator > 0) & denominator.isfinite()) & (batch.counts > 0)
        if wrong.any():
            i = int(wrong.nonzero()[0, 0])
            raise ValueError(f"denominator must be finite and > 0, got {denominator[i].item():g} for response {i}")


def from_statistics(problem: Problem, logprobs: Tensor, entropy: Tensor | None) -> PolicyLoss:
    """The loss of differentiable log-probabilities and entropies (N,)."""
    batch = problem.batch
    logp = batch.flat(logprobs)
    flat_entropy = None if entropy is None else batch.flat(entropy)
    terms, marks = objective_loss(problem.objective, batch, logp, flat_entropy, problem.weights)
    loss = terms[0].sum()
    if not isinstance(problem.objective, Objective):  # a callable's result may have no graph
        loss = loss + torch.nan_to_num(0 * logp).sum()
    return PolicyLoss(
        *loss_and_metrics(problem.objective, loss, terms, batch, logp, flat_entropy, marks),
        logp.detach().float().view(batch.shape),
        None if flat_entropy is None else flat_entropy.detach().float().view(batch.shape),
    )


def from_terms(
    problem: Problem,
    result: LossTerms,
    loss: Tensor,
    *,
    clamped: Tensor | None = None,
    marks: Mapping[str, Tensor] = MappingProxyType({}),
) -> PolicyLoss:
    """A PolicyLoss from the terms of `row_forward_gradient`, and what was found outside it."""
    batch, terms = problem.batch, result.terms
    if clamped is not None:
        terms = torch.cat([terms[:-1], torch.maximum(terms[-1], clamped.where(batch.mask, 0.0))[None]])
    return PolicyLoss(
        *loss_and_metrics(problem.objective, loss, terms, batch, result.logprobs, result.entropy, marks),
        result.logprobs.view(batch.shape),
        result.entropy.view(batch.shape),
    )
