"""The losses of a pair of responses, as functions of their scores: what `Preference.formula` names.

A score is what the objective reads of a response: its log-probability, less the reference's if it has one, summed over
its tokens or their mean. Each function takes the scores of chosen and rejected (pairs,), beta, and the other fields of
`Preference` that it reads, by their names; it returns one loss per pair.

The scores are float64, and what autograd would compute as a difference has its derivative by hand, so that slopes keep
their digits however large a margin is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.base.derivative import with_derivative


def _logistic(x: Tensor) -> Tensor:
    """-log sigmoid(x)."""
    return with_derivative(-torch.nn.functional.logsigmoid(x), -torch.sigmoid(-x), x)


def _either(b: Tensor, right: float, wrong: float) -> Tensor:
    """-right log sigmoid(b) - wrong log sigmoid(-b); a term without weight is not there, infinite or not."""
    return right * _logistic(b) if wrong == 0 else right * _logistic(b) + wrong * _logistic(-b)


def _finite(x: Tensor) -> Tensor:
    """x, with the largest finite number for an infinite one (of a pair that cannot be), which times 0 would be NaN."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def shortfall(x: Tensor) -> Tensor:
    """1 - sigmoid(x)."""
    return with_derivative(torch.sigmoid(-x), -torch.sigmoid(x) * torch.sigmoid(-x), x)


def _hinge(x: Tensor) -> Tensor:
    """max(0, 1 - x), whose derivative at the bend is 0."""
    return torch.relu(1 - x)


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = e^logp; where logp is 0 its largest finite value, with derivative 0."""
    # A response that is certain, or has no tokens, would have infinite odds, and an infinite derivative.
    logp = logp.clamp(max=-torch.finfo(torch.float32).tiny)
    rest = -torch.expm1(logp)  # 1 - p
    near_one = logp > -math.log(2)
    log_rest = torch.where(near_one, torch.log(rest), torch.log1p(-torch.exp(logp)))
    return with_derivative(logp - log_rest, 1 / rest, logp)


def sigmoid(chosen: Tensor, rejected: Tensor, beta: float, *, label_smoothing: float, gamma: float) -> Tensor:
    """-(1 - e) log sigmoid(b) - e log sigmoid(-b), b = beta (chosen - rejected) - gamma."""
    return _either(beta * (chosen - rejected) - gamma, 1 - label_smoothing, label_smoothing)


def robust(chosen: Tensor, rejected: Tensor, beta: float, *, label_smoothing: float) -> Tensor:
    """(-(1 - e) log sigmoid(b) + e log sigmoid(-b)) / (1 - 2 e)."""
    return _either(beta * (chosen - rejected), 1 - label_smoothing, -label_smoothing) / (1 - 2 * label_smoothing)


def hinge(chosen: Tensor, rejected: Tensor, beta: float, *, gamma: float) -> Tensor:
    """max(0, 1 - b), b = beta (chosen - rejected) - gamma."""
    return _hinge(beta * (chosen - rejected) - gamma)


def ipo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """(chosen - rejected - 1 / (2 beta))^2."""
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def sppo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2."""
    return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta chosen) + sigmoid(beta rejected)."""
    return shortfall(beta * chosen) + shortfall(-beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """sigmoid(beta chosen) + 1 - sigmoid(beta (chosen - rejected))."""
    return shortfall(-beta * chosen) + shortfall(beta * (chosen - rejected))


def odds_ratio(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-beta log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p) of p = e^score."""
    return beta * _logistic(log_odds(chosen) - log_odds(rejected))


def exo_pair(chosen: Tensor, rejected: Tensor, beta: float, *, label_smoothing: float) -> Tensor:
    """KL(q || p) of two choices: q = (sigmoid(b), sigmoid(-b)), p = (1 - e, e)."""
    b = _finite(beta * (chosen - rejected))
    q_chosen, q_rejected = torch.sigmoid(b), torch.sigmoid(-b)
    log_chosen, log_rejected = (torch.nn.functional.logsigmoid(x) for x in (b, -b))
    log_p_chosen, log_p_rejected = math.log1p(-label_smoothing), math.log(label_smoothing)
    value = q_chosen * (log_chosen - log_p_chosen) + q_rejected * (log_rejected - log_p_rejected)
    return with_derivative(value, q_chosen * q_rejected * (b - (log_p_chosen - log_p_rejected)), b)


def nca_pair(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta chosen) - (log sigmoid(-beta chosen) + log sigmoid(-beta rejected)) / 2."""
    return _logistic(beta * chosen) + (_logistic(-beta * chosen) + _logistic(-beta * rejected)) / 2


def bco_pair(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta chosen) - log sigmoid(-beta rejected)."""
    return _logistic(beta * chosen) + _logistic(-beta * rejected)


def discopop(chosen: Tensor, rejected: Tensor, beta: float, *, tau: float) -> Tensor:
    """-(1 - s) log sigmoid(b) + s e^-b, s = sigmoid(b / tau)."""
    margin = beta * (chosen - rejected)
    b = _finite(margin)
    s, rest = torch.sigmoid(b / tau), torch.sigmoid(-b / tau)
    logistic = -torch.nn.functional.logsigmoid(b)
    exponential = torch.exp(torch.nn.functional.logsigmoid(b / tau) - b)  # s e^-b, of which e^-b alone overflows
    slope = rest * (exponential - s * logistic) / tau - rest * torch.sigmoid(-b) - exponential
    return with_derivative(logistic * rest + exponential, slope, margin)


#: Every formula by name.
PREFERENCE_FORMULAS: dict[str, Callable[..., Tensor]] = {
    formula.__name__.replace("_", "-"): formula
    for formula in (
        sigmoid,
        robust,
        hinge,
        ipo,
        sppo,
        apo_zero,
        apo_down,
        odds_ratio,
        exo_pair,
        nca_pair,
        bco_pair,
        discopop,
    )
}
