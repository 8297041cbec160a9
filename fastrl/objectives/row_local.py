"""Which tokens a token's coefficients depend on: itself, its response, or the whole batch. The planner reads this.

Where a token depends on itself alone, the fused paths run the objective inside kernels: `row_objective` prepares their
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from fastrl.objectives import formulas as f
from fastrl.objectives.batch import Batch
from fastrl.objectives.objective import CovarianceKL, Objective, RolloutCorrection
from fastrl.objectives.rows import Numbers, RowInputs, RowObjective

#: The scope of a token's loss: the token itself, its response, the whole batch, or any tokens, through autograd. Or
#: tokens on several ranks: through autograd too, because its collectives are then the same whatever a rank's plan.
TOKEN, RESPONSE, BATCH, ANY, SPREAD = "token", "response", "batch", "any", "spread"


class Given(NamedTuple):
    """The optional inputs of a batch that affect the scope."""

    old: bool = True  # old_logprobs: off-policy
    rollout: bool = False
    threshold: bool = False
    uneven: bool = False  # token weights, or per-token advantages
    over_ranks: bool = False  # the tokens of a response lie over the ranks of a group

    @classmethod
    def of(cls, batch: Batch) -> Given:
        """Those of `batch`."""
        uneven = batch.token_weights is not None or not batch.per_response
        return cls(
            batch.old is not None,
            batch.rollout is not None,
            batch.entropy_threshold is not None,
            uneven,
            batch.responses.over_ranks,
        )


def scope(objective: Objective | Callable[..., Any], given: Given) -> str:
    """Returns TOKEN, RESPONSE, BATCH or SPREAD."""
    if why_not_row_local(objective, given) is None:
        return TOKEN
    if given.over_ranks:
        return SPREAD
    if not isinstance(objective, Objective) or objective.covariance is not None:
        return BATCH
    needs_quantile = objective.top_entropy_fraction is not None and not given.threshold
    return BATCH if needs_quantile else RESPONSE


def slopes(objective: Objective | Callable[..., Any]) -> int:
    """The number of gradient vectors per row: d logp / d hidden and, if the entropy is in the loss, its own."""
    return 1 + (_constants(objective).has_entropy_term if isinstance(objective, Objective) else True)


def why_not_row_local(objective: Objective | Callable[..., Any], given: Given) -> str | None:
    """Returns why a token's coefficients depend on other tokens, or None if they do not."""
    if not isinstance(objective, Objective):
        return None if getattr(objective, "row_local", False) else "a callable that does not promise row_local"
    correction, kl = objective.rollout_correction, objective.kl
    if objective.covariance is not None:
        return f"a {type(objective.covariance).__name__} reads the whole batch"
    if objective.future_kl is not None and given.old:
        return "a FutureKL reads the rest of a response"
    if objective.off_policy_delta is not None:
        return "off_policy_delta reads a whole response"
    if objective.top_entropy_fraction is not None and not given.threshold:
        return "a top-entropy fraction without a threshold reads the whole batch"
    if correction is not None and correction.level != "token" and not given.old:
        return f"the {correction.level} level of a rollout correction reads a whole response"
    if kl is not None and kl.weighted and (given.threshold or (correction is not None and not given.old)):
        return "the KL term is multiplied by weights that kernels find themselves"
    if objective.ratio == "token":
        return None
    if given.old:
        return f"the {objective.ratio} ratio reads a whole response"
    if given.over_ranks:  # kernels leave out the sum over the ranks that torch makes, and plans may differ by rank
        return f"the {objective.ratio} ratio is a sum over ranks"
    by_response = kl is not None and kl.kind == "k3-unbiased" and kl.ratio == "objective"
    if by_response and objective.ratio != "sequence-token":
        return "the KL term is multiplied by the response's ratio"
    if objective.gate.reads_rollout:
        return None if not given.rollout else "the ratio to the rollout policy reads a whole response"
    if objective.ratio == "sequence-token":
        return None
    if objective.ratio == "sequence-product":
        return "a sequence product's gradient grows with its length"
    if given.uneven or correction is not None or given.threshold:
        return "weights or advantages differ inside a response, whose tokens share one ratio"
    return None


