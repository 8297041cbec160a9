"""Random objectives: every preset, combinations of gate, ratio, KL, aggregation and token weights, and callables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from drawing import Draw
from torch import Tensor

import fastrl

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")
RATIOS = ("token", "sequence", "sequence-token", "sequence-product")
NEEDY = ("PPOKL", "DrGRPO", "DeepSeekV32", "DRO", "ClipCov")  # of required arguments, or a generator
KINDS = ("k1", "k2", "k3", "k3-unbiased", "k1+", "k3+", "forward", "old-new", "old-new-k2")


def draw_objective(draw: Draw) -> Any:
    """An objective, told by its repr."""
    kind = draw.choices(("preset", "combination", "callable"), (5, 6, 1))[0]
    objective = {"preset": _preset, "combination": _combination, "callable": _callable}[kind](draw)
    draw.tell(objective=objective)
    return objective


def _coefficient(draw: Draw, value: float) -> float | Tensor:
    """A float, or a 0-dim tensor of the same number."""
    return torch.tensor(value) if draw.often(0.2) else float(torch.tensor(value))


def _maybe(draw: Draw, chance: float, value: float) -> float | None:
    return value if draw.often(chance) else None


def _clips(draw: Draw) -> tuple[float, float]:
    low, high = draw.choice(((0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (0.01, 0.05), (0.9, 3.0), (0.5, 0.1), (1.5, 0.3)))
    return low, high


def draw_kl(draw: Draw) -> fastrl.KL:
    coef = _coefficient(draw, draw.choice((0.04, 0.001, 0.5, 1.0, -0.3)))
    return fastrl.KL(draw.choice(KINDS), coef, draw.choice(("token", "token", "objective")), draw.often(0.3))


def _future_kl(draw: Draw) -> fastrl.FutureKL:
    low, high = draw.choice(((1.0, 1.2), (0.8, 1.2), (0.0, 10.0), (0.5, 1.0)))
    ratios = _maybe(draw, 0.5, draw.choice((1.1, 3.0))), _maybe(draw, 0.5, draw.choice((1.05, 4.0)))
    return fastrl.FutureKL(draw.choice((0.3, 2.0, 32.0)), low, high, *ratios)


def _clip_cov(draw: Draw) -> fastrl.CovarianceClip:
    low, high = draw.choice(((-5.0, 5.0), (-0.1, 1.0), (0.05, 9.0), (1.0, 5.0)))
    return fastrl.CovarianceClip(draw.choice((2e-4, 0.1, 0.4, 1.0)), low, high, _generator(draw))


def _generator(draw: Draw) -> torch.Generator:
    return torch.Generator().manual_seed(draw.randint(0, 2**40))


def _kl_cov(draw: Draw) -> fastrl.CovarianceKL:
    return fastrl.CovarianceKL(draw.choice((2e-4, 0.1, 0.4, 1.0)), _coefficient(draw, draw.choice((0.1, 1.0, -0.3))))


def _fields(draw: Draw, chance: float) -> dict[str, Any]:
    """Fields that any objective may have, each with this chance."""
    fields: dict[str, Any] = {}
    if draw.often(chance):
        fields["kl"] = draw_kl(draw)
    if draw.often(chance):
        fields["entropy_coef"] = _coefficient(draw, draw.choice((0.01, 0.1, 1.0, -0.05)))
    if draw.often(chance):
        fields["aggregate"] = draw.choice(AGGREGATIONS)
        fields["max_length"] = draw.randint(1, 40)
    if draw.often(chance * 0.6):
        level, mode = draw.choice(("token", "sequence", "sequence-mean")), draw.choice(("truncate", "mask"))
        low = draw.choice((0.0, 0.5, 0.9))
        bounds = (low, low + draw.choice((0.2, 1.5, 4.0)))
        reject = draw.choice((0.0, 0.3, 0.95)), draw.choice((1.02, 1.3, 6.0))
        overlap = max(low, reject[0]) < min(bounds[1], reject[1])
        reject = _maybe(draw, 0.5, reject) if overlap else None
        fields["rollout_correction"] = fastrl.RolloutCorrection(level, mode, *bounds, reject)
    if draw.often(chance * 0.4):
        fields["off_policy_delta"] = draw.choice((-0.1, 0.0, 0.05, 0.2, 1.0))
    if draw.often(chance * 0.4):
        fields["top_entropy_fraction"] = draw.choice((0.13, 0.21, 0.37, 0.61, 0.83, 1.0))
    if draw.often(chance * 0.3):
        fields["future_kl"] = _future_kl(draw)
    if draw.often(chance * 0.3):
        fields["covariance"] = _clip_cov(draw) if draw.often(0.5) else _kl_cov(draw)
    if draw.often(chance * 0.4):
        fields["max_log_ratio"] = draw.choice((0.3, 2.0, 10.0, 30.0))
    return fields


def _preset(draw: Draw) -> fastrl.Objective:
    name = draw.choice(sorted(fastrl.PRESETS))
    low, high = _clips(draw)
    low = min(low, 0.9)
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "PPO": lambda: {"clip": low, "clip_high": _maybe(draw, 0.5, high), "dual_clip": _maybe(draw, 0.4, 3.0)},
        "PPOKL": lambda: {"coef": _coefficient(draw, 0.1)},
        "GRPO": lambda: {"clip": low, "kl_coef": _coefficient(draw, draw.choice((0.0, 0.04, 0.4)))},
        "DrGRPO": lambda: {"max_length": draw.randint(1, 40), "clip": low},
        "BNPO": lambda: {"clip": low, "clip_high": _maybe(draw, 0.5, high)},
        "DAPO": lambda: {"clip_low": low, "clip_high": high},
        "GSPO": lambda: {"clip_low": low, "clip_high": high} if draw.often(0.6) else {},
        "GSPOToken": lambda: {"clip_low": low, "clip_high": high} if draw.often(0.6) else {},
        "LUSPO": lambda: {"clip_low": low, "clip_high": high} if draw.often(0.6) else {},
        "SAPO": lambda: {"tau_pos": draw.choice((0.5, 1.0, 3.0)), "tau_neg": draw.choice((1.05, 2.0))},
        "CISPO": lambda: {"cap": draw.choice((1.2, 5.0)), "low": _maybe(draw, 0.5, 0.8)},
        "GMPO": lambda: {"clip": draw.choice((0.01, 0.1, 0.4))},
        "VESPO": lambda: {"k_pos": draw.choice((0.0, 1.0, 2.0)), "lam_neg": draw.choice((0.5, 2.0))},
        "DeepSeekV32": lambda: {
            "clip": low,
            "kl_coef": _coefficient(draw, 0.1),
            "off_policy_delta": draw.choice((0.0, 0.1, 0.5)),
        },
        "DPPO": lambda: {
            "kind": draw.choice(("tv", "kl")),
            "low": draw.choice((None, 0.01)),
            "cap": draw.choice((1.2, 9.0)),
        },
        "IcePop": lambda: {"low": draw.choice((0.0, 0.8)), "high": draw.choice((1.2, 2.0))},
        "TOPR": lambda: {"low": draw.choice((0.0, 0.8)), "high": draw.choice((1.0, 1.2))},
        "DRO": lambda: {"beta": _coefficient(draw, draw.choice((0.1, 1.0)))},
        "FIPO": lambda: {"clip_low": low, "clip_high": high, "future_kl": _future_kl(draw)},
        "ClipCov": lambda: {"clip": low, "covariance": _clip_cov(draw)},
        "KLCov": lambda: {"covariance": _kl_cov(draw)},
    }
    arguments = own.get(name, dict)() if draw.often(0.7) or name in NEEDY else {}
    return fastrl.PRESETS[name](**arguments, **{k: v for k, v in _fields(draw, 0.2).items() if k not in arguments})


def _combination(draw: Draw) -> fastrl.Objective:
    low, high = _clips(draw)
    gate = draw.choice(
        (
            fastrl.NoGate(ratio=draw.often(0.5)),
            fastrl.Clip(low, high, dual=_maybe(draw, 0.3, draw.choice((1.5, 3.0))), delta=_maybe(draw, 0.3, 4.0)),
            fastrl.Clip(low, high, dual=_maybe(draw, 0.3, 3.0), delta=_maybe(draw, 0.3, draw.choice((1.1, 1.6)))),
            fastrl.SoftGate(draw.choice((0.5, 1.0, 4.0)), draw.choice((1.05, 3.0))),
            fastrl.StopGradientClip(draw.choice((0.9, 1.5, 5.0)), _maybe(draw, 0.3, 0.7)),
            fastrl.GeometricMean(draw.choice((0.05, 0.4, 2.0))),
            fastrl.GammaWeight(draw.choice((0.5, 2.0)), draw.choice((0.5, 3.0)), draw.choice((1.0, 3.0)), 2.0),
            fastrl.RatioMask(draw.choice((0.0, 0.7)), draw.choice((1.1, 3.0))),
            fastrl.Tapered(draw.choice((0.0, 0.7)), draw.choice((1.0, 3.0))),
            fastrl.DivergenceMask(draw.choice(("tv", "kl")), draw.choice((1e-3, 0.1)), 0.02, draw.choice((1.5, 20.0))),
        )
    )
    ratio = "token" if gate.level is not None else draw.choice(RATIOS)
    return fastrl.Objective(gate=gate, ratio=ratio, **_fields(draw, 0.5))


class Custom:
    """A custom objective with the attributes that fastrl reads; `row_local` where it holds."""

    def __init__(self, function: Any, **attributes: Any) -> None:
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, log_ratio: Tensor, advantages: Tensor, context: Any) -> Tensor:
        return self.function(log_ratio, advantages, context)

    def __repr__(self) -> str:
        return f"{self.function.__name__} with {dict(vars(self), function=None)}"


def surrogate(log_ratio: Tensor, advantages: Tensor, context: Any) -> Tensor:
    return -log_ratio.exp() * advantages


def pulled_back(log_ratio: Tensor, advantages: Tensor, context: Any) -> Tensor:
    return -advantages * torch.tanh(log_ratio) + 0.1 * (context.logprobs - context.old_logprobs) ** 2


def with_entropy(log_ratio: Tensor, advantages: Tensor, context: Any) -> Tensor:
    return -log_ratio.exp() * advantages - 0.1 * context.entropy


def centred(log_ratio: Tensor, advantages: Tensor, context: Any) -> Tensor:
    """Of the whole batch: the advantages' mean is a baseline."""
    counted = torch.where(context.mask, advantages, 0)
    return -log_ratio.exp() * (advantages - counted.sum() / context.mask.sum().clamp(min=1))


def _callable(draw: Draw) -> Custom:
    function = draw.choice((surrogate, pulled_back, with_entropy, centred))
    attributes: dict[str, Any] = {}
    if function is not centred and draw.often(0.6):
        attributes["row_local"] = True
    if draw.often(0.5):
        attributes |= {"aggregate": draw.choice(AGGREGATIONS), "max_length": draw.randint(1, 40)}
    return Custom(function, **attributes)
