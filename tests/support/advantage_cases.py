"""Responses for the tests of advantages and rewards, as lists of tuples of numbers, and what a result may be off by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

few = settings(max_examples=60)
#: Responses, each a list of tokens, each a tuple with one number per column.
Rows = Sequence[Sequence[tuple[Any, ...]]]


def assert_rounded(actual: Tensor, expected: Sequence[float], atol: float = 1e-11) -> None:
    """Equal to the float64 numbers rounded to float32: half a unit in the last place, and float64's own rounding.

    1e-11 covers some hundred float64 operations on numbers up to 1e3; a wrong formula is off by far more.
    """
    assert actual.dtype == torch.float32
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual.double(), wanted, rtol=2**-24 * 1.01, atol=atol)


def assert_rounded_rows(actual: Tensor, expected: Sequence[Sequence[float]], atol: float = 1e-11) -> None:
    """The same of a padded batch, which is 0 behind each response."""
    for row, wanted in zip(actual, expected, strict=True):
        assert_rounded(row[: len(wanted)], wanted, atol)
        assert row[len(wanted) :].count_nonzero() == 0


def padded(rows: Rows, column: int, fill: float) -> Tensor:
    """(responses, the longest's length), with `fill` behind each response."""
    width = max(map(len, rows))
    flat = [[token[column] for token in row] + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(flat).reshape(len(rows), width)


def packed(rows: Rows, column: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(tokens,), one response after the other."""
    return torch.tensor([token[column] for row in rows for token in row], dtype=dtype)


def starts(rows: Sequence[Sequence[Any]]) -> Tensor:
    """Their cu_seqlens."""
    return torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
