"""The torch backend: the oracle's row functions, on any device that torch supports."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.torch.entries import gather_entries, scatter_entries
from fastrl.backend.torch.find_support import find_support
from fastrl.backend.torch.pair import pair_forward_gradient, pair_gradient, pair_statistics
from fastrl.backend.torch.rows import row_forward_gradient, row_gradient, row_statistics
from fastrl.backend.torch.support import (
    by_token,
    support_forward_gradient,
    support_gradient,
    support_hidden,
    support_products,
    support_restrict,
    support_statistics,
    support_weight,
)
from fastrl.base.pages import zeros as blank

_PIECE_BYTES = 2 << 20

__all__ = [
    "advise",
    "blank",
    "by_token",
    "find_support",
    "gather_entries",
    "pair_forward_gradient",
    "pair_gradient",
    "pair_statistics",
    "row_forward_gradient",
    "row_gradient",
    "row_statistics",
    "scale",
    "scatter_entries",
    "support_forward_gradient",
    "support_gradient",
    "support_hidden",
    "support_products",
    "support_restrict",
    "support_statistics",
    "support_weight",
]


def advise(tensor: Tensor) -> None:
    """Do nothing; the C++ backend uses it."""


def scale(tensor: Tensor, factor: Tensor, out: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    if tensor.device.type != "cpu":
        # A factor without dimensions would be rounded to the tensor's dtype first: 65536 is infinite in float16.
        torch.mul(tensor, factor.view((1,) * tensor.dim()), out=out)
    elif factor.item() == 1:
        if out is not tensor:
            out.copy_(tensor)
    elif out is tensor:
        out.mul_(factor)
    else:  # a product in another dtype would be held whole in its own first
        rows = max(1, _PIECE_BYTES // max(tensor[0].numel() * tensor.element_size(), 1))
        for source, target in zip(tensor.split(rows), out.split(rows), strict=True):
            target.copy_(source * factor)
