"""A loss whose gradients are computed with its value: the backward returns them, times the upstream scalar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.operators import consumed

Gradients = Sequence[Tensor | None]
#: inputs -> a 0-dim value, and a gradient or None for each input
Run = Callable[..., tuple[Tensor, Gradients]]


def refuse_second_order(upstream: Tensor | None) -> None:
    """Raises RuntimeError if a graph of the backward is requested: once_differentiable would cut it silently."""
    if torch.is_grad_enabled() and type(upstream) is Tensor:
        raise RuntimeError("this loss is differentiable once: its gradients are ready with it (create_graph=True)")


def hand_over(
    gradients: Gradients, upstream: Tensor, dtypes: Sequence[torch.dtype | None], backend: str
) -> list[Tensor | None]:
    """The gradient buffers times the upstream scalar, in these dtypes; None if either is None.

    A buffer that has the dtype is scaled in place: a second rounding, unless the scalar is a power of two. A float32
    buffer of a narrower gradient is scaled and rounded in one pass.
    """
    scaled: list[Tensor | None] = []
    for gradient, dtype in zip(gradients, dtypes, strict=True):
        if gradient is None or dtype is None:
            scaled.append(None)
            continue
        if type(gradient) is Tensor:
            out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
            if gradient.numel():  # a shard of the head may be empty
                with consumed.kept(gradient):
                    kernels(backend, gradient).scale(gradient, upstream.float(), out)
        else:  # a compiler's fake tensor: graphs are functional, and the compiler manages memory
            out = (gradient * upstream).to(dtype)
        scaled.append(out)
    return scaled


class _Attach(torch.autograd.Function):
    """Returns the value of `run`, and in the backward the gradients that `run` returned for the inputs."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, backend: str, consume: bool, reads: Sequence[Tensor | None], *inputs: Tensor | None
    ) -> Tensor:
        # The graph's edges to the inputs already exist here. If the logits were overwritten earlier, autograd would
        # rebuild the edge of a view as an as_strided one, whose backward copies the whole tensor.
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
        inputs = ctx.saved_tensors  # raises if they were freed, or changed since
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
    """The 0-dim value of `run(*inputs)`, attached to a graph that gives `inputs` the gradients that `run` returns.

    The first backward returns the gradient buffers, scaled in place by the upstream scalar, which is read on its
    device. A later one calls `run` again, or raises RuntimeError if `run` consumes its inputs, or if an input or
    another tensor that it `reads` has changed.
    """
    out: Tensor = _Attach.apply(run, backend, consume, reads, *inputs)
    return out
