"""The gates as data: which formulas turn a ratio and an advantage into a token's loss, and with what numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastrl.objectives import formulas as f

RatioLevel = Literal["token", "sequence", "sequence-token", "sequence-product"]
Formula = Callable[..., Any]
#: gate -> (value, weight, side, baseline), see `formulas`
GATE_FORMULAS: dict[str, tuple[Formula, Formula, Formula, Formula]] = {
    "surrogate": (f.surrogate_value, f.surrogate_weight, f.never_clipped, f.against_old),
    "reinforce": (f.reinforce_value, f.reinforce_weight, f.never_clipped, f.against_old),
    "clip": (f.clip_value, f.clip_weight, f.clip_side, f.against_old),
    "soft": (f.soft_value, f.soft_weight, f.never_clipped, f.against_old),
    "stop-gradient-clip": (
        f.stop_gradient_clip_value,
        f.stop_gradient_clip_weight,
        f.stop_gradient_clip_side,
        f.against_old,
    ),
    "gamma": (f.gamma_value, f.gamma_weight, f.never_clipped, f.against_old),  # a token's own ratio is not read
    "ratio-mask": (f.ratio_mask_value, f.ratio_mask_weight, f.ratio_mask_side, f.against_rollout),
    "tapered": (f.tapered_value, f.tapered_weight, f.tapered_side, f.against_rollout),
    "divergence-tv": (f.divergence_tv_value, f.divergence_tv_weight, f.divergence_tv_side, f.against_rollout),
    "divergence-kl": (f.divergence_kl_value, f.divergence_kl_weight, f.divergence_kl_side, f.against_rollout),
}
#: gates whose ratio, if any, is a constant factor: their gradient passes through log pi itself
DETACHED_GATES = ("reinforce", "stop-gradient-clip", "gamma", "ratio-mask", "tapered", "divergence-tv", "divergence-kl")

_ABSENT = 1e30  # a bound that never binds; finite, so that a product with it is never NaN


def check_number(name: str, value: object, low: float, *, strict: bool = False, high: float = math.inf) -> None:
    """Raises unless `value` is a real number in [low, high], or in (low, high] if strict."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < low or (strict and value == low) or value > high:
        raise ValueError(
            f"{name} must be {'>' if strict else '>='} {low:g}"
            f"{'' if high == math.inf else f' and <= {high:g}'}, got {value!r}"
        )


