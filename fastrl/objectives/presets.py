"""The published algorithms as presets of `Objective`. Every preset also takes any field of `Objective` by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fastrl.objectives.gates import (
    Clip,
    DivergenceMask,
    GammaWeight,
    GeometricMean,
    NoGate,
    RatioMask,
    SoftGate,
    StopGradientClip,
    Tapered,
)
from fastrl.objectives.objective import KL, CovarianceClip, CovarianceKL, FutureKL, Objective


def _objective(overrides: dict[str, Any], **defaults: Any) -> Objective:
    return Objective(**(defaults | overrides))


def _kl(kind: str, coef: float | Tensor, weighted: bool = False) -> KL | None:
    """A KL term, or None if the coefficient is the float 0."""
    return KL(kind, coef, weighted=weighted) if isinstance(coef, Tensor) or coef != 0 else None


_Preset = TypeVar("_Preset", bound=Callable[..., Any])

#: What ends the docstring of every preset of Objective or Preference.
_ENDING = """    **fields: fields of `{kind}`, in place of the preset's.

Returns:
    The `{kind}`.

Raises:
    TypeError, ValueError: a field of the wrong type or value.
"""


def entered_in(presets: dict[str, Callable[..., Any]], kind: str) -> Callable[[_Preset], _Preset]:
    """A decorator that enters a preset in a table by name, and ends its docstring with what all of a kind share."""

    def entered(preset: _Preset) -> _Preset:
        text = inspect.cleandoc(preset.__doc__ or "")
        own = [text] if "Args:" in text else [text, "", "Args:"]
        preset.__doc__ = "\n".join([*own, _ENDING.format(kind=kind)])
        presets[preset.__name__] = preset
        return preset

    return entered


PRESETS: dict[str, Callable[..., Objective]] = {}
"""Every preset by name; the command line, the tests and the plots read this table."""
_preset = entered_in(PRESETS, "Objective")


@_preset
def REINFORCE(**fields: Any) -> Objective:
    """`-A logp`, token-mean (Williams, 1992)."""
    return _objective(fields, gate=NoGate(ratio=False))


@_preset
def GPG(**fields: Any) -> Objective:
    """Group policy gradient: `-A logp` with group advantages, token-mean (arXiv:2504.02546)."""
    return _objective(fields, gate=NoGate(ratio=False))


@_preset
def CPI(**fields: Any) -> Objective:
    """The surrogate `-r A` of conservative policy iteration and TRPO, token-mean (Kakade and Langford, 2002)."""
    return _objective(fields, gate=NoGate(ratio=True))


@_preset
def PPO(clip: float = 0.2, clip_high: float | None = None, dual_clip: float | None = None, **fields: Any) -> Objective:
    """PPO's clipped surrogate, token-mean (arXiv:1707.06347); `dual_clip` as in arXiv:1912.09729.

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
        dual_clip: above 1: the loss of a negative advantage is at most `-dual_clip A`; None: no such bound.
    """
    return _objective(fields, gate=Clip(clip, clip if clip_high is None else clip_high, dual=dual_clip))


@_preset
def PPOKL(coef: float | Tensor, **fields: Any) -> Objective:
    """PPO with a KL penalty instead of the clip: `-r A + coef KL(old || new)`, token-mean (arXiv:1707.06347).

    Args:
        coef: the KL term's weight, a float or a 0-dim tensor; the float 0 leaves it out.
    """
    return _objective(fields, gate=NoGate(ratio=True), kl=_kl("old-new", coef))


@_preset
def GRPO(clip: float = 0.2, clip_high: float | None = None, kl_coef: float | Tensor = 0.04, **fields: Any) -> Objective:
    """GRPO: PPO's clip, a k3 KL term, the mean over responses of each response's mean (arXiv:2402.03300).

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
        kl_coef: the KL term's weight, a float or a 0-dim tensor; the float 0 leaves it out.
    """
    gate = Clip(clip, clip if clip_high is None else clip_high)
    return _objective(fields, gate=gate, kl=_kl("k3", kl_coef), aggregate="seq-mean-token-mean")


@_preset
def DrGRPO(max_length: int, clip: float = 0.2, **fields: Any) -> Objective:
    """Dr. GRPO: PPO's clip, sums over tokens divided by a constant length, no KL (arXiv:2503.20783).

    Args:
        max_length: the constant length, in tokens.
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
    """
    return _objective(fields, gate=Clip(clip, clip), aggregate="seq-mean-token-sum-norm", max_length=max_length)


@_preset
def BNPO(clip: float = 0.2, clip_high: float | None = None, **fields: Any) -> Objective:
    """GRPO's gate, averaged over the batch's tokens, no KL (TRL's `loss_type="bnpo"`).

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
    """
    return _objective(fields, gate=Clip(clip, clip if clip_high is None else clip_high))


@_preset
def DAPO(clip_low: float = 0.2, clip_high: float = 0.28, **fields: Any) -> Objective:
    """DAPO: a higher upper clip, token-mean, no KL (arXiv:2503.14476).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high))


