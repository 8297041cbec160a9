"""torch.library operators from hidden states and the output head: statistics (differentiable) and their backward.

The plan and its budget for each pass are arguments; `fastrl.planning.plans` chooses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import Statistics, Transform
from fastrl.base import checks
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.backward import Backward
from fastrl.linear.head import Head
from fastrl.operators.operator import Operator, operator
from fastrl.operators.rows import coefficients, empty_statistics, upstream
from fastrl.operators.saved import saved
from fastrl.planning.tiling import ELEMENTWISE_BYTES, PIECE_BYTES, Needs, PassBudget


class LinearStatistics(NamedTuple):
    """The statistics of the rows, each (N,) float32 as in `Statistics`, and the slopes of a frozen head."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_sum: Tensor
    logprobs_slope: Tensor  # (N, H) d logp / d hidden, or empty
    entropy_slope: Tensor  # (N, H) d entropy / d hidden, or empty


@operator()
def linear_statistics(
    head: Head,
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    backend: str,
    num_tokens: int,
    waits: bool,
    plan: str,
    budget: PassBudget,
    slopes: int,
    all_statistics: bool,
) -> LinearStatistics:
    """`row_statistics` of the logits hidden weight^T + bias, which never exist whole; the first two are differentiable.

    With a frozen head, `slopes` is how many of d logp / d hidden and d entropy / d hidden are formed here, so that the
    backward only scales their rows; then maximum and log_sum are empty unless `all_statistics`.
    """
    head = head.unpadded()
    checks.targets_in_range(targets, mask, head.entries)
    arguments = (head, targets, mask, transform, backend, num_tokens, budget)
    stats, formed = (
        forward.frozen(*arguments, slopes, all_statistics) if slopes else (forward.statistics(*arguments), [])
    )
    formed += [head.hidden.new_empty(0) for _ in range(2 - len(formed))]
    return LinearStatistics(*stats, *formed)


@linear_statistics.register_fake
def _(head: Head, targets: Tensor, slopes: int, all_statistics: bool, **_: Any) -> LinearStatistics:
    formed = (head.hidden.new_empty(head.hidden.shape if i < slopes else (0,)) for i in range(2))
    stats = empty_statistics(targets)
    if slopes and not all_statistics:
        stats = stats._replace(maximum=stats.maximum.new_empty(0), log_sum=stats.log_sum.new_empty(0))
    return LinearStatistics(*stats, *formed)


class HeadGradients(NamedTuple):
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor for each that is not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, gradients: Iterable[Tensor | None], hidden: Tensor) -> HeadGradients:
        """From gradients of which those not needed are None."""
        return cls(*(hidden.new_empty(0) if g is None else g for g in gradients))


@operator()
def linear_gradient(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
    backend: str,
    num_tokens: int,
    waits: bool,
    plan: str,
    budget: PassBudget,
) -> HeadGradients:
    """The backward of `linear_statistics`."""
    known = -1 if waits else num_tokens
    backward = Backward(head, targets, mask, transform, statistics, c, h, needs, backend, known, budget)
    return HeadGradients.of(backward.run(plan), head.hidden)


def fake_gradients(head: Head, needs: Needs, **_: Any) -> HeadGradients:
    """Uninitialised gradients; empty if not needed."""
    shapes = (head.hidden.shape, head.weight.shape, head.weight.shape[:1])
    return HeadGradients(*(head.hidden.new_empty(s if need else (0,)) for s, need in zip(shapes, needs, strict=True)))


linear_gradient.register_fake(fake_gradients)


@operator()
def combine_slopes(slopes: list[Tensor], coefficients: list[Tensor]) -> Tensor:
    """The sum of slopes (N, H) times coefficients (N,), computed in float32, in the dtype of the slopes."""
    out = torch.empty_like(slopes[0])
    if len(slopes) == 1 and out.is_cuda:  # which casts as it multiplies; a CPU would copy its operands
        return torch.mul(slopes[0], coefficients[0][:, None], out=out)
    piece_bytes = ELEMENTWISE_BYTES.get(out.device.type, PIECE_BYTES)
    for part in products.pieces(out.shape[0], 8 * out.shape[1], piece_bytes):
        total = slopes[0][part] * coefficients[0][part, None]
        for slope, coefficient in zip(slopes[1:], coefficients[1:], strict=True):
            total += slope[part] * coefficient[part, None]
        out[part] = total
    return out


combine_slopes.register_fake(lambda slopes, coefficients: torch.empty_like(slopes[0]))


def gradient_of_slopes(slopes: Sequence[Tensor], c: Tensor | None, h: Tensor | None, transform: Transform) -> Tensor:
    """dL/dhidden (N, H) of a frozen head, whose slopes are times `slope_scale`, from c and h (N,) or None."""
    assert h is None or len(slopes) == 2, "the entropy's slope was not asked for"
    pairs = [(s, u) for s, u in zip(slopes, (upstream(c), upstream(h)), strict=False) if u is not None]
    coefficients = [u for _, u in pairs]
    if slopes[0].dtype == torch.float16:
        scale = products.slope_scale(slopes[0].dtype, transform)
        coefficients = [u / scale for u in coefficients]
    return combine_slopes([s for s, _ in pairs], coefficients)


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    if count := inputs["slopes"]:  # the backward reads nothing else
        return {"slopes": results[4 : 4 + count], "transform": inputs["transform"]}
    kept = {name: value for name, value in inputs.items() if name not in ("slopes", "all_statistics")}
    return {**kept, "statistics": Statistics(*results[:4])}


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> Head:
    if "slopes" not in ctx.values:
        return head_backward(linear_gradient, ctx, **coefficients(d_logprobs, d_entropy))
    return Head(gradient_of_slopes(**saved(ctx), c=d_logprobs, h=d_entropy), None, None)  # type: ignore[arg-type]


def head_backward(gradient: Operator[..., HeadGradients], ctx: Any, **upstream: Tensor | None) -> Head:
    """The backward by `gradient`, from what was saved and the upstream gradients by name."""
    needs = Needs(*ctx.needs[:3])
    gradients = gradient(**saved(ctx), **upstream, needs=needs)
    return Head(*(g if need else None for g, need in zip(gradients, needs, strict=True)))  # type: ignore[arg-type]


linear_statistics.register_autograd(_backward, _save, differentiable=2)
