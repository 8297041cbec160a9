"""The published algorithms as presets of `Objective`. Every preset also takes any field of `Objective` by keyword."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar, Unpack, cast, get_args, get_type_hints

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
from fastrl.objectives.objective import (
    KL,
    CovarianceClip,
    CovarianceKL,
    DeltaFields,
    FutureKL,
    LengthFields,
    Objective,
    ObjectiveFields,
)


def _objective(overrides: Mapping[str, Any], **defaults: Any) -> Objective:
    return Objective(**{**defaults, **overrides})


def _kl(kind: str, coef: float | Tensor, weighted: bool = False) -> KL | None:
    """A KL term, or None if the coefficient is the float 0."""
    return KL(kind, coef, weighted=weighted) if isinstance(coef, Tensor) or coef != 0 else None


_Preset = TypeVar("_Preset", bound=Callable[..., Any])


def entered_in(presets: dict[str, Callable[..., Any]], fields: Collection[str]) -> Callable[[_Preset], _Preset]:
    """A decorator that enters a preset in a table by name, and refuses arguments but its own and fields."""

    def entered(preset: _Preset) -> _Preset:
        known = {*fields, *inspect.signature(preset).parameters} - {"fields"}

        @functools.wraps(preset)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    raise TypeError(_unexpected(preset, name))
            return preset(*args, **given)

        presets[preset.__name__] = checked
        return cast(_Preset, checked)

    return entered


def _unexpected(preset: Callable[..., Any], name: str) -> str:
    """The error of an argument that the preset does not take."""
    own = [parameter for parameter in inspect.signature(preset).parameters if parameter != "fields"]
    takes = [*own, *get_type_hints(get_args(get_type_hints(preset)["fields"])[0])]
    nearest = difflib.get_close_matches(name, takes, 1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"{preset.__name__}() got an unexpected argument {name!r}{hint} It takes {', '.join(takes)}"


PRESETS: dict[str, Callable[..., Objective]] = {}
"""Every preset by name; the command line, the tests and the plots read this table."""
_preset = entered_in(PRESETS, [field.name for field in dataclasses.fields(Objective)])


@_preset
def REINFORCE(**fields: Unpack[ObjectiveFields]) -> Objective:
    """`-A logp`, token-mean (Williams, 1992).

    Args:
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=NoGate(ratio=False))


@_preset
def GPG(**fields: Unpack[ObjectiveFields]) -> Objective:
    """Group policy gradient: `-A logp` with group advantages, token-mean (arXiv:2504.02546).

    Args:
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=NoGate(ratio=False))


@_preset
def CPI(**fields: Unpack[ObjectiveFields]) -> Objective:
    """The surrogate `-r A` of conservative policy iteration and TRPO, token-mean (Kakade and Langford, 2002).

    Args:
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=NoGate(ratio=True))


@_preset
def PPO(
    clip: float = 0.2, clip_high: float | None = None, dual_clip: float | None = None, **fields: Unpack[ObjectiveFields]
) -> Objective:
    """PPO's clipped surrogate, token-mean (arXiv:1707.06347); `dual_clip` as in arXiv:1912.09729.

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
        dual_clip: above 1: the loss of a negative advantage is at most `-dual_clip A`; None: no such bound.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Clip(clip, clip if clip_high is None else clip_high, dual=dual_clip))


@_preset
def PPOKL(coef: float | Tensor, **fields: Unpack[ObjectiveFields]) -> Objective:
    """PPO with a KL penalty instead of the clip: `-r A + coef KL(old || new)`, token-mean (arXiv:1707.06347).

    Args:
        coef: the KL term's weight, a float or a 0-dim tensor; the float 0 leaves it out.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=NoGate(ratio=True), kl=_kl("old-new", coef))


@_preset
def GRPO(
    clip: float = 0.2, clip_high: float | None = None, kl_coef: float | Tensor = 0.04, **fields: Unpack[ObjectiveFields]
) -> Objective:
    """GRPO: PPO's clip, a k3 KL term, the mean over responses of each response's mean (arXiv:2402.03300).

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
        kl_coef: the KL term's weight, a float or a 0-dim tensor; the float 0 leaves it out.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    gate = Clip(clip, clip if clip_high is None else clip_high)
    return _objective(fields, gate=gate, kl=_kl("k3", kl_coef), aggregate="seq-mean-token-mean")


@_preset
def DrGRPO(max_length: int, clip: float = 0.2, **fields: Unpack[DeltaFields]) -> Objective:
    """Dr. GRPO: PPO's clip, sums over tokens divided by a constant length, no KL (arXiv:2503.20783).

    Args:
        max_length: the length, in tokens, by which "seq-mean-token-sum-norm" divides sums.
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Clip(clip, clip), aggregate="seq-mean-token-sum-norm", max_length=max_length)


