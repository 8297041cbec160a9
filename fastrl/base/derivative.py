"""Values with explicit derivatives, for formulas in which autograd would add terms that cancel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _WithDerivative(torch.autograd.Function):
    """The function behind `with_derivative`, in a form that torch.compile can trace."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, derivative: Tensor, x: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, Tensor]:
        # The derivative has its own graph, so that create_graph=True differentiates this product.
        (derivative,) = ctx.saved_tensors
        return None, None, upstream * derivative


class _WithForwardMode(_WithDerivative):
    """The same function with forward-mode AD, which torch.compile does not trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, of_value: None, of_derivative: Tensor, of_x: Tensor) -> Tensor:
        (derivative,) = ctx.saved_tensors
        return of_x * derivative


def with_derivative(value: Tensor, derivative: Tensor, x: Tensor) -> Tensor:
    """`value` detached, with `derivative` as its elementwise derivative with respect to `x`; all have one shape.

    A derivative that is itself differentiable gives second derivatives; otherwise it needs no graph.
    """
    function = _WithDerivative if torch.compiler.is_compiling() else _WithForwardMode
    out: Tensor = function.apply(value.detach(), derivative, x)
    return out
