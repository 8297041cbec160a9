"""The forward from hidden states and the output head, a tile of logits at a time: no (N, V) tensor exists.

Rows that are masked never enter a matrix product. How many bytes a pass may take is an argument:
`fastrl.planning.plans` chooses the plan, `fastrl.planning.tiling` cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backends.choice import kernels
from fastrl.backends.contract import Statistics, Transform
from fastrl.linear import head as products
from fastrl.linear.head import Head, Held, slices
from fastrl.operators.dense_support import DenseSupport
from fastrl.planning import tiling
from fastrl.planning.tiling import Tile


class Limits(NamedTuple):
    """Bytes that a pass may take, and bytes that one of its tiles may have at most."""

    room: int
    tile: int
    mapped: int = 0  # 1: a pass's memory goes back to the system, as there is no room for another's beside it


@dataclass(frozen=True)
class Order:
    """The rows that take part, in the order in which they do."""

    index: Tensor | None  # (count,) int64; None: all rows as they lie
    count: int

    def of(self, x: Tensor | None) -> Tensor | None:
        """The rows' entries of x (N, ...), together."""
        return x if x is None or self.index is None else x[self.index]

    def dense_support(self, dense_support: DenseSupport | None) -> DenseSupport | None:
        """The rows' support, of that of all rows."""
        if dense_support is None or self.index is None:
            return dense_support
        return dense_support._replace(rows=self.index)

    def rows(self, part: slice) -> Tensor | slice:
        """Where the rows at these places of the order lie."""
        return part if self.index is None else self.index[part]


def order(valid: Tensor | None, total: int, known: int = -1) -> Order:
    """The valid rows; one synchronisation on a GPU unless their number is known (>= 0)."""
    if valid is None:
        return Order(None, total)
    index = _places(valid, known)
    return Order(None if index.shape[0] == total else index, index.shape[0])


def _places(chosen: Tensor, known: int) -> Tensor:
    """Where a mask (N,) is true; without a synchronisation if the number of places is known (>= 0)."""
    if known < 0 or not chosen.is_cuda:
        return chosen.nonzero()[:, 0]
    # Filled up with -1 where there are fewer: then the loss is NaN already, and an index must not be out of range.
    return torch.nonzero_static(chosen, size=known)[:, 0].clamp_min(0)


def active_first(valid: Tensor | None, idle: Tensor | None, total: int, known: int) -> tuple[Order, int]:
    """The valid rows, those that are not idle first, and how many these are.

    One synchronisation on a GPU; none, and no row taken for idle, where the number of valid rows is known.
    """
    if idle is None or (known >= 0 and idle.is_cuda):
        used = order(valid, total, known)
        return used, used.count
    active = ~idle if valid is None else valid & ~idle
    numbers = [active.sum()] if valid is None else [active.sum(), valid.sum()]
    many, *rest = torch.stack(numbers).tolist()
    count = rest[0] if rest else total
    if many == count:
        return order(valid, total, count), count
    resting = idle if valid is None else valid & idle
    return Order(torch.cat([_places(active, many), _places(resting, count - many)]), count), many


class Rows(NamedTuple):
    """What row functions read beside the logits, for the rows of an order: each (count,) or None."""

    targets: Tensor
    temperatures: Tensor | None
    statistics: Statistics | None = None
    c: Tensor | None = None
    h: Tensor | None = None
    dense_support: DenseSupport | None = None  # outside which their logits are -inf

    def part(self, rows: slice) -> Rows:
        """Some of the rows."""
        found = None if self.statistics is None else Statistics(*(s[rows] for s in self.statistics))
        t, c, h = (None if x is None else x[rows] for x in (self.temperatures, self.c, self.h))
        support = None if self.dense_support is None else self.dense_support.part(rows)
        return Rows(self.targets[rows], t, found, c, h, support)


def pass_tile(kind: str, head: Head, order: Order, limits: Limits, vectors: int = 1, weight: bool = True) -> Tile:
    """The tile of a pass; the planner has seen to it that there is one."""
    sizes = head.sizes(order.count, weight)
    tile = tiling.fit(kind, sizes, limits.room, limits.tile, tiling.pass_units(kind, vectors), vectors)
    if tile is None:
        least = tiling.least_bytes(kind, sizes, limits.tile, vectors)
        raise RuntimeError(f"the pass {kind!r} takes at least {least} bytes, got {limits.room}")
    return tile


def _zeros(targets: Tensor) -> Statistics:
    return Statistics(*(torch.zeros(targets.shape, dtype=torch.float32, device=targets.device) for _ in range(4)))


