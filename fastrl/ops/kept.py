"""torch.library operators for rows with recorded vocabulary sets: products only with the entries that a row keeps.

One operator from logits and one from hidden states. Each also serves the rows that have no set (`dense`) by the dense
kernels, so that one gradient buffer serves a call: dense rows write it first, the others add their entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import checks
from fastrl.ops import backward, forward, products
from fastrl.ops.backend import kernels
from fastrl.ops.contract import ByToken, Kept, Statistics, Transform
from fastrl.ops.forward import Limits
from fastrl.ops.products import Head, Needs
from fastrl.ops.restriction import Restriction
from fastrl.ops.rows import upstream


def _rows_of(kept: Kept) -> Tensor:
    """(nnz,) int64: the row of each entry."""
    rows = torch.arange(kept.counts.shape[0], device=kept.counts.device)
    return rows.repeat_interleave(kept.offsets.diff(), output_size=kept.token_ids.shape[0])


def _together(dense: Statistics | None, kept: Statistics) -> tuple[Tensor, ...]:
    """Statistics of rows, each of which is 0 in one of the two. An operator's results may not share memory."""
    return tuple(b.clone() if dense is None else a + b for a, b in zip(dense or kept, kept, strict=True))


def by_token(kept: Kept, vocab: int) -> ByToken:
    """The entries sorted by token; a stable sort, so that sums have one order."""
    takes_part = kept.counts.repeat_interleave(kept.offsets.diff(), output_size=kept.token_ids.shape[0])
    ids, entries = kept.token_ids.where(takes_part, vocab).sort(stable=True)
    rows = torch.searchsorted(kept.offsets, entries, right=True, out_int32=True)
    return ByToken(ids, entries, rows.sub_(1))


# --- from logits --------------------------------------------------------------------------------------------------


@torch.library.custom_op("fastrl::kept_row_statistics", mutates_args=())
def kept_row_statistics(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    dense: Tensor | None,  # (N,) bool: rows that count and have no set; None: there are none
    temperatures: Tensor | None,  # (N,) float32
    token_ids: Tensor,  # (nnz,) int32
    offsets: Tensor,  # (N + 1,) int64
    counts: Tensor,  # (N,) bool: rows that count and have a set
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    consume: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`row_statistics` over the kept entries, and their logits (nnz,) float32; the first two are differentiable."""
    kept, transform = Kept(token_ids, offsets, counts), Transform(temperature, temperatures, logit_scale, softcap)
    _check_targets(targets, dense, kept, logits.shape[-1])
    row_kernels: Any = kernels(backend, logits)
    rest = None if dense is None else row_kernels.row_statistics(logits, targets, dense, transform)
    rows = _rows_of(kept)
    values = logits[rows // logits.shape[1], rows % logits.shape[1], token_ids.long()].float()
    found = _together(rest, row_kernels.kept_statistics(values, targets, kept, transform))
    return *found, values  # type: ignore[return-value]


@kept_row_statistics.register_fake
def _(logits: Tensor, targets: Tensor, dense: Any, temperatures: Any, token_ids: Tensor, *rest: Any) -> Any:
    numbers = (logits.new_empty(targets.shape[0], dtype=torch.float32) for _ in range(4))
    return *numbers, logits.new_empty(token_ids.shape[0], dtype=torch.float32)


def _write_row_gradient(
    logits: Tensor, targets: Tensor, dense: Tensor | None, temperatures: Tensor | None, kept: Kept, values: Tensor,
    statistics: list[Tensor], c: Tensor, h: Tensor | None, transform: Transform, backend: str, out: Tensor,
) -> None:  # fmt: skip
    """dL/dlogits into `out` (A, B, V), which may be the logits: 0 outside the sets."""
    row_kernels: Any = kernels(backend, logits)
    found = Statistics(*statistics)
    if dense is None:
        out.zero_()
    else:
        row_kernels.row_gradient(logits, targets, dense, transform, found, c, h, out)
    gradient = torch.empty_like(values)
    row_kernels.kept_gradient(values, targets, kept, transform, found, c, h, gradient)
    rows = _rows_of(kept)
    out[rows // out.shape[1], rows % out.shape[1], kept.token_ids.long()] = gradient.to(out.dtype)


@torch.library.custom_op("fastrl::kept_row_gradient", mutates_args=())
def kept_row_gradient(
    logits: Tensor, targets: Tensor, dense: Tensor | None, temperatures: Tensor | None, token_ids: Tensor,
    offsets: Tensor, counts: Tensor, values: Tensor, statistics: list[Tensor], c: Tensor, h: Tensor | None,
    temperature: float, logit_scale: float, softcap: float, backend: str,
) -> Tensor:  # fmt: skip
    """dL/dlogits (A, B, V), contiguous."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_row_gradient(
        logits, targets, dense, temperatures, Kept(token_ids, offsets, counts), values, statistics, c, h,
        Transform(temperature, temperatures, logit_scale, softcap), backend, out,
    )  # fmt: skip
    return out


