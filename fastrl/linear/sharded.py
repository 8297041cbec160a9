"""From hidden states and a shard of the output head: what `operators`, `supports` do on one device, over a group.

Each rank computes the logits of its own vocabulary entries. It learns the statistics of whole rows from the other ranks
(one collective for all rows), and with these forms its own part of the gradients: dL/dweight is its own, and the parts
of dL/dhidden are added up over the group, in float32, and rounded once (in 16 bits with supports, each part before that
too).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import Statistics, Support, Transform
from fastrl.base import checks
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.backward import Backward
from fastrl.linear.head import Head, Held, slices
from fastrl.linear.operators import gradient_of_slopes
from fastrl.linear.statistics import Rows, order, pass_tile
from fastrl.linear.supports import support_products
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.rows import coefficients
from fastrl.operators.saved import keep, refuse_second_order, resumed, saved
from fastrl.operators.sharded import empty_shard_statistics, gathered, start_gathered
from fastrl.operators.support import together
from fastrl.planning.tiling import Needs, PassBudget


def start_statistics(
    logits: Tensor, targets: Tensor, transform: Transform, backend: str, shard: VocabularyShard
) -> Callable[[], Statistics]:
    """Starts to form the statistics of rows from this rank's logits (1, n, v) and those of the others.

    Targets (n,) are those of the whole vocabulary. The call of what it returns waits for the other ranks.
    """
    if not logits.shape[-1]:
        return start_gathered(empty_shard_statistics(targets), targets, shard)
    local = kernels(backend, logits).row_statistics(logits, targets - shard.start, None, transform)
    return start_gathered(local, targets, shard)


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
    shard: VocabularyShard,
    out: Tensor,
) -> None:
    """`row_gradient` of this rank's logits (1, n, v), from the statistics of whole rows."""
    if logits.shape[-1]:
        kernels(backend, logits).row_gradient(logits, targets - shard.start, None, transform, statistics, c, h, out)


class ShardedCall(NamedTuple):
    """What the forward and the backward of statistics over a group need beside tensors of the caller."""

    transform: Transform
    backend: str
    num_tokens: int  # the number of valid tokens, or of the dense rows if there are supports; -1 if it is not known
    waits: bool  # whether the backward may synchronise to learn which rows are idle
    plan: str
    budget: PassBudget
    slopes: int  # how many of d logp / d hidden and d entropy / d hidden a frozen head's forward forms
    shard: VocabularyShard
    dense: Tensor | None = None  # (N,) bool: with supports, the rows that take the dense kernels; None: none does
    support: Support | None = None  # this rank's entries, numbered from its first
    dense_support: DenseSupport | None = None
    outside: Tensor | None = None  # (N,) bool: rows whose target is not in their support


def sharded_statistics(head: Head, targets: Tensor, mask: Tensor | None, call: ShardedCall) -> Statistics:
    """`linear_statistics`, or with supports `support_linear_statistics`, of a vocabulary that lies over a group.

    head: this rank's rows; those beyond the shard are padding. targets (N,) and mask (N,) are the same on every
    rank. Log-probabilities and entropies are differentiable. Collectives: one in the forward, one in the backward
    (two-pass in 16 bits: one per chunk of rows). A frozen head's slopes: one per chunk of rows and one for each slope
    in the forward, none in the backward.
    """
    return Statistics(*_Statistics.apply(call, targets, mask, *head.tensors))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, targets: Tensor, mask: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        head = Head.of(tensors, call.shard.size)
        stats, values, slopes = _forward(head.unpadded(), targets, mask, call)
        if slopes:
            keep(ctx, {"slopes": slopes, "transform": call.transform})
        else:
            keep(ctx, {"head": head, "targets": targets, "mask": mask, "call": call, "stats": stats, "values": values})
        ctx.mark_non_differentiable(stats.maximum, stats.log_sum)
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if d_logprobs is None and d_entropy is None:
            return (None,) * 6
        refuse_second_order(d_logprobs, d_entropy)
        kept, needs = saved(ctx), Needs(*ctx.needs_input_grad[3:])
        gradients: tuple[Tensor | None, ...]
        with resumed(ctx):
            if "slopes" in kept:
                gradients = (gradient_of_slopes(**kept, c=d_logprobs, h=d_entropy), None, None)
            else:
                kept |= coefficients(d_logprobs, d_entropy)
                gradients = _backward(**kept, needs=needs)
        return None, None, None, *(g if need else None for g, need in zip(gradients, needs, strict=True))


