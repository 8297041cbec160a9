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
from fastrl.passes.combined import no_statistics
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
from fastrl.passes.head import Head, HeadGradients, Run, Workspace, float16_scale, pieces, slope_scale
from fastrl.passes.linear import (
    FrozenHead,
    dense_statistics,
    fake_gradients,
    head_backward,
    over_group,
    support_products,
)
from fastrl.passes.logits import RowStatistics, like_logits, logits_backward, statistics_of, write_gradient
from fastrl.passes.operator import Once, Operator, saved
from fastrl.passes.rows import Rows
from fastrl.passes.shards import failure, start_gathered, without_elsewhere
from fastrl.passes.supports import RowOptions, together
from fastrl.planning.tiling import Needs, elementwise_bytes

# --- from logits ------------------------------------------------------------------------------------------------------


class GatheredRows(NamedTuple):
    """Log-probabilities, differentiable, and what their backward reads."""

    logprobs: Tensor  # (nnz,)
    values: Tensor  # (nnz,) the entries' logits
    maximum: Tensor  # (N,), as in `Statistics`
    log_sum: Tensor  # (N,)
    support_values: Tensor  # the logits of the supports' entries, or empty


def _row_statistics(
    logits: Tensor, entries: Entries, options: RowOptions, backend: str, first: int, values: Tensor, best: Best
) -> RowStatistics:
    """The statistics (N,) of logits (A, B, V), whose targets are the best entries."""
    rows = torch.arange(best.ids.shape[0], device=logits.device)
    targets = row_functions(backend, logits).gather_entries(logits, first, rows, entries, values, best)
    return statistics_of(logits, targets, options, backend)


@Operator
def gathered_rows(
    logits: Tensor,  # (A, B, V)
    entries: Entries,
    options: RowOptions,
    vocab: int,
    backend: str,
    consume: bool,
) -> GatheredRows:
    """Log-probabilities of the entries, of which those outside a recorded support are marked `NOT_IN_SET`.

    `vocab` and `consume` are those of `row_statistics`.
    """
    check_entries(entries, options.mask, vocab)
    consumed.refuse(logits)
    if not entries.token_ids.shape[0]:
        return _empty_rows(logits, entries, options)
    values = torch.zeros(entries.token_ids.shape, dtype=wide_dtype(logits), device=logits.device)
    best = no_best(entries.offsets.shape[0] - 1, logits)
    stats = _row_statistics(logits[..., :vocab], entries, options, backend, 0, values, best)
    logprobs = entry_logprobs(values, entries, options.mask, best, stats.logprobs, options.transform, vocab)
    # Where a backend fills one (4, N) tensor, the copies free the two parts that are not kept.
    return GatheredRows(logprobs, values, stats.maximum.clone(), stats.log_sum.clone(), stats.values)


def _empty_rows(logits: Tensor, entries: Entries, options: RowOptions, **_: Any) -> GatheredRows:
    """Uninitialised results."""
    rows, nnz, dtype = entries.offsets.shape[0] - 1, entries.token_ids.shape[0], wide_dtype(logits)
    return GatheredRows(*(logits.new_empty(n, dtype=dtype) for n in (nnz, nnz, rows, rows, options.entries)))


gathered_rows.register_fake(_empty_rows)


def _write_rows_gradient(
    logits: Tensor,
    entries: Entries,
    options: RowOptions,
    vocab: int,
    backend: str,
    results: GatheredRows,
    upstream: Tensor,
    out: Tensor,
    first: int = 0,
) -> None:
    """Writes dL/dlogits, 0 in the padding, to `out` (A, B, V), which may be the logits themselves."""
    if not vocab or not entries.token_ids.shape[0] or not out.numel():
        out.zero_()
        return
    logprobs, values, maximum, log_sum, support_values = results
    gradients = entry_gradients(upstream, logprobs, values, entries, options.mask, options.transform)
    stats = RowStatistics(*gradients.statistics(maximum, log_sum), support_values)
    rows = torch.arange(maximum.shape[0], device=out.device)
    none = torch.full_like(rows, -1)
    write_gradient(logits, none, options, vocab, stats, gradients.totals, None, backend, out)
    row_functions(backend, logits).scatter_entries(gradients.entries, first, rows, entries, out[..., :vocab])


