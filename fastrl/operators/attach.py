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
        if torch.is_grad_enabled():  # once_differentiable would cut the graph without a word
            raise RuntimeError("this loss is differentiable once: its gradients are ready with it (create_graph=True)")
        gradients, ctx.gradients = ctx.gradients, None
        inputs = ctx.saved_tensors  # raises where they were freed, or changed since
        if gradients is None:
            if ctx.run is None:
                raise RuntimeError(
                    "the logits were consumed by the first backward (inplace=True): a second one has no input"
                )
            if any(x._version != version for x, version in ctx.reads):
                raise RuntimeError(
                    "a tensor that this loss reads was modified by an inplace operation since its forward, and a second"
                    " backward computes the gradients again"
                )
            _, gradients = ctx.run(*inputs)
        for gradient in gradients:
            if gradient is not None:
                with consumed.kept(gradient):
                    kernels(ctx.backend, gradient).scale_(gradient, upstream.float())
        cast = (None if g is None else g.to(d) for g, d in zip(gradients, ctx.dtypes, strict=True))
        return (None, None, None, None, *cast)


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
