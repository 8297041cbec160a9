"""The checked problem that every entry point of a policy loss builds; the result of every plan, and its metrics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms
from fastrl.base import checks
from fastrl.objectives import formulas as f
from fastrl.objectives.batch import Batch, make_batch
from fastrl.objectives.evaluate import CustomObjective, objective_loss, settings_of
from fastrl.objectives.objective import Objective, RolloutCorrection
from fastrl.objectives.row_local import log_rho
from fastrl.objectives.rows import TERMS


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
    settings: Objective  # the objective, or the settings of a callable
    batch: Batch
    weights: Tensor
    cu_seqlens: Tensor | None
    has_entropy: bool


def make_problem(
    objective: Objective | CustomObjective,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    logprobs: tuple[Tensor | None, Tensor | None, Tensor | None],
    weights: tuple[Tensor | None, Tensor | None, float | Tensor | None],
    cu_seqlens: Tensor | None,
    denominator: float | Tensor | None,
    group_ids: Tensor | Sequence[Hashable] | None,
    position_ids: Tensor | None,
    targets_name: str = "targets",
    has_entropy: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Checks the arguments that all entry points share.

    logprobs: those of the old policy, of the reference and of the rollout. weights: token_weights, entropy_weights and
    entropy_threshold. The arguments per token have the shape of `targets`, which errors call `targets_name`.
    """
    settings = objective if isinstance(objective, Objective) else settings_of(objective)
    old, ref, rollout = logprobs
    token_weights, entropy_weights, entropy_threshold = weights
    batch = make_batch(
        targets,
        targets_name,
        dtype=dtype,
        advantages=advantages,
        mask=mask,
        old_logprobs=old,
        ref_logprobs=ref,
        rollout_logprobs=rollout,
        token_weights=token_weights,
        entropy_weights=entropy_weights,
        entropy_threshold=entropy_threshold,
        cu_seqlens=cu_seqlens,
        group_ids=group_ids,
        position_ids=position_ids,
    )
    if isinstance(denominator, Tensor) and denominator.dim():
        _check_denominators(denominator, batch, targets, targets_name)
    elif denominator is not None:
        denominator = checks.scalar("denominator", denominator, positive=True)
    batch.check_requirements(settings, has_entropy)
    aggregation = batch.aggregation_weights(settings, denominator).to(dtype)
    return Problem(objective, settings, batch, aggregation, cu_seqlens, has_entropy)


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
        *loss_and_metrics(problem.settings, loss, terms, batch, logp, flat_entropy, marks),
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
        *loss_and_metrics(problem.settings, loss, terms, batch, result.logprobs, result.entropy, marks),
        result.logprobs.view(batch.shape),
        result.entropy.view(batch.shape),
    )


# --- metrics ----------------------------------------------------------------------------------------------------------

#: The metrics of rho that are means over tokens, and sums that others are made of.
_OF_RHO = ("rho", "rho^2", "rollout_log_weight_mean", "rollout_frac_low", "rollout_frac_high", "rollout_frac_rejected")


def _raw_weights(correction: RolloutCorrection, batch: Batch, log_rho: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Of rho before any bound: the sums of _OF_RHO over the valid tokens (6,), and the largest |log rho| (1,)."""
    log_rho = log_rho.where(batch.mask, 0.0)
    limited = f.clamp(log_rho, 30.0)  # so that float32 holds the sum of rho^2 over any batch
    raw, rho = limited.exp(), f.clamp(log_rho, bound).exp()
    low, high = correction.kept
    rejected = (rho < low) | (rho > high)
    rows = (raw, raw.square(), limited, rho < correction.low, rho > correction.high, rejected)
    sums = torch.stack([x.to(rho.dtype) for x in rows]).where(batch.mask, 0.0).sum(-1)
    largest = torch.linalg.vector_norm(log_rho, torch.inf) if log_rho.numel() else log_rho.sum()
    return sums.float(), largest.float()[None]


def loss_and_metrics(
    settings: Objective,
    loss: Tensor,
    terms: Tensor,
    batch: Batch,
    logp: Tensor,
    entropy: Tensor | None,
    marks: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss over all ranks' tokens, and detached float32 scalars: means over valid tokens, and counts. No host sync.

    loss (0-dim) is that of this batch; terms (len(TERMS), N), logp, entropy and the marks that are counted, all (N,),
    are 0 where masked. settings: the objective, or the settings of a callable. A kernel that finds a token's rho itself
    leaves no log rho in the marks.
    """
    terms = terms.detach().float()
    ratio, side = terms[TERMS.index("ratio")], terms[TERMS.index("side")]
    zero = torch.zeros((), dtype=torch.float32, device=terms.device)
    # Few operations, each over all terms: for small batches, a GPU waits for the launch of each operation.
    more = {"clipped": torch.linalg.vector_norm(side, 1)}  # side is +1, -1 or 0, so its sum separates the two
    if entropy is not None:
        more["entropy"] = entropy.detach().float().sum()
    counted = {name: x for name, x in marks.items() if name != "log_rho"}
    more |= {name: x.float().sum() for name, x in counted.items()}
    maxima = (ratio.amax() if terms.shape[1] else zero)[None]
    correction = settings.rollout_correction
    if correction is not None:
        raw = marks.get("log_rho")
        if raw is None:
            raw = log_rho(correction, batch, logp if batch.old is None else batch.old)
        of_rho, largest = _raw_weights(correction, batch, raw, settings.max_log_ratio)
        more |= dict(zip(_OF_RHO, of_rho.unbind(), strict=True))
        maxima = torch.cat([maxima, largest])
    sums = torch.cat([terms.sum(-1), *(x[None] for x in more.values())])
    loss, sums, maxima = batch.responses.totals(loss, sums, maxima)
    tokens = batch.tokens.float()
    names = (*TERMS, *more)
    total = dict(zip(names, sums.unbind(), strict=True))
    mean = dict(zip(names, (sums / tokens.clamp_min(1)).unbind(), strict=True))
    clipped_high = torch.lerp(mean["side"], mean["clipped"], 0.5)
    return loss, {
        "policy_loss": total["policy"],
        "kl": mean["kl"],
        "entropy": torch.full_like(zero, torch.nan) if entropy is None else mean["entropy"],
        "ratio_mean": mean["ratio"],
        "ratio_max": maxima[0],
        "clip_frac": mean["clipped"],
        "clip_frac_low": mean["clipped"] - clipped_high,
        "clip_frac_high": clipped_high,
        "gate_mean": mean["weight"],
        "approx_kl": mean["approx_kl"],
        "ratio_clamped": total["clamped"],
        "masked_off_policy": zero,
        **{name: total[name] for name in counted},
        **({} if correction is None else _correction_metrics(mean, maxima[1])),
        "tokens": tokens,
    }


def _correction_metrics(mean: Mapping[str, Tensor], largest: Tensor) -> dict[str, Tensor]:
    """What a rollout correction adds to the metrics."""
    return {
        "rollout_weight_mean": mean["rho"],
        "rollout_ess": effective_share(mean["rho"], mean["rho^2"]),
        **{name: mean[name] for name in _OF_RHO[2:]},
        "rollout_abs_log_weight_max": largest,
    }


def effective_share(mean: Tensor, mean_square: Tensor) -> Tensor:
    """The effective sample size of weights as a share of their number: `mean^2 / mean_square`, 0 if there are none."""
    return (mean * torch.nan_to_num(mean / mean_square)).clamp_max(1.0)  # rounding may take it above 1