class Gate:
    """Base class of the gates, which turn a ratio and an advantage into a per-token loss."""

    #: The key of the gate's functions in GATE_FORMULAS.
    formula: ClassVar[str]
    #: The only ratio level that the gate is defined for; None means any.
    level: ClassVar[RatioLevel | None] = None
    #: Whether its ratio is against the rollout policy, where its log-probabilities are given.
    reads_rollout: ClassVar[bool] = False
    #: Whether it reads the log-probability itself, not only the ratio.
    reads_logprob: ClassVar[bool] = False

    @property
    def token_clip(self) -> float | None:
        """The bound on each token's log-ratio before the mean over the response; None means no bound."""
        return None

    def parameters(self) -> tuple[float, float, float, float]:
        """The gate's parameters p0..p3, in the order of its formulas' arguments."""
        return (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class NoGate(Gate):
    """No clipping: `-r A` if `ratio` is true (CPI, TRPO's surrogate), else `-A logp` (REINFORCE, GPG).

    Args:
        ratio: whether the ratio multiplies the advantage.
    """

    ratio: bool = True

    @property
    def formula(self) -> str:  # type: ignore[override]
        return "surrogate" if self.ratio else "reinforce"


@dataclass(frozen=True)
class Clip(Gate):
    """PPO's clip: `-min(r A, clip(r, 1 - low, 1 + high) A)` (arXiv:1707.06347; DAPO, arXiv:2503.14476, high > low).

    `dual` bounds the loss of a negative advantage by `-dual A` (arXiv:1912.09729); `delta` bounds r inside the
    unclipped branch (INTELLECT-2, arXiv:2505.07291).

    Args:
        low: at least 0; the ratio's lower bound is `1 - low`.
        high: at least 0; the ratio's upper bound is `1 + high`.
        dual: above 1: bounds the loss of a negative advantage by `-dual A`; None: no such bound.
        delta: above 1: bounds r inside the unclipped branch; None: no such bound.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    delta: float | None = None
    formula: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        check_number("Clip.low", self.low, 0.0)
        check_number("Clip.high", self.high, 0.0)
        if self.dual is not None:
            check_number("Clip.dual", self.dual, 1.0, strict=True)
        if self.delta is not None:
            check_number("Clip.delta", self.delta, 1.0, strict=True)

    def parameters(self) -> tuple[float, float, float, float]:
        dual = _ABSENT if self.dual is None else self.dual
        return (self.low, self.high, dual, _ABSENT if self.delta is None else self.delta)


@dataclass(frozen=True)
class SoftGate(Gate):
    """SAPO's gate: `-(4 / tau) sigmoid(tau (r - 1)) A`; the weight on grad log pi is `r sech^2(tau (r - 1) / 2)`.

    `tau` is `tau_pos` for A > 0 and `tau_neg` otherwise (arXiv:2511.20347).

    Args:
        tau_pos: above 0, tau for A > 0.
        tau_neg: above 0, tau for A <= 0.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    formula: ClassVar[str] = "soft"

    def __post_init__(self) -> None:
        check_number("SoftGate.tau_pos", self.tau_pos, 0.0, strict=True)
        check_number("SoftGate.tau_neg", self.tau_neg, 0.0, strict=True)

    def parameters(self) -> tuple[float, float, float, float]:
        return (self.tau_pos, self.tau_neg, 0.0, 0.0)


@dataclass(frozen=True)
class StopGradientClip(Gate):
    """CISPO: `-sg[min(r, cap)] A logp`; `low` is an optional lower bound on the ratio (arXiv:2506.13585).

    Args:
        cap: above 0, the ratio's upper bound.
        low: from 0 to cap, the ratio's lower bound; None: 0.
    """

    cap: float = 5.0
    low: float | None = None
    formula: ClassVar[str] = "stop-gradient-clip"

    def __post_init__(self) -> None:
        check_number("StopGradientClip.cap", self.cap, 0.0, strict=True)
        if self.low is not None:
            check_number("StopGradientClip.low", self.low, 0.0, high=self.cap)

    def parameters(self) -> tuple[float, float, float, float]:
        return (self.cap, 0.0 if self.low is None else self.low, 0.0, 0.0)


@dataclass(frozen=True)
class GeometricMean(Gate):
    """GMPO: `-A exp(mean_t clip(log r_t))`; log r <= clip for A > 0, log r >= -clip for A < 0 (arXiv:2507.20673).

    Args:
        clip: above 0, the bound on each token's log-ratio.
    """

    clip: float = 0.4
    formula: ClassVar[str] = "surrogate"
    level: ClassVar[RatioLevel] = "sequence"

    def __post_init__(self) -> None:
        check_number("GeometricMean.clip", self.clip, 0.0, strict=True)

    @property
    def token_clip(self) -> float:
        return self.clip


@dataclass(frozen=True)
class GammaWeight(Gate):
    """VESPO: `-sg[phi] A logp` with `log phi = lam + k log W - lam W`; W is the product of the response's ratios.

    arXiv:2602.10693.

    Args:
        k_pos: at least 0, k for A >= 0.
        lam_pos: at least 0, lam for A >= 0.
        k_neg: at least 0, k for A < 0.
        lam_neg: at least 0, lam for A < 0.
    """

    k_pos: float = 2.0
    lam_pos: float = 3.0
    k_neg: float = 3.0
    lam_neg: float = 2.0
    formula: ClassVar[str] = "gamma"
    level: ClassVar[RatioLevel] = "sequence-product"
    reads_rollout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("k_pos", "lam_pos", "k_neg", "lam_neg"):
            check_number(f"GammaWeight.{name}", getattr(self, name), 0.0)

    def parameters(self) -> tuple[float, float, float, float]:
        return (self.k_pos, self.lam_pos, self.k_neg, self.lam_neg)


@dataclass(frozen=True)
class RatioMask(Gate):
    """IcePop on the current ratio: `-sg[r] A logp` where `low <= r <= high`, else 0 (INTELLECT-3, arXiv:2512.16144).

    r is against the rollout policy, where its log-probabilities are given, else against the old policy. Ring-1T's own
    IcePop (arXiv:2510.18855) masks by the old policy's ratio to the rollout's, beside a clip: that is a
    `RolloutCorrection(mode="mask")`. Both papers' bounds are 0.5 and 5.

    Args:
        low: at least 0, the smallest ratio that is kept.
        high: above low, the largest ratio that is kept.
    """

    low: float = 0.5
    high: float = 2.0
    formula: ClassVar[str] = "ratio-mask"
    reads_rollout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("RatioMask.low", self.low, 0.0)
        check_number("RatioMask.high", self.high, self.low, strict=True)

    def parameters(self) -> tuple[float, float, float, float]:
        return (self.low, self.high, 0.0, 0.0)


@dataclass(frozen=True)
class Tapered(Gate):
    """TOPR: `-A logp` for A > 0, else `-sg[clip(r, low, high)] A logp` (arXiv:2503.14286).

    r is against the rollout policy, the paper's mu, where its log-probabilities are given, else against the old one.

    Args:
        low: at least 0, the ratio's lower bound for A <= 0.
        high: above low, the ratio's upper bound for A <= 0.
    """

    low: float = 0.0
    high: float = 1.0
    formula: ClassVar[str] = "tapered"
    reads_rollout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("Tapered.low", self.low, 0.0)
        check_number("Tapered.high", self.high, self.low, strict=True)

    def parameters(self) -> tuple[float, float, float, float]:
        return (self.low, self.high, 0.0, 0.0)


@dataclass(frozen=True)
class DivergenceMask(Gate):
    """DPPO: `-sg[min(r, cap)] A logp`, 0 for tokens whose probability left a trust region (arXiv:2602.04879).

    A token with A > 0 is dropped where its probability has risen and its divergence exceeds `high`, one with A <= 0
    where it has fallen and its divergence exceeds `low`. The divergence is the paper's binary one, of the token against
    all others: kind "tv" is |p - p_old|, "kl" is KL(p_old || p), in nats. p_old is that of the rollout policy, where
    its log-probabilities are given (the paper's anchor), else of the old policy; it is p / r, with the clamped r.

    Args:
        kind: the divergence, "tv" or "kl".
        low: at least 0, the bound for A <= 0, in nats for "kl".
        high: at least 0, the bound for A > 0, in nats for "kl".
        cap: above 0, the ratio's upper bound.
    """

    kind: Literal["tv", "kl"] = "tv"
    low: float = 0.15
    high: float = 0.15
    cap: float = 20.0
    level: ClassVar[RatioLevel] = "token"
    reads_rollout: ClassVar[bool] = True
    reads_logprob: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.kind not in ("tv", "kl"):
            raise ValueError(f"DivergenceMask.kind must be 'tv' or 'kl', got {self.kind!r}")
        check_number("DivergenceMask.low", self.low, 0.0)
        check_number("DivergenceMask.high", self.high, 0.0)
        check_number("DivergenceMask.cap", self.cap, 0.0, strict=True)

    @property
    def formula(self) -> str:  # type: ignore[override]
        return f"divergence-{self.kind}"

    def parameters(self) -> tuple[float, float, float, float]:
        return (self.low, self.high, self.cap, 0.0)
