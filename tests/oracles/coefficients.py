"""c = dL/dlogp over a sweep of tokens, in float64: what every backend's float32 is held to.

By the gates' weights and the estimators' slopes of `exact_gates`, which do not use `fastrl.objectives.formulas`. What
cancels there costs fewer than eight of float64's sixteen digits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from exact_gates import gated_terms, kl_term
from torch import Tensor

from fastrl import (
    KL,
    Clip,
    DivergenceMask,
    GammaWeight,
    GeometricMean,
    NoGate,
    Objective,
    RatioMask,
    SoftGate,
    StopGradientClip,
    Tapered,
)

#: every gate with ordinary and extreme numbers, at each level that its ratio may have
GATES: dict[str, Objective] = {
    "surrogate": Objective(gate=NoGate()),
    "reinforce": Objective(gate=NoGate(ratio=False)),
    "clip": Objective(gate=Clip(0.2, 0.28)),
    "clip, dual": Objective(gate=Clip(0.2, 0.2, dual=3.0)),
    "clip, delta": Objective(gate=Clip(0.2, 0.2, delta=4.0)),
    "clip, delta inside": Objective(gate=Clip(0.2, 0.5, delta=1.2)),
    **{f"soft {tau}": Objective(gate=SoftGate(tau, tau)) for tau in (0.05, 0.7, 10.0, 100.0)},
    "soft 1 and 1.05": Objective(gate=SoftGate(1.0, 1.05)),
    "stop-gradient-clip": Objective(gate=StopGradientClip(5.0, 0.1)),
    "gamma": Objective(gate=GammaWeight()),
    "gamma, steep": Objective(gate=GammaWeight(5.0, 30.0, 0.5, 0.1)),
    "geometric mean": Objective(gate=GeometricMean(0.4)),
    "ratio mask": Objective(gate=RatioMask()),
    "ratio mask, wide": Objective(gate=RatioMask(1e-6, 1e6)),
    "tapered": Objective(gate=Tapered()),
    "tapered, wide": Objective(gate=Tapered(1e-3, 50.0)),
    "divergence tv": Objective(gate=DivergenceMask()),
    "divergence tv, tight": Objective(gate=DivergenceMask("tv", 1e-6, 1e-5, 3.0)),
    "divergence tv, loose": Objective(gate=DivergenceMask("tv", 0.9, 0.99, 1e9)),
    "divergence kl": Objective(gate=DivergenceMask("kl", 0.05, 0.05)),
    "divergence kl, tight": Objective(gate=DivergenceMask("kl", 1e-7, 1e-6, 3.0)),
    "divergence kl, loose": Objective(gate=DivergenceMask("kl", 2.0, 5.0, 1e9)),
    "divergence kl, tight clamp": Objective(gate=DivergenceMask("kl", 0.05, 0.05), max_log_ratio=0.75),
    "tight clamp": Objective(gate=SoftGate(3.0, 3.0), max_log_ratio=0.75),
}
ESTIMATORS = ("k1", "k2", "k3", "k3-unbiased", "k1+", "k3+", "forward", "old-new", "old-new-k2")


class Sweep(NamedTuple):
    """Tokens (N,) float64, float32 numbers whose differences are too: log ratios, d = ref - logp, A, logp."""

    x: Tensor
    d: Tensor
    a: Tensor
    logp: Tensor


def sweep(size: int, unit: float, seed: int = 0) -> Sweep:
    """Random tokens, |x| and |d| up to 21, multiples of `unit`: clamped ones, small ones, and the corners' ends."""
    g = torch.Generator().manual_seed(seed)

    def numbers() -> Tensor:
        wide = torch.empty(size, dtype=torch.float64).uniform_(-21, 21, generator=g)
        # Half of them where a soft gate's tail or a gamma weight is not yet nothing, a quarter small.
        narrow = torch.empty(size, dtype=torch.float64).uniform_(-3, 6, generator=g)
        small = torch.randn(size, generator=g, dtype=torch.float64) * 2.0 ** torch.empty(size).uniform_(-16, 0)
        kind = torch.randint(4, (size,), generator=g)
        x = torch.where(kind < 1, wide, torch.where(kind < 3, narrow, small))
        return (x / unit).round() * unit

    sizes = torch.tensor([1.0, -1.0, 0.375, -0.375, 2.0**-9, -250.0], dtype=torch.float64)
    x, d, a = numbers(), numbers(), sizes[torch.randint(len(sizes), (size,), generator=g)]
    ends = torch.tensor([-20.0, -16.0, 0.0, 0.5, 16.0, 18.0, 19.875, 20.0], dtype=torch.float64)
    corners = torch.cartesian_prod(ends, ends, sizes[:2]).T
    x, d, a = (torch.cat(pair) for pair in zip((x, d, a), corners, strict=True))
    return Sweep(x, d, a, torch.zeros_like(x))


