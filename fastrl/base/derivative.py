"""Values with derivatives written by hand, for formulas whose autograd would add up parts that cancel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _WithDerivative(torch.autograd.Function):
    """What `with_derivative` returns, as torch.compile can trace it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, derivative: Tensor, x: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, Tensor]:
        # The derivative comes with its own graph, so that create_graph=True differentiates this product.
        (derivative,) = ctx.saved_tensors
        return None, None, upstream * derivative


class _WithForwardMode(_WithDerivative):
    """The same with forward-mode AD, which torch.compile does not trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, of_value: None, of_derivative: Tensor, of_x: Tensor) -> Tensor:
        (derivative,) = ctx.saved_tensors
        return of_x * derivative


def with_derivative(value: Tensor, derivative: Tensor, x: Tensor) -> Tensor:
    """`value` detached, with `derivative` as its derivative in `x`, all shaped alike, entry by entry.

    A derivative that is itself differentiable gives the second derivatives; it needs no graph otherwise.
    """
    function = _WithDerivative if torch.compiler.is_compiling() else _WithForwardMode
    out: Tensor = function.apply(value.detach(), derivative, x)
    return out
