"""A loss whose gradients are formed with its value. Autograd saves them, and the backward returns them, times a scalar.

So activation checkpointing around such a loss drops them, and forms them once again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.operators import consumed
from fastrl.operators.saved import keep, refuse_second_order, resumed, saved, use_up

R = TypeVar("R")
Gradients = Sequence[Tensor | consumed.Written | None]


def formed(
    gradients: Gradients, inputs: Sequence[Tensor | None], needs: Sequence[bool], backend: str
) -> dict[str, Any]:
    """What `keep` saves for `hand_over`: the gradients that are needed of these inputs."""
    dtypes = tuple(x.dtype if x is not None and need else None for x, need in zip(inputs, needs, strict=True))
    written = tuple(x for x in gradients if isinstance(x, consumed.Written))
    tensors = tuple(x.gradient if isinstance(x, consumed.Written) else x for x in gradients)
    return {"gradients": tensors, "written": written, "dtypes": dtypes, "backend": backend}


def hand_over(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The saved gradients times the upstream scalar, which is read on its device; None if not needed.

    A buffer that has its input's dtype is scaled in place: a second rounding, unless the scalar is a power of two. A
    float32 buffer of a narrower gradient is scaled and rounded in one pass.
    """
    kept = saved(ctx)
    use_up(ctx)
    for one in kept["written"]:
        one.check()
    ctx.values = {}  # which hold what was written
    scaled: list[Tensor | None] = []
    for gradient, dtype in zip(kept["gradients"], kept["dtypes"], strict=True):
        if gradient is None or dtype is None:
            scaled.append(None)
            continue
        if type(gradient) is Tensor:
            gradient = gradient.data  # whose changes autograd does not report, because a second backward is refused
            out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
            if gradient.numel():  # a shard of the head may be empty
                kernels(kept["backend"], gradient).scale(gradient, upstream.float(), out)
        else:  # a compiler's fake tensor: graphs are functional, and the compiler manages memory
            out = (gradient * upstream).to(dtype)
        scaled.append(out)
    return scaled


class _Attach(torch.autograd.Function):
    """Returns the value of `run`, and in the backward the gradients that `run` returned for the inputs."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], backend: str, *inputs: Tensor | None) -> tuple[Tensor, tuple[Any]]:
        # The graph's edges to the inputs already exist here. If the logits were overwritten earlier, autograd would
        # rebuild the edge of a view as an as_strided one, whose backward copies the whole tensor.
        value, gradients, others = run(*inputs)
        keep(ctx, formed(gradients, inputs, ctx.needs_input_grad[2:], backend))
        return value, (others,)  # a tensor in a tuple is no output of the graph

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_second_order(upstream)
        with resumed(ctx):
            return None, None, *hand_over(ctx, upstream)


def attach_gradients(
    run: Callable[..., tuple[Tensor, Gradients, R]], inputs: Sequence[Tensor | None], backend: str
) -> tuple[Tensor, R]:
    """What `run(*inputs)` returns: a 0-dim value, which is attached to its gradients, and what has none.

    run: returns the value, a gradient or None for each input, and results without a gradient.
    """
    value, (others,) = _Attach.apply(run, backend, *inputs)
    return value, others