@Operator
def gathered_rows_gradient(
    logits: Tensor,
    entries: Entries,
    options: RowOptions,
    vocab: int,
    backend: str,
    results: GatheredRows,
    upstream: Tensor,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous."""
    out = like_logits(logits)
    _write_rows_gradient(logits, entries, options, vocab, backend, results, upstream, out)
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
    head: Head, entries: Entries, options: RowOptions, run: Run, values: Tensor, best: Best, first: int = 0
) -> tuple[RowStatistics, Best]:
    """The statistics (N,) with the best entries as targets, and these entries.

    values: (nnz,) zeros, for the entries' logits. first: the head's first entry, of a part of the vocabulary.
    """
    supports, of_entries = options.supports, EntryValues(entries, values, best, first)
    if supports is None:
        stats = dense_statistics(head, best.ids, options, run, of_entries)
        return RowStatistics(*stats, values.new_empty(0)), best
    dense = None if supports.dense is None else dense_statistics(head, best.ids, options, run, of_entries)
    functions: Any = row_functions(run.backend, head.hidden)
    support_values: Tensor = functions.support_products(*head[:3], supports.support)
    places = support_places(entries, first, supports.support)
    there = places >= 0
    if support_values.shape[0]:
        values.copy_(support_values[places.clamp_min(0)].where(there, values))
    of_support = best_of(values, entries, there)
    has_best = of_support.ids >= 0
    best = Best(of_support.ids.where(has_best, best.ids), of_support.values.where(has_best, best.values))
    gathered = functions.support_statistics(support_values, best.ids - first, supports.support, options.transform)
    return RowStatistics(*together(dense, gathered), support_values), best


@Operator
def linear_gathered(head: Head, entries: Entries, options: RowOptions, run: Run) -> Gathered:
    """Log-probabilities of the entries, of which those outside a recorded support are marked `NOT_IN_SET`."""
    head = head.unpadded()
    vocab, mask, transform = head.entries, options.mask, options.transform
    check_entries(entries, mask, vocab)
    values = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=head.hidden.device)
    best, slope = no_best(entries.offsets.shape[0] - 1, values), values.new_empty(0)
    if run.plan.name == "frozen-head":
        of_entries = EntryValues(entries, values, best)
        dense, (slope,) = FrozenHead(head, best.ids, options, run, False, of_entries).run()
        stats = RowStatistics(*dense, values.new_empty(0))
    else:
        stats, best = _statistics(head, entries, options, run, values, best)
    logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, vocab)
    return Gathered(logprobs, values, best.ids, *stats[2:], slope)


@linear_gathered.register_fake
def _(head: Head, entries: Entries, options: RowOptions, run: Run) -> Gathered:
    count, frozen = entries.offsets.shape[0] - 1, run.plan.name == "frozen-head"
    rows, recorded = 0 if frozen else count, options.entries
    logprobs, values, maximum, log_sum, support_values = (
        head.hidden.new_empty(n, dtype=torch.float32) for n in (*entries.token_ids.shape * 2, rows, rows, recorded)
    )
    best = entries.offsets.new_empty(count)
    slope = head.hidden.new_empty(head.hidden.shape if frozen else (0,))
    return Gathered(logprobs, values, best, maximum, log_sum, support_values, slope)


class _Backward(Passes):
    """The gradients of the rows that take the dense kernels, from those of their entries."""

    def __init__(
        self,
        head: Head,
        entries: Entries,
        options: RowOptions,
        stats: Statistics,
        gradients: EntryGradients,
        needs: Needs,
        run: Run,
        shard: VocabularyShard | None,
    ) -> None:
        mask, wide = options.dense
        active = order_of_active(mask, gradients.totals, -1, gradients.largest, gradients.flags)
        gradient, undo, c, transform = gradients.entries, None, gradients.totals, options.transform
        if head.hidden.dtype == torch.float16 and active.count:
            bounds = torch.maximum(active.of(c).abs(), active.of(gradients.largest))
            scale = float16_scale(bounds, transform if active.index is None else transform.of(active.index))
            c, gradient, undo = c * scale, gradient * scale, 1 / scale
        none = torch.full_like(c, -1, dtype=torch.int64)
        of_entries = EntryValues(entries, gradient, no_best(0, c), 0 if shard is None else shard.start)
        rows = Rows(none, transform, stats, c, None, wide, of_entries).ordered(active)
        super().__init__(head, active, rows, needs, run, undo, shard)

    def _gradient(self, hidden: Tensor, rows: Rows, columns: slice, workspace: Workspace) -> Tensor:
        gradient = row_gradient_of(workspace, hidden, rows, columns, self.backend)
        assert rows.entries is not None and rows.row_ids is not None
        rows.entries.scatter(gradient, columns.start, rows.row_ids, self.backend)
        return gradient


def _gradients(
    head: Head,
    entries: Entries,
    options: RowOptions,
    run: Run,
    results: Gathered,
    upstream: Tensor,
    needs: Needs,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias)."""
    _, transform, supports = options
    gradients = entry_gradients(upstream, results.logprobs, results.values, entries, options.mask, transform)
    stats = gradients.statistics(results.maximum, results.log_sum)
    if supports is None:
        return _Backward(head, entries, options, stats, gradients, needs, run, shard).run()
    dense = None
    if supports.dense is not None:
        alone = None if shard is None else replace(shard, reduces=False)  # entries are added before the sum
        dense = _Backward(head, entries, options, stats, gradients, needs, run, alone).run()
    gradient = torch.empty(results.support_values.shape[0] + 1, dtype=torch.float32, device=upstream.device)
    of_support, none, support = gradient[:-1], torch.full_like(results.best_ids, -1), supports.support
    arguments = (none, support, transform, stats, gradients.totals, None, of_support)
    row_functions(run.backend, upstream).support_gradient(results.support_values, *arguments)
    places = support_places(entries, 0 if shard is None else shard.start, support)
    gradient[places] = gradients.entries  # -1 is the last, which nothing reads
    results_of = support_products(head, support, of_support, needs, run.backend, dense)
    return over_group(results_of, shard, run.plan.call.block > 0)


def _frozen_gradient(
    head: Head, entries: Entries, options: RowOptions, backend: str, results: Gathered, upstream: Tensor
) -> Tensor:
    """dL/dhidden: that of the best entry's log-probability, times U, and products with the entries for the rest."""
    mask, transform, _ = options
    arguments = (upstream, results.logprobs, results.values, entries, mask, transform)
    gradients = entry_gradients(*arguments, slopes_best=results.best_ids)
    hidden, weight, *_ = head.unpadded()
    functions = row_functions(backend, upstream)
    out: Tensor = functions.blank(tuple(hidden.shape), hidden.dtype, hidden)
    valid = torch.ones_like(results.best_ids, dtype=torch.bool) if mask is None else mask
    ids = entries.token_ids.clamp(0, weight.shape[0] - 1)  # elsewhere the gradient is 0, or the row is NaN
    functions.support_hidden(gradients.entries, weight, Support(ids, entries.offsets, valid), out, False)
    factor = gradients.totals + gradients.flags
    if hidden.dtype == torch.float16:
        factor /= slope_scale(hidden.dtype, transform)
    for part in pieces(out.shape[0], 12 * out.shape[1], elementwise_bytes(out.device.type)):
        out[part] = results.slope[part] * factor[part, None] + out[part]
    return out


@Operator
def linear_gathered_gradient(
    head: Head, entries: Entries, options: RowOptions, run: Run, results: Gathered, upstream: Tensor, needs: Needs
) -> HeadGradients:
    """The backward of `linear_gathered`."""
    gradients: tuple[Tensor | None, ...]
    if run.plan.name == "frozen-head":
        gradients = (_frozen_gradient(head, entries, options, run.backend, results, upstream), None, None)
    else:
        gradients = _gradients(head, entries, options, run, results, upstream, needs)
    return HeadGradients.of(gradients, head.hidden)


linear_gathered_gradient.register_fake(fake_gradients)


def _save_linear(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {**inputs, "results": Gathered(*results)}


def _backward(ctx: Any, upstream: Tensor) -> Head:
    return head_backward(linear_gathered_gradient, ctx, upstream=upstream.detach().contiguous())


linear_gathered.register_autograd(_backward, _save_linear, differentiable=1)


# --- over a group -----------------------------------------------------------------------------------------------------


def _over_group(
    compute: Callable[[Tensor], RowStatistics],
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    shard: VocabularyShard,
) -> Gathered:
    """The log-probabilities of all entries, and the statistics of whole rows whose target is their best one.

    Two collectives: the sum of the logits, of which each is on one rank and 0 on the others, so that the sum is exact;
    and the statistics, as `shards.gathered`. An error in `compute` reaches all ranks.

    Args:
        compute: writes the logits (nnz,) of the entries that this rank holds into zeros, and returns the statistics
            (N,) of its part of the vocabulary, with its own best entries as targets.
        entries: of the whole vocabulary.
        mask: (N,) bool; the statistics of other rows are 0.
        transform: of the rows' logits.
        shard: of this rank.
    """
    targets = torch.zeros(entries.offsets.shape[0] - 1, dtype=torch.int64, device=entries.offsets.device)
    values = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=targets.device)
    none = values.new_empty(0)
    if not values.shape[0]:
        zeros = torch.zeros(targets.shape, device=targets.device)
        return Gathered(values, values, targets, zeros, zeros, none, none)
    try:
        local = compute(values)
    except Exception:
        add_parts(values.fill_(torch.nan), shard.group)
        start_gather(torch.stack(failure(targets)), shard.group)()
        raise
    add_parts(values, shard.group)
    best = best_of(values, entries, (entries.token_ids >= 0) & (entries.token_ids < shard.total))
    stats = start_gathered(Statistics(*local[:4]), best.ids, shard, mask)()
    logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, shard.total)
    return Gathered(logprobs, values, best.ids, stats.maximum, stats.log_sum, local.values, none)