@kept_row_gradient.register_fake
def _(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("fastrl::kept_row_gradient_", mutates_args=("logits",))
def kept_row_gradient_(
    logits: Tensor, targets: Tensor, dense: Tensor | None, temperatures: Tensor | None, token_ids: Tensor,
    offsets: Tensor, counts: Tensor, values: Tensor, statistics: list[Tensor], c: Tensor, h: Tensor | None,
    temperature: float, logit_scale: float, softcap: float, backend: str,
) -> None:  # fmt: skip
    """The same, written over the logits."""
    _write_row_gradient(
        logits, targets, dense, temperatures, Kept(token_ids, offsets, counts), values, statistics, c, h,
        Transform(temperature, temperatures, logit_scale, softcap), backend, logits,
    )  # fmt: skip


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, temperature, logit_scale, softcap, backend, consume = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options, ctx.consume, ctx.consumed = (temperature, logit_scale, softcap, backend), consume, False
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _rows_backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    if ctx.consumed:
        raise RuntimeError("the logits were consumed by the first backward (inplace=True): a second one has no input")
    *tensors, s0, s1, s2, s3, values = ctx.saved_tensors
    c, h = upstream(d_logprobs), upstream(d_entropy)
    if c is None and h is None:
        return (None,) * 12
    c = torch.zeros_like(s0) if c is None else c
    arguments = (*tensors[1:], values, [s0, s1, s2, s3], c, h, *ctx.options)
    if ctx.consume:
        ctx.consumed = True
        gradient = tensors[0].detach()
        kept_row_gradient_(gradient, *arguments)
    else:
        gradient = kept_row_gradient(tensors[0], *arguments)
    return (gradient, *(None,) * 11)


kept_row_statistics.register_autograd(_rows_backward, setup_context=_setup_rows)


# --- from hidden states ---------------------------------------------------------------------------------------------


@torch.library.custom_op("fastrl::kept_linear_statistics", mutates_args=())
def kept_linear_statistics(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) int64
    dense: Tensor | None,  # (N,) bool: rows for the dense kernels; None: there are none
    temperatures: Tensor | None,  # (N,) float32
    token_ids: Tensor,  # (nnz,) int32
    offsets: Tensor,  # (N + 1,) int64
    counts: Tensor,  # (N,) bool: rows whose entries are gathered
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    restricts: bool,
    num_dense: int,
    plan: str,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`linear_statistics` over the kept entries, and their logits (nnz,) float32; the first two are differentiable.

    `restricts`: some dense rows have sets, too wide to gather. `num_dense`: their number, or -1.
    """
    kept, transform = Kept(token_ids, offsets, counts), Transform(temperature, temperatures, logit_scale, softcap)
    _check_targets(targets, dense, kept, weight.shape[0])
    head, rest = Head(hidden, weight, bias), None
    if dense is not None:
        rest = forward.statistics(
            head, targets, dense, transform, backend, num_dense, Limits(*limits), _restriction(kept, restricts)
        )
    row_kernels: Any = kernels(backend, hidden)
    values = row_kernels.kept_products(hidden, weight, bias, kept)
    found = _together(rest, row_kernels.kept_statistics(values, targets, kept, transform))
    return *found, values


def _restriction(kept: Kept, restricts: bool) -> Restriction | None:
    if not restricts:
        return None
    return Restriction(kept.token_ids, kept.offsets, torch.arange(kept.counts.shape[0], device=kept.counts.device))


@kept_linear_statistics.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, dense: Any, temperatures: Any, token_ids: Tensor,
    *rest: Any,
) -> Any:  # fmt: skip
    numbers = (hidden.new_empty(targets.shape[0], dtype=torch.float32) for _ in range(4))
    return *numbers, hidden.new_empty(token_ids.shape[0], dtype=torch.float32)


@torch.library.custom_op("fastrl::kept_linear_gradient", mutates_args=())
def kept_linear_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dense: Tensor | None,
    temperatures: Tensor | None, token_ids: Tensor, offsets: Tensor, counts: Tensor, values: Tensor,
    statistics: list[Tensor], c: Tensor, h: Tensor | None, needs: list[bool], temperature: float, logit_scale: float,
    softcap: float, backend: str, restricts: bool, num_dense: int, plan: str, limits: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor where one is not needed."""
    kept, transform = Kept(token_ids, offsets, counts), Transform(temperature, temperatures, logit_scale, softcap)
    found, head = Statistics(*statistics), Head(hidden, weight, bias)
    if dense is not None:
        d_hidden, d_weight, d_bias = backward.gradients(
            head, targets, dense, transform, found, c, h, Needs(*needs), backend, -1, plan, Limits(*limits),
            _restriction(kept, restricts),
        )  # fmt: skip
    else:
        shapes = (hidden.shape, weight.shape, weight.shape[:1])
        d_hidden, d_weight, d_bias = (
            products.zeros(tuple(shape), hidden.dtype, hidden) if need else None
            for shape, need in zip(shapes, needs, strict=True)
        )
    row_kernels: Any = kernels(backend, hidden)
    gradient = torch.empty_like(values)
    row_kernels.kept_gradient(values, targets, kept, transform, found, c, h, gradient)
    if d_hidden is not None:
        row_kernels.kept_hidden(gradient, weight, kept, d_hidden)
    if d_weight is not None or d_bias is not None:
        entries = by_token(kept, weight.shape[0])
        row_kernels.kept_weight(gradient, hidden, entries, d_weight, d_bias, dense is not None)
    gradients = (d_hidden, d_weight, d_bias)
    return tuple(hidden.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


@kept_linear_gradient.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(s if need else (0,)) for s, need in zip(shapes, rest[11], strict=True))


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.options = inputs[9:]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _linear_backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    c, h = upstream(d_logprobs), upstream(d_entropy)
    nothing = (None,) * (6 + len(ctx.options))
    if c is None and h is None:
        return (None, None, None, *nothing)
    *tensors, s0, s1, s2, s3, values = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    c = torch.zeros_like(s0) if c is None else c
    found = kept_linear_gradient(*tensors, values, [s0, s1, s2, s3], c, h, needs, *ctx.options)
    return (*(g if need else None for g, need in zip(found, needs, strict=True)), *nothing)


kept_linear_statistics.register_autograd(_linear_backward, setup_context=_setup_linear)


def _check_targets(targets: Tensor, dense: Tensor | None, kept: Kept, vocab: int) -> None:
    """Where values may be looked at: IndexError for a target outside [0, vocab), ValueError for one outside its set."""
    if not checks.values_are_checked(targets):
        return
    recorded = kept.counts
    checks.targets_in_range(targets, recorded if dense is None else dense | recorded, vocab)
    rows = _rows_of(kept)
    hits = kept.token_ids == targets[rows]
    found = torch.zeros_like(recorded).index_put((rows[hits],), torch.ones_like(hits[hits]))
    missing = recorded & ~found
    if dense is not None:
        missing |= dense & (kept.offsets.diff() > 0) & ~found
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        size = int(kept.offsets[row + 1] - kept.offsets[row])
        raise ValueError(
            f"targets row {row} is {int(targets[row])}, which is not in its sampling_mask set of {size} ids"
            " (SamplingMask.with_targets adds tokens that were forced, not drawn)"
        )