def for_gate(objective: Objective, s: Sweep, seed: int = 0) -> Sweep:
    """The sweep itself, or for a gate that reads logp with logp of any size: confident tokens, likely and rare ones.

    old = logp - x is a float32 number and at most 0 there, so that x is another one.
    """
    if not objective.gate.reads_logprob:
        return s
    g = torch.Generator().manual_seed(seed)
    size = len(s.x)
    confident = -(2.0 ** torch.empty(size, dtype=torch.float64).uniform_(-30, 0, generator=g))
    likely = torch.empty(size, dtype=torch.float64).uniform_(-4, 0, generator=g)
    rare = torch.empty(size, dtype=torch.float64).uniform_(-90, -4, generator=g)
    kind = torch.randint(8, (size,), generator=g)
    logp = torch.where(kind < 3, confident, torch.where(kind < 6, likely, torch.where(kind < 7, rare, 0.0)))
    return of_logprobs(s, logp.float().double(), (logp - s.x).clamp(max=0).float().double())


def of_logprobs(s: Sweep, logp: Tensor, old: Tensor) -> Sweep:
    """The sweep with other log-probabilities, and the ratios of these."""
    return s._replace(x=logp - old, logp=logp)


def of_policy(objective: Objective, s: Sweep) -> Tensor:
    """c of the policy's term, the response being one token."""
    # Backends take a gate's parameters in float32.
    parameters = {k: float(torch.tensor(v)) for k, v in vars(objective.gate).items() if isinstance(v, float)}
    gate, bound, past = replace(objective.gate, **parameters), objective.max_log_ratio, torch.zeros_like(s.a)
    if isinstance(gate, GeometricMean):
        past = (((s.a > 0) & (s.x > gate.clip)) | ((s.a < 0) & (s.x < -gate.clip))).double()
    # A response's own ratio, of GSPO-token, is a constant, clamped or not.
    held = (s.x.abs() > bound) & (objective.ratio != "sequence-token")
    return -s.a * gated_terms(gate, s.x.clamp(-bound, bound), s.logp, s.a, past, held, []).weight


def of_kl(objective: Objective, s: Sweep) -> Tensor:
    """c of the KL's term, the response being one token."""
    kl, bound = objective.kl, objective.max_log_ratio
    assert isinstance(kl, KL)
    logp = torch.zeros_like(s.x, requires_grad=True)
    log_ratio = (s.x + logp).clamp(-bound, bound)
    if kl.ratio == "objective" and objective.ratio == "sequence-token":
        log_ratio = log_ratio.detach() + logp
    value, *_ = kl_term(kl.kind, (s.d - logp).clamp(-bound, bound), log_ratio, log_ratio.exp())
    return float(kl.coef) * torch.autograd.grad(value.sum(), logp)[0]


def assert_coefficients(actual: Tensor, expected: Tensor, what: str, edges: Tensor | None = None) -> None:
    """The rule: a relative error of at most 1e-5 wherever |c| > 1e-30. At `edges` a clip may go either way."""
    actual, seen = actual.double().cpu(), torch.ones_like(expected, dtype=torch.bool) if edges is None else ~edges
    large = (expected.abs() > 1e-30) & seen
    error = ((actual - expected) / expected).abs().where(large, 0.0).nan_to_num(nan=math.inf)
    worst = error.argmax()
    assert error[worst] <= 1e-5, (
        f"{what}: {actual[worst].item():.7g} for {expected[worst].item():.7g} at {worst.item()}, relative error"
        f" {error[worst].item():.2g}"
    )
    rest = actual[seen & ~large].abs()
    assert (rest <= 1.00001e-30).all(), f"{what}: {rest.max().item():.7g} for nothing"


def edges(objective: Objective, s: Sweep) -> Tensor:
    """Tokens whose ratio lies on a gate's bound, up to float32's rounding."""
    gate, r = objective.gate, s.x.exp()
    bounds: list[float] = []
    if isinstance(gate, Clip):
        bounds = [1 - gate.low, 1 + gate.high, *(b for b in (gate.dual, gate.delta) if b is not None)]
    if isinstance(gate, GeometricMean):
        bounds = [math.exp(gate.clip), math.exp(-gate.clip)]
    if isinstance(gate, RatioMask):
        bounds = [gate.low, gate.high]
    if isinstance(gate, DivergenceMask):
        off = 4e-6 * s.x.abs()
        one, two = (of_policy(objective, s._replace(x=x)) for x in (s.x - off, s.x + off))
        return (one == 0) != (two == 0)
    return sum(((r / b - 1).abs() < 1e-6 for b in bounds), torch.zeros_like(r, dtype=torch.bool))
