"""Log-probabilities of several entries per row, and their gradients, from logits or hidden states.

The passes are those of statistics: in the forward the logits of the entries are gathered before the row function reads
them, in the backward the entries' own gradients are written over those of the row function; `entries` has the formulas.
With a vocabulary over the ranks of a group, autograd functions instead of operators, which could not take the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Best, Entries, Statistics, Support, Transform
from fastrl.distributed.groups import start_gather
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts
from fastrl.passes import consumed
from fastrl.passes.backward import Passes, order_of_active, row_gradient_of
from fastrl.passes.entries import (
    EntryGradients,
    EntryValues,
    best_of,
    check_entries,
    entry_gradients,
    entry_logprobs,
    no_best,
    support_places,
    wide_dtype,
)
from fastrl.passes.head import Head, Workspace, float16_scale, pieces, slope_scale
from fastrl.passes.linear import (
    HeadGradients,
    dense_statistics,
    fake_gradients,
    frozen_head,
    head_backward,
    no_statistics,
    over_group,
    support_products,
)
from fastrl.passes.logits import RowStatistics, like_logits, logits_backward, statistics_of, write_gradient
from fastrl.passes.operator import Once, Operator, saved
from fastrl.passes.rows import Rows, rows_of
from fastrl.passes.shards import failure, start_gathered
from fastrl.passes.supports import Supports, elsewhere, together
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import ELEMENTWISE_BYTES, PIECE_BYTES, Needs

# --- from logits ------------------------------------------------------------------------------------------------------


class GatheredRows(NamedTuple):
    """Log-probabilities, differentiable, and what their backward reads."""

    logprobs: Tensor  # (nnz,)
    values: Tensor  # (nnz,) the entries' logits
    maximum: Tensor  # (N,), as in `Statistics`
    log_sum: Tensor  # (N,)
    support_values: Tensor  # the logits of the supports' entries, or empty


def _row_statistics(
    logits: Tensor,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    backend: str,
    first: int,
    values: Tensor,
    best: Best,
) -> tuple[Statistics, Tensor]:
    """The statistics (N,) of logits (A, B, V), whose targets are the best entries, and the logits of the supports."""
    rows = torch.arange(best.ids.shape[0], device=logits.device)
    targets = row_functions(backend, logits).gather_entries(logits, first, rows, entries, values, best)
    return statistics_of(logits, targets, mask, transform, supports, backend)


@Operator
def gathered_rows(
    logits: Tensor,  # (A, B, V)
    entries: Entries,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    supports: Supports | None,
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
        return _empty_rows(logits, entries, supports)
    values = torch.zeros(entries.token_ids.shape, dtype=wide_dtype(logits), device=logits.device)
    best, columns = no_best(entries.offsets.shape[0] - 1, logits), logits[..., :vocab]
    arguments = (entries, mask, transform, supports, backend, 0, values, best)
    stats, support_values = _row_statistics(columns, *arguments)
    logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, vocab)
    # The results of an operator may not share memory, but a backend may fill one (4, N) tensor.
    return GatheredRows(logprobs, values, stats.maximum.clone(), stats.log_sum.clone(), support_values)


def _empty_rows(logits: Tensor, entries: Entries, supports: Supports | None, **_: Any) -> GatheredRows:
    """Uninitialised results."""
    rows, recorded = entries.offsets.shape[0] - 1, 0 if supports is None else supports.support.token_ids.shape[0]
    nnz = entries.token_ids.shape[0]
    return GatheredRows(*(logits.new_empty(n, dtype=wide_dtype(logits)) for n in (nnz, nnz, rows, rows, recorded)))


gathered_rows.register_fake(_empty_rows)


def _write_rows_gradient(
    logits: Tensor,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    vocab: int,
    backend: str,
    results: GatheredRows,
    upstream: Tensor,
    out: Tensor,
    first: int = 0,
) -> None:
    """Writes dL/dlogits, 0 in the padding, to `out` (A, B, V), which may be the logits themselves."""
    used = vocab if entries.token_ids.shape[0] else 0
    if not used or not out.numel():
        out.zero_()
        return
    logprobs, values, maximum, log_sum, support_values = results
    found = entry_gradients(upstream, logprobs, values, entries, mask, transform)
    stats, rows = found.statistics(maximum, log_sum), torch.arange(maximum.shape[0], device=out.device)
    arguments = (RowStatistics(*stats, support_values), found.totals, None, backend, out)
    write_gradient(logits, torch.full_like(rows, -1), mask, transform, supports, used, *arguments)
    row_functions(backend, logits).scatter_entries(found.entries, first, rows, entries, out[..., :used])


@Operator
def gathered_rows_gradient(
    logits: Tensor,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    vocab: int,
    backend: str,
    results: GatheredRows,
    upstream: Tensor,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous."""
    out = like_logits(logits)
    _write_rows_gradient(logits, entries, mask, transform, supports, vocab, backend, results, upstream, out)
    return out


