"""What row functions read beside a tile of logits, for the rows of an order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Entries, Statistics, Transform
from fastrl.passes.entries import EntryValues
from fastrl.passes.head import Order
from fastrl.passes.supports import restrict


class Rows(NamedTuple):
    """The inputs of row functions other than the logits, each (count,) or None.

    `row_ids`: which of the call's rows they are, where `wide` or `entries` are given.
    """

    targets: Tensor
    transform: Transform
    statistics: Statistics | None = None
    c: Tensor | None = None
    h: Tensor | None = None
    wide: Entries | None = None  # supports, outside of which logits become -inf
    entries: EntryValues | None = None  # whose best is the target, or whose gradients are known
    row_ids: Tensor | None = None  # int64

    def part(self, rows: Tensor | slice) -> Rows:
        """The inputs of some of the rows."""
        stats = None if self.statistics is None else Statistics(*[s[rows] for s in self.statistics])
        c, h, row_ids = [None if x is None else x[rows] for x in (self.c, self.h, self.row_ids)]
        return Rows(self.targets[rows], self.transform.of(rows), stats, c, h, self.wide, self.entries, row_ids)

    def ordered(self, used: Order) -> Rows:
        """The inputs of an order's rows, from those of all rows (N,)."""
        if used.index is not None:
            return self.part(used.index)._replace(row_ids=used.index)
        if self.wide is None and self.entries is None:
            return self
        return self._replace(row_ids=torch.arange(used.count, device=self.targets.device))

    def restrict(self, logits: Tensor, first: int, backend: str) -> None:
        """Write -inf into the logits (n, v) of entries [first, first + v) where they are outside the supports."""
        if self.wide is not None and self.row_ids is not None:
            restrict(logits, first, self.row_ids, self.wide, backend)

    def write_gradient(self, logits: Tensor, first: int, backend: str, out: Tensor) -> None:
        """Write dL/dlogits (n, v) of entries [first, first + v), from the statistics, c and h; a shard may be empty."""
        if logits.shape[1]:
            of_rows = (self.targets - first, None, self.transform, self.statistics, self.c, self.h)
            row_functions(backend, logits).row_gradient(logits[None], *of_rows, out[None])