def log_rho(correction: RolloutCorrection, batch: Batch, old: Tensor) -> Tensor:
    """log rho (N,) at the correction's level, detached, not clamped."""
    log_rho: Tensor = f.difference(old.detach(), batch.rollout)
    if correction.level == "token":
        return log_rho
    total = batch.responses.sum(log_rho.where(batch.mask, 0.0))
    if correction.level == "sequence-mean":
        total = total / batch.counts.clamp_min(1)
    return batch.responses.spread(total)


def rollout_weights(correction: RolloutCorrection, log_rho: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Detached rollout-correction weights (N,), and 1 where log rho was clamped."""
    clamped = f.clamp(log_rho, bound)
    return f.rollout_weight(clamped, *correction.parameters()), 1 - f.within(log_rho, clamped)


def product(*factors: Tensor | None) -> Tensor | None:
    """The product of the factors that are not None; None if all are."""
    present = [factor for factor in factors if factor is not None]
    return math.prod(present[1:], start=present[0]) if present else None


class _Constants(NamedTuple):
    """What depends on an objective alone."""

    rows: RowObjective  # the objective as kernels take it, where it is row-local
    corrects_in_kernel: bool  # whether kernels then find the rollout correction's weights themselves
    has_entropy_term: bool
    needs_reference: bool


@lru_cache(maxsize=256)
def _constants(objective: Objective) -> _Constants:
    correction, kl, gate = objective.rollout_correction, objective.kl, objective.gate
    in_kernel = correction is not None and correction.level == "token" and not (kl is not None and kl.weighted)
    bounds = correction.parameters() if correction is not None and in_kernel else (1.0, 1.0, 0.0, math.inf)
    numbers = Numbers(*gate.parameters(), *bounds, objective.max_log_ratio)
    rows = RowObjective(gate.formula, "none" if kl is None else kl.kind, numbers)
    return _Constants(rows, in_kernel, objective.has_entropy_term, kl is not None and kl.needs_reference)


def row_objective(
    objective: Objective, batch: Batch, weights: Tensor
) -> tuple[RowObjective, RowInputs, Tensor | None, dict[str, Tensor]]:
    """A row-local objective as the kernels take it, 1 where an exponent was clamped outside the kernels, and marks.

    weights (N,) are the aggregation's. On-policy, the ratio is 1 at every level and the coefficients are those of the
    token level, so the kernels implement the token level only.
    """
    omega, correction, kl, clamped = batch.token_weights, objective.rollout_correction, objective.kl, None
    rows, in_kernel, has_entropy_term, needs_reference = _constants(objective)
    marks: dict[str, Tensor] = {}
    if correction is not None and batch.old is not None and not in_kernel:
        marks["log_rho"] = log_rho(correction, batch, batch.old)
        rho, clamped = rollout_weights(correction, marks["log_rho"], objective.max_log_ratio)
        omega = product(omega, rho)
    policy = (weights if omega is None else weights * omega).contiguous()
    # The weights of what moves a token whatever its advantage is: the KL term, or KL-Cov's, which torch forms.
    kl_weights = weights if isinstance(objective.covariance, CovarianceKL) else None
    if kl is not None and kl_weights is None:
        coef = kl.coef.detach() if isinstance(kl.coef, Tensor) else kl.coef
        kl_weights = ((policy if kl.weighted else weights) * coef).contiguous()
    entropy_weights = None
    if has_entropy_term:
        on_entropy = weights if batch.entropy_weights is None else batch.entropy_weights
        entropy_weights = (on_entropy * f.detach(objective.entropy_coef)).contiguous()
    inputs = RowInputs(
        advantages=batch.advantages.contiguous(),
        policy_weights=policy,
        old=batch.old,
        ref=batch.ref if needs_reference else None,
        rollout=batch.rollout if in_kernel or objective.gate.reads_rollout else None,
        kl_weights=kl_weights,
        entropy_weights=entropy_weights,
        entropy_threshold=batch.entropy_threshold,
    )
    return rows, inputs, clamped, marks
