"""Preference objectives as data: a formula of a pair's scores, what a score is, and a likelihood term.

The formulas are in `preference_formulas.py`; this file holds their parameters, and the published algorithms as presets.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from torch import Tensor

from fastrl.base import checks
from fastrl.objectives.preference_formulas import PREFERENCE_FORMULAS
from fastrl.objectives.presets import entered_in

#: formula -> the fields of Preference that it reads beside beta
_READS = {
    name: {p.name for p in inspect.signature(formula).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for name, formula in PREFERENCE_FORMULAS.items()
}


@dataclass(frozen=True)
class Preference:
    """A preference objective: a loss per pair of responses, `formula(chosen score, rejected score, beta)`.

    A field that the formula does not read keeps its default.

    Args:
        formula: a key of `fastrl.objectives.preference_formulas.PREFERENCE_FORMULAS`, where each is written out.
        beta: above 0, multiplies the scores.
        label_smoothing: e, the share of pairs that may be labelled wrongly, at least 0 and below 0.5.
        gamma: the margin that beta times the difference of the scores should exceed.
        tau: above 0, the width of DiscoPOP's blend.
        nll_coef: at least 0, the weight of the chosen responses' negative log-likelihood, a mean over tokens.
        average: whether a score is a mean over the response's tokens, not a sum.
        reference: whether the reference's log-probability is subtracted.
    """

    formula: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    tau: float = 0.05
    nll_coef: float = 0.0
    average: bool = False
    reference: bool = True

    def __post_init__(self) -> None:
        if self.formula not in PREFERENCE_FORMULAS:
            raise ValueError(
                f"Preference.formula must be one of {', '.join(PREFERENCE_FORMULAS)}, got {self.formula!r}"
            )
        for name in ("beta", "tau"):
            checks.number(f"Preference.{name}", getattr(self, name), positive=True)
        for name in ("label_smoothing", "gamma", "nll_coef"):
            checks.number(f"Preference.{name}", getattr(self, name))
        if self.nll_coef < 0:
            raise ValueError(f"Preference.nll_coef must be >= 0, got {self.nll_coef!r}")
        if not 0 <= self.label_smoothing < 0.5 or (self.formula == "exo-pair" and self.label_smoothing == 0):
            least = "> 0" if self.formula == "exo-pair" else ">= 0"
            raise ValueError(
                f"Preference.label_smoothing must be {least} and < 0.5 for formula={self.formula!r}, got"
                f" {self.label_smoothing!r}"
            )
        for name in ("average", "reference"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Preference.{name} must be a bool, got {getattr(self, name)!r}")
        if self.formula == "odds-ratio" and self.reference:
            raise ValueError(
                "Preference.reference must be False for formula='odds-ratio', which reads p itself, got True"
            )
        for field in dataclasses.fields(self):
            optional = field.name in ("label_smoothing", "gamma", "tau") and field.name not in _READS[self.formula]
            if optional and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"Preference.{field.name} is not read by formula={self.formula!r} and must be {field.default!r},"
                    f" got {getattr(self, field.name)!r}"
                )

    def losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss of each pair, without the likelihood term.

        Args:
            chosen: (B,) float64, the chosen responses' scores.
            rejected: (B,) float64, the rejected responses' scores.

        Returns:
            float64 (B,).
        """
        options = {name: getattr(self, name) for name in _READS[self.formula]}
        return PREFERENCE_FORMULAS[self.formula](chosen, rejected, self.beta, **options)

    @property
    def needs_lengths(self) -> bool:
        """Whether the responses' numbers of tokens enter the loss."""
        return self.average or self.nll_coef != 0

    def replace(self, **changes: Any) -> Preference:
        """Returns a copy with the given fields changed.

        Args:
            **changes: fields and their new values.

        Returns:
            The copy.

        Raises:
            TypeError, ValueError: a field of the wrong type or value.
        """
        return dataclasses.replace(self, **changes)


class ScoreFields(TypedDict, total=False):
    """The fields of `Preference` that every formula has a use for, and no preset names."""

    average: bool
    reference: bool


class LikelihoodFields(ScoreFields, total=False):
    """Also the weight of the likelihood term."""

    nll_coef: float


class MarginFields(ScoreFields, total=False):
    """Also the margin of the formulas that read one."""

    gamma: float


class LikelihoodAndMarginFields(LikelihoodFields, MarginFields, total=False):
    """Both."""


def _preference(overrides: Mapping[str, Any], formula: str, **defaults: Any) -> Preference:
    return Preference(formula=formula, **{**defaults, **overrides})


