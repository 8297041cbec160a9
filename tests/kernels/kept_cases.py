"""What the tests of kernels for kept entries share: random sets, and their entries sorted by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl.ops.contract import ByToken, Kept


def kept_sets(sizes: Sequence[int], vocab: int, device: str, counts: Tensor | None = None) -> Kept:
    """Rows that keep so many random tokens each."""
    sets = [torch.randperm(vocab)[:size].sort().values for size in sizes]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    counts = torch.ones(len(sizes), dtype=torch.bool) if counts is None else counts
    return Kept(torch.cat(sets).int().to(device), offsets.to(device), counts.to(device))


def entry_rows(kept: Kept) -> Tensor:
    """The row of each entry, (nnz,) int64."""
    return torch.repeat_interleave(torch.arange(kept.counts.numel(), device=kept.counts.device), kept.offsets.diff())


def by_token(kept: Kept, vocab: int) -> ByToken:
    """The entries sorted by token, those of rows that do not count last."""
    rows = entry_rows(kept)
    ids = kept.token_ids.long().where(kept.counts[rows], vocab)
    entries = ids.argsort(stable=True)
    return ByToken(ids[entries].int(), entries, rows[entries].int())


def row_ranges(kept: Kept) -> list[tuple[int, slice]]:
    """The rows that take part, and where their entries lie."""
    ends = kept.offsets.tolist()
    found = [(row, slice(ends[row], ends[row + 1])) for row in range(len(ends) - 1)]
    return [(row, span) for row, span in found if kept.counts[row] and span.start < span.stop]
