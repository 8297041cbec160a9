"""The preference losses of one pair, naively, from their papers; the likelihood term and KTO too.

`exp` and `log` are those of the numbers that come: of float64 tensors, or of mpmath, whose digits no cancellation
exhausts. Nothing here is taken from `fastrl.objectives.preference_formulas`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fastrl import Preference


class Arithmetic(NamedTuple):
    """The functions of one kind of numbers."""

    exp: Callable[[Any], Any]
    log: Callable[[Any], Any]


TORCH = Arithmetic(torch.exp, torch.log)


def pair_loss(objective: Preference, chosen: Any, rejected: Any, of: Arithmetic = TORCH) -> Any:
    """The loss of a pair with these scores: sums or means of `logp - ref`, or of logp."""
    beta, e = objective.beta, objective.label_smoothing
    w, l, m = beta * chosen, beta * rejected, beta * (chosen - rejected) - objective.gamma  # noqa: E741

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + of.exp(-x))

    def log_sigmoid(x: Any) -> Any:
        return -of.log(1 + of.exp(-x))

    def odds(logp: Any) -> Any:
        return of.exp(logp) / (1 - of.exp(logp))

    def exo() -> Any:
        q = sigmoid(m)
        return q * of.log(q / (1 - e)) + sigmoid(-m) * of.log(sigmoid(-m) / e)

    def discopop() -> Any:
        s = sigmoid(m / objective.tau)
        return -(1 - s) * log_sigmoid(m) + s * of.exp(-m)

    losses: dict[str, Callable[[], Any]] = {
        "sigmoid": lambda: -(1 - e) * log_sigmoid(m) - e * log_sigmoid(-m),
        "robust": lambda: (-(1 - e) * log_sigmoid(m) + e * log_sigmoid(-m)) / (1 - 2 * e),
        "hinge": lambda: (1 - m + abs(1 - m)) / 2,
        "ipo": lambda: (chosen - rejected - 1 / (2 * beta)) ** 2,
        "sppo": lambda: (chosen - 1 / beta * 0.5) ** 2 + (rejected - 1 / beta * -0.5) ** 2,
        "apo-zero": lambda: 1 - sigmoid(w) + sigmoid(l),
        "apo-down": lambda: sigmoid(w) + 1 - sigmoid(w - l),
        "odds-ratio": lambda: -beta * of.log(odds(chosen) / (odds(chosen) + odds(rejected))),
        "exo-pair": exo,
        "nca-pair": lambda: -log_sigmoid(w) - 0.5 * log_sigmoid(-w) - 0.5 * log_sigmoid(-l),
        "bco-pair": lambda: -log_sigmoid(w) - log_sigmoid(-l),
        "discopop": discopop,
    }
    return losses[objective.formula]()


def kto_term(log_ratio: Any, desirable: bool, z: Any, beta: float, weights: Sequence[float], of: Any = TORCH) -> Any:
    """The KTO loss of one response: lambda_y - v, with weights (desirable, undesirable)."""
    shifted = beta * (log_ratio - z) if desirable else beta * (z - log_ratio)
    weight = weights[0] if desirable else weights[1]
    return weight - weight / (1 + of.exp(-shifted))


def exact_preference(
    objective: Preference,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, losses (B,), rewards (2, B)) from float64 sums (B,) and lengths (2, B); pair by pair."""
    losses, rewards = [], []
    for i in range(len(chosen)):
        scores = []
        for logp, ref, n in zip((chosen[i], rejected[i]), (ref_chosen[i], ref_rejected[i]), lengths[:, i], strict=True):
            score = logp - ref if objective.reference else logp
            scores.append((score / int(n) if n else 0 * score) if objective.average else score)
        losses.append(pair_loss(objective, *scores))
        rewards.append(objective.beta * torch.stack(scores))
    nothing = chosen.new_zeros(0) + 0 * (chosen.sum() + rejected.sum())
    of_pair = torch.stack(losses) if losses else nothing
    loss = of_pair.sum() / max(len(chosen), 1)
    if objective.nll_coef:
        loss = loss - objective.nll_coef * chosen[lengths[0] > 0].sum() / max(int(lengths[0].sum()), 1)
    return loss, of_pair, torch.stack(rewards, 1) if rewards else nothing.expand(2, 0)
