"""What the tests of kernels for support entries share: random sets, and their entries sorted by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl.backend.contract import ByToken, Support


def random_support(sizes: Sequence[int], vocab: int, device: str, valid: Tensor | None = None) -> Support:
    """Rows that keep so many random tokens each."""
    sets = [torch.randperm(vocab)[:size].sort().values for size in sizes]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    valid = torch.ones(len(sizes), dtype=torch.bool) if valid is None else valid
    return Support(torch.cat(sets).int().to(device), offsets.to(device), valid.to(device))


def entry_rows(support: Support) -> Tensor:
    """The row of each entry, (nnz,) int64."""
    return torch.repeat_interleave(
        torch.arange(support.valid.numel(), device=support.valid.device), support.offsets.diff()
    )


def by_token(support: Support, vocab: int) -> ByToken:
    """The entries sorted by token, those of rows that do not count last."""
    rows = entry_rows(support)
    ids = support.token_ids.long().where(support.valid[rows], vocab)
    entries = ids.argsort(stable=True)
    return ByToken(ids[entries].int(), entries, rows[entries].int())


def row_ranges(support: Support) -> list[tuple[int, slice]]:
    """The rows that take part, and where their entries lie."""
    ends = support.offsets.tolist()
    found = [(row, slice(ends[row], ends[row + 1])) for row in range(len(ends) - 1)]
    return [(row, span) for row, span in found if support.valid[row] and span.start < span.stop]
