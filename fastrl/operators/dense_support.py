"""Rows whose support is too wide to gather: their dense logits become -inf outside it, and the rest is as ever."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastrl.backends.choice import kernels


class DenseSupport(NamedTuple):
    """The support of some rows, whose dense logits it restricts; a row without ids has the whole vocabulary."""

    token_ids: Tensor  # (nnz,) int32, rising within a row
    offsets: Tensor  # (N + 1,) int64
    rows: Tensor  # (n,) int64: the rows in question

    @classmethod
    def of(cls, tensors: list[Tensor]) -> DenseSupport | None:
        """As an operator takes it: nothing, or ids, offsets and rows."""
        return cls(*tensors) if tensors else None

    def part(self, rows: slice) -> DenseSupport:
        """Some of them."""
        return self._replace(rows=self.rows[rows])

    def apply(self, logits: Tensor, first: int, backend: str) -> None:
        """Write -inf outside the support into logits (n, v) of entries [first, first + v) of the vocabulary."""
        kernels(backend, logits).support_restrict(logits, first, self.rows, self.token_ids, self.offsets)
