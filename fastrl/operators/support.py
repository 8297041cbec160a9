"""torch.library operators over logits for rows with a recorded support: they read only its entries.

For rows without a support (`dense`), and with one too wide to gather (`dense_support`), they call the dense kernels.
Helpers that the operators from hidden states (`linear/supports.py`) share are also here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import Statistics, Support, Transform, entry_rows
from fastrl.base import checks
from fastrl.operators import consumed
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.operator import operator
from fastrl.operators.rows import empty_statistics, like_logits, logits_backward

#: Logits of rows with a wide support are copied and restricted in blocks of this many bytes.
_BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}


def together(dense: Statistics | None, support: Statistics) -> Statistics:
    """Merges statistics in which each row is 0 in one of the two. Results of an operator may not share memory."""
    pairs = zip(dense or support, support, strict=True)
    return Statistics(*(b.clone() if dense is None else a + b for a, b in pairs))


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


class SupportStatistics(NamedTuple):
    """The statistics of the rows, each (N,) float32 as in `Statistics`, and the logits of the support's entries."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_sum: Tensor
    values: Tensor  # (nnz,) float32


def statistics_over_support(
    logits: Tensor,
    targets: Tensor,
    dense: Tensor | None,
    transform: Transform,
    support: Support,
    dense_support: DenseSupport | None,
    backend: str,
) -> SupportStatistics:
    """What `support_row_statistics` returns; nothing is checked."""
    row_kernels: Any = kernels(backend, logits)
    rest = None if dense is None else row_kernels.row_statistics(logits, targets, dense, transform)
    rows = support.rows()
    values = logits[rows // logits.shape[1], rows % logits.shape[1], support.token_ids.long()].float()
    stats = together(rest, row_kernels.support_statistics(values, targets, support, transform))
    for chosen, block in _wide_blocks(logits, dense_support, backend):
        block_stats = row_kernels.row_statistics(block[None], targets[chosen], None, _of_rows(transform, chosen))
        for total, part in zip(stats, block_stats, strict=True):
            total[chosen] = part
    return SupportStatistics(*stats, values)


def fake_statistics(targets: Tensor, support: Support, **_: Any) -> SupportStatistics:
    """Uninitialised statistics of the targets' rows and of the support's entries."""
    values = targets.new_empty(support.token_ids.shape, dtype=torch.float32)
    return SupportStatistics(*empty_statistics(targets), values)


@operator()
def support_row_statistics(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    dense: Tensor | None,  # (N,) bool: valid rows without a support; None: no such rows
    transform: Transform,
    support: Support,  # valid: rows whose entries are gathered
    dense_support: DenseSupport | None,  # of the rows that take the dense kernels
    vocab: int,
    backend: str,
    consume: bool,
) -> SupportStatistics:
    """`row_statistics` over the support's entries, and their logits; the first two results are differentiable."""
    check_targets(targets, dense, support, dense_support, vocab)
    consumed.refuse(logits)
    entries = logits[..., :vocab]
    stats = statistics_over_support(entries, targets, dense, transform, support, dense_support, backend)
    if dense_support is not None:
        lacking = without_target(targets, dense_support.token_ids, dense_support.offsets)
        stats.logprobs.masked_fill_(lacking, torch.nan)
    return stats


support_row_statistics.register_fake(fake_statistics)


def write_row_gradient(
    logits: Tensor,
    targets: Tensor,
    dense: Tensor | None,
    transform: Transform,
    support: Support,
    dense_support: DenseSupport | None,
    vocab: int,
    values: Tensor,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
    out: Tensor,
) -> None:
    """Writes dL/dlogits, 0 outside the support, to `out` (A, B, V), which may be the logits themselves."""
    out[..., vocab:].zero_()
    logits, out = logits[..., :vocab], out[..., :vocab]
    row_kernels: Any = kernels(backend, logits)
    inner = out.shape[1]
    if dense_support is not None:  # then `dense` is None: `dense_support.rows` includes the rows without a support
        gathered = torch.ones(targets.shape, dtype=torch.bool, device=out.device).index_fill_(
            0, dense_support.rows, False
        )
        for rows, block in _wide_blocks(logits, dense_support, backend):
            part = Statistics(*(s[rows] for s in statistics))
            h_rows = None if h is None else h[rows]
            row_kernels.row_gradient(
                block[None], targets[rows], None, _of_rows(transform, rows), part, c[rows], h_rows, block[None]
            )
            out[rows // inner, rows % inner] = block
        out.masked_fill_(gathered.view(out.shape[0], inner, 1), 0.0)
    elif dense is not None:
        row_kernels.row_gradient(logits, targets, dense, transform, statistics, c, h, out)
    else:
        out.zero_()
    gradient = torch.empty_like(values)
    row_kernels.support_gradient(values, targets, support, transform, statistics, c, h, gradient)
    rows = support.rows()
    out[rows // inner, rows % inner, support.token_ids.long()] = gradient.to(out.dtype)


@operator()
def support_row_gradient(
    logits: Tensor,
    targets: Tensor,
    dense: Tensor | None,
    transform: Transform,
    support: Support,
    dense_support: DenseSupport | None,
    vocab: int,
    values: Tensor,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous."""
    out = like_logits(logits)
    write_row_gradient(
        logits, targets, dense, transform, support, dense_support, vocab, values, statistics, c, h, backend, out
    )
    return out


support_row_gradient.register_fake(like_logits)


@operator(mutates=("logits",))
def support_row_gradient_(
    logits: Tensor,
    targets: Tensor,
    dense: Tensor | None,
    transform: Transform,
    support: Support,
    dense_support: DenseSupport | None,
    vocab: int,
    values: Tensor,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
) -> None:
    """`support_row_gradient`, written over the logits."""
    write_row_gradient(
        logits, targets, dense, transform, support, dense_support, vocab, values, statistics, c, h, backend, logits
    )


def save_statistics(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    """What a backward reads: the inputs and the statistics."""
    *statistics, values = results
    return {**inputs, "statistics": Statistics(*statistics), "values": values}


support_row_statistics.register_autograd(
    logits_backward(support_row_gradient, support_row_gradient_), save_statistics, differentiable=2
)
