"""Log-probabilities of several entries per row from hidden states and the output head, and their backward.

The passes are those of statistics: in the forward each tile's logits of the entries are gathered before the row kernel
reads it, in the backward the entries' own gradients are written over those of the row kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import Best, Entries, Statistics, Support, Transform
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.backward import Passes, order_of_active, row_gradient_of
from fastrl.linear.head import Head, Held
from fastrl.linear.operators import HeadGradients, fake_gradients, head_backward
from fastrl.linear.statistics import Rows
from fastrl.linear.supports import support_products
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.entries import (
    EntryGradients,
    RowEntries,
    best_of,
    check_entries,
    entry_gradients,
    entry_logprobs,
    no_best,
    support_places,
)
from fastrl.operators.gathered import RowsSupport, over_group
from fastrl.operators.operator import operator
from fastrl.operators.saved import keep, refuse_second_order, resumed, saved
from fastrl.operators.support import together
from fastrl.planning.tiling import ELEMENTWISE_BYTES, PIECE_BYTES, Needs, PassBudget


class Gathered(NamedTuple):
    """Log-probabilities of entries, differentiable, and what their backward reads."""

    logprobs: Tensor  # (nnz,)
    values: Tensor  # (nnz,) the entries' logits
    best_ids: Tensor  # (N,) int64, each row's entry with the largest logit; -1: none
    maximum: Tensor  # (N,), as in `Statistics`; empty with a slope
    log_sum: Tensor  # (N,), the same
    support_values: Tensor  # the logits of the support's entries, or empty
    slope: Tensor  # (N, H), d logp / d hidden of the best entry, for a frozen head; or empty


def _rows(entries: Entries, numbers: Tensor, best: Best, first: int = 0) -> RowEntries:
    count = entries.offsets.shape[0] - 1
    return RowEntries(entries, torch.arange(count, device=numbers.device), numbers, best, first)


def _statistics(
    head: Head,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    over: RowsSupport | None,
    backend: str,
    num_rows: int,
    budget: PassBudget,
    values: Tensor,
    best: Best,
    shard: VocabularyShard | None = None,
) -> tuple[Statistics, Best, Tensor]:
    """The statistics (N,) with the best entries as targets, these entries, and the logits of the support.

    values: (nnz,) zeros, for the entries' logits. With a shard, all is of its part of the vocabulary.
    """
    first = 0 if shard is None else shard.start
    rows, stats = _rows(entries, values, best, first), None
    if over is None or over.dense is not None:
        dense, wide = (mask, None) if over is None else (over.dense, over.dense_support)
        given = (transform, backend, num_rows, budget, wide, shard, rows)
        stats = forward.statistics(head, best.ids, dense, *given)
    if over is None:
        assert stats is not None
        return stats, best, values.new_empty(0)
    own = entries._replace(token_ids=entries.token_ids - first)
    row_kernels: Any = kernels(backend, head.hidden)
    support_values: Tensor = row_kernels.support_products(*head.tensors, over.support)
    places = support_places(own, over.support.token_ids, over.support.offsets)
    there = places >= 0
    if support_values.shape[0]:
        values.copy_(support_values[places.clamp_min(0)].where(there, values))
    of_support = best_of(values, entries, there)
    found = of_support.ids >= 0
    best = Best(of_support.ids.where(found, best.ids), of_support.values.where(found, best.values))
    targets = best.ids - first
    return (
        together(stats, row_kernels.support_statistics(support_values, targets, over.support, transform)),
        best,
        support_values,
    )


@operator()
def linear_gathered(
    head: Head,
    entries: Entries,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    dense: Tensor | None,
    support: Support | None,
    dense_support: DenseSupport | None,
    backend: str,
    num_rows: int,
    plan: str,
    budget: PassBudget,
) -> Gathered:
    """Log-probabilities of the entries, of which those outside a recorded support are marked `NOT_IN_SET`.

    num_rows: the number of rows that take the dense kernels, or -1.
    """
    head = head.unpadded()
    vocab, count = head.entries, entries.offsets.shape[0] - 1
    check_entries(entries, mask, vocab)
    values = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=head.hidden.device)
    best, over, slope = no_best(count, values), RowsSupport.of(dense, support, dense_support), values.new_empty(0)
    if plan == "frozen-head":
        rows = _rows(entries, values, best)
        stats, (slope,) = forward.frozen(head, best.ids, mask, transform, backend, num_rows, budget, 1, False, rows)
        support_values = values.new_empty(0)
    else:
        given = (transform, over, backend, num_rows, budget, values, best)
        stats, best, support_values = _statistics(head, entries, mask, *given)
    logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, vocab)
    return Gathered(logprobs, values, best.ids, stats.maximum, stats.log_sum, support_values, slope)


@linear_gathered.register_fake
def _(head: Head, entries: Entries, support: Support | None, plan: str, **_: Any) -> Gathered:
    count, frozen = entries.offsets.shape[0] - 1, plan == "frozen-head"
    rows, recorded = 0 if frozen else count, 0 if support is None else support.token_ids.shape[0]
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
        budget: PassBudget,
        dense_support: DenseSupport | None = None,
        shard: VocabularyShard | None = None,
    ) -> None:
        active = order_of_active(mask, found.totals, -1, found.largest, found.flags)
        of, gradient, undo = active.of, found.entries, None
        c: Tensor = of(found.totals)  # type: ignore[assignment]
        if head.hidden.dtype == torch.float16 and active.count:
            bounds = torch.maximum(c.abs(), of(found.largest))  # type: ignore[arg-type]
            scale = products.float16_scale(bounds, transform._replace(temperatures=of(transform.temperatures)))
            c, gradient, undo = c * scale, gradient * scale, 1 / scale
        super().__init__(head, active, needs, backend, budget, undo, shard)
        self.transform, first = transform, 0 if shard is None else shard.start
        none = torch.full_like(c, -1, dtype=torch.int64)
        chosen = Statistics(*map(of, stats))  # type: ignore[arg-type]
        rows = active.entries(_rows(entries, gradient, no_best(0, c), first))
        temperatures, support = of(transform.temperatures), active.dense_support(dense_support)
        self.rows = Rows(none, temperatures, chosen, c, None, support, rows)

    def _rows(self, part: slice) -> Rows:
        return self.rows.part(part)

    def _gradient(self, hidden: Tensor, rows: Rows, columns: slice, held: Held) -> Tensor:
        gradient = row_gradient_of(held, hidden, rows, columns, self.transform, self.backend)
        assert rows.entries is not None
        rows.entries.scatter(gradient, columns.start, self.backend)
        return gradient


def _gradients(
    head: Head,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    over: RowsSupport | None,
    backend: str,
    plan: str,
    budget: PassBudget,
    results: Gathered,
    upstream: Tensor,
    needs: Needs,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias), without the sum over a group where there are supports."""
    found = entry_gradients(upstream, results.logprobs, results.values, entries, mask, transform)
    stats = found.statistics(results.maximum, results.log_sum)
    dense, rows = None, mask if over is None else over.dense
    if over is None or over.dense is not None:
        wide = None if over is None else over.dense_support
        alone = shard if over is None or shard is None else replace(shard, reduces=False)
        dense = _Backward(head, entries, rows, transform, stats, found, needs, backend, budget, wide, alone).run(plan)
    if over is None:
        assert dense is not None
        return dense
    first, none = 0 if shard is None else shard.start, torch.full_like(results.best_ids, -1)
    gradient = torch.empty(results.support_values.shape[0] + 1, dtype=torch.float32, device=upstream.device)
    of_support, c = gradient[:-1], found.totals
    kernels(backend, upstream).support_gradient(
        results.support_values, none, over.support, transform, stats, c, None, of_support
    )
    own = entries._replace(token_ids=entries.token_ids - first)
    places = support_places(own, over.support.token_ids, over.support.offsets)
    gradient[places] = found.entries  # -1 is the last, which nothing reads
    return support_products(head, over.support, of_support, needs, backend, dense)