@_preset
def GSPO(clip_low: float = 3e-4, clip_high: float = 4e-4, **fields: Any) -> Objective:
    """GSPO: PPO's clip on the response's geometric-mean ratio (arXiv:2507.18071).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high), ratio="sequence", aggregate="seq-mean-token-mean")


@_preset
def GSPOToken(clip_low: float = 3e-4, clip_high: float = 4e-4, **fields: Any) -> Objective:
    """GSPO-token: the response's ratio, each token's own gradient, per-token advantages (arXiv:2507.18071).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high), ratio="sequence-token", aggregate="seq-mean-token-mean")


@_preset
def SAPO(tau_pos: float = 1.0, tau_neg: float = 1.05, **fields: Any) -> Objective:
    """SAPO: a soft gate, weight sech^2, instead of the clip (arXiv:2511.20347).

    Args:
        tau_pos: above 0, the gate's tau for A > 0.
        tau_neg: above 0, the gate's tau for A <= 0.
    """
    return _objective(fields, gate=SoftGate(tau_pos, tau_neg), aggregate="seq-mean-token-mean")


@_preset
def CISPO(cap: float = 5.0, low: float | None = None, **fields: Any) -> Objective:
    """CISPO: REINFORCE weighted by the clipped, detached ratio, token-mean (arXiv:2506.13585).

    Args:
        cap: above 0, the ratio's upper bound.
        low: the ratio's lower bound; None: 0.
    """
    return _objective(fields, gate=StopGradientClip(cap, low))


@_preset
def GMPO(clip: float = 0.4, **fields: Any) -> Objective:
    """GMPO: the geometric mean of clipped token ratios (arXiv:2507.20673).

    Args:
        clip: above 0, the bound on each token's log-ratio.
    """
    return _objective(fields, gate=GeometricMean(clip), aggregate="seq-mean-token-mean")


