"""Passes over a vocabulary that lies over the ranks of a `tp_group`.

Each rank computes the statistics of its own vocabulary entries, the ranks gather these (4 float32 numbers per row), and
each of them combines all in the same order: the results have the same bits on every rank. From the statistics of whole
rows each forms its own part of the gradients. From hidden states, dL/dweight is a rank's own, and the parts of
dL/dhidden are added up over the group, in float32, and rounded once (in 16 bits with supports, each part before that
too).

A torch.library operator could not take the group: these are autograd functions. They are differentiable once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.base import checks
from fastrl.distributed.groups import start_gather
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts, start_add_parts
from fastrl.passes.combined import Combined, no_statistics, tile_statistics
from fastrl.passes.forward_gradient import Chunk, Coefficients, Gradients, GradientSums, empty_terms
from fastrl.passes.head import Head, Order, Run, Workspace, add_product, slices, store_rows
from fastrl.passes.linear import FrozenHead, gradient_of_slopes, gradients_of, saved_run
from fastrl.passes.linear import statistics_of as linear_statistics_of
from fastrl.passes.logits import RowStatistics, coefficients, row_backward, statistics_of
from fastrl.passes.operator import Once, saved
from fastrl.passes.rows import Rows
from fastrl.passes.supports import RowOptions, elsewhere
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import Needs, Tile, combined_rows

#: In place of log_sum, which is at least 0: the rank raised an error.
_FAILED = -1.0


class RankFailed(RuntimeError):
    """Another rank raised an error before it could compute its statistics."""


def failure(targets: Tensor) -> Statistics:
    """What a rank sends in place of its statistics (n,) after an error, because the others wait for them."""
    nan = torch.full(targets.shape, torch.nan, dtype=torch.float32, device=targets.device)
    return Statistics(nan, nan, nan, torch.full_like(nan, _FAILED))


def start_gathered(
    local: Statistics, targets: Tensor, shard: VocabularyShard, mask: Tensor | None = None
) -> Callable[[], Statistics]:
    """Starts `gathered`; the call of what it returns waits for the other ranks and gives the statistics."""
    if targets.shape[0] == 0:
        return lambda: Statistics(*(x.clone() for x in local))
    finish = start_gather(torch.stack(local), shard.group)

    def combined() -> Statistics:
        parts = finish()  # (ranks, 4, n)
        if checks.values_are_checked(targets):
            for rank in (parts[:, 3, 0] == _FAILED).nonzero()[:, 0].tolist():
                raise RankFailed(f"rank {rank} of tp_group raised an error while it computed its part")
        starts, ends = shard.bounds(targets.device)
        out = torch.empty_like(parts[0])
        step = combined_rows(shard.group.size(), targets.device.type)
        for rows in slices(targets.shape[0], step):
            ids = targets[rows]
            whole = Combined(ids)
            whole.add(Statistics(*parts[..., rows].unbind(1)), (ids >= starts) & (ids < ends))
            out[:, rows] = torch.stack(whole.finish())
        if mask is not None:
            out.masked_fill_(~mask, 0.0)
        return Statistics(*(x.clone() for x in out))

    return combined


def gathered(
    compute: Callable[[], RowStatistics],
    targets: Tensor,
    shard: VocabularyShard,
    mask: Tensor | None,
    lacking: Tensor | None,
) -> RowStatistics:
    """The statistics of whole rows, from those of every rank's columns: one collective, the same bits on every rank.

    The supports' logits are this rank's. An error in `compute` reaches all ranks: as one where values may be read, else
    as NaN in all statistics.

    Args:
        compute: gives those of this rank's columns, each (n,) float32; a maximum of -inf means that the row has none.
        targets: (n,) int64 ids in the whole vocabulary; one outside it has a NaN log-probability.
        shard: of this rank.
        mask: (n,) bool; the statistics of other rows are 0. None means that all rows count.
        lacking: (n,) bool: rows whose log-probability is NaN, because their target is not in their support.
    """
    try:
        local = compute()
    except Exception:
        if targets.shape[0]:
            start_gather(torch.stack(failure(targets)), shard.group)()
        raise
    stats = start_gathered(Statistics(*local[:4]), targets, shard, mask)()
    if lacking is not None:
        stats.logprobs.masked_fill_(lacking, torch.nan)
    return RowStatistics(*stats, local.values)


# --- from logits ------------------------------------------------------------------------------------------------------


def without_elsewhere(stats: RowStatistics, options: RowOptions) -> RowStatistics:
    """A rank's statistics, with a maximum of -inf in the gathered rows of which it holds nothing."""
    if options.supports is None:
        return stats
    return stats._replace(maximum=stats.maximum.masked_fill(elsewhere(options.supports), -torch.inf))


