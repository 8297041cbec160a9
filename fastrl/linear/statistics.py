"""The forward from hidden states and the output head, a tile of logits at a time: no (N, V) tensor exists.

Masked rows never enter a matrix product. How many bytes a pass may take is an argument: `fastrl.planning.plans` chooses
the plan, `fastrl.planning.tiling` the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.distributed.shards import VocabularyShard
from fastrl.linear import head as products
from fastrl.linear.head import Head, Held, slices
from fastrl.objectives.rows import RowInputs, RowObjective
from fastrl.operators.combined import Combined
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.entries import RowEntries
from fastrl.operators.sharded import empty_shard_statistics
from fastrl.planning.tiling import ALL, NO_TEACHER, Needs, Pass, PassBudget, Teacher, Tile


@dataclass(frozen=True)
class Order:
    """The rows that are computed, in the order in which they are computed."""

    index: Tensor | None  # (count,) int64; None: all rows in their own order
    count: int

    def of(self, x: Tensor | None) -> Tensor | None:
        """The entries of x (N, ...) for these rows, contiguous."""
        return x if x is None or self.index is None else x[self.index]

    def dense_support(self, dense_support: DenseSupport | None) -> DenseSupport | None:
        """The support of these rows, from that of all rows."""
        if dense_support is None or self.index is None:
            return dense_support
        return dense_support._replace(rows=self.index)

    def entries(self, entries: RowEntries | None) -> RowEntries | None:
        """The entries of these rows, from those of all rows."""
        return entries if entries is None or self.index is None else entries._replace(rows=self.index)

    def rows(self, part: slice) -> Tensor | slice:
        """The indices of the rows at these positions of the order."""
        return part if self.index is None else self.index[part]


def order(valid: Tensor | None, total: int, known: int = -1) -> Order:
    """The order of the valid rows; one synchronisation on a GPU unless their number is known (>= 0)."""
    if valid is None:
        return Order(None, total)
    index = _places(valid, known)
    return Order(None if index.shape[0] == total else index, index.shape[0])


def _places(chosen: Tensor, known: int) -> Tensor:
    """The indices at which a mask (N,) is true; without a synchronisation if their number is known (>= 0)."""
    if known < 0 or not chosen.is_cuda:
        return chosen.nonzero()[:, 0]
    # Padded with -1 if there are fewer: the loss is NaN already then, but an index must not be out of range.
    return torch.nonzero_static(chosen, size=known)[:, 0].clamp_min(0)


def counted(valid: Tensor | None, active: Tensor) -> tuple[int, int]:
    """The number of valid rows, and of those that are also `active` (N,) bool; one synchronisation on a GPU."""
    if valid is None:
        return active.shape[0], int(active.sum())
    count, active_count = torch.stack([valid.sum(), (active & valid).sum()]).tolist()
    return count, active_count


def active_first(
    valid: Tensor | None, active: Tensor, total: int, known: int, known_active: int = -1
) -> tuple[Order, int]:
    """The order of the valid rows, with the `active` rows (N,) bool first, and the number of those.

    Where that of the active ones is not known (>= 0), a GPU counts all rows as active if it knows the number of valid
    ones, and is synchronised otherwise.
    """
    if known_active < 0 and active.is_cuda and (known >= 0 or valid is None):
        used = order(valid, total, known)
        return used, used.count
    count, active_count = (known, known_active) if known_active >= 0 else counted(valid, active)
    if active_count == count:
        return order(valid, total, count), count
    active = active if valid is None else active & valid
    valid_idle = ~active if valid is None else valid & ~active
    return (
        Order(torch.cat([_places(active, active_count), _places(valid_idle, count - active_count)]), count),
        active_count,
    )


class Rows(NamedTuple):
    """The inputs of row functions other than the logits, for the rows of an order: each (count,) or None."""

    targets: Tensor
    temperatures: Tensor | None
    statistics: Statistics | None = None
    c: Tensor | None = None
    h: Tensor | None = None
    dense_support: DenseSupport | None = None  # logits outside it become -inf
    entries: RowEntries | None = None  # whose best is the target, or whose gradients are known

    def part(self, rows: slice) -> Rows:
        """The inputs of some of the rows."""
        stats = None if self.statistics is None else Statistics(*(s[rows] for s in self.statistics))
        t, c, h = (None if x is None else x[rows] for x in (self.temperatures, self.c, self.h))
        support = None if self.dense_support is None else self.dense_support.part(rows)
        entries = None if self.entries is None else self.entries.part(rows)
        return Rows(self.targets[rows], t, stats, c, h, support, entries)


def pass_tile(
    kind: str,
    head: Head,
    order: Order,
    budget: PassBudget,
    vectors: int = 1,
    needs: Needs = ALL,
    summed: bool = False,
    shard: VocabularyShard | None = None,
    teacher: Teacher = NO_TEACHER,
) -> Tile:
    """The tile of a pass. The planner has made sure that one fits."""
    sizes = head.sizes(order.count, needs.weight, shard)
    sizes = sizes._replace(teacher=teacher, float32_logits=budget.float32_logits)
    one = Pass(kind, sizes, vectors, inner=needs.hidden, summed=summed)
    tile = one.tile(budget.total, budget.tile)
    if tile is None:
        least = one.least_bytes(budget.tile)
        raise RuntimeError(f"the pass {kind!r} takes at least {least} bytes, got {budget.total}")
    return tile


def _zeros(targets: Tensor) -> Statistics:
    return Statistics(*(torch.zeros(targets.shape, dtype=torch.float32, device=targets.device) for _ in range(4)))


def statistics(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    num_tokens: int,
    budget: PassBudget,
    dense_support: DenseSupport | None = None,
    shard: VocabularyShard | None = None,
    entries: RowEntries | None = None,
) -> Statistics:
    """Row statistics (N,) from hidden states, with one product (1U); 0 for masked rows.

    With a shard, those of its entries alone, for targets counted from its first. With `entries` their logits are
    gathered, and the targets are the best of them, whatever `targets` says.
    """
    out, used = _zeros(targets), order(mask, targets.shape[0], num_tokens)
    if used.count == 0:
        return out
    tile = pass_tile("statistics", head, used, budget, shard=shard)
    held = Held(head, tile, used.index is not None, backend, budget.mapped, budget.float32_logits)
    support = used.dense_support(dense_support)
    temperatures, entries = used.of(transform.temperatures), used.entries(entries)
    rows = Rows(used.of(targets), temperatures, dense_support=support, entries=entries)  # type: ignore[arg-type]
    for part in slices(used.count, tile.rows):
        where = used.rows(part)
        chunk = chunk_statistics(held, held.hidden(where), rows.part(part), transform, tile.columns, backend)
        for total, values in zip(out, chunk, strict=True):
            total[where] = values
    return out


def chunk_statistics(
    held: Held, hidden: Tensor, rows: Rows, transform: Transform, step: int, backend: str
) -> Statistics:
    """Statistics of a chunk of rows, computed one slice of the vocabulary after another."""
    vocab = held.head.weight.shape[0]
    if vocab == 0:  # an empty shard
        return empty_shard_statistics(rows.targets)
    transform = transform._replace(temperatures=rows.temperatures)
    combined = None if step >= vocab else Combined(rows.targets)
    for columns in slices(vocab, step):
        logits = held.logits(hidden, columns)
        if rows.dense_support is not None:
            rows.dense_support.apply(logits, columns.start, backend)
        if rows.entries is not None:
            targets = rows.entries.gather(logits, columns.start, backend)
        else:
            targets = rows.targets - columns.start if columns.start else rows.targets
        stats: Statistics = kernels(backend, logits).row_statistics(logits[None], targets, None, transform)
        if combined is None:
            return stats
        combined.add(stats, (targets >= 0) & (targets < logits.shape[1]))
    assert combined is not None
    return combined.finish()


#: With `_slope_inputs`, the row-local objective whose gradient is that of logp (c = 1) or of the entropy (h = 1).
_SLOPE = RowObjective("reinforce", (0.0, 0.0, 0.0, 0.0))


def _slope_inputs(vector: int, like: Tensor, scale: float | Tensor) -> RowInputs:
    """Inputs with which the gradient of `_SLOPE` is d logp (vector 0) or d entropy (vector 1), times `scale`."""
    zeros = torch.zeros_like(like, dtype=torch.float32)
    minus = -scale if isinstance(scale, Tensor) else torch.full_like(zeros, -scale)
    return RowInputs(zeros, zeros, entropy_weights=minus) if vector else RowInputs(minus, torch.ones_like(zeros))


def frozen(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    num_tokens: int,
    budget: PassBudget,
    vectors: int,
    all_statistics: bool,
    entries: RowEntries | None = None,
) -> tuple[Statistics, list[Tensor]]:
    """Row statistics, and d logp / d hidden (N, H); with two `vectors` also d entropy / d hidden; in hidden's dtype,
    times `slope_scale`.

    A row's statistics and each of its slopes are one visit by `row_forward_gradient`, which does not give the maximum
    and the log-sum: without `all_statistics` these are empty. `entries` as in `statistics`.
    """
    out, used = _zeros(targets), order(mask, targets.shape[0], num_tokens)
    slopes = [torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) for _ in range(vectors)]
    if not all_statistics:
        out = out._replace(maximum=out.maximum.new_empty(0), log_sum=out.log_sum.new_empty(0))
    if used.count == 0:
        return out, slopes
    tile = pass_tile("frozen", head, used, budget, vectors)
    wide = budget.float32_logits
    held = Held(head, tile, used.index is not None, backend, float32_logits=wide, forms_gradient=True)
    second = products.empty_tile(*tile, head.weight, backend) if vectors == 2 and not wide else None
    rows = Rows(used.of(targets), used.of(transform.temperatures), entries=used.entries(entries))  # type: ignore[arg-type]
    for places in slices(used.count, tile.rows):
        where, part = used.rows(places), rows.part(places)
        logits = held.logits(held.hidden(where), slice(0, tile.columns))
        if part.entries is not None:  # any target will do in a row without one: nothing reads its slope
            part = part._replace(targets=part.entries.gather(logits, 0, backend).clamp_min(0))
        row_kernels, part_transform = kernels(backend, logits), transform._replace(temperatures=part.temperatures)
        scale = products.slope_scale(head.hidden.dtype, part_transform)
        row = (logits[None], part.targets, None, part_transform)
        if all_statistics:
            for total, values in zip(out, row_kernels.row_statistics(*row), strict=True):
                total[where] = values
        for vector in reversed(range(vectors)):  # the first slope last, because it may overwrite the logits
            gradient = held.gradient(logits) if second is None or vector == 0 else second[: logits.shape[0]]
            terms: LossTerms = row_kernels.row_forward_gradient(
                *row, _SLOPE, _slope_inputs(vector, part.targets, scale), None if gradient is logits else gradient[None]
            )
            out.logprobs[where], out.entropy[where] = terms.logprobs, terms.entropy
            products.store_product(slopes[vector], where, gradient, head.weight)
    return out, slopes
