"""A loss whose gradients are known with its value: autograd gets them when it asks, times the upstream scalar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.backends.choice import kernels
from fastrl.operators import consumed

Gradients = Sequence[Tensor | None]
#: inputs -> a 0-dim value and the gradients of the inputs, one each or None
Run = Callable[..., tuple[Tensor, Gradients]]


def refuse_second_order(upstream: Tensor | None) -> None:
    """RuntimeError where a graph of the backward is wanted: once_differentiable would cut it without a word."""
    if torch.is_grad_enabled() and type(upstream) is Tensor:
        raise RuntimeError("this loss is differentiable once: its gradients are ready with it (create_graph=True)")


def hand_over(
    gradients: Gradients, upstream: Tensor, dtypes: Sequence[torch.dtype | None], backend: str
) -> list[Tensor | None]:
    """The gradients' own buffers, scaled in place by the upstream scalar, in these dtypes; None where one is None."""
    scaled: list[Tensor | None] = []
    for gradient, dtype in zip(gradients, dtypes, strict=True):
        if gradient is None or dtype is None:
            scaled.append(None)
            continue
        if type(gradient) is Tensor:
            with consumed.kept(gradient):
                kernels(backend, gradient).scale_(gradient, upstream.float())
        else:  # a compiler's stand-in: graphs are functional, and memory is the compiler's
            gradient = gradient * upstream
        scaled.append(gradient.to(dtype))
    return scaled


class _Attach(torch.autograd.Function):
    """The value that `run` returns, with the gradients that it returns for the inputs."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, backend: str, consume: bool, reads: Sequence[Tensor | None], *inputs: Tensor | None
    ) -> Tensor:
        # Here the graph's edges to the inputs exist already. Had the logits been overwritten before, autograd would
        # have rebuilt a view's edge as an as_strided one, whose backward copies the whole tensor.
        value, ctx.gradients = run(*inputs)
        ctx.backend = backend
        ctx.run = None if consume else run
        ctx.reads = [(x, x._version) for x in reads if x is not None and not x.is_inference()]
        if not consume:
            ctx.save_for_backward(*inputs)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order(upstream)
        gradients, ctx.gradients = ctx.gradients, None
        inputs = ctx.saved_tensors  # raises where they were freed, or changed since
        if gradients is None:
            if ctx.run is None:
                raise RuntimeError(consumed.SECOND_BACKWARD)
            if any(x._version != version for x, version in ctx.reads):
                raise RuntimeError(
                    "a tensor that this loss reads was modified by an inplace operation since its forward, and a second"
                    " backward computes the gradients again"
                )
            _, gradients = ctx.run(*inputs)
        return (None, None, None, None, *hand_over(gradients, upstream, ctx.dtypes, ctx.backend))


def attach_gradients(
    run: Run, inputs: Sequence[Tensor | None], backend: str, *, consume: bool, reads: Sequence[Tensor | None] = ()
) -> Tensor:
    """The 0-dim value of `run(*inputs)`, with a graph to `inputs` whose gradients it returns too.

    The first backward hands the gradients' buffers over, scaled in place by the upstream scalar, which is read on its
    device; a later one runs again, or raises RuntimeError where the run consumes its inputs, or where one of them or of
    the other tensors that it `reads` has changed.
    """
    out: Tensor = _Attach.apply(run, backend, consume, reads, *inputs)
    return out
