"""Evaluates an objective on log-probabilities in torch, differentiable by autograd.

If tokens do not depend on each other, the fused paths run the same formulas inside kernels (`row_local`); otherwise
they use this file. The formulas' derivatives are those that the kernels use;
autograd carries them from the ratio's level to the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.base.derivative import with_derivative
from fastrl.objectives import formulas as f
from fastrl.objectives.batch import Batch
from fastrl.objectives.gates import DETACHED_GATES, GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS, CovarianceClip, CovarianceKL, Objective
from fastrl.objectives.other_tokens import chosen_by_covariance, future_weights
from fastrl.objectives.presets import PRESETS
from fastrl.objectives.row_local import log_rho, product, rollout_weights
from fastrl.objectives.rows import MARKS


class LossContext(NamedTuple):
    """The further inputs of a custom objective; all are detached except `logprobs` and `entropy`.

    Tensors have the shape of the log-ratio that the callable gets; None = not given by the caller.
    """

    logprobs: Tensor
    """The policy's log-probabilities, in nats, with their graph."""
    entropy: Tensor | None
    """In nats, with its graph."""
    old_logprobs: Tensor
    """In nats; on-policy the detached logprobs."""
    ref_logprobs: Tensor | None
    """In nats."""
    rollout_logprobs: Tensor | None
    """In nats."""
    mask: Tensor
    """bool, True = valid."""
    cu_seqlens: Tensor | None
    """(B + 1,) int32, as given."""


CustomObjective = Callable[[Tensor, Tensor, LossContext], Tensor]


class _Ratio(NamedTuple):
    """A log-ratio, per token."""

    log: Tensor  # clamped
    active: Tensor  # 1 where the gradient passes, else 0
    source: Tensor  # the tensor that gets the gradient
    clamped: Tensor  # 1 where an exponent was clamped, else 0


def settings_of(objective: Objective | CustomObjective) -> Objective:
    """The objective itself; for a callable, one with its `aggregate` (default token-mean) and `max_length`."""
    if isinstance(objective, Objective):
        return objective
    if not callable(objective):
        raise TypeError(f"objective must be an Objective or a callable, got {type(objective).__name__}")
    presets: list[object] = [*PRESETS.values()]
    if isinstance(objective, type) or any(objective is preset for preset in presets):
        name = getattr(objective, "__name__", repr(objective))
        raise TypeError(f"objective must be an Objective or a callable, got {name} itself: call it, as in {name}(...)")
    return Objective(
        aggregate=getattr(objective, "aggregate", "token-mean"), max_length=getattr(objective, "max_length", None)
    )


def _token_ratio(logp: Tensor, baseline: Tensor, bound: float) -> _Ratio:
    """The token-level log-ratio."""
    raw = f.difference(logp, baseline)
    log = f.clamp(raw, bound)
    free = f.within(raw, log)
    return _Ratio(log, free * f.possible(logp), logp, 1 - free)


def _ratio(objective: Objective, batch: Batch, logp: Tensor, old: Tensor) -> _Ratio:
    """The log-ratio that the gate reads, at the objective's level."""
    bound, responses = objective.max_log_ratio, batch.responses
    rollout = batch.rollout if objective.gate.reads_rollout else None
    if objective.ratio == "token" and rollout is not None:
        log, active, source, clamped = _token_ratio(logp, rollout, bound)
        for other in (_token_ratio(logp, old, bound), _token_ratio(old, rollout, bound)):  # as the kernels count
            clamped = torch.maximum(clamped, other.clamped)
        return _Ratio(log, active, source, clamped)
    if objective.ratio == "token":
        return _token_ratio(logp, old, bound)
    raw = f.difference(logp, old)
    clamped = 1 - f.within(raw, f.clamp(raw, bound))
    clip, a = objective.gate.token_clip, batch.advantages
    if clip is not None:
        raw = torch.where(a > 0, f.minimum(raw, clip), torch.where(a < 0, f.maximum(raw, -clip), raw))
    summed = raw if rollout is None else f.difference(logp, rollout)
    total = responses.sum(summed.where(batch.mask, 0.0))
    if objective.ratio != "sequence-product":
        total = total / batch.counts.clamp_min(1)
    level = responses.spread(total)
    log = f.clamp(level, bound)
    active = f.within(level, log)
    clamped = torch.maximum(clamped, 1 - active)
    if objective.ratio == "sequence-token":
        log = with_derivative(log, torch.ones_like(log), logp)
        return _Ratio(log, f.possible(logp), logp, clamped)
    return _Ratio(log, active, level, clamped)


def _off_policy_mask(objective: Objective, batch: Batch, logp: Tensor, old: Tensor) -> Tensor | None:
    """1 for tokens that DeepSeek-V3.2's sequence mask drops (A < 0 in a response that drifted beyond delta), else 0."""
    if objective.off_policy_delta is None:
        return None
    sampled = old if batch.rollout is None else batch.rollout
    drift = batch.responses.sum(f.difference(sampled, logp.detach()).where(batch.mask, 0.0)) / batch.counts.clamp_min(1)
    drifted = batch.responses.spread(drift) > objective.off_policy_delta
    return (drifted & (batch.advantages < 0) & batch.mask).to(logp.dtype)


