"""The torch backend: the oracle's row functions, on any device that torch supports."""

from __future__ import annotations

from torch import Tensor

from fastrl.backend.torch.find_support import find_support
from fastrl.backend.torch.rows import row_forward_gradient, row_gradient, row_statistics
from fastrl.backend.torch.support import (
    support_gradient,
    support_hidden,
    support_products,
    support_restrict,
    support_statistics,
    support_weight,
)

__all__ = [
    "advise",
    "find_support",
    "row_forward_gradient",
    "row_gradient",
    "row_statistics",
    "scale_",
    "support_gradient",
    "support_hidden",
    "support_products",
    "support_restrict",
    "support_statistics",
    "support_weight",
]


def advise(tensor: Tensor) -> None:
    """Do nothing; the C++ backend uses it."""


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a tensor in place by a 0-dim factor."""
    if factor.device.type != "cpu" or factor.item() != 1:
        tensor.mul_(factor)
