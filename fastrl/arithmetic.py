"""The few names that `formulas.py` is written in, as torch executes them.

Every formula is a plain function on these bare names, so that one source serves three executors: torch through this
module, Triton by rebinding the same code objects (`fastrl.ops.triton_formulas`), C++ by translation
(`fastrl.ops.cpp_formulas`). Arguments are tensors or Python floats in any mixture.
"""

from __future__ import annotations

import torch
from torch import Tensor

Value = Tensor | float


def exp(x: Value) -> Tensor:
    """e**x."""
    return torch.exp(torch.as_tensor(x))


def expm1(x: Value) -> Tensor:
    """e**x - 1 without cancellation near 0."""
    return torch.expm1(torch.as_tensor(x))


def sigmoid(x: Value) -> Tensor:
    """1 / (1 + e**-x)."""
    return torch.sigmoid(torch.as_tensor(x))


def minimum(a: Value, b: Value) -> Tensor:
    """The smaller of the two; a float bound passes the gradient at the bound itself, as torch.clamp does."""
    if not isinstance(b, Tensor):
        return torch.clamp(torch.as_tensor(a), max=b)
    return torch.clamp(b, max=a) if not isinstance(a, Tensor) else torch.minimum(a, b)


def maximum(a: Value, b: Value) -> Tensor:
    """The larger of the two; a float bound passes the gradient at the bound itself, as torch.clamp does."""
    if not isinstance(b, Tensor):
        return torch.clamp(torch.as_tensor(a), min=b)
    return torch.clamp(b, min=a) if not isinstance(a, Tensor) else torch.maximum(a, b)


def where(condition: Tensor, a: Value, b: Value) -> Tensor:
    """a where the condition holds, else b."""
    return torch.where(condition, a, b)


def detach(x: Value) -> Value:
    """Stop-gradient: the value without its derivative."""
    return x.detach() if isinstance(x, Tensor) else x
