"""torch.library operators from hidden states for rows with a recorded support: products with its entries only.

Rows without a support, or with one too wide to gather, are `dense`: the passes of `statistics.py` and `backward.py`
write their gradients first, and the other rows add their entries, so that no second (V, H) buffer exists.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import ByToken, Statistics, Support, Transform
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.backward import Backward
from fastrl.linear.head import Head
from fastrl.linear.operators import HeadGradients, fake_gradients, head_backward
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.operator import operator
from fastrl.operators.support import (
    SupportStatistics,
    check_targets,
    fake_statistics,
    save_statistics,
    together,
    without_target,
)
from fastrl.planning.tiling import Needs, PassBudget


def by_token(support: Support, vocab: int) -> ByToken:
    """The entries sorted by token; the sort is stable, so that sums have a fixed order."""
    takes_part = support.valid.repeat_interleave(support.offsets.diff(), output_size=support.token_ids.shape[0])
    ids, entries = support.token_ids.where(takes_part, vocab).sort(stable=True)
    rows = torch.searchsorted(support.offsets, entries, right=True, out_int32=True)
    return ByToken(ids, entries, rows.sub_(1))


@operator()
def support_linear_statistics(
    head: Head,  # unit stride on H
    targets: Tensor,  # (N,) int64
    dense: Tensor | None,  # (N,) bool: rows with a wide support or none, for the dense kernels; None: no such rows
    transform: Transform,
    support: Support,  # valid: rows whose entries are gathered
    dense_support: DenseSupport | None,  # of all rows, like `dense`
    backend: str,
    num_dense: int,
    plan: str,
    budget: PassBudget,
) -> SupportStatistics:
    """`linear_statistics` over the support's entries, and their logits; the first two results are differentiable.

    `num_dense`: the number of dense rows, or -1.
    """
    check_targets(targets, dense, support, dense_support, head.weight.shape[0])
    rest = None
    if dense is not None:
        rest = forward.statistics(head, targets, dense, transform, backend, num_dense, budget, dense_support)
        if dense_support is not None:
            lacking = without_target(targets, dense_support.token_ids, dense_support.offsets)
            rest.logprobs.masked_fill_(lacking & dense, torch.nan)
    row_kernels: Any = kernels(backend, head.hidden)
    values = row_kernels.support_products(*head, support)
    stats = together(rest, row_kernels.support_statistics(values, targets, support, transform))
    return SupportStatistics(*stats, values)


support_linear_statistics.register_fake(fake_statistics)


@operator()
def support_linear_gradient(
    head: Head,
    targets: Tensor,
    dense: Tensor | None,
    transform: Transform,
    support: Support,
    dense_support: DenseSupport | None,
    values: Tensor,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
    backend: str,
    plan: str,
    budget: PassBudget,
) -> HeadGradients:
    """The backward of `support_linear_statistics`."""
    hidden, weight, _ = head
    if dense is not None:
        d_hidden, d_weight, d_bias = Backward(
            head, targets, dense, transform, statistics, c, h, needs, backend, -1, budget, dense_support
        ).run(plan)
    else:
        shapes = (hidden.shape, weight.shape, weight.shape[:1])
        d_hidden, d_weight, d_bias = (
            products.zeros(tuple(shape), hidden.dtype, hidden) if need else None
            for shape, need in zip(shapes, needs, strict=True)
        )
    row_kernels: Any = kernels(backend, hidden)
    gradient = torch.empty_like(values)
    row_kernels.support_gradient(values, targets, support, transform, statistics, c, h, gradient)
    if d_hidden is not None:
        row_kernels.support_hidden(gradient, weight, support, d_hidden)
    if d_weight is not None or d_bias is not None:
        entries = by_token(support, weight.shape[0])
        row_kernels.support_weight(gradient, hidden, entries, d_weight, d_bias, dense is not None)
    return HeadGradients.of((d_hidden, d_weight, d_bias), hidden)


support_linear_gradient.register_fake(fake_gradients)


def _save(ctx: Any, inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    del inputs["num_dense"]  # the backward counts the rows with a gradient itself
    return save_statistics(ctx, inputs, results)


support_linear_statistics.register_autograd(partial(head_backward, support_linear_gradient), _save, differentiable=2)
