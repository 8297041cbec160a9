"""The scalar functions that the objectives run on, entry by entry against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from fastrl.backend.triton.formulas import _GLOBALS  # noqa: E402
from fastrl.kernels import device_functions as functions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def _apply(x_ptr, y_ptr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, FUNCTION(tl.load(x_ptr + offsets)))


def _evaluate(function: object, x: Tensor, device: str) -> Tensor:
    x = x.float().to(device)
    y = torch.empty_like(x)
    _apply[(x.numel() // 1024,)](x, y, FUNCTION=function, BLOCK=1024)
    return y.double().cpu()


def _log_uniform(low: float, high: float) -> Tensor:
    return (torch.rand(4096, dtype=torch.float64) * (high - low) + low).exp().float()


SIGNS = torch.tensor([-1.0, 1.0]).repeat(2048)


@pytest.mark.parametrize(
    ("name", "truth", "inputs", "tolerance"),
    [
        ("exp", torch.exp, torch.empty(4096).uniform_(-86, 88), 3e-7),
        ("expm1", torch.expm1, _log_uniform(-80, 4.4) * SIGNS, 3e-7),
        ("expm1_minus", lambda x: torch.expm1(x) - x, _log_uniform(-12, 4.4) * SIGNS, 1e-6),
        ("log", torch.log, _log_uniform(-80, 80), 3e-7),
        ("log", torch.log, 1 + _log_uniform(-14, -1), 3e-7),
        ("log1p", torch.log1p, _log_uniform(-80, 80), 3e-7),
        ("sigmoid", torch.sigmoid, torch.empty(4096).uniform_(-80, 80), 5e-7),
    ],
)
def test_relative_accuracy(name: str, truth: object, inputs: Tensor, tolerance: float, device: str) -> None:
    expected = truth(inputs.double())
    actual = _evaluate(getattr(functions, name), inputs, device)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-38)


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("exp", -torch.inf, 0.0),
        ("exp", torch.inf, torch.inf),
        ("exp", 0.0, 1.0),
        ("exp", 1e4, torch.inf),
        ("expm1_minus", -torch.inf, torch.inf),
        ("expm1_minus", 0.0, 0.0),
        ("expm1", -torch.inf, -1.0),
        ("expm1", torch.inf, torch.inf),
        ("expm1", 0.0, 0.0),
        ("expm1", 1e-30, 1e-30),
        ("log", 0.0, -torch.inf),
        ("log", torch.inf, torch.inf),
        ("log", 1.0, 0.0),
        ("log1p", 0.0, 0.0),
        ("log1p", 1e-30, 1e-30),
        ("sigmoid", -torch.inf, 0.0),
        ("sigmoid", torch.inf, 1.0),
        ("sigmoid", -1e4, 0.0),
    ],
)
def test_ends(name: str, x: float, y: float, device: str) -> None:
    actual = _evaluate(getattr(functions, name), torch.full((1024,), x), device)[0].item()
    assert actual == torch.tensor(y).item()


@pytest.mark.parametrize("name", ["exp", "expm1", "expm1_minus", "log", "log1p", "sigmoid"])
def test_nan_stays_nan(name: str, device: str) -> None:
    assert _evaluate(getattr(functions, name), torch.full((1024,), torch.nan), device).isnan().all()


@triton.jit
def _pair(x_ptr, t_ptr, slope_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t, slope = functions.tanh_and_slope(tl.load(x_ptr + offsets) * (-2.0 * functions.LOG2E))
    tl.store(t_ptr + offsets, t)
    tl.store(slope_ptr + offsets, slope)


def test_tanh_and_its_slope(device: str) -> None:
    x = (_log_uniform(-10, 3.7) * SIGNS).to(device)
    t, slope = torch.empty_like(x), torch.empty_like(x)
    _pair[(4,)](x, t, slope, BLOCK=1024)
    torch.testing.assert_close(t.double(), torch.tanh(x.double()), rtol=0, atol=3e-7)
    # Where tanh rounds to 1, 1 - tanh**2 would be 0; the exponent's own rounding grows with |x|.
    expected = 1 / torch.cosh(x.double()) ** 2
    assert ((slope.double() / expected - 1).abs() <= 1e-6 + 4e-7 * x.abs()).all()


def test_every_formula_is_bound() -> None:
    from fastrl.objectives import formulas

    plain = {name for name, f in vars(formulas).items() if getattr(f, "__module__", "") == formulas.__name__}
    assert plain <= _GLOBALS.keys()