@_preset
def BNPO(clip: float = 0.2, clip_high: float | None = None, **fields: Unpack[ObjectiveFields]) -> Objective:
    """GRPO's gate, averaged over the batch's tokens, no KL (TRL's `loss_type="bnpo"`).

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Clip(clip, clip if clip_high is None else clip_high))


@_preset
def DAPO(clip_low: float = 0.2, clip_high: float = 0.28, **fields: Unpack[ObjectiveFields]) -> Objective:
    """DAPO: a higher upper clip, token-mean, no KL (arXiv:2503.14476).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high))


@_preset
def GSPO(clip_low: float = 3e-4, clip_high: float = 4e-4, **fields: Unpack[ObjectiveFields]) -> Objective:
    """GSPO: PPO's clip on the response's geometric-mean ratio (arXiv:2507.18071).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high), ratio="sequence", aggregate="seq-mean-token-mean")


@_preset
def GSPOToken(clip_low: float = 3e-4, clip_high: float = 4e-4, **fields: Unpack[ObjectiveFields]) -> Objective:
    """GSPO-token: the response's ratio, each token's own gradient, per-token advantages (arXiv:2507.18071).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high), ratio="sequence-token", aggregate="seq-mean-token-mean")


@_preset
def SAPO(tau_pos: float = 1.0, tau_neg: float = 1.05, **fields: Unpack[ObjectiveFields]) -> Objective:
    """SAPO: a soft gate, weight sech^2, instead of the clip (arXiv:2511.20347).

    Args:
        tau_pos: above 0, tau for A > 0.
        tau_neg: above 0, tau for A <= 0.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=SoftGate(tau_pos, tau_neg), aggregate="seq-mean-token-mean")


@_preset
def CISPO(cap: float = 5.0, low: float | None = None, **fields: Unpack[ObjectiveFields]) -> Objective:
    """CISPO: REINFORCE weighted by the clipped, detached ratio, token-mean (arXiv:2506.13585).

    Args:
        cap: above 0, the ratio's upper bound.
        low: from 0 to cap, the ratio's lower bound; None: 0.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=StopGradientClip(cap, low))


@_preset
def GMPO(clip: float = 0.4, **fields: Unpack[ObjectiveFields]) -> Objective:
    """GMPO: the geometric mean of clipped token ratios (arXiv:2507.20673).

    Args:
        clip: above 0, the bound on each token's log-ratio.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=GeometricMean(clip), aggregate="seq-mean-token-mean")


@_preset
def LUSPO(clip_low: float = 3e-4, clip_high: float = 4e-4, **fields: Unpack[ObjectiveFields]) -> Objective:
    """LUSPO: GSPO with each response weighted by its length, aggregate "seq-mean-token-sum" (arXiv:2602.05261).

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Clip(clip_low, clip_high), ratio="sequence", aggregate="seq-mean-token-sum")


@_preset
def VESPO(
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
    **fields: Unpack[ObjectiveFields],
) -> Objective:
    """VESPO: REINFORCE weighted by a gamma-shaped function of the product of the response's ratios (arXiv:2602.10693).

    Token-mean.

    Args:
        k_pos: at least 0, k for A >= 0.
        lam_pos: at least 0, lam for A >= 0.
        k_neg: at least 0, k for A < 0.
        lam_neg: at least 0, lam for A < 0.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=GammaWeight(k_pos, lam_pos, k_neg, lam_neg), ratio="sequence-product")


@_preset
def DeepSeekV32(
    clip: float = 0.2, *, kl_coef: float | Tensor, off_policy_delta: float, **fields: Unpack[LengthFields]
) -> Objective:
    """DeepSeek-V3.2's GRPO: the unbiased k3 KL term and off-policy sequence masking (arXiv:2512.02556).

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        kl_coef: the KL term's weight, a float or a 0-dim tensor; the float 0 leaves it out.
        off_policy_delta: in nats: a response whose mean of `rollout - logp` exceeds it has no policy term where A < 0
            (without rollout_logprobs, of `old - logp`). None: all have.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
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
    **fields: Unpack[ObjectiveFields],
) -> Objective:
    """FIPO: DAPO's clip, each token weighted by its response's later ratios, token-mean (arXiv:2603.19835).

    The weight is `FutureKL`'s, in which ratios above dual_clip do not count. Numbers are those of the authors' 32B run.
    Their code also drops a response with more than one token that the dual clip stops; this has no such rule.

    Args:
        clip_low: the ratio's lower bound is `1 - clip_low`.
        clip_high: the ratio's upper bound is `1 + clip_high`.
        dual_clip: above 1: the loss of A < 0 is at most `-dual_clip A`; larger ratios add to no weight; None: neither.
        half_life: above 0, the distance in tokens, without masked ones, at which a later token counts half in a weight.
        low: from 0 to 1, the lower bound of a token's weight.
        high: at least 1, the upper bound of a token's weight.
        safe_ratio: above 1: tokens with A < 0 and a larger ratio get a weight clipped to [0.8, 1]; None: no such ratio.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
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
    **fields: Unpack[ObjectiveFields],
) -> Objective:
    """Clip-Cov: PPO's clip, without a random few of the tokens that lower the entropy most (arXiv:2505.22617).

    Token-mean; the tokens and the generator are `CovarianceClip`'s.

    Args:
        clip: the ratio's bounds are `1 - clip` and `1 + clip`.
        clip_high: the ratio's upper bound is `1 + clip_high`; None: `1 + clip`.
        fraction: the share of the valid tokens that is drawn, above 0 and up to 1.
        cov_low: the lower bound of the covariance of tokens that may be drawn.
        cov_high: the upper bound of the covariance of tokens that may be drawn.
        generator: the torch.Generator, on any device, that draws them; None: the default one of the inputs' device.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    gate = Clip(clip, clip if clip_high is None else clip_high)
    return _objective(fields, gate=gate, covariance=CovarianceClip(fraction, cov_low, cov_high, generator))


