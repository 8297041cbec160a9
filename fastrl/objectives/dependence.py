"""Which tokens a token's coefficients depend on: itself, its response, or the whole batch. The planner reads this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastrl.objectives.batch import Batch
from fastrl.objectives.objective import Objective

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
    if not isinstance(objective, Objective) or objective.covariance is not None or _needs_quantile(objective, given):
        return BATCH
    return RESPONSE


def slopes(objective: Objective | Callable[..., Any]) -> int:
    """The number of gradient vectors per row: d logp / d hidden and, if the entropy is in the loss, its own."""
    return 1 + (objective.has_entropy_term if isinstance(objective, Objective) else True)


def _needs_quantile(objective: Objective, given: Given) -> bool:
    return objective.top_entropy_fraction is not None and not given.threshold


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
    if _needs_quantile(objective, given):
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
