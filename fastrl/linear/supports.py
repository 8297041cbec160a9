"""torch.library operators from hidden states for rows with a recorded support: products with its entries only.

Rows without a support, or with one too wide to gather, are `dense`: the passes of `statistics.py` and `backward.py`
write their gradients first, and the other rows add their entries, so that no second (V, H) buffer exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.backends.choice import kernels
from fastrl.backends.contract import ByToken, Statistics, Support, Transform
from fastrl.linear import backward
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.head import Head
from fastrl.linear.operators import empty_gradients, head_gradients
from fastrl.linear.statistics import Limits
from fastrl.operators.arguments import Arguments
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.rows import upstream
from fastrl.operators.support import check_targets, together, without_target
from fastrl.planning.tiling import Needs


def by_token(support: Support, vocab: int) -> ByToken:
    """The entries sorted by token; the sort is stable, so that sums have a fixed order."""
    takes_part = support.valid.repeat_interleave(support.offsets.diff(), output_size=support.token_ids.shape[0])
    ids, entries = support.token_ids.where(takes_part, vocab).sort(stable=True)
    rows = torch.searchsorted(support.offsets, entries, right=True, out_int32=True)
    return ByToken(ids, entries, rows.sub_(1))


@torch.library.custom_op("fastrl::support_linear_statistics", mutates_args=())
def support_linear_statistics(
    hidden: Tensor,  # (N, H), unit stride on H, like the weight
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) int64
    dense: Tensor | None,  # (N,) bool: rows with a wide support or none, for the dense kernels; None: no such rows
    temperatures: Tensor | None,  # (N,) float32
    token_ids: Tensor,  # (nnz,) int32
    offsets: Tensor,  # (N + 1,) int64
    valid: Tensor,  # (N,) bool: valid rows whose entries are gathered
    dense_support: list[Tensor],  # as in `support_row_statistics`, for all rows
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_dense: int,
    plan: str,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`linear_statistics` over the support entries, and their logits (nnz,) float32; the first two are differentiable.

    `num_dense`: the number of dense rows, or -1.
    """
    support, transform = Support(token_ids, offsets, valid), Transform(temperature, temperatures, logit_scale, softcap)
    wide = DenseSupport.of(dense_support)
    check_targets(targets, dense, support, wide, weight.shape[0])
    head, rest = Head(hidden, weight, bias), None
    if dense is not None:
        rest = forward.statistics(head, targets, dense, transform, backend, num_dense, Limits(*limits), wide)
        if wide is not None:
            rest.logprobs.masked_fill_(without_target(targets, dense_support[0], dense_support[1]) & dense, torch.nan)
    row_kernels: Any = kernels(backend, hidden)
    values = row_kernels.support_products(hidden, weight, bias, support)
    stats = together(rest, row_kernels.support_statistics(values, targets, support, transform))
    return *stats, values


_ARGUMENTS = Arguments("support_linear_statistics")


@support_linear_statistics.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _ARGUMENTS.named(inputs)
    return tuple(a.hidden.new_empty(n, dtype=torch.float32) for n in (*(a.targets.shape[0],) * 4, a.token_ids.shape[0]))


@torch.library.custom_op("fastrl::support_linear_gradient", mutates_args=())
def support_linear_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dense: Tensor | None,
    temperatures: Tensor | None,
    token_ids: Tensor,
    offsets: Tensor,
    valid: Tensor,
    dense_support: list[Tensor],
    values: Tensor,
    statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    needs: list[bool],
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_dense: int,
    plan: str,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor for each that is not needed."""
    support, transform = Support(token_ids, offsets, valid), Transform(temperature, temperatures, logit_scale, softcap)
    stats, head = Statistics(*statistics), Head(hidden, weight, bias)
    if dense is not None:
        d_hidden, d_weight, d_bias = backward.gradients(
            head,
            targets,
            dense,
            transform,
            stats,
            c,
            h,
            Needs(*needs),
            backend,
            -1,
            plan,
            Limits(*limits),
            DenseSupport.of(dense_support),
        )
    else:
        shapes = (hidden.shape, weight.shape, weight.shape[:1])
        d_hidden, d_weight, d_bias = (
            products.zeros(tuple(shape), hidden.dtype, hidden) if need else None
            for shape, need in zip(shapes, needs, strict=True)
        )
    row_kernels: Any = kernels(backend, hidden)
    gradient = torch.empty_like(values)
    row_kernels.support_gradient(values, targets, support, transform, stats, c, h, gradient)
    if d_hidden is not None:
        row_kernels.support_hidden(gradient, weight, support, d_hidden)
    if d_weight is not None or d_bias is not None:
        entries = by_token(support, weight.shape[0])
        row_kernels.support_weight(gradient, hidden, entries, d_weight, d_bias, dense is not None)
    gradients = (d_hidden, d_weight, d_bias)
    return tuple(hidden.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


_GRADIENT_ARGUMENTS = Arguments("support_linear_gradient")


@support_linear_gradient.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return empty_gradients(_GRADIENT_ARGUMENTS.named(inputs))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *statistics, values = output
    _ARGUMENTS.save(ctx, inputs, statistics=statistics, values=values)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    c, h = upstream(d_logprobs), upstream(d_entropy)
    if c is None and h is None:
        return _ARGUMENTS.gradients(ctx)
    arguments = _ARGUMENTS.saved(ctx)
    return head_gradients(ctx, _ARGUMENTS, support_linear_gradient, arguments, arguments["statistics"][0], c, h)


support_linear_statistics.register_autograd(_backward, setup_context=_setup_context)
