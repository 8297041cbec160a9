"""Statistics of rows whose vocabulary lies over the ranks of a group, one collective for all of them.

Each rank computes the statistics of its own columns, the ranks gather these (4 float32 numbers per row), and each of
them combines all in the same order: the results have the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.backend.contract import Statistics
from fastrl.distributed.groups import start_gather
from fastrl.distributed.shards import VocabularyShard
from fastrl.operators.combined import Combined


def empty_shard_statistics(targets: Tensor) -> Statistics:
    """The statistics (N,) of no logits at all: their maximum is -inf, which `Combined` leaves out."""
    zeros = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    return Statistics(zeros, zeros, torch.full_like(zeros, -torch.inf), zeros)


def start_gathered(
    local: Statistics, targets: Tensor, shard: VocabularyShard, mask: Tensor | None = None
) -> Callable[[], Statistics]:
    """Starts `gathered`; the call of what it returns waits for the other ranks and gives the statistics."""
    if targets.shape[0] == 0:
        return lambda: local
    finish = start_gather(torch.stack(local), shard.group)

    def combined() -> Statistics:
        parts = Statistics(*finish().unbind(1))
        starts, sizes = (torch.tensor(x, device=targets.device)[:, None] for x in (shard.starts, shard.sizes))
        whole = Combined(targets)
        whole.add(parts, (targets >= starts) & (targets < starts + sizes))
        stats = whole.finish()
        return stats if mask is None else Statistics(*(x.where(mask, 0.0) for x in stats))

    return combined


def gathered(local: Statistics, targets: Tensor, shard: VocabularyShard, mask: Tensor | None = None) -> Statistics:
    """The statistics of whole rows, from those of every rank's columns: one collective, the same bits on every rank.

    Args:
        local: each (n,) float32, of this rank's columns; a maximum of -inf means that the row has none here.
        targets: (n,) int64 ids in the whole vocabulary; one outside it has a NaN log-probability.
        shard: of this rank.
        mask: (n,) bool; the statistics of other rows are 0. None means that all rows count.
    """
    return start_gathered(local, targets, shard, mask)()
