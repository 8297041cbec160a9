"""The Triton backend: the row functions of `fastrl.backend.contract` as kernel launches; imported on first use."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms, Support, Transform
from fastrl.backend.cuda import row_forward_gradient as cluster_kernel
from fastrl.backend.torch.backend import advise
from fastrl.backend.triton.formulas import device_terms
from fastrl.kernels import row_forward_gradient as forward_gradient_kernel
from fastrl.kernels import support_forward_gradient as support_forward_gradient_kernel
from fastrl.kernels.entries import gather_entries, scatter_entries
from fastrl.kernels.find_support import find_support
from fastrl.kernels.row_divergence import pair_forward_gradient, pair_gradient, pair_statistics
from fastrl.kernels.row_gradient import row_gradient
from fastrl.kernels.row_statistics import row_statistics
from fastrl.kernels.scale import scale
from fastrl.kernels.support_hidden import support_hidden
from fastrl.kernels.support_products import support_products
from fastrl.kernels.support_restrict import support_restrict
from fastrl.kernels.support_statistics import support_gradient, support_statistics
from fastrl.kernels.support_weight import by_token, support_weight
from fastrl.objectives.rows import RowInputs, RowObjective


def blank(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised memory: the kernels write zeros where nothing else is written."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def row_forward_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor | None = None,
) -> LossTerms:
    """See `fastrl.backend.contract`."""
    if cluster_kernel.fits(logits, out, transform):
        return cluster_kernel.row_forward_gradient(logits, targets, mask, transform, objective, inputs, out)
    terms = device_terms(objective.gate, objective.kl)
    return forward_gradient_kernel.row_forward_gradient(
        logits, targets, mask, transform, terms, objective.numbers, inputs, out
    )


def support_forward_gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor,
) -> LossTerms:
    """See `fastrl.backend.contract`."""
    terms = device_terms(objective.gate, objective.kl)
    return support_forward_gradient_kernel.support_forward_gradient(
        values, targets, support, transform, terms, objective.numbers, inputs, out
    )