PREFERENCES: dict[str, Callable[..., Preference]] = {}
"""Every preset by name; the command line and the tests read this table."""
_preset = entered_in(PREFERENCES, [field.name for field in dataclasses.fields(Preference) if field.name != "formula"])


@_preset
def DPO(beta: float = 0.1, label_smoothing: float = 0.0, **fields: Unpack[LikelihoodAndMarginFields]) -> Preference:
    """DPO: `-log sigmoid(b)`, b = beta times the difference of the log-ratios (arXiv:2305.18290).

    With `label_smoothing` e it is cDPO, `-(1 - e) log sigmoid(b) - e log sigmoid(-b)` (Mitchell, 2023). TRL's
    `sigmoid_norm` has `average=True`.

    Args:
        beta: above 0, multiplies the log-ratios.
        label_smoothing: e, the share of pairs that may be labelled wrongly, at least 0 and below 0.5.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, gamma, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "sigmoid", beta=beta, label_smoothing=label_smoothing)


@_preset
def IPO(beta: float = 0.1, **fields: Unpack[LikelihoodFields]) -> Preference:
    """IPO: `(difference of the log-ratios - 1 / (2 beta))^2`, beta being the paper's tau (arXiv:2310.12036, eq. 17).

    The log-ratios are means over each response's tokens, as in TRL, whose authors report that the paper's did so too;
    the paper's text does not say it. `average=False` takes sums.

    Args:
        beta: above 0; the log-ratios' target is `1 / (2 beta)`.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "ipo", beta=beta, average=True)


@_preset
def Hinge(beta: float = 0.1, **fields: Unpack[LikelihoodAndMarginFields]) -> Preference:
    """`max(0, 1 - b)`, with b as in DPO: the hinge of RSO (arXiv:2309.06657), as in TRL and Liger.

    SLiC-HF (arXiv:2305.10425) has it without the reference: `reference=False`, and `nll_coef` for its second term.

    Args:
        beta: above 0, multiplies the log-ratios.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, gamma, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "hinge", beta=beta)


@_preset
def RobustDPO(beta: float = 0.1, label_smoothing: float = 0.1, **fields: Unpack[LikelihoodFields]) -> Preference:
    """Robust DPO: DPO's loss without the bias of labels flipped with probability e (arXiv:2403.00409).

    `(-(1 - e) log sigmoid(b) + e log sigmoid(-b)) / (1 - 2 e)`, which may be negative.

    Args:
        beta: above 0, multiplies the log-ratios.
        label_smoothing: e, the share of pairs that may be labelled wrongly, at least 0 and below 0.5.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "robust", beta=beta, label_smoothing=label_smoothing)


@_preset
def APOZero(beta: float = 0.1, **fields: Unpack[LikelihoodFields]) -> Preference:
    """APO-zero: raises the chosen and lowers the rejected response, `1 - sigmoid(b_w) + sigmoid(b_l)`.

    b_w and b_l are beta times each response's log-ratio (arXiv:2408.06266, eq. 7, plus 1, as in TRL).

    Args:
        beta: above 0, multiplies the log-ratios.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "apo-zero", beta=beta)


@_preset
def APODown(beta: float = 0.1, **fields: Unpack[LikelihoodFields]) -> Preference:
    """APO-down: lowers both responses, the rejected one more, `sigmoid(b_w) + 1 - sigmoid(b_w - b_l)`.

    b_w and b_l are beta times each response's log-ratio (arXiv:2408.06266, eq. 8, plus 1, as in TRL).

    Args:
        beta: above 0, multiplies the log-ratios.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "apo-down", beta=beta)


@_preset
def SPPO(beta: float = 0.1, **fields: Unpack[LikelihoodFields]) -> Preference:
    """SPPO: `(log-ratio_w - 1 / (2 beta))^2 + (log-ratio_l + 1 / (2 beta))^2` (arXiv:2405.00675, eq. 4.7).

    beta is the paper's 1 / eta, and a chosen response is preferred with probability 1, a rejected one with 0: TRL's and
    Liger's `sppo_hard`. The paper estimates these probabilities by a preference model.

    Args:
        beta: above 0; the log-ratios' target is `1 / (2 beta)`.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "sppo", beta=beta)


@_preset
def SimPO(
    beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, **fields: Unpack[LikelihoodFields]
) -> Preference:
    """SimPO: `-log sigmoid(beta (mean logp_w - mean logp_l) - gamma)`, without a reference (arXiv:2405.14734, eq. 6).

    gamma is the paper's; its authors' code takes gamma / beta. TRL's and Liger's `gamma` is the paper's too.

    Args:
        beta: above 0, multiplies the mean log-probabilities.
        gamma: the margin that beta times the difference of the scores should exceed.
        label_smoothing: e, the share of pairs that may be labelled wrongly, at least 0 and below 0.5.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    own = {"beta": beta, "gamma": gamma, "label_smoothing": label_smoothing}
    return _preference(fields, "sigmoid", average=True, reference=False, **own)


