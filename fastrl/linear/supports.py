"""torch.library operators from hidden states for rows with a recorded support: products with its entries only.

Rows without a support, or with one too wide to gather, are `dense`: the passes of `statistics.py` and `backward.py`
write their gradients first, and the other rows add their entries, so that no second (V, H) buffer exists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import LossTerms, Statistics, Support, Transform
from fastrl.linear import statistics as forward
from fastrl.linear.backward import Backward
from fastrl.linear.head import Head
from fastrl.linear.operators import HeadGradients, fake_gradients, head_backward
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.operator import operator
from fastrl.operators.rows import coefficients
from fastrl.operators.support import (
    SupportStatistics,
    check_targets,
    fake_statistics,
    save_statistics,
    together,
    without_target,
)
from fastrl.planning.tiling import Needs, PassBudget


def support_products(
    head: Head,
    support: Support,
    gradient: Tensor,
    needs: Needs,
    backend: str,
    dense: tuple[Tensor | None, ...] | None = None,
) -> HeadGradients:
    """dL/d(hidden, weight, bias) from dL/d(support logits) (nnz,), added to those of the dense rows, if any."""
    (hidden, weight, _, _), row_kernels, vocab = head, kernels(backend, gradient), head.entries
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    d_hidden, d_weight, d_bias = dense or (
        row_kernels.blank(tuple(shape), hidden.dtype, hidden) if need else None
        for shape, need in zip(shapes, needs, strict=True)
    )
    if d_hidden is not None:
        row_kernels.support_hidden(gradient, weight, support, d_hidden, dense is not None)
    if d_weight is not None or d_bias is not None:
        by_token = row_kernels.by_token(support, vocab)
        entries = (None if x is None else x[:vocab] for x in (d_weight, d_bias))
        row_kernels.support_weight(gradient, hidden, by_token, *entries, dense is not None)
        for x in (d_weight, d_bias) if dense is None else ():
            if x is not None and vocab < x.shape[0]:
                x[vocab:].zero_()
    return HeadGradients.of((d_hidden, d_weight, d_bias), hidden)


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
    head = head.unpadded()
    check_targets(targets, dense, support, dense_support, head.entries)
    rest = None
    if dense is not None:
        rest = forward.statistics(head, targets, dense, transform, backend, num_dense, budget, dense_support)
        if dense_support is not None:
            lacking = without_target(targets, dense_support.token_ids, dense_support.offsets)
            rest.logprobs.masked_fill_(lacking & dense, torch.nan)
    row_kernels: Any = kernels(backend, head.hidden)
    values = row_kernels.support_products(*head.tensors, support)
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
    gradients = None
    if dense is not None:
        backward = Backward(
            head, targets, dense, transform, statistics, c, h, needs, backend, -1, budget, dense_support
        )
        gradients = backward.run(plan)
    gradient = torch.empty_like(values)
    kernels(backend, values).support_gradient(values, targets, support, transform, statistics, c, h, gradient)
    return support_products(head, support, gradient, needs, backend, gradients)


support_linear_gradient.register_fake(fake_gradients)


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    kept = save_statistics(inputs, results)
    del kept["num_dense"]  # the backward counts the rows with a gradient itself
    return kept


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> Head:
    return head_backward(support_linear_gradient, ctx, **coefficients(d_logprobs, d_entropy))


support_linear_statistics.register_autograd(_backward, _save, differentiable=2)


class SupportLoss(NamedTuple):
    """A loss from hidden states whose rows all have a recorded support."""

    loss: Tensor  # ()
    logprobs: Tensor  # (N,)
    entropy: Tensor  # (N,)
    terms: Tensor  # (len(TERMS), N)
    gradient: Tensor  # (nnz,) float32, dL/d(support logits)


@operator()
def support_linear_loss(
    head: Head,  # unit stride on H
    targets: Tensor,  # (N,) int64
    transform: Transform,
    support: Support,
    inputs: RowInputs,
    objective: RowObjective,
    backend: str,
) -> SupportLoss:
    """The loss of a row-local objective, differentiable once. A row's gradient is formed with its statistics.

    The backward multiplies it by the upstream scalar before the products with the head, so that dH and dW are rounded
    once and float16 takes the caller's loss scale.
    """
    head = head.unpadded()
    check_targets(targets, None, support, None, head.entries)
    row_kernels = kernels(backend, head.hidden)
    values = row_kernels.support_products(*head.tensors, support)
    results: LossTerms = row_kernels.support_forward_gradient(
        values, targets, support, transform, objective, inputs, values
    )
    return SupportLoss(results.terms[0].sum(), *results, values)


@support_linear_loss.register_fake
def _(head: Head, targets: Tensor, support: Support, **_: Any) -> SupportLoss:
    n = targets.shape[0]
    shapes = ((), (n,), (n,), (len(TERMS), n), support.token_ids.shape)
    return SupportLoss(*(head.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes))


@operator()
def support_linear_products(
    head: Head, support: Support, gradient: Tensor, upstream: Tensor, needs: Needs, backend: str
) -> HeadGradients:
    """The backward of `support_linear_loss`, from dL/d(support logits) (nnz,) and the upstream scalar."""
    return support_products(head, support, gradient * upstream, needs, backend)


support_linear_products.register_fake(fake_gradients)


def _save_loss(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {name: inputs[name] for name in ("head", "support", "backend")} | {"gradient": results[-1]}


def _loss_backward(ctx: Any, upstream: Tensor) -> Head:
    return head_backward(support_linear_products, ctx, upstream=upstream.float())


support_linear_loss.register_autograd(_loss_backward, _save_loss, differentiable=1)
