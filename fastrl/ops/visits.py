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
from fastrl.ops.linear import Head, Needs, kernel_visit, power_of_two_scale

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

    The loss is differentiable. Gradients of weight and bias, and of float16 hidden states, are float32.
    """
    checks.targets_in_range(targets, mask, weight.shape[0])
    p0, p1, p2, p3 = gate_parameters
    objective = RowObjective(gate, (p0, p1, p2, p3), kl, rollout_mode, rollout_low, rollout_high, max_log_ratio)
    inputs = RowInputs(advantages, policy_weights, old, ref, rollout, kl_weights, entropy_weights, entropy_threshold)
    undo = None
    if hidden.dtype == torch.float16 and targets.numel():
        inputs, undo = _scaled(inputs)
    found, gradients = linear.visit(
        Head(hidden, weight, bias), targets, mask, Transform(temperature, temperatures, logit_scale, softcap),
        kernel_visit(backend, objective, inputs), Needs(*needs), num_tokens, undo,
    )  # fmt: skip
    if undo is not None:
        found.terms[:2] *= undo  # loss and policy, to which the weights belong
    d_hidden, d_weight, d_bias = (hidden.new_empty(0) if g is None else g for g in gradients)
    return found.terms[0].sum(), *found, d_hidden, d_weight, d_bias


def _scaled(inputs: RowInputs) -> tuple[RowInputs, Tensor]:
    """Weights times a power of two that keeps float16 gradients above underflow, and its inverse (0-dim)."""
    policy = inputs.policy_weights * inputs.advantages
    scale = power_of_two_scale(policy, inputs.kl_weights, inputs.entropy_weights)
    scaled = inputs._replace(
        policy_weights=inputs.policy_weights * scale,
        kl_weights=None if inputs.kl_weights is None else inputs.kl_weights * scale,
        entropy_weights=None if inputs.entropy_weights is None else inputs.entropy_weights * scale,
    )
    return scaled, 1 / scale


@linear_visit.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    n, needs = targets.shape[0], rest[-6]
    narrow = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    shapes = ((hidden.shape, narrow), (weight.shape, torch.float32), (weight.shape[:1], torch.float32))
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
