"""Rows whose sets are too wide to gather: their dense logits become -inf outside the set, and the rest is as ever."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Restriction(NamedTuple):
    """The recorded sets of some rows; a row without ids keeps the whole vocabulary."""

    token_ids: Tensor  # (nnz,) int32, rising within a row
    offsets: Tensor  # (N + 1,) int64
    rows: Tensor  # (n,) int64: the rows in question

    def part(self, rows: slice) -> Restriction:
        """Some of them."""
        return self._replace(rows=self.rows[rows])

    def apply(self, logits: Tensor, first: int) -> None:
        """Write -inf over what logits (n, v), entries [first, first + v) of the vocabulary, hold outside the sets."""
        begin = self.offsets[self.rows]
        lengths = self.offsets[self.rows + 1] - begin
        total = int(lengths.sum())
        row = torch.arange(len(self.rows), device=logits.device).repeat_interleave(lengths, output_size=total)
        entry = torch.arange(total, device=logits.device) + (begin - (lengths.cumsum(0) - lengths))[row]
        column = self.token_ids[entry].long() - first
        inside = (column >= 0) & (column < logits.shape[1])
        row, column = row[inside], column[inside]
        kept = logits[row, column]
        logits.masked_fill_((lengths > 0)[:, None], -torch.inf)
        logits[row, column] = kept
