"""Rows whose support is too wide to gather: their dense logits become -inf outside it; all else is unchanged."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastrl.backend.choice import kernels


class DenseSupport(NamedTuple):
    """Restricts the dense logits of some rows to their support; the support of a row without ids is the vocabulary."""

    token_ids: Tensor  # (nnz,) int32, ascending within a row
    offsets: Tensor  # (N + 1,) int64
    rows: Tensor  # (n,) int64: the rows that are restricted

    def part(self, rows: slice) -> DenseSupport:
        """The support of some of the rows."""
        return self._replace(rows=self.rows[rows])

    def apply(self, logits: Tensor, first: int, backend: str) -> None:
        """Write -inf outside the support into logits (n, v) of entries [first, first + v) of the vocabulary."""
        kernels(backend, logits).support_restrict(logits, first, self.rows, self.token_ids, self.offsets)
