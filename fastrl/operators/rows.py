"""torch.library operators over logits: row statistics (differentiable) and the row gradient, out of place and in place.

They check target values and call the functions of a backend; `fastrl.backend.contract` specifies these. The name of
the backend is an argument, so that a backward uses the same backend as its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import Statistics, Transform
from fastrl.base import checks
from fastrl.operators import consumed
from fastrl.operators.operator import operator
from fastrl.operators.saved import saved, use_up


@operator()
def row_statistics(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    vocab: int,
    backend: str,
    consume: bool,
) -> Statistics:
    """The statistics of the rows; log-probabilities and entropies are differentiable.

    The first `vocab` columns are the vocabulary; the others are padding, which has no probability and a gradient of 0.
    With `consume` the backward writes the gradient over the logits.
    """
    checks.targets_in_range(targets, mask, vocab)
    consumed.refuse(logits)
    if targets.numel() == 0:
        return empty_statistics(targets)
    entries = logits[..., :vocab]
    statistics: Statistics = kernels(backend, logits).row_statistics(entries, targets, mask, transform)
    # The results of an operator may not share memory, but a backend may fill one (4, N) tensor.
    shared = len({s.untyped_storage().data_ptr() for s in statistics}) < len(statistics)
    return Statistics(*(s.clone() for s in statistics)) if shared else statistics


def empty_statistics(targets: Tensor) -> Statistics:
    """Uninitialised statistics of the targets' rows."""
    return Statistics(*(targets.new_empty(targets.shape, dtype=torch.float32) for _ in range(4)))


row_statistics.register_fake(lambda targets, **_: empty_statistics(targets))


@operator()
def row_gradient(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    vocab: int,
    statistics: Statistics,
    c: Tensor,  # (N,) float32
    h: Tensor | None,  # (N,) float32
    backend: str,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous, from c = dL/dlogp and h = dL/dH."""
    out = like_logits(logits)
    write_gradient(out, logits, targets, mask, transform, vocab, statistics, c, h, backend)
    return out


def write_gradient(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    vocab: int,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
) -> None:
    """Writes dL/dlogits (A, B, V), 0 in the padding, to `out`, which may be the logits themselves."""
    entries, own = logits[..., :vocab], out[..., :vocab]
    if own.numel():
        kernels(backend, logits).row_gradient(entries, targets, mask, transform, statistics, c, h, own)
    out[..., vocab:].zero_()


def like_logits(logits: Tensor, **_: Any) -> Tensor:
    """Uninitialised memory for dL/dlogits (A, B, V), contiguous."""
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


row_gradient.register_fake(like_logits)


@operator(mutates=("logits",))
def row_gradient_(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    vocab: int,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
) -> None:
    """`row_gradient`, written over the logits."""
    write_gradient(logits, logits, targets, mask, transform, vocab, statistics, c, h, backend)


def upstream(gradient: Tensor | None) -> Tensor | None:
    """A per-row gradient as backends take it: contiguous (N,) float32, or None."""
    return None if gradient is None else gradient.detach().float().contiguous()


def coefficients(d_logprobs: Tensor | None, d_entropy: Tensor | None) -> dict[str, Tensor | None]:
    """c and h (N,) of a row gradient, from the upstream gradients, of which at least one is not None."""
    c, h = upstream(d_logprobs), upstream(d_entropy)
    return {"c": torch.zeros_like(h) if c is None and h is not None else c, "h": h}


def logits_backward(
    gradient: Callable[..., Tensor],
    gradient_: Callable[..., None],
    of_results: Callable[..., dict[str, Tensor | None]] = coefficients,
) -> Callable[..., Tensor]:
    """The backward of statistics of logits: by `gradient`, or by `gradient_` over logits that the loss may consume.

    `of_results` gives what they take by name from the upstream gradients, of which at least one is not None.
    """

    def backward(ctx: Any, *upstream: Tensor | None) -> Tensor:
        if ctx.values["consume"]:
            use_up(ctx)
        arguments = saved(ctx) | of_results(*upstream)
        if not arguments.pop("consume"):
            return gradient(**arguments)
        logits = arguments["logits"] = arguments["logits"].detach()
        with consumed.kept(logits):
            gradient_(**arguments)
        consumed.mark(logits)
        return cast(Tensor, logits)

    return backward


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {**inputs, "statistics": Statistics(*results)}


row_statistics.register_autograd(logits_backward(row_gradient, row_gradient_), _save, differentiable=2)


def as_rows(logits: Tensor, inplace: bool) -> Tensor:
    """Logits (..., V) as (A, B, V): a view if two leading strides suffice, else a contiguous copy.

    Raises ValueError if `inplace` would need the copy, or would write a broadcast row more than once.
    """
    vocab = logits.shape[-1]
    # The last dimension before V stays B, so that x[:, :-1] of a padded batch needs no copy.
    inner = logits.shape[-2] if logits.dim() > 1 else 1
    outer = logits.shape[:-2].numel()
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