@_preset
def KLCov(fraction: float = 2e-4, coef: float | Tensor = 1.0, **fields: Unpack[ObjectiveFields]) -> Objective:
    """KL-Cov: `-r A`, `+ coef |log r|` for the tokens that lower the entropy most, token-mean (arXiv:2505.22617).

    No token is clipped, as in the paper and the authors' code; `gate=Clip()` adds PPO's clip. See `CovarianceKL`.

    Args:
        fraction: the share of the valid tokens that is chosen, above 0 and up to 1.
        coef: the weight of `|log r|`, a float or a 0-dim tensor.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=NoGate(ratio=True), covariance=CovarianceKL(fraction, coef))


@_preset
def DPPO(
    kind: Literal["tv", "kl"] = "tv",
    low: float | None = None,
    high: float | None = None,
    cap: float = 20.0,
    **fields: Unpack[ObjectiveFields],
) -> Objective:
    """DPPO: REINFORCE weighted by the capped ratio, without the tokens that left a trust region (arXiv:2602.04879).

    The trust region is one of binary divergence, see `DivergenceMask`; token-mean. low and high are by default the
    authors' thresholds, 0.15 for kind "tv" and 0.05 for "kl"; they train with DrGRPO's aggregation.

    Args:
        kind: the binary divergence, "tv" (total variation) or "kl".
        low: the divergence's bound for A <= 0, in nats for "kl"; None: the authors'.
        high: the divergence's bound for A > 0; None: the authors'.
        cap: above 0, the ratio's upper bound.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    threshold = {"tv": 0.15, "kl": 0.05}.get(kind, 0.0)
    gate = DivergenceMask(kind, threshold if low is None else low, threshold if high is None else high, cap)
    return _objective(fields, gate=gate)


@_preset
def IcePop(low: float = 0.5, high: float = 2.0, **fields: Unpack[ObjectiveFields]) -> Objective:
    """IcePop on the current ratio: REINFORCE weighted by the ratio to the rollout policy, 0 outside [low, high].

    Token-mean, INTELLECT-3's form (arXiv:2512.16144); for Ring-1T's see `RatioMask`.

    Args:
        low: at least 0, the smallest ratio that is kept.
        high: above low, the largest ratio that is kept.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=RatioMask(low, high))


@_preset
def TOPR(low: float = 0.0, high: float = 1.0, **fields: Unpack[ObjectiveFields]) -> Objective:
    """TOPR: REINFORCE, its negative part weighted by the clipped ratio to the rollout policy (arXiv:2503.14286).

    The paper's form: the ratio is the product over a response, and responses are summed over their tokens. Others'
    code has each token's own, which is `TOPR(ratio="token")`.

    Args:
        low: at least 0, the ratio's lower bound for A <= 0.
        high: above low, the ratio's upper bound for A <= 0.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=Tapered(low, high), ratio="sequence-product", aggregate="seq-mean-token-sum")


@_preset
def DRO(beta: float | Tensor, **fields: Unpack[ObjectiveFields]) -> Objective:
    """DRO: `-A logp + beta / 2 (log r)^2`, token-mean (arXiv:2405.19107; Kimi k1.5, arXiv:2501.12599).

    verl's form, in which each token's log-ratio is squared; the papers square a response's. The square is the
    objective's KL term, of kind "old-new-k2", which token weights multiply too: a `kl` given beside beta replaces it.

    Args:
        beta: the square's weight, a float or a 0-dim tensor; the float 0 leaves it out.
        **fields: fields of `Objective`, in place of the preset's: gate, ratio, kl, entropy_coef, aggregate, max_length,
            max_log_ratio, rollout_correction, off_policy_delta, top_entropy_fraction, future_kl, covariance.

    Returns:
        The `Objective`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _objective(fields, gate=NoGate(ratio=False), kl=_kl("old-new-k2", beta, weighted=True))


def any_numbers(name: str) -> Objective:
    """The preset with this name in PRESETS, with 1 for every required argument: for uses that read no numbers."""
    parameters = inspect.signature(PRESETS[name]).parameters.values()
    return PRESETS[name](**{p.name: 1 for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD})
