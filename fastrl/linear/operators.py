"""torch.library operators from hidden states and the output head: statistics (differentiable) and their backward.

Which plan is followed and how many bytes it may take are arguments: `fastrl.planning.plans` chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.backends.contract import Statistics, Transform
from fastrl.base import checks
from fastrl.linear import backward
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.head import Head
from fastrl.linear.statistics import Limits
from fastrl.operators.rows import upstream
from fastrl.planning.tiling import Needs


@torch.library.custom_op("fastrl::linear_statistics", mutates_args=())
def linear_statistics(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    temperatures: Tensor | None,  # (N,) float32
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_tokens: int,
    waits: bool,
    plan: str,
    limits: list[int],
    slopes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`row_statistics` of the logits hidden weight^T + bias, which never exist whole; the first two differentiable.

    With a frozen head, `slopes` says how many of d logp / d hidden and d entropy / d hidden, each (N, H), are formed
    here and make the backward a product by rows; they are the last two results, else empty.
    """
    checks.targets_in_range(targets, mask, weight.shape[0])
    arguments = (
        Head(hidden, weight, bias),
        targets,
        mask,
        Transform(temperature, temperatures, logit_scale, softcap),
        backend,
        num_tokens,
        Limits(*limits),
    )
    found, formed = forward.frozen(*arguments, slopes) if slopes else (forward.statistics(*arguments), [])
    formed += [hidden.new_empty(0) for _ in range(2 - len(formed))]
    return *found, formed[0], formed[1]


@linear_statistics.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    slopes = rest[-1]
    return (
        *(hidden.new_empty(targets.shape[0], dtype=torch.float32) for _ in range(4)),
        *(hidden.new_empty(hidden.shape if i < slopes else (0,)) for i in range(2)),
    )


@torch.library.custom_op("fastrl::linear_gradient", mutates_args=())
def linear_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    row_statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    needs: list[bool],
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_tokens: int,
    waits: bool,
    plan: str,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor where one is not needed."""
    found = backward.gradients(
        Head(hidden, weight, bias),
        targets,
        mask,
        Transform(temperature, temperatures, logit_scale, softcap),
        Statistics(*row_statistics),
        c,
        h,
        Needs(*needs),
        backend,
        -1 if waits else num_tokens,
        plan,
        Limits(*limits),
    )
    return tuple(hidden.new_empty(0) if g is None else g for g in found)  # type: ignore[return-value]


@linear_gradient.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    row_statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    needs: list[bool],
    *options: Any,
) -> tuple[Tensor, ...]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(s if need else (0,)) for s, need in zip(shapes, needs, strict=True))


@torch.library.custom_op("fastrl::combine_slopes", mutates_args=())
def combine_slopes(slopes: list[Tensor], coefficients: list[Tensor]) -> Tensor:
    """The sum of slopes (N, H) times coefficients (N,), formed in float32, in the slopes' dtype."""
    out = torch.empty_like(slopes[0])
    for part in products.pieces(out.shape[0], 8 * out.shape[1]):
        total = slopes[0][part] * coefficients[0][part, None]
        for slope, coefficient in zip(slopes[1:], coefficients[1:], strict=True):
            total += slope[part] * coefficient[part, None]
        out[part] = total
    return out


@combine_slopes.register_fake
def _(slopes: list[Tensor], coefficients: list[Tensor]) -> Tensor:
    return torch.empty_like(slopes[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *ctx.options, ctx.slopes = inputs[6:]
    ctx.mark_non_differentiable(*output[2:])
    if ctx.slopes:
        ctx.save_for_backward(*output[4 : 4 + ctx.slopes])
    else:
        ctx.save_for_backward(*inputs[:6], *output[:4])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    c, h = upstream(d_logprobs), upstream(d_entropy)
    nothing = (None,) * (4 + len(ctx.options))
    if c is None and h is None:
        return (None, None, None, *nothing)
    if ctx.slopes:
        slopes = ctx.saved_tensors
        assert h is None or len(slopes) == 2, "the entropy's slope was not asked for"
        pairs = [(s, u) for s, u in zip(slopes, (c, h), strict=False) if u is not None]
        return (combine_slopes([s for s, _ in pairs], [u for _, u in pairs]), None, None, *nothing)
    hidden, weight, bias, targets, mask, temperatures, *stats = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = linear_gradient(
        hidden,
        weight,
        bias,
        targets,
        mask,
        temperatures,
        stats,
        torch.zeros_like(stats[0]) if c is None else c,
        h,
        needs,
        *ctx.options,
    )
    return (*(g if need else None for g, need in zip(found, needs, strict=True)), *nothing)


linear_statistics.register_autograd(_backward, setup_context=_setup_context)
