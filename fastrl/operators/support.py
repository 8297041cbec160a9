"""torch.library operators over logits for rows with a recorded support: they read only its entries.

For rows without a support (`dense`), and with one too wide to gather (`dense_support`), they call the dense kernels.
Helpers that the operators from hidden states (`linear/supports.py`) share are also here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastrl.backends.choice import kernels
from fastrl.backends.contract import Statistics, Support, Transform, entry_rows
from fastrl.base import checks
from fastrl.operators import consumed
from fastrl.operators.arguments import Arguments
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.rows import gradient_of_logits, upstream

#: Logits of rows with a wide support are copied and restricted in blocks of this many bytes.
_BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}


def together(dense: Statistics | None, support: Statistics) -> tuple[Tensor, ...]:
    """Merges statistics in which each row is 0 in one of the two. Results of an operator may not share memory."""
    return tuple(b.clone() if dense is None else a + b for a, b in zip(dense or support, support, strict=True))


def without_target(targets: Tensor, token_ids: Tensor, offsets: Tensor) -> Tensor:
    """(N,) bool: rows that have a support which lacks their target."""
    rows = entry_rows(offsets, token_ids.shape[0])
    hits = (token_ids == targets[rows]).to(torch.int32)
    return (offsets.diff() > 0) & (torch.zeros_like(targets, dtype=torch.int32).index_add_(0, rows, hits) == 0)


def check_targets(
    targets: Tensor, dense: Tensor | None, support: Support, dense_support: DenseSupport | None, vocab: int
) -> None:
    """Checks targets if values may be read.

    Raises IndexError for a target outside [0, vocab), ValueError for one outside its support.
    """
    if not checks.values_are_checked(targets):
        return
    valid, supports = (
        support.valid if dense is None else support.valid | dense,
        [(support.token_ids, support.offsets)],
    )
    if dense_support is not None:
        valid = valid.index_fill(0, dense_support.rows, True) if dense is None else valid
        supports.append((dense_support.token_ids, dense_support.offsets))
    checks.targets_in_range(targets, valid, vocab)
    for token_ids, offsets in supports:
        missing = valid & without_target(targets, token_ids, offsets)
        if bool(missing.any()):
            row = int(missing.nonzero()[0])
            raise ValueError(
                f"targets row {row} is {int(targets[row])}, which is not in its sampling_mask set of"
                f" {int(offsets[row + 1] - offsets[row])} ids (SamplingMask.with_targets adds tokens that were forced,"
                " not drawn)"
            )


def _wide_blocks(logits: Tensor, dense_support: DenseSupport | None, backend: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields blocks of rows: (row indices, their logits (n, V) with -inf outside the support)."""
    if dense_support is None:
        return
    block_bytes = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES["cpu"])
    for rows in dense_support.rows.split(max(1, block_bytes // (logits.shape[2] * logits.element_size()))):
        block = logits[rows // logits.shape[1], rows % logits.shape[1]]
        dense_support._replace(rows=rows).apply(block, 0, backend)
        yield rows, block


def _of_rows(transform: Transform, rows: Tensor) -> Transform:
    t = transform.temperatures
    return transform if t is None else transform._replace(temperatures=t[rows])


@torch.library.custom_op("fastrl::support_row_statistics", mutates_args=())
def support_row_statistics(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    dense: Tensor | None,  # (N,) bool: valid rows without a support; None: no such rows
    temperatures: Tensor | None,  # (N,) float32
    token_ids: Tensor,  # (nnz,) int32
    offsets: Tensor,  # (N + 1,) int64
    valid: Tensor,  # (N,) bool: valid rows whose entries are gathered
    # (nnz',) int32, (N + 1,) int64 and (M,) int64: support of the M rows that take the dense kernels
    dense_support: list[Tensor],
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    consume: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`row_statistics` over the support entries, and their logits (nnz,) float32; the first two are differentiable."""
    support, transform = Support(token_ids, offsets, valid), Transform(temperature, temperatures, logit_scale, softcap)
    wide = DenseSupport.of(dense_support)
    check_targets(targets, dense, support, wide, logits.shape[-1])
    consumed.refuse(logits)
    row_kernels: Any = kernels(backend, logits)
    rest = None if dense is None else row_kernels.row_statistics(logits, targets, dense, transform)
    rows = support.rows()
    values = logits[rows // logits.shape[1], rows % logits.shape[1], token_ids.long()].float()
    stats = together(rest, row_kernels.support_statistics(values, targets, support, transform))
    for chosen, block in _wide_blocks(logits, wide, backend):
        block_stats = row_kernels.row_statistics(block[None], targets[chosen], None, _of_rows(transform, chosen))
        for total, part in zip(stats, block_stats, strict=True):
            total[chosen] = part
    if wide is not None:
        stats[0].masked_fill_(without_target(targets, dense_support[0], dense_support[1]), torch.nan)
    return *stats, values  # type: ignore[return-value]


_ARGUMENTS = Arguments("support_row_statistics")


@support_row_statistics.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _ARGUMENTS.named(inputs)
    return tuple(a.logits.new_empty(n, dtype=torch.float32) for n in (*(a.targets.shape[0],) * 4, a.token_ids.shape[0]))


def _write_row_gradient(
    logits: Tensor,
    targets: Tensor,
    dense: Tensor | None,
    temperatures: Tensor | None,
    support: Support,
    dense_support: DenseSupport | None,
    values: Tensor,
    statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    transform: Transform,
    backend: str,
    out: Tensor,
) -> None:
    """Writes dL/dlogits, 0 outside the support, to `out` (A, B, V), which may be the logits themselves."""
    row_kernels: Any = kernels(backend, logits)
    stats, inner = Statistics(*statistics), out.shape[1]
    if dense_support is not None:  # then `dense` is None: `dense_support.rows` includes the rows without a support
        gathered = torch.ones(targets.shape, dtype=torch.bool, device=out.device).index_fill_(
            0, dense_support.rows, False
        )
        for rows, block in _wide_blocks(logits, dense_support, backend):
            part = Statistics(*(s[rows] for s in stats))
            row_kernels.row_gradient(
                block[None],
                targets[rows],
                None,
                _of_rows(transform, rows),
                part,
                c[rows],
                None if h is None else h[rows],
                block[None],
            )
            out[rows // inner, rows % inner] = block
        out.masked_fill_(gathered.view(out.shape[0], inner, 1), 0.0)
    elif dense is not None:
        row_kernels.row_gradient(logits, targets, dense, transform, stats, c, h, out)
    else:
        out.zero_()
    gradient = torch.empty_like(values)
    row_kernels.support_gradient(values, targets, support, transform, stats, c, h, gradient)
    rows = support.rows()
    out[rows // inner, rows % inner, support.token_ids.long()] = gradient.to(out.dtype)


@torch.library.custom_op("fastrl::support_row_gradient", mutates_args=())
def support_row_gradient(
    logits: Tensor,
    targets: Tensor,
    dense: Tensor | None,
    temperatures: Tensor | None,
    token_ids: Tensor,
    offsets: Tensor,
    valid: Tensor,
    dense_support: list[Tensor],
    values: Tensor,
    statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_row_gradient(
        logits,
        targets,
        dense,
        temperatures,
        Support(token_ids, offsets, valid),
        DenseSupport.of(dense_support),
        values,
        statistics,
        c,
        h,
        Transform(temperature, temperatures, logit_scale, softcap),
        backend,
        out,
    )
    return out


@support_row_gradient.register_fake
def _(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("fastrl::support_row_gradient_", mutates_args=("logits",))
def support_row_gradient_(
    logits: Tensor,
    targets: Tensor,
    dense: Tensor | None,
    temperatures: Tensor | None,
    token_ids: Tensor,
    offsets: Tensor,
    valid: Tensor,
    dense_support: list[Tensor],
    values: Tensor,
    statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
) -> None:
    """`support_row_gradient`, written over the logits."""
    _write_row_gradient(
        logits,
        targets,
        dense,
        temperatures,
        Support(token_ids, offsets, valid),
        DenseSupport.of(dense_support),
        values,
        statistics,
        c,
        h,
        Transform(temperature, temperatures, logit_scale, softcap),
        backend,
        logits,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *statistics, values = output
    _ARGUMENTS.save(ctx, inputs, statistics=statistics, values=values)
    ctx.consumed = False
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    if ctx.consumed:
        raise RuntimeError(consumed.SECOND_BACKWARD)
    c, h = upstream(d_logprobs), upstream(d_entropy)
    if c is None and h is None:
        return _ARGUMENTS.gradients(ctx)
    arguments = _ARGUMENTS.saved(ctx)
    arguments |= {"c": torch.zeros_like(arguments["statistics"][0]) if c is None else c, "h": h}
    gradient = gradient_of_logits(ctx, support_row_gradient, support_row_gradient_, arguments)
    return _ARGUMENTS.gradients(ctx, logits=gradient)


support_row_statistics.register_autograd(_backward, setup_context=_setup_context)
