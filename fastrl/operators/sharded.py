"""Statistics of rows whose vocabulary lies over the ranks of a group, one collective for all of them.

Each rank computes the statistics of its own columns, the ranks gather these (4 float32 numbers per row), and each of
them combines all in the same order: the results have the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import Statistics, Support, Transform
from fastrl.base import checks
from fastrl.distributed.groups import start_gather
from fastrl.distributed.shards import VocabularyShard
from fastrl.operators.combined import Combined
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.rows import like_logits, logits_backward, write_gradient
from fastrl.operators.saved import keep, refuse_second_order
from fastrl.operators.support import statistics_over_support, write_row_gradient
from fastrl.planning.tiling import combined_rows

#: In place of log_sum, which is at least 0: the rank raised an error.
_FAILED = -1.0


def empty_shard_statistics(targets: Tensor) -> Statistics:
    """The statistics (N,) of no logits at all: their maximum is -inf, which `Combined` leaves out."""
    zeros = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    return Statistics(zeros, zeros, torch.full_like(zeros, -torch.inf), zeros)


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
        for first in range(0, targets.shape[0], step):
            rows = slice(first, first + step)
            ids = targets[rows]
            whole = Combined(ids)
            whole.add(Statistics(*parts[..., rows].unbind(1)), (ids >= starts) & (ids < ends))
            out[:, rows] = torch.stack(whole.finish())
        if mask is not None:
            out.masked_fill_(~mask, 0.0)
        return Statistics(*(x.clone() for x in out))

    return combined


def gathered(
    compute: Callable[[], Statistics], targets: Tensor, shard: VocabularyShard, mask: Tensor | None = None
) -> Statistics:
    """The statistics of whole rows, from those of every rank's columns: one collective, the same bits on every rank.

    An error in `compute` reaches all ranks: as one where values may be read, else as NaN in all statistics.

    Args:
        compute: gives those of this rank's columns, each (n,) float32; a maximum of -inf means that the row has none.
        targets: (n,) int64 ids in the whole vocabulary; one outside it has a NaN log-probability.
        shard: of this rank.
        mask: (n,) bool; the statistics of other rows are 0. None means that all rows count.
    """
    try:
        local = compute()
    except Exception:
        if targets.shape[0]:
            start_gather(torch.stack(failure(targets)), shard.group)()
        raise
    return start_gathered(local, targets, shard, mask)()


def sharded_row_statistics(
    logits: Tensor,  # (A, B, V_r)
    targets: Tensor,  # (N,) int64 ids in the whole vocabulary
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    shard: VocabularyShard,
    backend: str,
    consume: bool,
    dense: Tensor | None = None,  # (N,) bool, with a support: valid rows without one; None: no such rows
    support: Support | None = None,  # this rank's entries
    dense_support: DenseSupport | None = None,  # this rank's entries
    outside: Tensor | None = None,  # (N,) bool: rows whose target is not in their support
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) of whole rows, the same bits on every rank.

    The forward makes one collective, the backward none. Columns beyond the shard's size are padding. With `consume` the
    backward writes the gradient over the logits.
    """
    entries = (dense, support, dense_support, outside)
    logprobs, entropy = _Statistics.apply(logits, targets, mask, transform, shard, backend, consume, entries)
    return logprobs, entropy


class _Statistics(torch.autograd.Function):
    """A torch.library operator could not take the group."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        transform: Transform,
        shard: VocabularyShard,
        backend: str,
        consume: bool,
        entries: tuple[Tensor | None, Support | None, DenseSupport | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        dense, support, dense_support, outside = entries
        own, values = targets - shard.start, None
        columns = logits[..., : shard.size]

        def local() -> Statistics:
            nonlocal values
            if not columns.numel():
                return empty_shard_statistics(targets)
            if support is None:
                stats: Statistics = kernels(backend, logits).row_statistics(columns, own, mask, transform)
                return stats
            *found, values = statistics_over_support(columns, own, dense, transform, support, dense_support, backend)
            stats = Statistics(*found)
            stats.maximum.masked_fill_(support.valid & (support.offsets.diff() == 0), -torch.inf)
            return stats

        statistics = gathered(local, targets, shard, mask)
        if outside is not None:
            statistics.logprobs.masked_fill_(outside if mask is None else outside & mask, torch.nan)
        saved = {"logits": logits, "size": shard.size, "targets": own, "mask": mask, "transform": transform}
        saved |= {"dense": dense, "support": support, "dense_support": dense_support, "values": values}
        keep(ctx, {**saved, "statistics": statistics, "backend": backend, "consume": consume})
        return statistics.logprobs, statistics.entropy

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order(d_logprobs, d_entropy)
        none = d_logprobs is None and d_entropy is None
        return (None if none else _backward(ctx, d_logprobs, d_entropy), *[None] * 7)


def _write_gradient(
    out: Tensor,
    logits: Tensor,
    size: int,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    dense: Tensor | None,
    support: Support | None,
    dense_support: DenseSupport | None,
    values: Tensor | None,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
) -> None:
    """Writes dL/dlogits (A, B, V_r), 0 in the padding, to `out`, which may be the logits themselves."""
    if support is None or not size:
        write_gradient(out, logits, targets, mask, transform, size, statistics, c, h, backend)
    else:
        assert values is not None
        write_row_gradient(
            logits, targets, dense, transform, support, dense_support, size, values, statistics, c, h, backend, out
        )


def _gradient(logits: Tensor, **arguments: Any) -> Tensor:
    out = like_logits(logits)
    _write_gradient(out, logits, **arguments)
    return out


def _gradient_(logits: Tensor, **arguments: Any) -> None:
    _write_gradient(logits, logits, **arguments)
    torch.autograd.graph.increment_version(logits)  # so that autograd raises if another operation saved the logits


_backward = logits_backward(_gradient, _gradient_)