def _frozen(
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
    row_kernels = kernels(backend, upstream)
    out: Tensor = row_kernels.blank(tuple(hidden.shape), hidden.dtype, hidden)
    valid = torch.ones_like(results.best_ids, dtype=torch.bool) if mask is None else mask
    ids = entries.token_ids.clamp(0, weight.shape[0] - 1)  # elsewhere the gradient is 0, or the row is NaN
    row_kernels.support_hidden(found.entries, weight, Support(ids, entries.offsets, valid), out, False)
    factor = found.totals + found.flags
    if hidden.dtype == torch.float16:
        factor /= products.slope_scale(hidden.dtype, transform)
    piece_bytes = ELEMENTWISE_BYTES.get(out.device.type, PIECE_BYTES)
    for part in products.pieces(out.shape[0], 12 * out.shape[1], piece_bytes):
        out[part] = results.slope[part] * factor[part, None] + out[part]
    return out


@operator()
def linear_gathered_gradient(
    head: Head,
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    dense: Tensor | None,
    support: Support | None,
    dense_support: DenseSupport | None,
    backend: str,
    plan: str,
    budget: PassBudget,
    results: Gathered,
    upstream: Tensor,
    needs: Needs,
) -> HeadGradients:
    """The backward of `linear_gathered`."""
    if plan == "frozen-head":
        found: tuple[Tensor | None, ...] = (
            _frozen(head, entries, mask, transform, backend, results, upstream),
            None,
            None,
        )
    else:
        over = RowsSupport.of(dense, support, dense_support)
        found = _gradients(head, entries, mask, transform, over, backend, plan, budget, results, upstream, needs)
    return HeadGradients.of(found, head.hidden)


linear_gathered_gradient.register_fake(fake_gradients)


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    kept = {**inputs, "results": Gathered(*results)}
    del kept["num_rows"]  # the backward counts the rows with a gradient itself
    return kept


def _backward(ctx: Any, upstream: Tensor) -> Head:
    return head_backward(linear_gathered_gradient, ctx, upstream=upstream.detach().contiguous())


linear_gathered.register_autograd(_backward, _save, differentiable=1)


# --- over a group -----------------------------------------------------------------------------------------------------


class ShardedGather(NamedTuple):
    """What the forward and the backward over a group need beside tensors of the caller."""

    entries: Entries  # ids in the whole vocabulary
    mask: Tensor | None
    transform: Transform
    over: RowsSupport | None  # this rank's entries of the support
    backend: str
    num_rows: int
    plan: str
    budget: PassBudget
    shard: VocabularyShard


def sharded_gathered(head: Head, call: ShardedGather) -> Tensor:
    """`linear_gathered` of a vocabulary that lies over a group: two collectives, and in the backward those of its plan.

    head: this rank's rows, of which those beyond the shard are padding. Entries and mask are the same on every rank.
    """
    check_entries(call.entries, call.mask, call.shard.total)
    found: Tensor = _Sharded.apply(call, *head.tensors)
    return found


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ShardedGather, *tensors: Any) -> Tensor:
        entries, mask, transform, over, backend, num_rows, _, budget, shard = call
        padded, count = Head.of(tensors, shard.size), entries.offsets.shape[0] - 1
        head = padded.unpadded()
        values = torch.zeros(entries.token_ids.shape, dtype=torch.float32, device=head.hidden.device)
        support_values = values.new_empty(0)

        def local() -> tuple[Tensor, Statistics]:
            nonlocal support_values
            given = (transform, over, backend, num_rows, budget, values, no_best(count, values), shard)
            stats, _, support_values = _statistics(head, entries, mask, *given)
            if over is not None:  # a row may have all of its support on other ranks
                here = over.support.offsets.diff() > 0
                elsewhere = ~here if over.dense is None else ~(here | over.dense)
                stats = stats._replace(maximum=stats.maximum.masked_fill(elsewhere, -torch.inf))
            return values, stats

        if values.shape[0]:
            values, best, stats = over_group(local, entries, mask, shard)
            logprobs = entry_logprobs(values, entries, mask, best, stats.logprobs, transform, shard.total)
        else:
            logprobs, best = values, no_best(count, values)
            stats = Statistics(*torch.zeros(4, count, device=values.device).unbind())
        results = Gathered(
            logprobs, values, best.ids, stats.maximum, stats.log_sum, support_values, values.new_empty(0)
        )
        given = call._asdict()
        del given["num_rows"]  # the backward counts the rows with a gradient itself
        keep(ctx, {"head": padded, **given, "results": results})
        return logprobs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 4
        refuse_second_order(upstream)
        given, needs = saved(ctx), Needs(*ctx.needs_input_grad[1:4])
        over, shard = given["over"], given["shard"]
        with resumed(ctx):
            gradients = _gradients(**given, upstream=upstream.detach().contiguous(), needs=needs)
        if over is not None and shard.reduces and needs.hidden:
            hidden = gradients[0]
            assert hidden is not None
            total = hidden.float()
            add_parts(total, shard.group)
            gradients = (hidden.copy_(total), *gradients[1:])
        return None, *(g if need else None for g, need in zip(gradients, needs, strict=True))
