"""Rows whose sets are too wide to gather: their dense logits become -inf outside the set, and the rest is as ever."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastrl.ops.backend import kernels


class Restriction(NamedTuple):
    """The recorded sets of some rows; a row without ids keeps the whole vocabulary."""

    token_ids: Tensor  # (nnz,) int32, rising within a row
    offsets: Tensor  # (N + 1,) int64
    rows: Tensor  # (n,) int64: the rows in question

    def part(self, rows: slice) -> Restriction:
        """Some of them."""
        return self._replace(rows=self.rows[rows])

    def apply(self, logits: Tensor, first: int, backend: str) -> None:
        """Write -inf over what logits (n, v), entries [first, first + v) of the vocabulary, hold outside the sets."""
        kernels(backend, logits).kept_restrict(logits, first, self.rows, self.token_ids, self.offsets)
