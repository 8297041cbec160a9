"""torch.library operators over logits: log-probabilities of several entries per row, and their gradient.

With a vocabulary over the ranks of a group, an autograd function instead; no operator could take the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import Best, Entries, Statistics, Support, Transform
from fastrl.distributed.groups import start_gather
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts
from fastrl.operators import consumed
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.entries import best_of, check_entries, entry_gradients, entry_logprobs, no_best, wide
from fastrl.operators.operator import operator
from fastrl.operators.rows import like_logits, logits_backward
from fastrl.operators.saved import keep, refuse_second_order
from fastrl.operators.sharded import empty_shard_statistics, failure, start_gathered
from fastrl.operators.support import statistics_over_support, write_row_gradient


class GatheredRows(NamedTuple):
    """Log-probabilities, differentiable, and what their backward reads."""

    logprobs: Tensor  # (nnz,)
    values: Tensor  # (nnz,) the entries' logits
    maximum: Tensor  # (N,), as in `Statistics`
    log_sum: Tensor  # (N,)
    support_values: Tensor  # the logits of the support's entries, or empty


class RowsSupport(NamedTuple):
    """The recorded support of rows, as `operators.support` and `linear.supports` take it."""

    dense: Tensor | None  # (N,) bool: valid rows that take the dense kernels; None: no such rows
    support: Support
    dense_support: DenseSupport | None

    @classmethod
    def of(
        cls, dense: Tensor | None, support: Support | None, dense_support: DenseSupport | None
    ) -> RowsSupport | None:
        """From an operator's arguments, which cannot take an optional tuple of tuples."""
        return None if support is None else cls(dense, support, dense_support)


def _statistics(
    logits: Tensor,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    over: RowsSupport | None,
    backend: str,
    first: int,
    values: Tensor,
    best: Best,
) -> tuple[Statistics, Tensor]:
    """The statistics (N,) of logits (A, B, V), whose targets are the best entries, and the logits of the support."""
    rows = torch.arange(best.ids.shape[0], device=logits.device)
    targets = kernels(backend, logits).gather_entries(logits, first, rows, entries, values, best)
    if over is None:
        stats: Statistics = kernels(backend, logits).row_statistics(logits, targets, mask, transform)
        return stats, values.new_empty(0)
    *found, support_values = statistics_over_support(
        logits, targets, over.dense, transform, over.support, over.dense_support, backend
    )
    return Statistics(*found), support_values


@operator()
def gathered_rows(
    logits: Tensor,  # (A, B, V)
    entries: Entries,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    dense: Tensor | None,
    support: Support | None,
    dense_support: DenseSupport | None,
    vocab: int,
    backend: str,
    consume: bool,
) -> GatheredRows:
    """Log-probabilities of the entries, of which those outside a recorded support are marked `NOT_IN_SET`.

    `vocab` and `consume` are those of `row_statistics`.
    """
    check_entries(entries, mask, vocab)
    consumed.refuse(logits)
    if not entries.token_ids.shape[0]:
        return fake_rows(logits, entries, support)
    values = torch.zeros(entries.token_ids.shape, dtype=wide(logits), device=logits.device)
    best, over = no_best(entries.offsets.shape[0] - 1, logits), RowsSupport.of(dense, support, dense_support)
    columns = logits[..., :vocab]
    stats, support_values = _statistics(columns, entries, mask, transform, over, backend, 0, values, best)
    logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, vocab)
    # The results of an operator may not share memory, but a backend may fill one (4, N) tensor.
    return GatheredRows(logprobs, values, stats.maximum.clone(), stats.log_sum.clone(), support_values)


def fake_rows(logits: Tensor, entries: Entries, support: Support | None, **_: Any) -> GatheredRows:
    """Uninitialised results."""
    rows, recorded = entries.offsets.shape[0] - 1, 0 if support is None else support.token_ids.shape[0]
    nnz = entries.token_ids.shape[0]
    return GatheredRows(*(logits.new_empty(n, dtype=wide(logits)) for n in (nnz, nnz, rows, rows, recorded)))


gathered_rows.register_fake(fake_rows)


def _write(
    logits: Tensor,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    over: RowsSupport | None,
    vocab: int,
    backend: str,
    first: int,
    results: GatheredRows,
    upstream: Tensor,
    out: Tensor,
) -> None:
    """Writes dL/dlogits, 0 in the padding, to `out` (A, B, V), which may be the logits themselves."""
    used = vocab if entries.token_ids.shape[0] else 0
    out[..., used:].zero_()
    logits, out = logits[..., :used], out[..., :used]
    if not out.numel():
        return
    logprobs, values, maximum, log_sum, support_values = results
    found = entry_gradients(upstream, logprobs, values, entries, mask, transform)
    stats, rows = found.statistics(maximum, log_sum), torch.arange(maximum.shape[0], device=out.device)
    none, row_kernels = torch.full_like(rows, -1), kernels(backend, logits)
    if over is None:
        row_kernels.row_gradient(logits, none, mask, transform, stats, found.totals, None, out)
    else:
        dense, support, dense_support = over
        write_row_gradient(
            logits,
            none,
            dense,
            transform,
            support,
            dense_support,
            vocab,
            support_values,
            stats,
            found.totals,
            None,
            backend,
            out,
        )
    row_kernels.scatter_entries(found.entries, first, rows, entries, out)