def _entropy_weights(objective: Objective, batch: Batch, entropy: Tensor) -> Tensor | None:
    """1 for high-entropy tokens, the only ones trained on (80/20), else 0; None if all are."""
    threshold = batch.entropy_threshold
    if threshold is None:
        if objective.top_entropy_fraction is None:
            return None
        threshold = _quantile(entropy.detach(), batch, 1 - objective.top_entropy_fraction)
    return (entropy.detach() >= threshold).to(entropy.dtype)


def _quantile(values: Tensor, batch: Batch, q: float) -> Tensor:
    """The q-quantile (0-dim) of the valid values (N,), interpolated linearly; torch.quantile takes up to 2^24."""
    everywhere = batch.responses.all_tokens(values.where(batch.mask, torch.inf), torch.inf)
    if not everywhere.numel():
        return values.new_zeros(())
    ordered = everywhere.sort().values
    position = q * (batch.tokens - 1).clamp_min(0)
    low = position.floor()
    ends = ordered[torch.stack([low, position.ceil()]).long()]
    return torch.lerp(ends[0], ends[1], (position - low).to(values.dtype))


def _token_weights(
    objective: Objective, batch: Batch, token: _Ratio, old: Tensor, entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
    """omega (N,) or None for ones, the off-policy mask, log rho, and of each exponent 1 where it was clamped."""
    correction, raw_rho, rho, rho_clamped = objective.rollout_correction, None, None, None
    if correction is not None:
        raw_rho = log_rho(correction, batch, old)
        rho, rho_clamped = rollout_weights(correction, raw_rho, objective.max_log_ratio)
    future, future_clamped = None, None
    if objective.future_kl is not None and batch.old is not None:  # on-policy it is 1
        future, future_clamped = future_weights(objective.future_kl, batch, token.log, objective.max_log_ratio)
    logp = token.source
    dropped = _off_policy_mask(objective, batch, logp, old)
    high_entropy = None if entropy is None else _entropy_weights(objective, batch, entropy)
    kept = None if dropped is None else 1 - dropped
    clamped = [x for x in (rho_clamped, future_clamped) if x is not None]
    return product(batch.token_weights, rho, kept, high_entropy, future), dropped, raw_rho, clamped


def _kl(objective: Objective, batch: Batch, logp: Tensor, old: Tensor, token: _Ratio) -> tuple[Tensor, Tensor]:
    """Per-token KL (N,), with its derivative, and 1 where its exponent was clamped."""
    assert objective.kl is not None
    value_of, gradient_of = KL_FORMULAS[objective.kl.kind]
    bound, unused = objective.max_log_ratio, batch.ref is None or not objective.kl.needs_reference
    by_response = (
        objective.kl.kind == "k3-unbiased" and objective.kl.ratio == "objective" and objective.ratio != "token"
    )
    # A token's derivatives through its response's ratio and through d are both of the size e^d and may cancel (in a
    # response of one token, or of tokens with equal d). They are added in float64.
    wide = logp.double() if by_response else logp
    raw = torch.zeros_like(wide) if unused else f.difference(batch.ref, wide)
    d = f.clamp(raw, bound)
    free_d = f.within(raw, d)
    active_d, clamped = free_d * f.possible(logp), 1 - free_d
    if not by_response:
        value = value_of(d.detach(), token.log.detach())
        return with_derivative(value, gradient_of(d, token.log, active_d, token.active), logp), clamped
    ratio = _ratio(objective, batch, wide, old.double())
    value = value_of(d.detach(), ratio.log.detach())
    zeros = torch.zeros_like(value)
    through_d = with_derivative(value, gradient_of(d, ratio.log, active_d, zeros), wide)
    through_ratio = with_derivative(zeros, gradient_of(d, ratio.log, zeros, ratio.active), ratio.source)
    return (through_d + through_ratio).to(logp.dtype), clamped


def objective_loss(
    objective: Objective | CustomObjective, batch: Batch, logp: Tensor, entropy: Tensor | None, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns per-token terms (len(TERMS), N), whose first row sums to the loss, and by the names of MARKS (N,) each.

    logp and entropy (N,) are differentiable; weights (N,) are the aggregation's, detached.
    """
    settings = settings_of(objective)
    old = logp.detach() if batch.old is None else batch.old
    ratio = _ratio(settings, batch, logp, old)
    own = settings.ratio == "token" and (batch.rollout is None or not settings.gate.reads_rollout)
    token = ratio if own else _token_ratio(logp, old, settings.max_log_ratio)
    clamped = ratio.clamped
    omega, dropped, raw_rho, omega_clamped = _token_weights(settings, batch, token, old, entropy)
    chosen = None
    kept = weighted = weights if omega is None else weights * omega
    if isinstance(objective, Objective):
        value_of, weight_of, side_of, _ = GATE_FORMULAS[objective.gate.formula]
        a, parameters, log_ratio = batch.advantages, objective.gate.parameters(), ratio.log.detach()
        weight = weight_of(ratio.log, logp, ratio.active, a, *parameters)
        side = _sides(objective, batch, logp, old, side_of(log_ratio, logp.detach(), a, *parameters))
        if objective.covariance is not None:
            chosen = chosen_by_covariance(objective.covariance, batch, logp, side)
            if isinstance(objective.covariance, CovarianceClip):
                kept, weight = kept.where(~chosen, 0.0), weight.where(~chosen, 0.0)
        policy = torch.where(kept == 0, 0.0, kept * value_of(log_ratio, logp.detach(), a, *parameters))
        source = logp if objective.gate.formula in DETACHED_GATES else ratio.source
        policy = with_derivative(policy, torch.where(kept == 0, 0.0, -kept * a * weight), source)
        if isinstance(objective.covariance, CovarianceKL) and chosen is not None:
            policy = policy + _distance(objective.covariance, token, kept.where(chosen, 0.0))
        if objective.gate.token_clip is not None:  # a clipped token has no gradient through the response's mean
            weight = weight.where(side == 0, 0.0)
    else:
        value = _custom_value(objective, batch, token.log, logp, entropy, old)
        policy = torch.where(kept == 0, 0.0, kept * value)
        weight = side = torch.full_like(logp, torch.nan)  # unknown for a callable
    loss, kl = policy, torch.zeros_like(logp)
    if settings.kl is not None:
        kl, kl_clamped = _kl(settings, batch, logp, old, token)
        loss = loss + (weighted if settings.kl.weighted else weights) * f.detach(settings.kl.coef) * kl
        clamped = torch.maximum(clamped, kl_clamped)
    if settings.has_entropy_term and entropy is not None:
        on_entropy = weights if batch.entropy_weights is None else batch.entropy_weights
        loss = loss - on_entropy * f.detach(settings.entropy_coef) * entropy
    for more in omega_clamped:
        clamped = torch.maximum(clamped, more)
    with torch.no_grad():
        approx_kl = f.kl_old_new_value(token.log, token.log)
        rest = torch.stack([policy, kl, ratio.log.exp(), weight, side, approx_kl, clamped])
        rest = rest.where(batch.mask, 0.0)
    marks = {name: x for name, x in zip(MARKS, (dropped, chosen, raw_rho), strict=True) if x is not None}
    return torch.cat([loss.where(batch.mask, 0.0)[None], rest]), marks


def marks_of(objective: Objective | CustomObjective) -> list[str]:
    """The names of the marks that `objective_loss` makes for an objective."""
    settings = settings_of(objective)
    makers = (settings.off_policy_delta, settings.covariance, settings.rollout_correction)
    return [name for name, x in zip(MARKS, makers, strict=True) if x is not None]


def _distance(rule: CovarianceKL, token: _Ratio, kept: Tensor) -> Tensor:
    """KL-Cov's term of each token, with its derivative; kept (N,) is 0 where the rule does not choose."""
    log, weight = token.log.detach(), kept * f.detach(rule.coef)
    return with_derivative(weight * log.abs(), weight * log.sign() * token.active, token.source)


def _sides(objective: Objective, batch: Batch, logp: Tensor, old: Tensor, side: Tensor) -> Tensor:
    """The side on which each token is clipped; GMPO clips each token's log-ratio, before the gate."""
    clip, a = objective.gate.token_clip, batch.advantages
    if clip is None:
        return side
    raw = f.difference(logp.detach(), old)
    return ((a > 0) & (raw > clip)).to(raw.dtype) - ((a < 0) & (raw < -clip)).to(raw.dtype)


def _custom_value(
    objective: CustomObjective, batch: Batch, log_ratio: Tensor, logp: Tensor, entropy: Tensor | None, old: Tensor
) -> Tensor:
    """The callable's per-token loss (N,); the callable gets tensors shaped like the targets."""

    def shaped(x: Tensor | None) -> Any:
        return None if x is None else x.reshape(batch.shape)

    offsets = batch.responses.offsets  # from 0 to all tokens, whatever padding the caller's leave out
    context = LossContext(
        shaped(logp),
        shaped(entropy),
        shaped(old),
        shaped(batch.ref),
        shaped(batch.rollout),
        shaped(batch.mask),
        None if offsets is None else offsets.int(),
    )
    value = objective(shaped(log_ratio), shaped(batch.advantages), context)
    if not isinstance(value, Tensor) or value.shape != batch.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"objective must return a per-token loss of shape {tuple(batch.shape)}, got {got}")
    return value.reshape(-1).to(logp.dtype)
