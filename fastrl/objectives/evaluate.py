"""An objective evaluated on log-probabilities in torch, differentiable by autograd: the readable loss, and its metrics.

The fused paths run the same formulas inside kernels where tokens do not depend on each other (`row_objective` says
when, and what the kernels are given), and this file where they do. The formulas' derivatives are those that the kernels
use; autograd carries them from the ratio's level to the log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.base.derivative import with_derivative
from fastrl.objectives import formulas as f
from fastrl.objectives.batch import Batch
from fastrl.objectives.objective import DETACHED_GATES, GATE_FORMULAS, KL_FORMULAS, ROLLOUT_FORMULAS, Objective
from fastrl.objectives.presets import PRESETS
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective


class LossContext(NamedTuple):
    """What a custom objective may read beside its log-ratio and advantages; all detached but `logprobs` and `entropy`.

    Tensors have the shape of the log-ratio given to the callable; None = not given by the caller.
    """

    logprobs: Tensor
    entropy: Tensor | None
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    mask: Tensor
    cu_seqlens: Tensor | None


CustomObjective = Callable[[Tensor, Tensor, LossContext], Tensor]


class _Ratio(NamedTuple):
    """A ratio's clamped log; 1 where its gradient passes, and what it passes to; 1 where an exponent was clamped."""

    log: Tensor
    active: Tensor
    source: Tensor
    clamped: Tensor


def settings_of(objective: Objective | CustomObjective) -> Objective:
    """The objective itself; for a callable what its `aggregate` (token-mean) and `max_length` say."""
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


def check_requirements(objective: Objective, batch: Batch, has_entropy: bool) -> None:
    """ValueError where the objective reads something that the caller did not give."""
    if objective.kl is not None and objective.kl.needs_reference and batch.ref is None:
        raise ValueError(f"ref_logprobs is needed by the objective's KL term ({objective.kl.kind}), got None")
    if objective.rollout_correction is not None and batch.rollout is None:
        raise ValueError("rollout_logprobs is needed by the objective's rollout_correction, got None")
    wants = objective.has_entropy_term or objective.top_entropy_fraction is not None
    if not has_entropy and (wants or batch.entropy_threshold is not None):
        raise ValueError("entropy is needed by the objective's entropy terms, got None")


def _token_ratio(logp: Tensor, baseline: Tensor, bound: float) -> _Ratio:
    """The log-ratio of each token alone."""
    raw = f.difference(logp, baseline)
    log = f.clamp(raw, bound)
    free = f.within(raw, log)
    return _Ratio(log, free * f.possible(logp), logp, 1 - free)


def _ratio(objective: Objective, batch: Batch, logp: Tensor, old: Tensor) -> _Ratio:
    """The log-ratio that the gate reads, at the objective's level."""
    bound, responses = objective.max_log_ratio, batch.responses
    if objective.ratio == "token":
        return _token_ratio(logp, old, bound)
    raw = f.difference(logp, old)
    clamped = 1 - f.within(raw, f.clamp(raw, bound))
    clip, a = objective.gate.token_clip, batch.advantages
    if clip is not None:
        raw = torch.where(a > 0, f.minimum(raw, clip), torch.where(a < 0, f.maximum(raw, -clip), raw))
    total = responses.sum(raw.where(batch.mask, 0.0))
    if objective.gate.reads_rollout and batch.rollout is not None:
        total = total + responses.sum(f.difference(old, batch.rollout))
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


