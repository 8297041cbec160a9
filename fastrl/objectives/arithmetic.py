"""The functions that the formulas in `formulas.py` call, implemented in torch.

Every formula calls these functions by their bare names, so that one source runs on three backends: in torch through
this module, in Triton by rebinding the same code objects (`fastrl.backend.triton.formulas`), in C++ by translation
(`fastrl.backend.cpp.formulas`). Arguments are tensors, or tensors and Python floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

Value = Tensor | float


def exp(x: Tensor) -> Tensor:
    """e**x."""
    return torch.exp(x)


def expm1(x: Tensor) -> Tensor:
    """e**x - 1 without cancellation near 0."""
    return torch.expm1(x)


def _wide(x: Tensor) -> Tensor:
    """x in float64 if the device has it (Apple's GPUs do not)."""
    return x if x.device.type == "mps" else x.double()


def expm1_minus(x: Tensor) -> Tensor:
    """e**x - 1 - x without cancellation near 0."""
    wide = _wide(x)
    return (torch.expm1(wide) - wide).to(x.dtype)


def exp_of_exp(x: Tensor, a: Tensor, b: Value) -> Tensor:
    """e**(b - a (e**x - 1)), in float64: its relative error is the absolute error of the exponent, which is large."""
    exponent = (_wide(b) if isinstance(b, Tensor) else b) - a * torch.expm1(_wide(x))
    return torch.exp(exponent).to(x.dtype)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x) for x >= 0."""
    return torch.log1p(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e**-x)."""
    return torch.sigmoid(x)


def minimum(a: Tensor, b: Value) -> Tensor:
    """The smaller of the two; a float bound passes the gradient at the bound itself, as torch.clamp does."""
    if not isinstance(b, Tensor):
        return torch.clamp(a, max=b)
    return torch.minimum(a, b)


def maximum(a: Tensor, b: Value) -> Tensor:
    """The larger of the two; a float bound passes the gradient at the bound itself, as torch.clamp does."""
    if not isinstance(b, Tensor):
        return torch.clamp(a, min=b)
    return torch.maximum(a, b)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """x, or the bound that it is beyond; passes the gradient at the bounds themselves."""
    return torch.clamp(x, low, high)


def where(condition: Tensor, a: Value, b: Value) -> Tensor:
    """a if the condition is true, else b; two floats give float32 on its device, whatever torch's defaults are."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.where(condition, a, b)
    indicator = condition.to(torch.float32)
    return indicator if (a, b) == (1.0, 0.0) else indicator * (a - b) + b


def detach(x: Value) -> Value:
    """Stop-gradient: the value without its derivative."""
    return x.detach() if isinstance(x, Tensor) else x
