"""Policy losses token by token, in Python loops over scalars with autograd: slow, and meant to be obviously right.

Written from the papers' formulas alone, not from `fastrl.objectives.formulas`, so that the tests compare two texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.objectives.objective import Clip, GammaWeight, GeometricMean, NoGate, Objective, SoftGate, StopGradientClip


@dataclass
class Response:
    """One response's unmasked tokens: (T_i,) tensors, float64; old, ref and rollout may be None."""

    logp: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    rollout: Tensor | None = None
    entropy: Tensor | None = None
    token_weights: Tensor | None = None

    @property
    def old_or_current(self) -> Tensor:
        """The baseline's log-probabilities: the detached current ones on-policy."""
        return self.logp.detach() if self.old is None else self.old


def _bounded(x: Tensor, bound: float) -> Tensor:
    return x if abs(x.item()) <= bound else torch.full_like(x, math.copysign(bound, x.item()))


def _log_ratios(r: Response, objective: Objective) -> list[Tensor]:
    """The log-ratio of each token at the objective's level, clamped."""
    log_ratio = r.logp - r.old_or_current
    n, bound = len(log_ratio), objective.max_log_ratio
    gate = objective.gate
    if isinstance(gate, GeometricMean):
        clipped = []
        for x, a in zip(log_ratio, r.advantages, strict=True):
            past = (a > 0 and x > gate.clip) or (a < 0 and x < -gate.clip)
            clipped.append(torch.full_like(x, math.copysign(gate.clip, float(a))) if past else x)
        return [_bounded(sum(clipped) / n, bound)] * n  # type: ignore[arg-type]
    if isinstance(gate, GammaWeight):
        log_w = log_ratio.sum()
        if r.rollout is not None:
            log_w = log_w + (r.old_or_current - r.rollout).sum()
        return [_bounded(log_w, bound)] * n
    if objective.ratio == "token":
        return [_bounded(x, bound) for x in log_ratio]
    if objective.ratio == "sequence":
        return [_bounded(log_ratio.mean(), bound)] * n
    if objective.ratio == "sequence-product":
        return [_bounded(log_ratio.sum(), bound)] * n
    return [_bounded(log_ratio.mean().detach(), bound) + x - x.detach() for x in r.logp]


def _gate_loss(gate: object, log_ratio: Tensor, logp: Tensor, a: Tensor) -> Tensor:
    """f of one token."""
    r = torch.exp(log_ratio)
    if isinstance(gate, NoGate):
        return -r * a if gate.ratio else -a * logp
    if isinstance(gate, GeometricMean):
        return -r * a
    if isinstance(gate, Clip):
        inside = min(max(r.item(), 1 - gate.low), 1 + gate.high)
        clipped = r if inside == r.item() else torch.full_like(r, inside)
        first = r if gate.delta is None or r.item() <= gate.delta else torch.full_like(r, gate.delta)
        loss = -first * a if (first * a).item() < (clipped * a).item() else -clipped * a
        if gate.dual is not None and a < 0 and loss.item() > (-gate.dual * a).item():
            return -gate.dual * a
        return loss
    if isinstance(gate, SoftGate):
        tau = gate.tau_pos if a > 0 else gate.tau_neg
        return -(4 / tau) / (1 + torch.exp(-tau * (r - 1))) * a
    if isinstance(gate, StopGradientClip):
        return -max(min(r.item(), gate.cap), gate.low or 0.0) * a * logp
    if isinstance(gate, GammaWeight):
        k, lam = (gate.k_pos, gate.lam_pos) if a >= 0 else (gate.k_neg, gate.lam_neg)
        log_w = min(max(log_ratio.item(), math.log(1e-8)), 20.0)
        return -math.exp(lam + k * log_w - lam * math.exp(log_w)) * a * logp
    raise AssertionError(gate)


def _kl(objective: Objective, logp: Tensor, old: Tensor, ref: Tensor | None, log_ratio: Tensor) -> Tensor:
    """kl of one token."""
    assert objective.kl is not None
    kind, bound = objective.kl.kind, objective.max_log_ratio
    token = _bounded(logp - old, bound)
    if kind == "old-new":
        return torch.exp(token) - 1 - token
    assert ref is not None
    d = _bounded(ref - logp, bound)
    k1, k2, k3 = -d, d * d / 2, torch.exp(d) - 1 - d
    if kind == "k3-unbiased":
        return torch.exp(token if objective.kl.ratio == "token" else log_ratio) * k3
    forward = torch.exp(d) * d - (torch.exp(d) - 1)
    straight = {"k1+": k2 + (k1 - k2).detach(), "k3+": k2 + (k3 - k2).detach()}
    return {"k1": k1, "k2": k2, "k3": k3, "forward": forward, **straight}[kind]


def _omegas(r: Response, objective: Objective, threshold: float | None) -> list[float]:
    """The detached weights of the tokens' policy terms."""
    old = r.old_or_current
    omegas = [1.0] * len(r.logp) if r.token_weights is None else [float(x) for x in r.token_weights]
    correction, bound = objective.rollout_correction, objective.max_log_ratio
    if correction is not None:
        assert r.rollout is not None
        log_rho = [float(x) for x in old - r.rollout]
        if correction.level == "sequence":
            log_rho = [sum(log_rho)] * len(log_rho)
        for t, x in enumerate(log_rho):
            rho = math.exp(min(max(x, -bound), bound))
            inside = correction.low <= rho <= correction.high
            kept = min(max(rho, correction.low), correction.high)
            omegas[t] *= kept if correction.mode == "truncate" or inside else 0.0
    if objective.off_policy_delta is not None and len(r.logp):
        sampled = old if r.rollout is None else r.rollout
        if float((sampled - r.logp.detach()).mean()) > objective.off_policy_delta:
            omegas = [0.0 if a < 0 else x for x, a in zip(omegas, r.advantages, strict=True)]
    if threshold is not None:
        assert r.entropy is not None
        omegas = [x if h.item() >= threshold else 0.0 for x, h in zip(omegas, r.entropy, strict=True)]
    return omegas


def policy_loss(responses: list[Response], objective: Objective, entropy_threshold: float | None = None) -> Tensor:
    """The loss of a batch of responses, by the definition: sum_t w_t (omega_t f_t + beta kl_t - alpha H_t)."""
    total_tokens = sum(len(r.logp) for r in responses)
    loss = torch.zeros((), dtype=torch.float64)
    for r in responses:
        n = len(r.logp)
        if n == 0:
            continue
        w = {
            "token-mean": 1 / total_tokens,
            "seq-mean-token-mean": 1 / (len(responses) * n),
            "seq-mean-token-sum": 1 / len(responses),
            "seq-mean-token-sum-norm": 1 / (len(responses) * (objective.max_length or 1)),
        }[objective.aggregate]
        log_ratios, omegas = _log_ratios(r, objective), _omegas(r, objective, entropy_threshold)
        for t in range(n):
            term = omegas[t] * _gate_loss(objective.gate, log_ratios[t], r.logp[t], r.advantages[t])
            if objective.kl is not None:
                ref = None if r.ref is None else r.ref[t]
                term = term + objective.kl.coef * _kl(objective, r.logp[t], r.old_or_current[t], ref, log_ratios[t])
            if r.entropy is not None:
                term = term - objective.entropy_coef * r.entropy[t]
            loss = loss + w * term
    return loss
