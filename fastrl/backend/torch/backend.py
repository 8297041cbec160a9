"""The torch backend: the oracle's row functions, on any device that torch supports."""

from __future__ import annotations

from torch import Tensor

from fastrl.backend.torch.find_support import find_support
from fastrl.backend.torch.pair import pair_forward_gradient, pair_gradient, pair_statistics
from fastrl.backend.torch.rows import row_forward_gradient, row_gradient, row_statistics
from fastrl.backend.torch.support import (
    by_token,
    gather_entries,
    scatter_entries,
    support_forward_gradient,
    support_gradient,
    support_hidden,
    support_products,
    support_restrict,
    support_statistics,
    support_weight,
)
from fastrl.base.pages import zeros as blank


def advise(tensor: Tensor) -> None:
    """Do nothing; the C++ backend uses it."""
