"""The torch backend: the oracle's row functions, on any device torch has."""

from __future__ import annotations

from torch import Tensor

from fastrl.reference.kept import kept_gradient, kept_hidden, kept_products, kept_restrict, kept_statistics, kept_weight
from fastrl.reference.kept_sets import kept_sets
from fastrl.reference.rows import row_gradient, row_statistics, row_visit

__all__ = [
    "advise",
    "kept_gradient",
    "kept_hidden",
    "kept_products",
    "kept_restrict",
    "kept_sets",
    "kept_statistics",
    "kept_weight",
    "row_gradient",
    "row_statistics",
    "row_visit",
    "scale_",
]


def advise(tensor: Tensor) -> None:
    """Nothing: see the C++ backend."""


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a tensor in place by a 0-dim factor."""
    if factor.device.type != "cpu" or factor.item() != 1:
        tensor.mul_(factor)
