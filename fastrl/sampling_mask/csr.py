"""The CSR layout of a sampling mask, token ids row by row with the offset of each row: checks and arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.contract import offsets_of
from fastrl.base import checks

INT32_MAX = 2**31 - 1


def sorted_csr(rows: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """token_ids int32, ascending and distinct, and offsets of `count` rows, from the row and the id of each entry."""
    keys = ((rows << 32) | ids).unique(sorted=True)  # sorts by row first, then by id
    return (keys & INT32_MAX).to(torch.int32), offsets_of(torch.bincount(keys >> 32, minlength=count))


def row_of(offsets: Tensor, entry: int) -> int:
    """The row in which an entry lies."""
    return int(torch.searchsorted(offsets, entry, right=True)) - 1


def integers(name: str, ids: Any) -> list[int]:
    """Token ids or offsets from any sequence or array, as Python integers; [] for None."""
    if ids is None:
        return []
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {type(ids).__name__}")
    listed: list[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if any(isinstance(x, bool) or not isinstance(x, Integral) or not 0 <= int(x) <= INT32_MAX for x in listed):
        raise ValueError(f"{name} must hold integers in [0, 2^31), got {listed!r:.80}")
    return [int(x) for x in listed]


def check_layout(token_ids: object, offsets: object, where: str = "") -> None:
    """Raise TypeError or ValueError if the two tensors are no valid CSR; `where` is put before their names."""
    for name, value in (("token_ids", token_ids), ("offsets", offsets)):
        value = checks.tensor(where + name, value, (torch.int32, torch.int64))
        if value.dim() != 1:
            raise ValueError(f"{where}{name} must be one-dimensional, got shape {tuple(value.shape)}")
    assert isinstance(token_ids, Tensor) and isinstance(offsets, Tensor)
    checks.same_device("offsets", offsets, token_ids, "token_ids")
    if offsets.shape[0] == 0:
        raise ValueError(f"{where}offsets must have shape (N + 1,), got (0,)")
    nnz, last = token_ids.shape[0], int(offsets[-1])
    if offsets[0] != 0:
        raise ValueError(f"{where}offsets must begin with 0, got {int(offsets[0])}")
    falls = offsets.diff() < 0
    if bool(falls.any()):
        row = int(falls.nonzero()[0])
        fall = f"row {row} from {int(offsets[row])} to {int(offsets[row + 1])}"
        raise ValueError(f"{where}offsets must never fall, got {fall}")
    if last != nnz:
        raise ValueError(f"{where}offsets must end with the number of token_ids, {nnz}, got {last}")
    bad = (token_ids < 0) | (token_ids > INT32_MAX)
    if bool(bad.any()):
        entry = int(bad.nonzero()[0])
        row = row_of(offsets, entry)
        raise ValueError(f"{where}token_ids of row {row} must be in [0, 2^31), got {int(token_ids[entry])}")
