"""The few names that `formulas.py` is written in, as torch executes them.

Every formula is a plain function on these bare names, so that one source serves three executors: torch through this
module, Triton by rebinding the same code objects (`fastrl.ops.triton_formulas`), C++ by translation
(`fastrl.ops.cpp_formulas`). Arguments are tensors, or tensors and Python floats.
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


def where(condition: Tensor, a: Value, b: Value) -> Tensor:
    """a where the condition holds, else b; of two floats float32 where the condition is, whatever torch's defaults."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.where(condition, a, b)
    return condition.to(torch.float32) * (a - b) + b


def detach(x: Value) -> Value:
    """Stop-gradient: the value without its derivative."""
    return x.detach() if isinstance(x, Tensor) else x
