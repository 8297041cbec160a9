"""Gates and KL estimators in float64, from the published tables: what one response's tokens lose.

Where a gate decides something (clipped or not), the distance to the border is added to `borders`: rounding may turn
what is too near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastrl

INFINITY = math.inf


@dataclass
class Gated:
    """A gate's loss, its weight on grad log pi, and on which side it clips (+1 above, -1 below)."""

    value: Tensor
    weight: Tensor
    side: Tensor


def clip_gate(gate: Any, log: Tensor, advantage: Tensor, borders: list[Tensor]) -> Gated:
    ratio = log.exp()
    unclipped = ratio if gate.delta is None else ratio.clamp(max=gate.delta)
    value = -torch.minimum(unclipped * advantage, ratio.clamp(1 - gate.low, 1 + gate.high) * advantage)
    plus, minus = advantage > 0, advantage < 0
    top, falling = 1 + gate.high, INFINITY  # from where on A > 0 and A < 0 gain nothing
    if gate.delta is not None:
        top, falling = min(top, gate.delta), max(top, gate.delta)
    if gate.dual is not None:
        value = torch.where(minus, torch.minimum(value, -gate.dual * advantage), value)
        falling = min(falling, gate.dual)
    high, low = (plus & (ratio > top)) | (minus & (ratio > falling)), minus & (ratio < 1 - gate.low)
    borders += [border(log - math.log(top), plus), border(log - math.log(falling), minus)]
    if gate.low < 1:
        borders.append(border(log - math.log1p(-gate.low), minus))
    return Gated(value, torch.where(high | low, 0.0, ratio), high.double() - low.double())


def with_slope(value: Tensor, slope: Tensor, x: Tensor) -> Tensor:
    """A value whose derivative is not left to autograd, which would add up parts that cancel."""
    return value.detach() + slope.detach() * (x - x.detach())


def kl_term(kind: str, d: Tensor, log_ratio: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The estimator's value with its graph, its slope's size, and what its rounding errors are relative to.

    d is not read for old-new and old-new-k2.
    """
    x = log_ratio if kind.startswith("old-new") else d
    linear, squared, rest = x.abs(), x * x / 2, torch.expm1(x) - x
    parts = torch.expm1(x).abs() + linear
    if kind == "k3-unbiased":
        return ratio * rest, (ratio * x).detach().abs(), ratio * parts
    value, slope, size = {
        "k1": (-x, -torch.ones_like(x), linear),
        "k2": (squared, x, squared),
        "k3": (rest, torch.expm1(x), parts),
        "k1+": (-x, x, linear),
        "k3+": (rest, x, parts),
        "forward": (x.exp() * x - torch.expm1(x), x.exp() * x, x.exp() * linear + torch.expm1(x).abs()),
        "old-new": (rest, torch.expm1(x), parts),
        "old-new-k2": (squared, x, squared),
    }[kind]
    return with_slope(value, slope, x), slope.detach().abs(), size


def either(choice: Tensor, first: float, second: float) -> Tensor:
    """Float64, which `torch.where` of two floats is not."""
    return torch.where(choice, torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64))


def border(distance: Tensor, where: Tensor) -> Tensor:
    """The distance where it matters, infinite elsewhere."""
    return torch.where(where, distance.detach(), INFINITY)


def rest_of(logp: Tensor) -> Tensor:
    """The probability of all other tokens, and the 1e-8 of DPPO's authors."""
    return (-torch.expm1(logp)).clamp(min=0) + 1e-8


def detached_weight(
    gate: Any, log: Tensor, logp: Tensor, advantage: Tensor, borders: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """IcePop's, TOPR's and DPPO's weight on grad log pi, and the side."""
    ratio, plus = log.exp(), advantage > 0
    if isinstance(gate, fastrl.DivergenceMask):
        old = logp - log
        divergence = (logp.exp() - old.exp()).abs()
        if gate.kind == "kl":
            divergence = -old.exp() * log + rest_of(old) * (rest_of(old) / rest_of(logp)).log()
        high, low = plus & (log > 0) & (divergence > gate.high), ~plus & (log < 0) & (divergence > gate.low)
        borders += [border(divergence - gate.high, plus & (log > 0)), border(divergence - gate.low, ~plus & (log < 0))]
        return torch.where(high | low, 0.0, ratio.clamp(max=gate.cap)), high.double() - low.double()
    high, low = ratio > gate.high, ratio < gate.low
    weight = torch.where(high | low, 0.0, ratio)
    counted = torch.ones_like(plus)
    if isinstance(gate, fastrl.Tapered):
        weight, counted = torch.where(plus, 1.0, ratio.clamp(gate.low, gate.high)), ~plus
    borders += [border(log - math.log(bound), counted) for bound in (gate.low, gate.high) if bound]
    return weight, (high & counted).double() - (low & counted).double()


def gated_terms(
    gate: Any, log: Tensor, logp: Tensor, advantage: Tensor, clipped: Tensor, held: Tensor, borders: list[Tensor]
) -> Gated:
    """The gate of tokens whose ratio has this logarithm.

    clipped: on which side GMPO has clipped a token's own ratio; held: bool, where no gradient passes the exponent.
    """
    ratio, unclipped = log.exp(), torch.zeros_like(log)
    if isinstance(gate, fastrl.NoGate) and not gate.ratio:
        return Gated(-advantage * logp, torch.ones_like(log), unclipped)
    if isinstance(gate, fastrl.StopGradientClip):
        ratio, low = ratio.detach(), gate.low or 0.0
        borders += [log.detach() - math.log(bound) for bound in (gate.cap, low) if bound]
        weight, side = ratio.clamp(low, gate.cap), (ratio > gate.cap).double() - (ratio < low).double()
        return Gated(-weight * advantage * logp, weight, side)
    if isinstance(gate, fastrl.RatioMask | fastrl.Tapered | fastrl.DivergenceMask):
        weight, side = detached_weight(gate, log.detach(), logp.detach(), advantage, borders)
        return Gated(-weight * advantage * logp, weight, side)
    if isinstance(gate, fastrl.GammaWeight):
        log = log.detach().clamp(math.log(1e-8), 20.0)
        k = either(advantage >= 0, gate.k_pos, gate.k_neg)
        lam = either(advantage >= 0, gate.lam_pos, gate.lam_neg)
        weight = (lam + k * log - lam * log.exp()).exp()
        return Gated(-weight * advantage * logp, weight, unclipped)
    if isinstance(gate, fastrl.Clip):
        gated = clip_gate(gate, log, advantage, borders)
    elif isinstance(gate, fastrl.SoftGate):
        tau = either(advantage > 0, gate.tau_pos, gate.tau_neg)
        z = tau * (ratio - 1)
        sigmoid = torch.where(z > 0, 1 - torch.sigmoid(-z), torch.sigmoid(z))  # each with its own slope's digits
        weight = ratio / torch.cosh((z / 2).clamp(max=350)) ** 2
        gated = Gated(-(4 / tau) * sigmoid * advantage, weight, unclipped)
    else:
        assert isinstance(gate, fastrl.NoGate | fastrl.GeometricMean), gate
        gated = Gated(-ratio * advantage, torch.where(clipped == 0, ratio, 0.0), clipped)
    gated.weight = torch.where(held, 0.0, gated.weight)
    return gated