def sharded_row_statistics(
    logits: Tensor,  # (A, B, V_r)
    targets: Tensor,  # (N,) int64 ids in the whole vocabulary
    options: RowOptions,  # with the supports' entries of this rank
    lacking: Tensor | None,  # (N,) bool: valid rows whose target is not in their support
    backend: str,
    consume: bool,
    shard: VocabularyShard,
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) of whole rows, the same bits on every rank.

    The forward makes one collective, the backward none. Columns beyond the shard's size are padding. With `consume` the
    backward writes the gradient over the logits.
    """
    local_targets, columns = targets - shard.start, logits[..., : shard.size]

    def local() -> RowStatistics:
        if not columns.numel():
            return RowStatistics(*no_statistics(targets), targets.new_empty(0, dtype=torch.float32))
        return without_elsewhere(statistics_of(columns, local_targets, options, backend), options)

    def forward(logits: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        stats = gathered(local, targets, shard, options.mask, lacking)
        to_save = {"logits": logits, "targets": local_targets, "options": options, "vocab": shard.size}
        to_save |= {"statistics": stats, "backend": backend, "consume": consume}
        return (stats.logprobs, stats.entropy), to_save

    logprobs, entropy = Once.apply(forward, row_backward, 2, logits)
    return logprobs, entropy


# --- from hidden states: statistics -----------------------------------------------------------------------------------


def sharded_statistics(
    head: Head,
    targets: Tensor,
    options: RowOptions,  # with the supports' entries of this rank
    lacking: Tensor | None,  # (N,) bool: valid rows whose target is not in their support
    run: Run,
    may_synchronise: bool,
    shard: VocabularyShard,
) -> Statistics:
    """`linear_statistics` of a vocabulary that lies over a group.

    head: this rank's rows; those beyond the shard are padding. targets (N,) and the mask are the same on every rank.
    Log-probabilities and entropies are differentiable. Collectives: one in the forward, one in the backward (two-pass
    in 16 bits: one per chunk of rows). A frozen head's slopes: one per chunk of rows and one for each slope in the
    forward, none in the backward.
    """
    local_targets = targets - shard.start

    def forward(*tensors: Tensor | None) -> tuple[Sequence[Tensor], dict[str, Any]]:
        padded = Head.of(tensors, shard.size)
        head = padded.unpadded()
        if options.supports is None:
            checks.targets_in_range(targets, options.mask, shard.total)
        if run.plan.name == "frozen-head":
            of_head, slopes = _ShardedFrozenHead(shard, head, targets, options, run, True).run()
            return of_head, {"slopes": slopes, "transform": options.transform}

        def local() -> RowStatistics:
            return without_elsewhere(linear_statistics_of(head, local_targets, options, run), options)

        stats = gathered(local, targets, shard, options.mask, lacking)
        to_save = {"head": padded, "targets": local_targets, "options": options, "statistics": stats}
        return stats[:4], {**to_save, "run": saved_run(run, may_synchronise), "shard": shard}

    return Statistics(*Once.apply(forward, _statistics_backward, 2, *head[:3]))


def _statistics_backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs = saved(ctx)
    if "slopes" in inputs:
        return gradient_of_slopes(**inputs, c=d_logprobs, h=d_entropy), None, None
    return gradients_of(**inputs, **coefficients(d_logprobs, d_entropy), needs=Needs(*ctx.needs))  # type: ignore[arg-type]


def _start_statistics(
    logits: Tensor, rows: Rows, step: int, backend: str, shard: VocabularyShard
) -> Callable[[], Statistics]:
    """Starts to form the statistics of rows from this rank's logits (n, v) and those of the others.

    Targets are those of the whole vocabulary. The call of what it returns waits for the other ranks.
    """
    return start_gathered(tile_statistics(logits, rows, step, backend, shard.start), rows.targets, shard)


class _ShardedFrozenHead(FrozenHead):
    """`FrozenHead` of a shard, whose slopes are parts of sums over the group, if the shard says so."""

    def __init__(self, shard: VocabularyShard, *args: Any) -> None:
        super().__init__(*args)
        self.shard, self.first, self.statistics_first = shard, shard.start, True
        self.started = 0  # the chunks whose statistics the ranks have exchanged
        # The parts, by position in the order, if they need a wider dtype than the slopes.
        self.parts: list[Tensor] = []
        if shard.reduces and self.head.hidden.dtype != torch.float32:
            shape, device = (self.order.count, self.head.hidden.shape[1]), self.head.hidden.device
            self.parts = [torch.empty(shape, dtype=torch.float32, device=device) for _ in self.slopes]

    def _run(self) -> None:
        try:
            super()._run()
        except RankFailed:
            raise
        except Exception:
            tile = self.plan.tile("frozen", self.order.count)
            chunks = [self.rows.targets[part] for part in slices(self.order.count, tile.rows)]
            _release(chunks[self.started :], 1, self._fail, self.shard)
            raise
        for slope, total in enumerate(self._sums()):
            add_parts(total, self.shard.group, self.plan.call.block > 0)
            if self.parts:
                store_rows(self.slopes[slope], self.order.rows(slice(0, self.order.count)), total, None)

    def _sums(self) -> list[Tensor]:
        """What is to be summed over the group."""
        return self.parts or (self.slopes if self.shard.reduces else [])

    def _fail(self) -> None:
        """Make the sums over the group with NaN for this rank's parts."""
        for total in self._sums():
            add_parts(total.fill_(torch.nan), self.shard.group, self.plan.call.block > 0)

    def _statistics(self, logits: Tensor, rows: Rows) -> Statistics:
        statistics = _start_statistics(logits, rows, self.step, self.backend, self.shard)
        self.started += 1
        return statistics()

    def _store(self, vector: int, places: slice, where: Tensor | slice, gradient: Tensor) -> None:
        if self.parts:
            part = self.parts[vector][places]
            add_product(part, gradient, self.head.weight, first=True, block=self.plan.call.block)
        else:
            super()._store(vector, places, where, gradient)


