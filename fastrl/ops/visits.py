"""torch.library operators of the forward-gradient plan: a row-local objective's loss and gradients from hidden states.

The gradients are outputs of the forward. The backward hands their buffers over, times the upstream scalar, which is
read on its device; a second backward, whose buffers are gone, computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import checks
from fastrl.ops import linear
from fastrl.ops.backend import kernels
from fastrl.ops.contract import TERMS, RowInputs, RowObjective, Transform
from fastrl.ops.linear import Head, Needs, kernel_visit

_RESULTS = 4  # loss, logprobs, entropy, terms; the three gradients follow


@torch.library.custom_op("fastrl::scale_", mutates_args=("tensor",))
def scale_(tensor: Tensor, factor: Tensor, backend: str) -> None:
    """Multiply a tensor in place by a 0-dim factor on its device; no work where that is 1."""
    kernels(backend, tensor).scale_(tensor, factor)


@torch.library.custom_op("fastrl::linear_visit", mutates_args=())
def linear_visit(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    temperatures: Tensor | None,  # (N,) float32
    advantages: Tensor,  # (N,) float32, as the next six; see RowInputs
    policy_weights: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    rollout: Tensor | None,
    kl_weights: Tensor | None,
    entropy_weights: Tensor | None,
    entropy_threshold: Tensor | None,  # 0-dim float32
    gate: str,
    gate_parameters: list[float],
    kl: str,
    rollout_mode: str,
    rollout_low: float,
    rollout_high: float,
    max_log_ratio: float,
    needs: list[bool],
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss (), logprobs (N,), entropy (N,), terms (len(TERMS), N), and dL/d(hidden, weight, bias) or empty tensors.

    The loss is differentiable, once. Gradients of weight and bias are float32. Not for float16, whose gradients want a
    scale that is known only when all coefficients are.
    """
    checks.targets_in_range(targets, mask, weight.shape[0])
    p0, p1, p2, p3 = gate_parameters
    objective = RowObjective(gate, (p0, p1, p2, p3), kl, rollout_mode, rollout_low, rollout_high, max_log_ratio)
    inputs = RowInputs(advantages, policy_weights, old, ref, rollout, kl_weights, entropy_weights, entropy_threshold)
    found, gradients = linear.visit(
        Head(hidden, weight, bias), targets, mask, Transform(temperature, temperatures, logit_scale, softcap),
        kernel_visit(backend, objective, inputs), Needs(*needs), num_tokens,
    )  # fmt: skip
    d_hidden, d_weight, d_bias = (hidden.new_empty(0) if g is None else g for g in gradients)
    return found.terms[0].sum(), *found, d_hidden, d_weight, d_bias


@linear_visit.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    n, needs = targets.shape[0], rest[-6]
    shapes = ((hidden.shape, hidden.dtype), (weight.shape, torch.float32), (weight.shape[:1], torch.float32))
    return (
        *(hidden.new_empty(shape, dtype=torch.float32) for shape in ((), (n,), (n,), (len(TERMS), n))),
        *(
            hidden.new_empty(shape, dtype=dtype) if need else hidden.new_empty(0)
            for (shape, dtype), need in zip(shapes, needs, strict=True)
        ),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:14], inputs[14:]
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.gradients = output[_RESULTS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    if torch.is_grad_enabled() and type(upstream) is Tensor:
        raise RuntimeError("this loss is differentiable once: its gradients are ready with it (create_graph=True)")
    nothing = (None,) * (11 + len(ctx.options))
    if upstream is None:
        return (None, None, None, *nothing)
    gradients, ctx.gradients = ctx.gradients, None
    tensors, (*numbers, needs, temperature, logit_scale, softcap, backend, num_tokens) = ctx.saved_tensors, ctx.options
    if gradients is None:
        with torch.no_grad():
            again = linear_visit(*tensors, *numbers, needs, temperature, logit_scale, softcap, backend, num_tokens)
        gradients = again[_RESULTS:]
    dtype = tensors[0].dtype
    found: list[Tensor | None] = []
    for gradient, need in zip(gradients, needs, strict=True):
        if type(gradient) is not Tensor:  # a compiler's stand-in: graphs are functional, and memory is the compiler's
            gradient = gradient * upstream
        elif need:
            scale_(gradient, upstream.float(), backend)
        found.append(gradient.to(dtype) if need else None)
    return (*found, *nothing)


linear_visit.register_autograd(_backward, setup_context=_setup_context)