gathered_rows_gradient.register_fake(like_logits)


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {**inputs, "results": GatheredRows(*results)}


def _upstream(gradient: Tensor) -> dict[str, Tensor | None]:
    return {"upstream": gradient.detach().contiguous()}


gathered_rows.register_autograd(
    logits_backward(gathered_rows_gradient, _write_rows_gradient, _upstream), _save, differentiable=1
)


# --- from hidden states -----------------------------------------------------------------------------------------------


class Gathered(NamedTuple):
    """Log-probabilities of entries, differentiable, and what their backward reads."""

    logprobs: Tensor  # (nnz,)
    values: Tensor  # (nnz,) the entries' logits
    best_ids: Tensor  # (N,) int64, each row's entry with the largest logit; -1: none
    maximum: Tensor  # (N,), as in `Statistics`; empty with a slope
    log_sum: Tensor  # (N,), the same
    support_values: Tensor  # the logits of the supports' entries, or empty
    slope: Tensor  # (N, H), d logp / d hidden of the best entry, for a frozen head; or empty


def _statistics(
    head: Head,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    backend: str,
    num_rows: int,
    plan: Plan,
    values: Tensor,
    best: Best,
    first: int = 0,
) -> tuple[Statistics, Best, Tensor]:
    """The statistics (N,) with the best entries as targets, these entries, and the logits of the supports.

    values: (nnz,) zeros, for the entries' logits. first: the head's first entry, of a part of the vocabulary.
    """
    stats, of_entries = None, EntryValues(entries, values, best, first)
    if supports is None or supports.dense is not None:
        dense, wide = (mask, None) if supports is None else (supports.dense, supports.wide)
        arguments = (transform, backend, num_rows, plan, wide, of_entries)
        stats = dense_statistics(head, best.ids, dense, *arguments)
    if supports is None:
        assert stats is not None
        return stats, best, values.new_empty(0)
    support = supports.support
    functions: Any = row_functions(backend, head.hidden)
    support_values: Tensor = functions.support_products(*head[:3], support)
    places = support_places(entries, first, support)
    there = places >= 0
    if support_values.shape[0]:
        values.copy_(support_values[places.clamp_min(0)].where(there, values))
    of_support = best_of(values, entries, there)
    found = of_support.ids >= 0
    best = Best(of_support.ids.where(found, best.ids), of_support.values.where(found, best.values))
    of_gathered = functions.support_statistics(support_values, best.ids - first, support, transform)
    return together(stats, of_gathered), best, support_values


@Operator
def linear_gathered(
    head: Head,
    entries: Entries,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    supports: Supports | None,
    backend: str,
    num_rows: int,
    plan: Plan,
) -> Gathered:
    """Log-probabilities of the entries, of which those outside a recorded support are marked `NOT_IN_SET`.

    num_rows: the number of rows that take the dense kernels, or -1.
    """
    head = head.unpadded()
    vocab, count = head.entries, entries.offsets.shape[0] - 1
    check_entries(entries, mask, vocab)
    values = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=head.hidden.device)
    best, slope = no_best(count, values), values.new_empty(0)
    if plan.name == "frozen-head":
        run: Any = (backend, num_rows, plan, False, EntryValues(entries, values, best))
        stats, (slope,) = frozen_head(head, best.ids, mask, transform, *run)
        support_values = values.new_empty(0)
    else:
        run = (supports, backend, num_rows, plan, values, best)
        stats, best, support_values = _statistics(head, entries, mask, transform, *run)
    logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, vocab)
    return Gathered(logprobs, values, best.ids, stats.maximum, stats.log_sum, support_values, slope)


@linear_gathered.register_fake
def _(head: Head, entries: Entries, supports: Supports | None, plan: Plan, **_: Any) -> Gathered:
    count, frozen = entries.offsets.shape[0] - 1, plan.name == "frozen-head"
    rows, recorded = 0 if frozen else count, 0 if supports is None else supports.support.token_ids.shape[0]
    logprobs, values, maximum, log_sum, support_values = (
        head.hidden.new_empty(n, dtype=torch.float32) for n in (*entries.token_ids.shape * 2, rows, rows, recorded)
    )
    best = entries.offsets.new_empty(count)
    slope = head.hidden.new_empty(head.hidden.shape if frozen else (0,))
    return Gathered(logprobs, values, best, maximum, log_sum, support_values, slope)


