"""Vocabulary shards: rank r of a group holds consecutive rows of the output head, or consecutive columns of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of a vocabulary that lies over the ranks of a group, padding left out."""

    group: ProcessGroup
    rank: int
    starts: tuple[int, ...]  # by rank: the first entry that it holds
    sizes: tuple[int, ...]  # by rank: the number of entries that it holds, 0 for some
    reduces: bool  # whether the gradient of the hidden states is summed over the group

    @property
    def start(self) -> int:
        """The first entry that this rank holds."""
        return self.starts[self.rank]

    @property
    def size(self) -> int:
        """The number of entries that this rank holds."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """The number of entries in the vocabulary."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """The size of the largest shard, for which plans and tiles are chosen, so that all ranks choose the same."""
        return max(self.sizes)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(ranks, 1) int64 each: the first entry of every shard, and the one behind its last."""
        return _bounds(self.starts, self.sizes, device)


@lru_cache(maxsize=64)
def _bounds(starts: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.tensor(starts, device=device)[:, None]
    return first, first + torch.tensor(sizes, device=device)[:, None]


def shard_of(
    group: ProcessGroup, rows: Sequence[int], vocab_starts: Sequence[int | None], vocab_size: int | None, reduces: bool
) -> VocabularyShard:
    """The shard of this rank, from the rows of the head (or columns of logits) and the `vocab_start` of every rank.

    Raises ValueError for starts that are not where the earlier ranks end, and for a vocab_size larger than all rows.
    """
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    for rank, (given, start) in enumerate(zip(vocab_starts, starts, strict=True)):
        if given is not None and given != start:
            raise ValueError(
                f"vocab_start must be {start} on rank {rank}, where the rows of the earlier ranks end, got {given}"
            )
    held = sum(rows)
    total = held if vocab_size is None else vocab_size
    if not 1 <= total <= held:
        raise ValueError(f"vocab_size must be from 1 to {held}, the rows of all ranks, got {total}")
    sizes = [max(0, min(count, total - start)) for count, start in zip(rows, starts, strict=True)]
    return VocabularyShard(group, group.rank(), tuple(starts), tuple(sizes), reduces)


def checked_options(vocab_start: Any, vocab_size: Any, reduce_hidden_grad: Any, tp_group: object) -> None:
    """Raises TypeError or ValueError for options of vocabulary shards that are wrong by themselves."""
    for name, value, least in (("vocab_start", vocab_start, 0), ("vocab_size", vocab_size, 1)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if vocab_start is not None and tp_group is None:
        raise ValueError(f"vocab_start goes with tp_group, got {vocab_start} without one")
    if not isinstance(reduce_hidden_grad, bool):
        raise TypeError(f"reduce_hidden_grad must be a bool, got {type(reduce_hidden_grad).__name__}")
