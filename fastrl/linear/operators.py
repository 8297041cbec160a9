"""torch.library operators from hidden states and the output head: statistics (differentiable) and their backward.

The plan and its memory limits are arguments; `fastrl.planning.plans` chooses them.
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
from fastrl.operators.arguments import Arguments
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
    """`row_statistics` of the logits hidden weight^T + bias, which never exist whole; the first two are differentiable.

    With a frozen head, `slopes` is how many of d logp / d hidden and d entropy / d hidden, each (N, H), are formed
    here, so that the backward only scales their rows. They are the last two results; those not formed are empty.
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
    stats, formed = forward.frozen(*arguments, slopes) if slopes else (forward.statistics(*arguments), [])
    formed += [hidden.new_empty(0) for _ in range(2 - len(formed))]
    return *stats, formed[0], formed[1]


_ARGUMENTS = Arguments("linear_statistics")


@linear_statistics.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _ARGUMENTS.named(inputs)
    return (
        *(a.hidden.new_empty(a.targets.shape[0], dtype=torch.float32) for _ in range(4)),
        *(a.hidden.new_empty(a.hidden.shape if i < a.slopes else (0,)) for i in range(2)),
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
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor for each that is not needed."""
    gradients = backward.gradients(
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
    return tuple(hidden.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


_GRADIENT_ARGUMENTS = Arguments("linear_gradient")


@linear_gradient.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return empty_gradients(_GRADIENT_ARGUMENTS.named(inputs))


def empty_gradients(arguments: Any) -> tuple[Tensor, ...]:
    """Uninitialised dL/d(hidden, weight, bias) for an operator's arguments; empty if not needed."""
    hidden, weight = arguments.hidden, arguments.weight
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(s if need else (0,)) for s, need in zip(shapes, arguments.needs, strict=True))


@torch.library.custom_op("fastrl::combine_slopes", mutates_args=())
def combine_slopes(slopes: list[Tensor], coefficients: list[Tensor]) -> Tensor:
    """The sum of slopes (N, H) times coefficients (N,), computed in float32, in the dtype of the slopes."""
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
    slopes = output[4 : 4 + _ARGUMENTS.named(inputs).slopes]
    if slopes:  # the backward reads nothing else
        _ARGUMENTS.save(ctx, (None,) * len(inputs), formed=slopes)
    else:
        _ARGUMENTS.save(ctx, inputs, row_statistics=output[:4])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    c, h = upstream(d_logprobs), upstream(d_entropy)
    if c is None and h is None:
        return _ARGUMENTS.gradients(ctx)
    arguments = _ARGUMENTS.saved(ctx)
    slopes = arguments.get("formed")
    if slopes is not None:
        assert h is None or len(slopes) == 2, "the entropy's slope was not asked for"
        pairs = [(s, u) for s, u in zip(slopes, (c, h), strict=False) if u is not None]
        return _ARGUMENTS.gradients(ctx, hidden=combine_slopes([s for s, _ in pairs], [u for _, u in pairs]))
    del arguments["slopes"]
    return head_gradients(ctx, _ARGUMENTS, linear_gradient, arguments, arguments["row_statistics"][0], c, h)


def head_gradients(
    ctx: Any,
    names: Arguments,
    operator: Any,
    arguments: dict[str, Any],
    logprobs: Tensor,
    c: Tensor | None,
    h: Tensor | None,
) -> tuple[Any, ...]:
    """The result of a backward: dL/d(hidden, weight, bias) from the operator, None for each that is not needed."""
    needs = list(ctx.needs_input_grad[:3])
    gradients = operator(**arguments, c=torch.zeros_like(logprobs) if c is None else c, h=h, needs=needs)
    named = zip(names.names[:3], gradients, needs, strict=True)
    return names.gradients(ctx, **{name: gradient if need else None for name, gradient, need in named})


linear_statistics.register_autograd(_backward, setup_context=_setup_context)