# --- from hidden states: a loss and its gradients ---------------------------------------------------------------------


class _ShardedSums(GradientSums):
    """`GradientSums` of a shard, whose dH is a part of a sum over the group, if the shard says so.

    Then it is float32, by position in the order, and the ranks add up their parts while the last chunk's dW is
    computed.
    """

    def __init__(
        self, shard: VocabularyShard, head: Head, used: Order, chunks: Sequence[Chunk], plan: Plan, *args: Any
    ) -> None:
        super().__init__(head, used, chunks, plan, *args)
        self.group = shard.group if shard.reduces and plan.call.needs.hidden else None
        self.last = max([chunk for chunk in chunks if chunk.active], default=None)
        self.parts: Tensor | None = None
        self.wait: Callable[[], None] | None = None
        if self.group is not None and head.hidden.dtype != torch.float32:
            make, shape = torch.empty if self.all_active else torch.zeros, (used.count, head.hidden.shape[1])
            self.parts = make(shape, dtype=torch.float32, device=head.hidden.device)

    def _store_hidden(self, chunk: Chunk, gradient: Tensor) -> None:
        if self.parts is None:
            super()._store_hidden(chunk, gradient)
        else:
            part = self.parts[chunk.start : chunk.start + chunk.active]
            add_product(part, gradient, self.matrix, first=True, block=self.block)
        if chunk is self.last:
            self._start_sum()

    def _start_sum(self) -> None:
        if self.group is not None and self.wait is None:
            total = self.hidden if self.parts is None else self.parts
            assert total is not None
            self.wait = start_add_parts(total, self.group, self.block > 0)

    def fail(self) -> None:
        """Make the sum of dH over the group with NaN for this rank's part, unless it has been started."""
        if self.wait is None:
            for total in (self.parts, self.hidden):
                if total is not None:
                    total.fill_(torch.nan)
            self._start_sum()
        if self.wait is not None:
            self.wait()

    def finish(self) -> None:
        """Waits for the sum of dH over the group."""
        self._start_sum()
        if self.wait is not None:
            self.wait()
        if self.parts is not None and self.hidden is not None:
            store_rows(self.hidden, self.used.rows(slice(0, self.used.count)), self.parts, None)