class _Backward(Passes):
    """The gradients of the rows of a mask, from those of their entries."""

    def __init__(
        self,
        head: Head,
        entries: Entries,
        mask: Tensor | None,
        transform: Transform,
        stats: Statistics,
        found: EntryGradients,
        needs: Needs,
        backend: str,
        plan: Plan,
        wide: Entries | None,
        first: int,
        shard: VocabularyShard | None,
    ) -> None:
        active = order_of_active(mask, found.totals, -1, found.largest, found.flags)
        gradient, undo, c = found.entries, None, found.totals
        if head.hidden.dtype == torch.float16 and active.count:
            bounds = torch.maximum(active.of(c).abs(), active.of(found.largest))
            of_rows = transform if active.index is None else transform.of(active.index)
            scale = float16_scale(bounds, of_rows)
            c, gradient, undo = c * scale, gradient * scale, 1 / scale
        super().__init__(head, active, needs, backend, plan, undo, shard)
        none = torch.full_like(c, -1, dtype=torch.int64)
        of_entries = EntryValues(entries, gradient, no_best(0, c), first)
        self.rows = rows_of(active, none, transform, stats, c, None, wide, of_entries)

    def _rows(self, part: slice) -> Rows:
        return self.rows.part(part)

    def _gradient(self, hidden: Tensor, rows: Rows, columns: slice, workspace: Workspace) -> Tensor:
        gradient = row_gradient_of(workspace, hidden, rows, columns, self.backend)
        assert rows.entries is not None and rows.row_ids is not None
        rows.entries.scatter(gradient, columns.start, rows.row_ids, self.backend)
        return gradient


def _gradients(
    head: Head,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    backend: str,
    plan: Plan,
    results: Gathered,
    upstream: Tensor,
    needs: Needs,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias)."""
    found = entry_gradients(upstream, results.logprobs, results.values, entries, mask, transform)
    stats, first = found.statistics(results.maximum, results.log_sum), 0 if shard is None else shard.start
    given = (transform, stats, found, needs, backend, plan)
    if supports is None:
        return _Backward(head, entries, mask, *given, None, first, shard).run()
    support, dense, wide, _ = supports
    of_dense = None
    if dense is not None:
        alone = None if shard is None else replace(shard, reduces=False)  # entries are added before the sum
        of_dense = _Backward(head, entries, dense, *given, wide, first, alone).run()
    gradient = torch.empty(results.support_values.shape[0] + 1, dtype=torch.float32, device=upstream.device)
    of_support, none = gradient[:-1], torch.full_like(results.best_ids, -1)
    arguments = (none, support, transform, stats, found.totals, None, of_support)
    row_functions(backend, upstream).support_gradient(results.support_values, *arguments)
    gradient[support_places(entries, first, support)] = found.entries  # -1 is the last, which nothing reads
    return over_group(support_products(head, support, of_support, needs, backend, of_dense), shard)


def _frozen_gradient(
    head: Head,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    results: Gathered,
    upstream: Tensor,
) -> Tensor:
    """dL/dhidden: that of the best entry's log-probability, times U, and products with the entries for the rest."""
    given = (upstream, results.logprobs, results.values, entries, mask, transform)
    found = entry_gradients(*given, slopes_best=results.best_ids)
    hidden, weight, *_ = head.unpadded()
    functions = row_functions(backend, upstream)
    out: Tensor = functions.blank(tuple(hidden.shape), hidden.dtype, hidden)
    valid = torch.ones_like(results.best_ids, dtype=torch.bool) if mask is None else mask
    ids = entries.token_ids.clamp(0, weight.shape[0] - 1)  # elsewhere the gradient is 0, or the row is NaN
    functions.support_hidden(found.entries, weight, Support(ids, entries.offsets, valid), out, False)
    factor = found.totals + found.flags
    if hidden.dtype == torch.float16:
        factor /= slope_scale(hidden.dtype, transform)
    piece_bytes = ELEMENTWISE_BYTES.get(out.device.type, PIECE_BYTES)
    for part in pieces(out.shape[0], 12 * out.shape[1], piece_bytes):
        out[part] = results.slope[part] * factor[part, None] + out[part]
    return out


@Operator
def linear_gathered_gradient(
    head: Head,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    backend: str,
    plan: Plan,
    results: Gathered,
    upstream: Tensor,
    needs: Needs,
) -> HeadGradients:
    """The backward of `linear_gathered`."""
    if plan.name == "frozen-head":
        hidden = _frozen_gradient(head, entries, mask, transform, backend, results, upstream)
        return HeadGradients.of((hidden, None, None), head.hidden)
    arguments = (backend, plan, results, upstream, needs)
    return HeadGradients.of(_gradients(head, entries, mask, transform, supports, *arguments), head.hidden)


linear_gathered_gradient.register_fake(fake_gradients)


