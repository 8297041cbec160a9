"""Values and slopes of every preference and of KTO, swept over margins up to 1e4, against many-digit arithmetic."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from exact_preferences import Arithmetic, kto_term, pair_loss
from preferences import PREFERENCES
from torch import Tensor

import fastrl

DIGITS = 200
MANY = Arithmetic(mpmath.exp, mpmath.log)
#: Of beta times a score: small, ordinary, and far into every tail.
SIZES = (0.0, 2.0**-20, 1e-3, 0.3, 1.0, 5.0, 17.0, 40.0, 65.0, 90.0, 700.0, 1e4)
MARGINS = sorted({s * x for x in SIZES for s in (1, -1)})
#: Mean log-probabilities: certain to the last digit, ordinary, hopeless.
MEANS = (-1e-30, -1e-12, -(2.0**-24), -1e-3, -0.3, -math.log(2), -1.0, -8.0, -40.0, -1e4)


def scores(objective: fastrl.Preference) -> tuple[Tensor, Tensor]:
    """Chosen and rejected, float32 numbers."""
    single = MEANS if objective.formula == "odds-ratio" else [x / objective.beta for x in MARGINS]
    # A pair's margin is swept by itself too, and with it where a formula has a zero or a bend.
    pairs = [(a, b) for a in single for b in (single if objective.formula == "odds-ratio" else single[::4])]
    if objective.formula != "odds-ratio":
        pairs += [(x / objective.beta + b, b) for x in (*MARGINS, 0.75, 1.5, 2.2) for b in (0.0, -3.0)]
    chosen, rejected = torch.tensor(pairs, dtype=torch.float32).T
    return chosen.contiguous(), rejected.contiguous()


def exact(function: Any, *at: float) -> list[float]:
    """The value, and the derivative in each argument, by a central difference that is far below the rest's digits."""
    with mpmath.workdps(DIGITS):
        x = [mpmath.mpf(a) for a in at]
        step = mpmath.mpf(10) ** (-DIGITS // 4)
        slopes = []
        for i in range(len(x)):
            up, down = ([v + (s * step if i == j else 0) for j, v in enumerate(x)] for s in (1, -1))
            slopes.append((function(*up) - function(*down)) / (2 * step))
        return [float(v) for v in (function(*x), *slopes)]


def assert_digits(found: Tensor, expected: list[float], scale: list[float], what: str) -> None:
    """The rule of the coefficients' sweep: relative 1e-5 above 1e-30. Parts that cancel count as they are."""
    for i, (a, b, s) in enumerate(zip(found.double().tolist(), expected, scale, strict=True)):
        if abs(b) > torch.finfo(torch.float32).max:
            assert abs(a) == math.inf and a * b > 0, f"{what}: {a} for {b} at {i}"
            continue
        assert abs(a - b) <= 1e-5 * abs(b) + 1e-12 * s + 1.00001e-30, f"{what}: {a:.8g} for {b:.8g} at {i}"


@pytest.mark.parametrize("name", PREFERENCES)
def test_values_and_slopes_keep_their_digits(name: str) -> None:
    objective = PREFERENCES[name].replace(nll_coef=0.0)
    chosen, rejected = (x.requires_grad_() for x in scores(objective))
    ones, zeros = torch.ones_like(chosen), torch.zeros_like(chosen)
    out = fastrl.preference_loss(
        chosen, rejected, zeros, zeros, objective=objective, chosen_lengths=ones, rejected_lengths=ones, denominator=1
    )
    found = [out.losses, *torch.autograd.grad(out.loss, (chosen, rejected))]
    # beta and the others are float64 in the loss too
    expected = [
        exact(lambda c, r: pair_loss(objective, c, r, MANY), *pair)
        for pair in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    largest = [max(map(abs, x)) for x in expected]
    for i, what in enumerate(("loss", "slope of the chosen", "slope of the rejected")):
        # A value near a zero is a difference of parts of the size of 1; slopes are not, but for APO-down's, whose two
        # terms may cancel: to float64's last digits.
        scale = [1e-3] * len(expected) if objective.formula == "apo-down" else [0.0] * len(expected)
        scale = [min(1.0, x) for x in largest] if i == 0 else scale
        assert_digits(found[i], [x[i] for x in expected], scale, f"{name}: {what}")


@pytest.mark.parametrize("z", [0.0, 0.7, 300.0])
def test_kto_keeps_its_digits(z: float) -> None:
    beta, weights = 0.5, (1.5, 0.25)
    ratios = torch.tensor([x / beta for x in MARGINS] * 2).requires_grad_()
    desirable = torch.arange(len(ratios)) < len(MARGINS)
    options = {"desirable_weight": weights[0], "undesirable_weight": weights[1], "denominator": 1.0}
    out = fastrl.kto_loss(ratios, torch.zeros_like(ratios), desirable, kl=z, beta=beta, **options)
    (slopes,) = torch.autograd.grad(out.loss, ratios)
    expected = [
        exact(lambda x, d=d: kto_term(x, d, z, beta, weights, MANY), ratio)
        for ratio, d in zip(ratios.tolist(), desirable.tolist(), strict=True)
    ]
    nothing = [0.0] * len(expected)
    assert_digits(out.losses, [x[0] for x in expected], nothing, "loss")
    assert_digits(slopes, [x[1] for x in expected], nothing, "slope")


@pytest.mark.parametrize("name", PREFERENCES)
def test_derivatives_are_those_of_the_value(name: str) -> None:
    """Of first and second order, and forward mode."""
    g = torch.Generator().manual_seed(4)
    chosen, rejected = (-0.2 - 3 * torch.rand(6, generator=g, dtype=torch.float64) for _ in range(2))
    ref = [x + torch.randn(6, generator=g, dtype=torch.float64) for x in (chosen, rejected)]
    objective, lengths = PREFERENCES[name], torch.tensor([1, 2, 3, 1, 2, 3])

    def loss(*sums: Tensor) -> Tensor:
        given = {"objective": objective, "chosen_lengths": lengths, "rejected_lengths": lengths.flip(0)}
        return fastrl.preference_loss(*sums, *ref, **given).loss

    inputs = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_kto_derivatives() -> None:
    g = torch.Generator().manual_seed(4)
    logp, ref = (torch.randn(6, generator=g, dtype=torch.float64) * 3 for _ in range(2))

    def loss(x: Tensor) -> Tensor:
        return fastrl.kto_loss(x, ref, torch.arange(6) % 2, kl=torch.tensor([0.3, 1.1])).loss

    assert torch.autograd.gradcheck(loss, (logp.requires_grad_(),), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (logp,))


def test_certain_and_empty_responses_of_orpo() -> None:
    """Their odds are infinite: the largest finite ones, without a gradient, not NaN."""
    chosen, rejected = (torch.tensor(x).requires_grad_() for x in ([0.0, -1.0, 0.0], [-1.0, 0.0, 0.0]))
    lengths = torch.tensor([1, 1, 0])
    given = {"objective": fastrl.ORPO(nll_coef=0.0), "chosen_lengths": lengths, "rejected_lengths": lengths}
    out = fastrl.preference_loss(chosen, rejected, **given)
    assert out.losses.isfinite().all() and out.losses[0] < 1e-30 and out.losses[1] > 5
    assert out.losses[2].item() == pytest.approx(0.1 * math.log(2))
    slopes = torch.autograd.grad(out.loss, (chosen, rejected))
    assert slopes[0][[0, 2]].tolist() == [0, 0] and slopes[1][[1, 2]].tolist() == [0, 0]
    # Of the uncertain one of a pair it stays: -beta / (1 - p) for the chosen.
    assert slopes[0][1].item() == pytest.approx(-0.1 / -math.expm1(-1) / 3)