@_preset
def CPO(
    beta: float = 0.1, label_smoothing: float = 0.0, nll_coef: float = 1.0, **fields: Unpack[MarginFields]
) -> Preference:
    """CPO: `-log sigmoid(beta (logp_w - logp_l))` without a reference, plus the chosen responses' NLL.

    The NLL is a mean over the batch's tokens, as in the authors' code, TRL and Liger (arXiv:2401.08417, eq. 3).

    Args:
        beta: above 0, multiplies the log-probabilities.
        label_smoothing: e, the share of pairs that may be labelled wrongly, at least 0 and below 0.5.
        nll_coef: at least 0, the weight of the chosen responses' negative log-likelihood, a mean over tokens.
        **fields: fields of `Preference`, in place of the preset's: gamma, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    own = {"beta": beta, "label_smoothing": label_smoothing, "nll_coef": nll_coef}
    return _preference(fields, "sigmoid", reference=False, **own)


@_preset
def ORPO(beta: float = 0.1, nll_coef: float = 1.0, **fields: Unpack[ScoreFields]) -> Preference:
    """ORPO: the chosen responses' NLL plus `-beta log sigmoid(log odds_w - log odds_l)` (arXiv:2403.07691, eq. 6).

    odds = p / (1 - p) with p = exp(mean logp); beta is the paper's lambda. The NLL is that of the response; the
    authors' code, and TRL, count the prompt's tokens in it: `nll_mask` of `linear_preference_loss`.

    Args:
        beta: above 0, the weight of the odds' term.
        nll_coef: at least 0, the weight of the chosen responses' negative log-likelihood, a mean over tokens.
        **fields: fields of `Preference`, in place of the preset's: average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "odds-ratio", beta=beta, nll_coef=nll_coef, average=True, reference=False)


@_preset
def EXOPair(beta: float = 0.1, label_smoothing: float = 1e-3, **fields: Unpack[LikelihoodFields]) -> Preference:
    """EXO for pairs: the reverse KL from the policy's choice to labels smoothed by e > 0 (arXiv:2402.00856, eq. 16).

    Args:
        beta: above 0, multiplies the log-ratios.
        label_smoothing: e, the share of pairs that may be labelled wrongly, above 0 and below 0.5.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "exo-pair", beta=beta, label_smoothing=label_smoothing)


@_preset
def NCAPair(beta: float = 0.1, **fields: Unpack[LikelihoodFields]) -> Preference:
    """NCA for pairs: `-log sigmoid(b_w) - (log sigmoid(-b_w) + log sigmoid(-b_l)) / 2` (arXiv:2402.05369).

    b_w and b_l are beta times each response's log-ratio.

    Args:
        beta: above 0, multiplies the log-ratios.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "nca-pair", beta=beta)


@_preset
def BCOPair(beta: float = 0.1, **fields: Unpack[LikelihoodFields]) -> Preference:
    """BCO for pairs: `-log sigmoid(b_w) - log sigmoid(-b_l)`, b as in NCAPair (arXiv:2404.04656).

    As TRL's and Liger's `bco_pair`: without the paper's shift of the rewards by a running mean.

    Args:
        beta: above 0, multiplies the log-ratios.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "bco-pair", beta=beta)


@_preset
def DiscoPOP(beta: float = 0.1, tau: float = 0.05, **fields: Unpack[LikelihoodFields]) -> Preference:
    """DiscoPOP: `-(1 - s) log sigmoid(b) + s exp(-b)` with s = sigmoid(b / tau) (arXiv:2406.08414, eq. 5).

    Args:
        beta: above 0, multiplies the log-ratios.
        tau: above 0, the width of DiscoPOP's blend.
        **fields: fields of `Preference`, in place of the preset's: nll_coef, average, reference.

    Returns:
        The `Preference`.

    Raises:
        TypeError, ValueError: an unknown argument, or a value of the wrong type or range.
    """
    return _preference(fields, "discopop", beta=beta, tau=tau)