@torch.no_grad()
def statistics(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    num_tokens: int,
    limits: Limits,
    dense_support: DenseSupport | None = None,
) -> Statistics:
    """Row statistics (N,) from hidden states: one product (1U)."""
    out, used = _zeros(targets), order(mask, targets.shape[0], num_tokens)
    if used.count == 0:
        return out
    tile = pass_tile("statistics", head, used, limits)
    held = Held(head, tile, used.index is not None, backend, bool(limits.mapped))
    rows = Rows(used.of(targets), used.of(transform.temperatures), dense_support=used.dense_support(dense_support))  # type: ignore[arg-type]
    for part in slices(used.count, tile.rows):
        where = used.rows(part)
        found = _chunk_statistics(held, held.hidden(where), rows.part(part), transform, tile.columns, backend)
        for total, values in zip(out, found, strict=True):
            total[where] = values
    return out


def _chunk_statistics(
    held: Held, hidden: Tensor, rows: Rows, transform: Transform, step: int, backend: str
) -> Statistics:
    """Statistics of a chunk of rows, one slice of the vocabulary after the other."""
    vocab = held.head.weight.shape[0]
    transform = transform._replace(temperatures=rows.temperatures)
    combined = None if step >= vocab else _Combined(rows.targets)
    for columns in slices(vocab, step):
        logits = held.logits(hidden, columns)
        if rows.dense_support is not None:
            rows.dense_support.apply(logits, columns.start, backend)
        targets = rows.targets - columns.start if columns.start else rows.targets
        found: Statistics = kernels(backend, logits).row_statistics(logits[None], targets, None, transform)
        if combined is None:
            return found
        combined.add(found, (targets >= 0) & (targets < logits.shape[1]))
    assert combined is not None
    return combined.finish()


class _Combined:
    """Statistics of rows from those of slices of their vocabulary, in float64.

    With l = log sum exp of a slice: the target's log-probability is that within its own slice less
    log1p(exp(rest - l)), rest being the other slices' l: a confident token keeps its digits. The entropy is
    log sum exp - mean z, and a slice's mean z is its l - H.
    """

    def __init__(self, targets: Tensor) -> None:
        zeros = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
        self.maximum = torch.full_like(zeros, -torch.inf)
        self.total, self.rest = self.maximum, self.maximum  # log sum exp of all slices; without the target's
        self.mean = zeros
        self.own = self.logprob = torch.full_like(zeros, torch.nan)  # the target's slice: its l, the logp within it

    def add(self, found: Statistics, here: Tensor) -> None:
        """A slice's statistics, and where the target is in it."""
        empty = found.maximum == -torch.inf  # nothing but -inf: its other statistics are NaN
        l = (found.maximum.double() + found.log_sum.double()).where(~empty, -torch.inf)  # noqa: E741
        total = torch.logaddexp(self.total, l)
        nothing = total == -torch.inf
        share = (l - total).exp().where(~nothing, 0.0)
        mean = (l - found.entropy).where(~empty, 0.0)
        self.mean = self.mean * (1 - share) + mean * share
        self.total = total
        self.maximum = torch.maximum(self.maximum, found.maximum.double())
        self.rest = torch.where(here, self.rest, torch.logaddexp(self.rest, l))
        self.own = torch.where(here, l, self.own)
        self.logprob = torch.where(here, found.logprobs.double().where(~empty, 0.0), self.logprob)

    def finish(self) -> Statistics:
        """The rows' own statistics."""
        logprob = self.logprob - torch.nn.functional.softplus(self.rest - self.own)
        found = (logprob, self.total - self.mean, self.maximum, self.total - self.maximum)
        return Statistics(*(x.float() for x in found))


@torch.no_grad()
def frozen(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    num_tokens: int,
    limits: Limits,
    vectors: int,
) -> tuple[Statistics, list[Tensor]]:
    """Row statistics, and d logp / d hidden (N, H), and with two vectors d entropy / d hidden, in hidden's dtype."""
    out, used = _zeros(targets), order(mask, targets.shape[0], num_tokens)
    slopes = [torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) for _ in range(vectors)]
    if used.count == 0:
        return out, slopes
    tile = pass_tile("frozen", head, used, limits, vectors)
    held = Held(head, tile, used.index is not None, backend)
    second = (
        products.empty((tile.rows, tile.columns), head.weight.dtype, head.weight, backend) if vectors == 2 else None
    )
    rows = Rows(used.of(targets), used.of(transform.temperatures))  # type: ignore[arg-type]
    for places in slices(used.count, tile.rows):
        where, part = used.rows(places), rows.part(places)
        logits = held.logits(held.hidden(where), slice(0, tile.columns))
        row_kernels, own = kernels(backend, logits), transform._replace(temperatures=part.temperatures)
        found: Statistics = row_kernels.row_statistics(logits[None], part.targets, None, own)
        for total, values in zip(out, found, strict=True):
            total[where] = values
        one = torch.ones_like(found.logprobs)
        pairs: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = [(slopes[0], one, None, logits)]
        if second is not None:  # before the other slope takes the logits' place
            pairs.insert(0, (slopes[1], 0 * one, one, second[: logits.shape[0]]))
        for slope, c, h, out_tile in pairs:
            row_kernels.row_gradient(logits[None], part.targets, None, own, found, c, h, out_tile[None])
            products.store_product(slope, where, out_tile, head.weight)
    return out, slopes