def sharded_gathered_rows(
    logits: Tensor,  # (A, B, V_r)
    entries: Entries,  # ids in the whole vocabulary
    options: RowOptions,  # with the supports' entries of this rank
    backend: str,
    consume: bool,
    shard: VocabularyShard,
) -> Tensor:
    """Differentiable log-probabilities (nnz,), the same bits on every rank; columns beyond the shard are padding.

    Two collectives in the forward, none in the backward.
    """
    check_entries(entries, options.mask, shard.total)
    columns, best = logits[..., : shard.size], no_best(entries.offsets.shape[0] - 1, logits)

    def local(values: Tensor) -> RowStatistics:
        if not columns.numel():
            return RowStatistics(*no_statistics(best.ids), values.new_empty(0))
        stats = _row_statistics(columns, entries, options, backend, shard.start, values, best)
        return without_elsewhere(stats, options)

    def forward(logits: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        logprobs, values, _, *stats, _ = _over_group(local, entries, options.mask, options.transform, shard)
        to_save = {"logits": logits, "entries": entries, "options": options, "vocab": shard.size}
        to_save |= {"first": shard.start, "backend": backend, "consume": consume}
        return (logprobs,), {**to_save, "results": GatheredRows(logprobs, values, *stats)}

    (logprobs,) = Once.apply(forward, _sharded_rows_backward, 1, logits)
    return cast(Tensor, logprobs)


def _sharded_rows_gradient(logits: Tensor, **inputs: Any) -> Tensor:
    out = like_logits(logits)
    _write_rows_gradient(logits, out=out, **inputs)
    return out


_sharded_rows_backward = logits_backward(_sharded_rows_gradient, _write_rows_gradient, _upstream)


def sharded_gathered(
    head: Head,
    entries: Entries,  # ids in the whole vocabulary
    options: RowOptions,  # with the supports' entries of this rank
    run: Run,
    shard: VocabularyShard,
) -> Tensor:
    """`linear_gathered` of a vocabulary that lies over a group: two collectives, and in the backward those of its plan.

    head: this rank's rows, of which those beyond the shard are padding. Entries and mask are the same on every rank.
    """
    check_entries(entries, options.mask, shard.total)

    def forward(*tensors: Any) -> tuple[tuple[Tensor], dict[str, Any]]:
        padded = Head.of(tensors, shard.size)

        def local(values: Tensor) -> RowStatistics:
            best = no_best(entries.offsets.shape[0] - 1, values)
            stats, _ = _statistics(padded.unpadded(), entries, options, run, values, best, shard.start)
            return without_elsewhere(stats, options)

        results = _over_group(local, entries, options.mask, options.transform, shard)
        to_save = {"head": padded, "entries": entries, "options": options, "run": run, "shard": shard}
        return (results.logprobs,), {**to_save, "results": results}

    (logprobs,) = Once.apply(forward, _sharded_backward, 1, *head[:3])
    return cast(Tensor, logprobs)


def _sharded_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    arguments, needs = saved(ctx), Needs(*ctx.needs)
    if not upstream.shape[0]:  # of no entries nothing was computed, on no rank
        return tuple(torch.zeros_like(x) if need else None for x, need in zip(arguments["head"], needs, strict=False))
    return _gradients(**arguments, upstream=upstream.detach().contiguous(), needs=needs)