def forward_gradient(
    head: Head,
    targets: Tensor,
    transform: Transform,
    used: Order,
    chunks: Sequence[Chunk],
    chunk_coefficients: Coefficients,
    one_chunk: bool,
    plan: Plan,
    backend: str,
    shard: VocabularyShard,
) -> tuple[LossTerms, Gradients]:
    """`forward_gradient.forward_gradient` of a head that lies over a group.

    A chunk's statistics travel between the ranks while the product of the next is computed.
    """
    sums = _ShardedSums(shard, head, used, chunks, plan, one_chunk, backend)
    out, whole = empty_terms(targets, used), slice(0, head.entries)
    memory = (head.unpadded(), Tile(sums.longest, head.entries), used.index is not None, backend, False)
    kind: dict[str, Any] = {"forms_gradient": True, "block": plan.call.block, "step": plan.call.step}
    ahead = min(max(len(chunks), 1), 2)
    begun: list[tuple[int, Tensor, Tensor, Rows, Callable[[], Statistics]]] = []

    def end() -> None:
        """Forms the gradient of the chunk that was begun first."""
        number, hidden, logits, rows, statistics = begun.pop(0)
        chunk = chunks[number]
        where = used.rows(slice(chunk.start, chunk.stop))
        stats, gradient = statistics(), workspaces[number % len(workspaces)].gradient(logits)
        terms, c, h = chunk_coefficients(stats, where, number)
        rows._replace(statistics=stats, c=c, h=h).write_gradient(logits, shard.start, backend, gradient)
        out.logprobs[where], out.entropy[where], out.terms[:, where] = stats.logprobs, stats.entropy, terms
        sums.add(chunk, hidden, gradient)

    workspaces, started = list[Workspace](), 0
    try:
        workspaces += [Workspace(*memory, plan.call.float32_logits, **kind) for _ in range(ahead)]
        for number, chunk in enumerate(chunks):
            where, workspace = used.rows(slice(chunk.start, chunk.stop)), workspaces[number % len(workspaces)]
            hidden = workspace.hidden(where)
            logits = workspace.logits(hidden, whole)
            rows = Rows(targets[where], transform.of(where))
            statistics = _start_statistics(logits, rows, plan.call.step, backend, shard)
            started += 1
            begun.append((number, hidden, logits, rows, statistics))
            if len(begun) == len(workspaces):
                end()
        while begun:
            end()
        sums.finish()
        return out, sums.gradients
    except RankFailed:
        raise
    except Exception:
        left = [targets[used.rows(slice(chunk.start, chunk.stop))] for chunk in chunks[started:]]
        _release(left, ahead, sums.fail, shard)
        raise


def _release(left: Sequence[Tensor], ahead: int, fail: Callable[[], None], shard: VocabularyShard) -> None:
    """After an error, makes the collectives that the other ranks wait for.

    Those are of the chunks whose targets are `left`, and the sums of dH, which `fail` makes. Where values may be read,
    the others stop at the first chunk whose statistics are a failure; by then they are `ahead` by so many chunks.
    """
    seen = bool(left) and checks.values_are_checked(left[0])
    for ids in left[:ahead] if seen else left:
        start_gather(torch.stack(failure(ids)), shard.group)()
    if not seen:
        fail()