def _forward(
    head: Head, targets: Tensor, mask: Tensor | None, call: ShardedCall
) -> tuple[Statistics, Tensor | None, list[Tensor]]:
    """The statistics of whole rows, the logits of this rank's support entries, and the slopes of a frozen head."""
    shard, own = call.shard, targets - call.shard.start
    if call.support is None:
        checks.targets_in_range(targets, mask, shard.total)
        if call.slopes:
            stats, slopes = _frozen(head, targets, mask, call)
            return stats, None, slopes
        arguments = (mask, call.transform, call.backend, call.num_tokens, call.budget)
        return gathered(lambda: forward.statistics(head, own, *arguments, shard=shard), targets, shard, mask), None, []
    support, values = call.support, None

    def local() -> Statistics:
        nonlocal values
        rest = None
        if call.dense is not None:
            arguments = (call.dense, call.transform, call.backend, call.num_tokens, call.budget, call.dense_support)
            rest = forward.statistics(head, own, *arguments, shard)
        row_kernels = kernels(call.backend, head.hidden)
        values = row_kernels.support_products(*head.tensors, support)
        stats = together(rest, row_kernels.support_statistics(values, own, support, call.transform))
        # A row may have all of its entries on other ranks.
        here = support.offsets.diff() > 0
        elsewhere = ~here if call.dense is None else ~(here | call.dense)
        return stats._replace(maximum=stats.maximum.masked_fill(elsewhere, -torch.inf))

    stats = gathered(local, targets, shard, mask)
    if call.outside is not None:
        stats.logprobs.masked_fill_(call.outside if mask is None else call.outside & mask, torch.nan)
    return stats, values, []


def _backward(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    call: ShardedCall,
    stats: Statistics,
    values: Tensor | None,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias)."""
    shard, own = call.shard, targets - call.shard.start
    if call.support is None or values is None:
        known = -1 if call.waits else call.num_tokens
        arguments = (own, mask, call.transform, stats, c, h, needs, call.backend, known, call.budget)
        return Backward(head, *arguments, shard=shard).run(call.plan)
    # Entries are added to the gradients of the dense rows before these are summed over the group.
    dense = None
    if call.dense is not None:
        arguments = (own, call.dense, call.transform, stats, c, h, needs, call.backend, -1, call.budget)
        alone = replace(shard, reduces=False)
        dense = Backward(head, *arguments, call.dense_support, alone).run(call.plan)
    gradient = torch.empty_like(values)
    kernels(call.backend, values).support_gradient(values, own, call.support, call.transform, stats, c, h, gradient)
    gradients = support_products(head, call.support, gradient, needs, call.backend, dense)
    if not (shard.reduces and needs.hidden):
        return gradients
    total = gradients.hidden.float()
    add_parts(total, shard.group)
    return gradients.hidden.copy_(total), gradients.weight, gradients.bias


def _frozen(head: Head, targets: Tensor, mask: Tensor | None, call: ShardedCall) -> tuple[Statistics, list[Tensor]]:
    """Row statistics and d logp / d hidden (N, H), with two slopes also d entropy / d hidden.

    The slopes are in hidden's dtype, times `slope_scale`.
    """
    shard, transform, backend = call.shard, call.transform, call.backend
    used = order(mask, targets.shape[0], call.num_tokens)
    out = Statistics(*torch.zeros(4, targets.shape[0], dtype=torch.float32, device=targets.device).unbind())
    slopes = [torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) for _ in range(call.slopes)]
    if used.count == 0:
        return Statistics(*(x.clone() for x in out)), slopes
    tile = pass_tile("frozen", head, used, call.budget, call.slopes, shard=shard)
    wide, vocab = call.budget.float32_logits, head.weight.shape[0]
    held = Held(head, tile, used.index is not None, backend, float32_logits=wide, forms_gradient=True)
    second = products.empty_tile(tile.rows, vocab, head.weight, backend) if call.slopes == 2 and not wide else None
    narrow = head.hidden.dtype != torch.float32
    shape = (used.count, head.hidden.shape[1])
    parts = [torch.empty(shape, dtype=torch.float32, device=targets.device) for _ in slopes if shard.reduces and narrow]
    rows = Rows(used.of(targets), used.of(transform.temperatures))  # type: ignore[arg-type]
    for places in slices(used.count, tile.rows):
        where, part = used.rows(places), rows.part(places)
        part_transform = transform._replace(temperatures=part.temperatures)
        logits = held.logits(held.hidden(where), slice(0, vocab))
        stats = start_statistics(logits[None], part.targets, part_transform, backend, shard)()
        for total, x in zip(out, stats, strict=True):
            total[where] = x
        scale = products.slope_scale(head.hidden.dtype, part_transform)
        one = scale if isinstance(scale, Tensor) else torch.full_like(stats.logprobs, scale)
        for slope in reversed(range(call.slopes)):  # the first slope last, because it may overwrite the logits
            gradient = held.gradient(logits) if slope == 0 or second is None else second[: logits.shape[0]]
            c, h = (one, None) if slope == 0 else (torch.zeros_like(one), one)
            write_gradient(logits[None], part.targets, part_transform, stats, c, h, backend, shard, gradient[None])
            if parts:
                products.add_inner(parts[slope][places], gradient, head.weight, first=True)
            else:
                products.store_product(slopes[slope], where, gradient, head.weight)
    for slope, total in enumerate(parts or (slopes if shard.reduces else [])):
        add_parts(total, shard.group)
        if parts:
            products.store_rows(slopes[slope], used.rows(slice(0, used.count)), total, None)
    return Statistics(*(x.clone() for x in out)), slopes
