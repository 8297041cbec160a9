"""Objectives as data: a ratio level, a gate, a KL term and an aggregation.

The arithmetic is in `formulas.py`; this file names the formulas, and holds and checks their parameters.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.objectives import formulas as f
from fastrl.objectives.gates import Clip, Formula, Gate, RatioLevel, check_number

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
CorrectionLevel = Literal["token", "sequence", "sequence-mean"]
RATIO_LEVELS = ("token", "sequence", "sequence-token", "sequence-product")
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
CORRECTION_LEVELS: tuple[str, ...] = get_args(CorrectionLevel)

#: KL kind -> (value, its derivative in logp), see `formulas`; k1+ and k3+ have k2's derivative (straight-through)
KL_FORMULAS: dict[str, tuple[Formula, Formula]] = {
    "none": (f.kl_none_value, f.kl_none_gradient),
    "k1": (f.kl_k1_value, f.kl_k1_gradient),
    "k2": (f.kl_k2_value, f.kl_k2_gradient),
    "k3": (f.kl_k3_value, f.kl_k3_gradient),
    "k3-unbiased": (f.kl_k3_unbiased_value, f.kl_k3_unbiased_gradient),
    "k1+": (f.kl_k1_value, f.kl_k2_gradient),
    "k3+": (f.kl_k3_value, f.kl_k2_gradient),
    "forward": (f.kl_forward_value, f.kl_forward_gradient),
    "old-new": (f.kl_old_new_value, f.kl_old_new_gradient),
    "old-new-k2": (f.kl_old_new_k2_value, f.kl_old_new_k2_gradient),
}


@dataclass(frozen=True)
class KL:
    """A KL term `coef * kl_t` in the loss (http://joschu.net/blog/kl-approx.html; k3-unbiased: arXiv:2512.02556).

    Args:
        kind: k1, k2, k3, k3-unbiased, k1+, k3+, forward, old-new or old-new-k2.
        coef: the term's weight, a float or a 0-dim tensor, which is not copied to the host.
        ratio: what multiplies "k3-unbiased": each token's ratio, or the objective's (at sequence levels, the
            response's).
        weighted: whether omega multiplies this term too, not only the gate's.
    """

    kind: str = "k3"
    coef: float | Tensor = 0.04
    ratio: Literal["token", "objective"] = "token"
    weighted: bool = False

    def __post_init__(self) -> None:
        kinds = [k for k in KL_FORMULAS if k != "none"]
        if self.kind not in kinds:
            raise ValueError(f"KL.kind must be one of {', '.join(kinds)}, got {self.kind!r}")
        if self.ratio not in ("token", "objective"):
            raise ValueError(f"KL.ratio must be 'token' or 'objective', got {self.ratio!r}")
        checks.scalar("KL.coef", self.coef)

    @property
    def needs_reference(self) -> bool:
        """Whether the estimator reads the reference policy's log-probabilities."""
        return not self.kind.startswith("old-new")


def _check_bounds(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raises unless two numbers of a RolloutCorrection are bounds on a ratio; the upper one may be infinite."""
    check_number(f"RolloutCorrection.{low_name}", low, 0.0)
    if high != math.inf:
        check_number(f"RolloutCorrection.{high_name}", high, 0.0)
    if low >= high:
        raise ValueError(f"RolloutCorrection.{low_name} must be < {high_name}, got {low!r} and {high!r}")


@dataclass(frozen=True)
class RolloutCorrection:
    """A detached weight of the policy term, from rho, the ratio of the old policy to the engine on sampled tokens.

    An upper bound may be infinity. No weight is more than e^max_log_ratio, as every exponent is clamped. Like all
    weights of tokens, it changes no denominator, and no KL or entropy term.

    Args:
        level: "token": rho is `exp(old - rollout)` of each token. "sequence": the product of these over the response's
            valid tokens, which is unbiased, with a spread that grows with the length. "sequence-mean": their geometric
            mean, which is biased, and has the same scale at any length. At the last two levels, a response's tokens
            share its rho.
        mode: "truncate" (TIS) clips rho to [low, high]; "mask" (MIS, IcePop) keeps rho inside [low, high], else gives
            0.
        low: at least 0, the lower bound.
        high: above low, the upper bound.
        reject: bounds (low, high) outside which the weight is 0, whatever the mode; None rejects nothing.
    """

    level: CorrectionLevel = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    low: float = 0.0
    high: float = 2.0
    reject: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.level not in CORRECTION_LEVELS:
            raise ValueError(
                f"RolloutCorrection.level must be one of {', '.join(CORRECTION_LEVELS)}, got {self.level!r}"
            )
        if self.mode not in ("truncate", "mask"):
            raise ValueError(f"RolloutCorrection.mode must be 'truncate' or 'mask', got {self.mode!r}")
        _check_bounds("low", self.low, "high", self.high)
        if self.reject is None:
            return
        if not isinstance(self.reject, tuple | list) or len(self.reject) != 2:
            raise TypeError(f"RolloutCorrection.reject must be None or two numbers, (low, high), got {self.reject!r}")
        low, high = self.reject
        object.__setattr__(self, "reject", (low, high))
        _check_bounds("reject[0]", low, "reject[1]", high)
        if not max(low, self.low) < min(high, self.high):
            raise ValueError(
                f"RolloutCorrection.reject must overlap [low, high] = [{self.low:g}, {self.high:g}], got {self.reject}"
            )

    @property
    def kept(self) -> tuple[float, float]:
        """The bounds on rho outside which the weight is 0."""
        low, high = (0.0, math.inf) if self.reject is None else self.reject
        return (low, high) if self.mode == "truncate" else (max(low, self.low), min(high, self.high))

    def parameters(self) -> tuple[float, float, float, float]:
        """The arguments of `formulas.rollout_weight` after log rho: the bounds of a clip, then those of rejection."""
        return (*((self.low, self.high) if self.mode == "truncate" else (0.0, math.inf)), *self.kept)


@dataclass(frozen=True)
class FutureKL:
    """FIPO's detached weight of a token, `clip(exp(sum_{k >= t} gamma^(k - t) M_k log r_k), low, high)`.

    arXiv:2603.19835. The sum runs over the response's tokens from t on, gamma is `0.5 ** (1 / half_life)`, r_k the
    token's own ratio whatever the objective's level, and M_k is 0 where `r_k > max_ratio`. low <= 1 <= high, so that
    the weight is 1 on-policy. Masked tokens add nothing to the distance k - t, whereas the authors' code counts them;
    safe_ratio is as in that code.

    Args:
        half_life: above 0, the distance in tokens, without masked ones, at which a later token counts half in a weight.
        low: from 0 to 1, the lower bound of a token's weight.
        high: at least 1, the upper bound of a token's weight.
        max_ratio: above 1, the ratio above which a token does not count in the sums; None: all count.
        safe_ratio: above 1: tokens with A < 0 and a larger ratio get a weight clipped to [0.8, 1]; None: no such ratio.
    """

    half_life: float = 32.0
    low: float = 1.0
    high: float = 1.2
    max_ratio: float | None = None
    safe_ratio: float | None = None

    def __post_init__(self) -> None:
        check_number("FutureKL.half_life", self.half_life, 0.0, strict=True)
        check_number("FutureKL.low", self.low, 0.0, high=1.0)
        check_number("FutureKL.high", self.high, 1.0)
        for name in ("max_ratio", "safe_ratio"):
            if getattr(self, name) is not None:
                check_number(f"FutureKL.{name}", getattr(self, name), 1.0, strict=True)

    @property
    def decay(self) -> float:
        """gamma."""
        return float(0.5 ** (1 / self.half_life))


def _check_fraction(name: str, fraction: object) -> None:
    check_number(name, fraction, 0.0, strict=True, high=1.0)


@dataclass(frozen=True)
class CovarianceClip:
    """Clip-Cov: a few tokens whose covariance lies between low and high, drawn at random, lose their policy term.

    arXiv:2505.22617. A token's covariance is `(A_t - mean A) (logp_t - mean logp)` with means over the valid tokens of
    the call (over a cp_group, of all ranks) whose probability is not 0; `max(1, floor(fraction * tokens))` are drawn,
    all if fewer are between the bounds, which are excluded. As in the authors' code, tokens that the gate clips are not
    drawn.

    Every call draws once from the generator, float64 numbers in [0, 1), one for each token, masked or not, with a
    gradient or without: the smallest numbers win, and every evaluation of the objective within the call uses the same.
    Over a group, generators must be in the same state on all ranks. Activation checkpointing repeats a call: only draws
    of a default generator, which it restores, are then the same.

    Args:
        fraction: the share of the valid tokens that is drawn, above 0 and up to 1.
        low: the lower bound on the covariance.
        high: above low, the upper bound.
        generator: the torch.Generator, on any device, that draws them; None: the default one of the inputs' device.
    """

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        _check_fraction("CovarianceClip.fraction", self.fraction)
        check_number("CovarianceClip.low", self.low, -math.inf)
        check_number("CovarianceClip.high", self.high, self.low, strict=True)
        if not isinstance(self.generator, torch.Generator | None):
            raise TypeError(
                f"CovarianceClip.generator must be a torch.Generator or None, got {type(self.generator).__name__}"
            )


@dataclass(frozen=True)
class CovarianceKL:
    """KL-Cov: the tokens with the largest covariance get `+ coef |log r_t|` in their policy term (arXiv:2505.22617).

    The covariance is `CovarianceClip`'s; `max(1, floor(fraction * tokens))` tokens are chosen, of equal ones the first.
    The paper writes KL(old || new); |log r_t| is the authors' code.

    Args:
        fraction: the share of the valid tokens that is chosen, above 0 and up to 1.
        coef: the weight of `|log r|`, a float or a 0-dim tensor.
    """

    fraction: float = 2e-4
    coef: float | Tensor = 1.0

    def __post_init__(self) -> None:
        _check_fraction("CovarianceKL.fraction", self.fraction)
        checks.scalar("CovarianceKL.coef", self.coef)


@dataclass(frozen=True)
class Objective:
    """A policy objective, `sum_t m_t w_t (omega_t f_t + beta kl_t - alpha H_t)`.

    The factors of omega are token_weights, and those of rollout_correction, off_policy_delta, top_entropy_fraction and
    future_kl.

    Args:
        gate: the gate, which gives f.
        ratio: the level of the ratio that the gate reads: "token", "sequence", "sequence-token" or "sequence-product".
        kl: the term beta kl, or None.
        entropy_coef: alpha, a float or a 0-dim tensor.
        aggregate: w: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm" or
            "prompt-mean". The seq-mean ones divide by the number of all responses, also of those without a valid token.
            "prompt-mean" (ScaleRL, arXiv:2510.13786) divides by the number of prompts, and by the number of valid
            tokens of the prompt's responses.
        max_length: the length, in tokens, by which "seq-mean-token-sum-norm" divides sums.
        max_log_ratio: above 0 and up to 80: every exponent is clamped to [-max_log_ratio, max_log_ratio].
        rollout_correction: a weight of each token for the distance of the rollout policy from the old one, or None.
        off_policy_delta: in nats: a response whose mean of `rollout - logp` exceeds it has no policy term where A < 0
            (without rollout_logprobs, of `old - logp`). None: all have.
        top_entropy_fraction: above 0 and up to 1: only this share of the valid tokens, those with the largest entropy,
            has a policy term. None: all have.
        future_kl: FIPO's weight of each token, or None.
        covariance: a CovarianceClip makes f of some tokens 0, a CovarianceKL adds a penalty to it; None: neither.
    """

    gate: Gate = field(default_factory=Clip)  # torch.compile of 2.11 cannot trace an instance as the default
    ratio: RatioLevel = "token"
    kl: KL | None = None
    entropy_coef: float | Tensor = 0.0
    aggregate: Aggregation = "token-mean"
    max_length: int | None = None
    max_log_ratio: float = 20.0
    rollout_correction: RolloutCorrection | None = None
    off_policy_delta: float | None = None
    top_entropy_fraction: float | None = None
    future_kl: FutureKL | None = None
    covariance: CovarianceClip | CovarianceKL | None = None

    def __post_init__(self) -> None:
        if not issubclass(type(self.gate), Gate):
            names = ", ".join(g.__name__ for g in Gate.__subclasses__())
            raise TypeError(f"Objective.gate must be one of {names}, got {self.gate!r}")
        for name, options in (("ratio", RATIO_LEVELS), ("aggregate", AGGREGATIONS)):
            if getattr(self, name) not in options:
                raise ValueError(f"Objective.{name} must be one of {', '.join(options)}, got {getattr(self, name)!r}")
        level = self.gate.level or self.ratio
        if self.ratio not in ("token", level):
            raise ValueError(
                f"Objective.ratio must be {level!r} (or left out) for a {type(self.gate).__name__}, got {self.ratio!r}"
            )
        object.__setattr__(self, "ratio", level)
        for name, kind in (("kl", KL), ("rollout_correction", RolloutCorrection), ("future_kl", FutureKL)):
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"Objective.{name} must be a {kind.__name__} or None, got {getattr(self, name)!r}")
        if not isinstance(self.covariance, CovarianceClip | CovarianceKL | None):
            raise TypeError(
                f"Objective.covariance must be a CovarianceClip, a CovarianceKL or None, got {self.covariance!r}"
            )
        checks.scalar("Objective.entropy_coef", self.entropy_coef)
        check_number("Objective.max_log_ratio", self.max_log_ratio, 0.0, strict=True, high=80.0)
        if self.aggregate == "seq-mean-token-sum-norm" and self.max_length is None:
            raise ValueError("Objective.max_length is needed by aggregate='seq-mean-token-sum-norm', got None")
        if self.max_length is not None:
            check_number("Objective.max_length", self.max_length, 0, strict=True)
        if self.off_policy_delta is not None:
            check_number("Objective.off_policy_delta", self.off_policy_delta, -math.inf)
        if self.top_entropy_fraction is not None:
            check_number("Objective.top_entropy_fraction", self.top_entropy_fraction, 0.0, strict=True, high=1.0)

    @property
    def has_entropy_term(self) -> bool:
        """Whether the entropy enters the loss; true for a 0-dim tensor, because its value is not read here."""
        return isinstance(self.entropy_coef, Tensor) or self.entropy_coef != 0.0

    def replace(self, **changes: Any) -> Objective:
        """Returns a copy with the given fields changed.

        Args:
            **changes: fields and their new values.

        Returns:
            The copy.

        Raises:
            TypeError, ValueError: a field of the wrong type or value.
        """
        return dataclasses.replace(self, **changes)


# --- what a preset takes beside its own arguments: the fields of an objective that it does not name -------------------


class CommonFields(TypedDict, total=False):
    """Those that no preset names."""

    gate: Gate
    ratio: RatioLevel
    kl: KL | None
    entropy_coef: float | Tensor
    aggregate: Aggregation
    max_log_ratio: float
    rollout_correction: RolloutCorrection | None
    top_entropy_fraction: float | None
    future_kl: FutureKL | None
    covariance: CovarianceClip | CovarianceKL | None


class LengthFields(CommonFields, total=False):
    """All but off_policy_delta."""

    max_length: int | None


class DeltaFields(CommonFields, total=False):
    """All but max_length."""

    off_policy_delta: float | None


class ObjectiveFields(LengthFields, DeltaFields, total=False):
    """All fields of `Objective`."""