@operator()
def gathered_rows_gradient(
    logits: Tensor,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    dense: Tensor | None,
    support: Support | None,
    dense_support: DenseSupport | None,
    vocab: int,
    backend: str,
    results: GatheredRows,
    upstream: Tensor,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous."""
    out = like_logits(logits)
    over = RowsSupport.of(dense, support, dense_support)
    _write(logits, entries, mask, transform, over, vocab, backend, 0, results, upstream, out)
    return out


gathered_rows_gradient.register_fake(like_logits)


@operator(mutates=("logits",))
def gathered_rows_gradient_(
    logits: Tensor,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    dense: Tensor | None,
    support: Support | None,
    dense_support: DenseSupport | None,
    vocab: int,
    backend: str,
    results: GatheredRows,
    upstream: Tensor,
) -> None:
    """`gathered_rows_gradient`, written over the logits."""
    over = RowsSupport.of(dense, support, dense_support)
    _write(logits, entries, mask, transform, over, vocab, backend, 0, results, upstream, logits)


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {**inputs, "results": GatheredRows(*results)}


def _upstream(gradient: Tensor) -> dict[str, Tensor | None]:
    return {"upstream": gradient.detach().contiguous()}


gathered_rows.register_autograd(
    logits_backward(gathered_rows_gradient, gathered_rows_gradient_, _upstream), _save, differentiable=1
)


# --- over a group -----------------------------------------------------------------------------------------------------


def over_group(
    compute: Callable[[], tuple[Tensor, Statistics]], entries: Entries, mask: Tensor | None, shard: VocabularyShard
) -> tuple[Tensor, Best, Statistics]:
    """The logits of all entries, each row's best one, and the statistics of whole rows whose target it is.

    Two collectives: the sum of the logits, of which each is on one rank and 0 on the others, so that the sum is exact;
    and the statistics, as `sharded.gathered`. An error in `compute` reaches all ranks.

    Args:
        compute: gives the logits (nnz,) of the entries that this rank holds, 0 for the others, and the statistics (N,)
            of its part of the vocabulary, with its own best entries as targets.
        entries: of the whole vocabulary, at least one.
        mask: (N,) bool; the statistics of other rows are 0.
        shard: of this rank.
    """
    targets = torch.zeros(entries.offsets.shape[0] - 1, dtype=torch.int64, device=entries.offsets.device)
    try:
        values, local = compute()
    except Exception:
        add_parts(
            torch.full(entries.token_ids.shape, torch.nan, dtype=torch.float32, device=targets.device), shard.group
        )
        start_gather(torch.stack(failure(targets)), shard.group)()
        raise
    add_parts(values, shard.group)
    best = best_of(values, entries, (entries.token_ids >= 0) & (entries.token_ids < shard.total))
    return values, best, start_gathered(local, best.ids, shard, mask)()


def sharded_gathered_rows(
    logits: Tensor,  # (A, B, V_r)
    entries: Entries,  # ids in the whole vocabulary
    mask: Tensor | None,
    transform: Transform,
    over: RowsSupport | None,  # this rank's entries of the support
    shard: VocabularyShard,
    backend: str,
    consume: bool,
) -> Tensor:
    """Differentiable log-probabilities (nnz,), the same bits on every rank; columns beyond the shard are padding.

    Two collectives in the forward, none in the backward.
    """
    check_entries(entries, mask, shard.total)
    found: Tensor = _Gathered.apply(logits, entries, mask, transform, over, shard, backend, consume)
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        entries: Entries,
        mask: Tensor | None,
        transform: Transform,
        over: RowsSupport | None,
        shard: VocabularyShard,
        backend: str,
        consume: bool,
    ) -> Tensor:
        columns = logits[..., : shard.size]
        values = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=logits.device)
        support_values = values.new_empty(0)

        def local() -> tuple[Tensor, Statistics]:
            nonlocal support_values
            best = no_best(entries.offsets.shape[0] - 1, logits)
            if not columns.numel():
                return values, empty_shard_statistics(best.ids)
            stats, support_values = _statistics(
                columns, entries, mask, transform, over, backend, shard.start, values, best
            )
            if over is not None:
                stats.maximum.masked_fill_(over.support.valid & (over.support.offsets.diff() == 0), -torch.inf)
            return values, stats

        if entries.token_ids.shape[0]:
            values, best, stats = over_group(local, entries, mask, shard)
            logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, shard.total)
            results = GatheredRows(logprobs, values, stats.maximum, stats.log_sum, support_values)
        else:
            results = fake_rows(logits, entries, None)
        given = {"logits": logits, "entries": entries, "mask": mask, "transform": transform, "over": over}
        keep(
            ctx,
            {
                **given,
                "vocab": shard.size,
                "first": shard.start,
                "backend": backend,
                "consume": consume,
                "results": results,
            },
        )
        return results.logprobs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order(upstream)
        return (None if upstream is None else _backward(ctx, upstream), *[None] * 7)


def _gradient(logits: Tensor, **given: Any) -> Tensor:
    out = like_logits(logits)
    _write(logits, out=out, **given)
    return out


def _gradient_(logits: Tensor, **given: Any) -> None:
    _write(logits, out=logits, **given)
    torch.autograd.graph.increment_version(logits)  # so that autograd raises if another operation saved the logits


_backward = logits_backward(_gradient, _gradient_, _upstream)
