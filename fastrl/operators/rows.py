"""torch.library operators over logits: row statistics (differentiable) and the row gradient, out of place and in place.

They check target values and call the functions of a backend; `fastrl.backends.contract` specifies these. The name of
the backend is an argument, so that a backward uses the same backend as its forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.backends.choice import kernels
from fastrl.backends.contract import Statistics, Transform
from fastrl.base import checks
from fastrl.operators import consumed
from fastrl.operators.arguments import Arguments


@torch.library.custom_op("fastrl::row_statistics", mutates_args=())
def row_statistics(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    temperatures: Tensor | None,  # (N,) float32
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    consume: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, maxima and log-sums, each (N,) float32.

    The first two are differentiable; with `consume` the backward writes the gradient over the logits.
    """
    checks.targets_in_range(targets, mask, logits.shape[-1])
    consumed.refuse(logits)
    if targets.numel() == 0:
        return tuple(logits.new_empty(0, dtype=torch.float32) for _ in range(4))  # type: ignore[return-value]
    transform = Transform(temperature, temperatures, logit_scale, softcap)
    statistics: Statistics = kernels(backend, logits).row_statistics(logits, targets, mask, transform)
    # The results of an operator may not share memory, but a backend may fill one (4, N) tensor.
    shared = len({s.untyped_storage().data_ptr() for s in statistics}) < len(statistics)
    return tuple(s.clone() for s in statistics) if shared else tuple(statistics)  # type: ignore[return-value]


_ARGUMENTS = Arguments("row_statistics")


@row_statistics.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _ARGUMENTS.named(inputs)
    return tuple(a.logits.new_empty(a.targets.shape[0], dtype=torch.float32) for _ in range(4))


@torch.library.custom_op("fastrl::row_gradient", mutates_args=())
def row_gradient(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    temperatures: Tensor | None,  # (N,) float32
    statistics: list[Tensor],  # 4 x (N,) float32
    c: Tensor,  # (N,) float32
    h: Tensor | None,  # (N,) float32
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous, from c = dL/dlogp and h = dL/dH."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    transform = Transform(temperature, temperatures, logit_scale, softcap)
    if out.numel():
        kernels(backend, logits).row_gradient(logits, targets, mask, transform, Statistics(*statistics), c, h, out)
    return out


@row_gradient.register_fake
def _(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("fastrl::row_gradient_", mutates_args=("logits",))
def row_gradient_(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
) -> None:
    """`row_gradient`, written over the logits."""
    transform = Transform(temperature, temperatures, logit_scale, softcap)
    if logits.numel():
        kernels(backend, logits).row_gradient(logits, targets, mask, transform, Statistics(*statistics), c, h, logits)


def upstream(gradient: Tensor | None) -> Tensor | None:
    """A per-row gradient as backends take it: contiguous (N,) float32, or None."""
    return None if gradient is None else gradient.detach().float().contiguous()


def gradient_of_logits(ctx: Any, operator: Any, operator_: Any, arguments: dict[str, Any]) -> Tensor:
    """dL/dlogits by `operator`, or by `operator_` over logits that the loss may consume."""
    logits = arguments.pop("logits")
    if not arguments.pop("consume"):
        gradient: Tensor = operator(logits, **arguments)
        return gradient
    ctx.consumed = True
    gradient = logits.detach()
    with consumed.kept(gradient):
        operator_(gradient, **arguments)
    consumed.mark(gradient)
    return gradient


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _ARGUMENTS.save(ctx, inputs, statistics=output)
    ctx.consumed = False
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    if ctx.consumed:
        raise RuntimeError(consumed.SECOND_BACKWARD)
    c, h = upstream(d_logprobs), upstream(d_entropy)
    if c is None and h is None:
        return _ARGUMENTS.gradients(ctx)
    arguments = _ARGUMENTS.saved(ctx)
    arguments |= {"c": torch.zeros_like(arguments["statistics"][0]) if c is None else c, "h": h}
    return _ARGUMENTS.gradients(ctx, logits=gradient_of_logits(ctx, row_gradient, row_gradient_, arguments))


row_statistics.register_autograd(_backward, setup_context=_setup_context)


def as_rows(logits: Tensor, inplace: bool) -> Tensor:
    """Logits (..., V) as (A, B, V): a view if two leading strides suffice, else a contiguous copy.

    Raises ValueError if `inplace` would need the copy, or would write a broadcast row more than once.
    """
    vocab = logits.shape[-1]
    # The last dimension before V stays B, so that x[:, :-1] of a padded batch needs no copy.
    inner = logits.shape[-2] if logits.dim() > 1 else 1
    outer = logits.numel() // max(inner * vocab, 1)
    try:
        rows = logits.view(outer, inner, vocab)
    except RuntimeError:
        rows = None
    if rows is not None and rows.stride(-1) != 1 and vocab > 1:
        rows = None
    if inplace:
        broadcast = logits.numel() > 0 and any(
            stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)
        )
        if rows is None or broadcast:
            raise ValueError(
                "inplace=True needs logits that are dense in the vocabulary, not broadcast, and regular in their"
                f" leading dimensions; got shape {tuple(logits.shape)} with strides {logits.stride()}"
            )
    return logits.reshape(outer, inner, vocab).contiguous() if rows is None else rows