def rollout_weights(objective: Objective, batch: Batch, old: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Detached rollout-correction weights (N,), and 1 where log rho was clamped."""
    correction = objective.rollout_correction
    if correction is None or batch.rollout is None:
        return None, None
    log_rho = f.difference(old.detach(), batch.rollout)
    if correction.level == "sequence":
        log_rho = batch.responses.spread(batch.responses.sum(log_rho.where(batch.mask, 0.0)))
    clamped = f.clamp(log_rho, objective.max_log_ratio)
    weight = ROLLOUT_FORMULAS[correction.mode](clamped, correction.low, correction.high)
    return weight, 1 - f.within(log_rho, clamped)


def _off_policy_mask(objective: Objective, batch: Batch, logp: Tensor, old: Tensor) -> Tensor | None:
    """1 for tokens that DeepSeek-V3.2's sequence mask leaves out: A < 0 in a response that drifted beyond delta."""
    if objective.off_policy_delta is None:
        return None
    sampled = old if batch.rollout is None else batch.rollout
    drift = batch.responses.sum(f.difference(sampled, logp.detach()).where(batch.mask, 0.0)) / batch.counts.clamp_min(1)
    drifted = batch.responses.spread(drift) > objective.off_policy_delta
    return (drifted & (batch.advantages < 0) & batch.mask).to(logp.dtype)


def _entropy_weights(objective: Objective, batch: Batch, entropy: Tensor) -> Tensor | None:
    """1 for the tokens of high entropy that alone are trained on (80/20), else 0."""
    threshold = batch.entropy_threshold
    if threshold is None:
        if objective.top_entropy_fraction is None:
            return None
        threshold = _quantile(entropy.detach(), batch, 1 - objective.top_entropy_fraction)
    return (entropy.detach() >= threshold).to(entropy.dtype)


def _quantile(values: Tensor, batch: Batch, q: float) -> Tensor:
    """The q-quantile (0-dim) of the unmasked values (N,), linearly interpolated: torch.quantile ends at 2^24 values."""
    if not values.numel():
        return values.new_zeros(())
    ordered = values.where(batch.mask, torch.inf).sort().values
    position = q * (batch.tokens - 1).clamp_min(0)
    low = position.floor()
    ends = ordered[torch.stack([low, position.ceil()]).long()]
    return torch.lerp(ends[0], ends[1], (position - low).to(values.dtype))


def _token_weights(
    objective: Objective, batch: Batch, logp: Tensor, old: Tensor, entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """omega (N,) or None for ones, the off-policy mask, and 1 where a rollout exponent was clamped."""
    rho, rho_clamped = rollout_weights(objective, batch, old)
    dropped = _off_policy_mask(objective, batch, logp, old)
    high_entropy = None if entropy is None else _entropy_weights(objective, batch, entropy)
    kept = None if dropped is None else 1 - dropped
    return _product(batch.token_weights, rho, kept, high_entropy), dropped, rho_clamped


def _product(*factors: Tensor | None) -> Tensor | None:
    """The product of those that are there; None where none is."""
    there = [factor for factor in factors if factor is not None]
    return math.prod(there[1:], start=there[0]) if there else None


def _kl(objective: Objective, batch: Batch, logp: Tensor, old: Tensor, token: _Ratio) -> tuple[Tensor, Tensor]:
    """Per-token KL (N,), with its derivative, and 1 where its exponent was clamped."""
    assert objective.kl is not None
    value_of, gradient_of = KL_FORMULAS[objective.kl.kind]
    bound, unused = objective.max_log_ratio, batch.ref is None or not objective.kl.needs_reference
    own = objective.kl.kind == "k3-unbiased" and objective.kl.ratio == "objective" and objective.ratio != "token"
    # Through a response's ratio and through d, a token's derivative are two numbers of the size e^d, which may cancel
    # (a response of one token, or of tokens with equal d). They are added up in float64.
    wide = logp.double() if own else logp
    raw = torch.zeros_like(wide) if unused else f.difference(batch.ref, wide)
    d = f.clamp(raw, bound)
    free_d = f.within(raw, d)
    active_d, clamped = free_d * f.possible(logp), 1 - free_d
    if not own:
        value = value_of(d.detach(), token.log.detach())
        return with_derivative(value, gradient_of(d, token.log, active_d, token.active), logp), clamped
    ratio = _ratio(objective, batch, wide, old.double())
    value = value_of(d.detach(), ratio.log.detach())
    nothing = torch.zeros_like(value)
    through_d = with_derivative(value, gradient_of(d, ratio.log, active_d, nothing), wide)
    through_ratio = with_derivative(nothing, gradient_of(d, ratio.log, nothing, ratio.active), ratio.source)
    return (through_d + through_ratio).to(logp.dtype), clamped


def objective_loss(
    objective: Objective | CustomObjective,
    batch: Batch,
    logp: Tensor,
    entropy: Tensor | None,
    weights: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Per-token terms (len(TERMS), N), whose first row sums to the loss, and the off-policy mask (N,) or None.

    logp and entropy (N,) carry the graph; weights (N,) are the aggregation's, detached.
    """
    settings = settings_of(objective)
    old = logp.detach() if batch.old is None else batch.old
    ratio = _ratio(settings, batch, logp, old)
    token = ratio if settings.ratio == "token" else _token_ratio(logp, old, settings.max_log_ratio)
    clamped = ratio.clamped
    omega, dropped, rho_clamped = _token_weights(settings, batch, logp, old, entropy)
    kept = weights if omega is None else weights * omega
    if isinstance(objective, Objective):
        value_of, weight_of, side_of = GATE_FORMULAS[objective.gate.formula]
        a, numbers, log_ratio = batch.advantages, objective.gate.parameters(), ratio.log.detach()
        weight = weight_of(ratio.log, ratio.active, a, *numbers)
        side = _sides(objective, batch, logp, old, side_of(log_ratio, a, *numbers))
        policy = torch.where(kept == 0, 0.0, kept * value_of(log_ratio, logp.detach(), a, *numbers))
        source = logp if objective.gate.formula in DETACHED_GATES else ratio.source
        policy = with_derivative(policy, torch.where(kept == 0, 0.0, -kept * a * weight), source)
        if objective.gate.token_clip is not None:  # a clipped token passes nothing to the response's mean
            weight = weight.where(side == 0, 0.0)
    else:
        value = _custom_value(objective, batch, token.log, logp, entropy, old, cu_seqlens)
        policy = torch.where(kept == 0, 0.0, kept * value)
        weight = side = torch.full_like(logp, torch.nan)  # what a callable clips is not known
    loss, kl = policy, torch.zeros_like(logp)
    if settings.kl is not None:
        kl, kl_clamped = _kl(settings, batch, logp, old, token)
        loss = loss + weights * f.detach(settings.kl.coef) * kl
        clamped = torch.maximum(clamped, kl_clamped)
    if settings.has_entropy_term and entropy is not None:
        on_entropy = weights if batch.entropy_weights is None else batch.entropy_weights
        loss = loss - on_entropy * f.detach(settings.entropy_coef) * entropy
    if rho_clamped is not None:
        clamped = torch.maximum(clamped, rho_clamped)
    with torch.no_grad():
        approx_kl = f.kl_old_new_value(token.log, token.log)
        rest = torch.stack([policy, kl, ratio.log.exp(), weight, side, approx_kl, clamped])
        rest = rest.where(batch.mask, 0.0)
    return torch.cat([loss.where(batch.mask, 0.0)[None], rest]), dropped


def _sides(objective: Objective, batch: Batch, logp: Tensor, old: Tensor, side: Tensor) -> Tensor:
    """The gate's clipped sides; GMPO's clip is on each token's log-ratio, before the gate."""
    clip, a = objective.gate.token_clip, batch.advantages
    if clip is None:
        return side
    raw = f.difference(logp.detach(), old)
    return ((a > 0) & (raw > clip)).to(raw.dtype) - ((a < 0) & (raw < -clip)).to(raw.dtype)


def _custom_value(
    objective: CustomObjective,
    batch: Batch,
    log_ratio: Tensor,
    logp: Tensor,
    entropy: Tensor | None,
    old: Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The callable's per-token loss (N,); it sees tensors shaped like the targets."""

    def shaped(x: Tensor | None) -> Any:
        return None if x is None else x.reshape(batch.shape)

    context = LossContext(
        shaped(logp),
        shaped(entropy),
        shaped(old),
        shaped(batch.ref),
        shaped(batch.rollout),
        shaped(batch.mask),
        cu_seqlens,
    )
    value = objective(shaped(log_ratio), shaped(batch.advantages), context)
    if not isinstance(value, Tensor) or value.shape != batch.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"objective must return a per-token loss of shape {tuple(batch.shape)}, got {got}")
    return value.reshape(-1).to(logp.dtype)


def metrics(terms: Tensor, batch: Batch, entropy: Tensor | None, dropped: Tensor | None) -> dict[str, Tensor]:
    """Detached float32 scalars from terms (len(TERMS), N): means over unmasked tokens, and counts. No host sync."""
    terms = terms.detach().float()
    tokens = batch.tokens.float()
    count = tokens.clamp_min(1)
    # Few operations, each over all terms: at small batches a GPU waits for every one of them to be launched.
    sums = terms.sum(-1)
    total = dict(zip(TERMS, sums.unbind(), strict=True))
    mean = dict(zip(TERMS, (sums / count).unbind(), strict=True))
    ratio, side = terms[TERMS.index("ratio")], terms[TERMS.index("side")]
    clipped = torch.linalg.vector_norm(side, 1) / count  # above 1, below -1, so that their sum tells one from the other
    nothing = torch.zeros((), dtype=torch.float32, device=terms.device)
    return {
        "policy_loss": total["policy"],
        "kl": mean["kl"],
        "entropy": torch.full_like(nothing, torch.nan)
        if entropy is None
        else batch.flat(entropy.detach().float()).sum() / count,
        "ratio_mean": mean["ratio"],
        "ratio_max": ratio.amax() if terms.shape[1] else nothing,
        "clip_frac": clipped,
        "clip_frac_low": (clipped - mean["side"]) / 2,
        "clip_frac_high": (clipped + mean["side"]) / 2,
        "gate_mean": mean["weight"],
        "approx_kl": mean["approx_kl"],
        "ratio_clamped": total["clamped"],
        "masked_off_policy": nothing if dropped is None else dropped.float().sum(),
        "tokens": tokens,
    }


def row_objective(objective: Objective, batch: Batch, weights: Tensor) -> tuple[RowObjective, RowInputs, Tensor | None]:
    """A row-local objective as the kernels take it, and 1 where an exponent outside the kernels was clamped.

    weights (N,) are the aggregation's. On-policy, every ratio level has ratio 1 and the token level's coefficients, so
    the kernels know tokens only.
    """
    omega = batch.token_weights
    correction, clamped = objective.rollout_correction, None
    in_kernel = correction is not None and correction.level == "token"
    if batch.old is not None and not in_kernel:
        rho, clamped = rollout_weights(objective, batch, batch.old)
        omega = _product(omega, rho)
    policy = (weights if omega is None else weights * omega).contiguous()
    kl = objective.kl
    entropy_weights = None
    if objective.has_entropy_term:
        on_entropy = weights if batch.entropy_weights is None else batch.entropy_weights
        entropy_weights = (on_entropy * f.detach(objective.entropy_coef)).contiguous()
    spec = RowObjective(
        gate=objective.gate.formula,
        gate_parameters=objective.gate.parameters(),
        kl="none" if kl is None else kl.kind,
        rollout=correction.mode if correction is not None and in_kernel else "none",
        rollout_low=0.0 if correction is None else correction.low,
        rollout_high=0.0 if correction is None else correction.high,
        max_log_ratio=objective.max_log_ratio,
    )
    inputs = RowInputs(
        advantages=batch.advantages.contiguous(),
        policy_weights=policy,
        old=batch.old,
        ref=batch.ref if kl is not None and kl.needs_reference else None,
        rollout=batch.rollout if in_kernel else None,
        kl_weights=None if kl is None else (weights * f.detach(kl.coef)).contiguous(),
        entropy_weights=entropy_weights,
        entropy_threshold=batch.entropy_threshold,
    )
    return spec, inputs, clamped