@_preset
def LUSPO(clip_low: float = 3e-4, clip_high: float = 4e-4, **fields: Any) -> Objective:
    """LUSPO: GSPO with each response weighted by its length, aggregate "seq-mean-token-sum" (arXiv:2602.05261).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high), ratio="sequence", aggregate="seq-mean-token-sum")


@_preset
def VESPO(
    k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0, **fields: Any
) -> Objective:
    """VESPO: REINFORCE weighted by a gamma-shaped function of the product of the response's ratios (arXiv:2602.10693).

    Token-mean.

    Args:
        k_pos: k of `GammaWeight` for A >= 0.
        lam_pos: lam of `GammaWeight` for A >= 0.
        k_neg: k of `GammaWeight` for A < 0.
        lam_neg: lam of `GammaWeight` for A < 0.
    """
    return _objective(fields, gate=GammaWeight(k_pos, lam_pos, k_neg, lam_neg), ratio="sequence-product")


@_preset
def DeepSeekV32(clip: float = 0.2, *, kl_coef: float | Tensor, off_policy_delta: float, **fields: Any) -> Objective:
    """DeepSeek-V3.2's GRPO: the unbiased k3 KL term and off-policy sequence masking (arXiv:2512.02556).

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        kl_coef: the KL term's weight, a float or a 0-dim tensor; the float 0 leaves it out.
        off_policy_delta: in nats, the field of `Objective`.
    """
    return _objective(
        fields,
        gate=Clip(clip, clip),
        kl=_kl("k3-unbiased", kl_coef),
        aggregate="seq-mean-token-mean",
        off_policy_delta=off_policy_delta,
    )


@_preset
def FIPO(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    half_life: float = 32.0,
    low: float = 1.0,
    high: float = 1.2,
    safe_ratio: float | None = 10.0,
    **fields: Any,
) -> Objective:
    """FIPO: DAPO's clip, each token weighted by its response's later ratios, token-mean (arXiv:2603.19835).

    The weight is `FutureKL`'s, in which ratios above dual_clip do not count. Numbers are those of the authors' 32B run.
    Their code also drops a response with more than one token that the dual clip stops; this has no such rule.

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
        dual_clip: as in `PPO`, and the ratio above which a token does not count in the weights' sums; None: neither.
        half_life: the distance, in tokens, at which a later token counts half in a token's weight.
        low: the lower bound of a token's weight.
        high: the upper bound of a token's weight.
        safe_ratio: the ratio above which a token with A < 0 is not weighted up, see `FutureKL`; None: no such ratio.
    """
    return _objective(
        fields,
        gate=Clip(clip_low, clip_high, dual=dual_clip),
        future_kl=FutureKL(half_life, low, high, dual_clip, safe_ratio),
    )


@_preset
def ClipCov(
    clip: float = 0.2,
    clip_high: float | None = None,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
    **fields: Any,
) -> Objective:
    """Clip-Cov: PPO's clip, without a random few of the tokens that lower the entropy most (arXiv:2505.22617).

    Token-mean; the tokens and the generator are `CovarianceClip`'s.

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
        fraction: the share of the valid tokens that is drawn.
        cov_low: the lower bound of the covariance of tokens that may be drawn.
        cov_high: the upper bound of the covariance of tokens that may be drawn.
        generator: what draws them, see `CovarianceClip`; None: the default one of the inputs' device.
    """
    gate = Clip(clip, clip if clip_high is None else clip_high)
    return _objective(fields, gate=gate, covariance=CovarianceClip(fraction, cov_low, cov_high, generator))


@_preset
def KLCov(fraction: float = 2e-4, coef: float | Tensor = 1.0, **fields: Any) -> Objective:
    """KL-Cov: `-r A`, `+ coef |log r|` for the tokens that lower the entropy most, token-mean (arXiv:2505.22617).

    No token is clipped, as in the paper and the authors' code; `gate=Clip()` adds PPO's clip. See `CovarianceKL`.

    Args:
        fraction: the share of the valid tokens that is chosen.
        coef: the weight of `|log r|`, a float or a 0-dim tensor.
    """
    return _objective(fields, gate=NoGate(ratio=True), covariance=CovarianceKL(fraction, coef))


@_preset
def DPPO(
    kind: Literal["tv", "kl"] = "tv",
    low: float | None = None,
    high: float | None = None,
    cap: float = 20.0,
    **fields: Any,
) -> Objective:
    """DPPO: REINFORCE weighted by the capped ratio, without the tokens that left a trust region (arXiv:2602.04879).

    The trust region is one of binary divergence, see `DivergenceMask`; token-mean. low and high are by default the
    authors' thresholds, 0.15 for kind "tv" and 0.05 for "kl"; they train with DrGRPO's aggregation.

    Args:
        kind: the binary divergence, "tv" (total variation) or "kl".
        low: the divergence's bound for A <= 0, in nats for "kl"; None: the authors'.
        high: the divergence's bound for A > 0; None: the authors'.
        cap: above 0, the ratio's upper bound.
    """
    threshold = {"tv": 0.15, "kl": 0.05}.get(kind, 0.0)
    gate = DivergenceMask(kind, threshold if low is None else low, threshold if high is None else high, cap)
    return _objective(fields, gate=gate)


@_preset
def IcePop(low: float = 0.5, high: float = 2.0, **fields: Any) -> Objective:
    """IcePop on the current ratio: REINFORCE weighted by the ratio to the rollout policy, 0 outside [low, high].

    Token-mean, INTELLECT-3's form (arXiv:2512.16144); for Ring-1T's see `RatioMask`.

    Args:
        low: the smallest ratio that is kept.
        high: the largest ratio that is kept.
    """
    return _objective(fields, gate=RatioMask(low, high))


@_preset
def TOPR(low: float = 0.0, high: float = 1.0, **fields: Any) -> Objective:
    """TOPR: REINFORCE, its negative part weighted by the clipped ratio to the rollout policy (arXiv:2503.14286).

    The paper's form: the ratio is the product over a response, and responses are summed over their tokens. Others'
    code has each token's own, which is `TOPR(ratio="token")`.

    Args:
        low: the ratio's lower bound for A <= 0.
        high: the ratio's upper bound for A <= 0.
    """
    return _objective(fields, gate=Tapered(low, high), ratio="sequence-product", aggregate="seq-mean-token-sum")


@_preset
def DRO(beta: float | Tensor, **fields: Any) -> Objective:
    """DRO: `-A logp + beta / 2 (log r)^2`, token-mean (arXiv:2405.19107; Kimi k1.5, arXiv:2501.12599).

    verl's form, in which each token's log-ratio is squared; the papers square a response's. The square is the
    objective's KL term, of kind "old-new-k2", which token weights multiply too: a `kl` given beside beta replaces it.

    Args:
        beta: the square's weight, a float or a 0-dim tensor; the float 0 leaves it out.
    """
    return _objective(fields, gate=NoGate(ratio=False), kl=_kl("old-new-k2", beta, weighted=True))


def any_numbers(name: str) -> Objective:
    """The preset with this name in PRESETS, with 1 for every required argument: for uses that read no numbers."""
    parameters = inspect.signature(PRESETS[name]).parameters.values()
    return PRESETS[name](**{p.name: 1 for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD})