def _save_linear(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    kept = {**inputs, "results": Gathered(*results)}
    del kept["num_rows"]  # the backward counts the rows with a gradient itself
    return kept


def _backward(ctx: Any, upstream: Tensor) -> Head:
    return head_backward(linear_gathered_gradient, ctx, upstream=upstream.detach().contiguous())


linear_gathered.register_autograd(_backward, _save_linear, differentiable=1)


# --- over a group -----------------------------------------------------------------------------------------------------


def _over_group(
    compute: Callable[[], tuple[Tensor, Statistics]], entries: Entries, mask: Tensor | None, shard: VocabularyShard
) -> tuple[Tensor, Best, Statistics]:
    """The logits of all entries, each row's best one, and the statistics of whole rows whose target it is.

    Two collectives: the sum of the logits, of which each is on one rank and 0 on the others, so that the sum is exact;
    and the statistics, as `shards.gathered`. An error in `compute` reaches all ranks.

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
        nan = torch.full(entries.token_ids.shape, torch.nan, dtype=torch.float32, device=targets.device)
        add_parts(nan, shard.group)
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
    supports: Supports | None,  # this rank's entries
    backend: str,
    consume: bool,
    shard: VocabularyShard,
) -> Tensor:
    """Differentiable log-probabilities (nnz,), the same bits on every rank; columns beyond the shard are padding.

    Two collectives in the forward, none in the backward.
    """
    check_entries(entries, mask, shard.total)
    columns, count = logits[..., : shard.size], entries.offsets.shape[0] - 1
    zeros = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=logits.device)
    support_values = zeros.new_empty(0)

    def local() -> tuple[Tensor, Statistics]:
        nonlocal support_values
        best = no_best(count, logits)
        if not columns.numel():
            return zeros, no_statistics(best.ids)
        arguments = (entries, mask, transform, supports, backend, shard.start, zeros, best)
        stats, support_values = _row_statistics(columns, *arguments)
        if supports is not None:
            none = supports.support.valid & (supports.support.offsets.diff() == 0)
            stats.maximum.masked_fill_(none, -torch.inf)
        return zeros, stats

    def run(logits: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        results = _empty_rows(logits, entries, None)
        if entries.token_ids.shape[0]:
            values, best, stats = _over_group(local, entries, mask, shard)
            logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, shard.total)
            results = GatheredRows(logprobs, values, stats.maximum, stats.log_sum, support_values)
        kept = {"logits": logits, "entries": entries, "mask": mask, "transform": transform, "supports": supports}
        kept |= {"vocab": shard.size, "first": shard.start, "backend": backend, "consume": consume}
        return (results.logprobs,), {**kept, "results": results}

    (logprobs,) = Once.apply(run, _sharded_rows_backward, 1, logits)
    return cast(Tensor, logprobs)


def _sharded_rows_gradient(logits: Tensor, **given: Any) -> Tensor:
    out = like_logits(logits)
    _write_rows_gradient(logits, out=out, **given)
    return out


_sharded_rows_backward = logits_backward(_sharded_rows_gradient, _write_rows_gradient, _upstream)


def sharded_gathered(
    head: Head,
    entries: Entries,  # ids in the whole vocabulary
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,  # this rank's entries
    backend: str,
    num_rows: int,
    plan: Plan,
    shard: VocabularyShard,
) -> Tensor:
    """`linear_gathered` of a vocabulary that lies over a group: two collectives, and in the backward those of its plan.

    head: this rank's rows, of which those beyond the shard are padding. Entries and mask are the same on every rank.
    """
    check_entries(entries, mask, shard.total)
    count = entries.offsets.shape[0] - 1
    zeros = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=head.hidden.device)
    support_values = zeros.new_empty(0)

    def run(*tensors: Any) -> tuple[tuple[Tensor], dict[str, Any]]:
        padded = Head.of(tensors, shard.size)

        def local() -> tuple[Tensor, Statistics]:
            nonlocal support_values
            arguments = (transform, supports, backend, num_rows, plan, zeros, no_best(count, zeros), shard.start)
            stats, _, support_values = _statistics(padded.unpadded(), entries, mask, *arguments)
            if supports is not None:
                stats = stats._replace(maximum=stats.maximum.masked_fill(elsewhere(supports), -torch.inf))
            return zeros, stats

        if zeros.shape[0]:
            values, best, stats = _over_group(local, entries, mask, shard)
            logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, shard.total)
        else:
            logprobs, values, best = zeros, zeros, no_best(count, zeros)
            stats = Statistics(*torch.zeros(4, count, device=zeros.device).unbind())
        none = zeros.new_empty(0)
        results = Gathered(logprobs, values, best.ids, stats.maximum, stats.log_sum, support_values, none)
        kept = {"head": padded, "entries": entries, "mask": mask, "transform": transform, "supports": supports}
        return (logprobs,), {**kept, "backend": backend, "plan": plan, "shard": shard, "results": results}

    (logprobs,) = Once.apply(run, _sharded_backward, 1, *head[:3])
    return cast(Tensor, logprobs)


def _sharded_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(**saved(ctx), upstream=upstream.detach().contiguous(), needs=Needs(*ctx.needs))
