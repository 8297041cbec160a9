"""Logits outside a row's set become -inf, in whole rows and in slices of the vocabulary, on every backend."""

from __future__ import annotations

import pytest
import support_cases
import torch

from fastrl.backend.choice import forced, row_functions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("first", "width"), [(0, 1100), (0, 600), (513, 587), (1099, 1)])
def test_what_is_not_kept_is_minus_infinity(backend_device: str, first: int, width: int, dtype: torch.dtype) -> None:
    """1100 entries are three of the kernel's blocks, the last ragged; rows in any order, one of them twice."""
    support = support_cases.random_support((3, 0, 400, 1, 1100), 1100, backend_device)
    rows = torch.tensor([2, 4, 0, 1, 2, 3], device=backend_device)
    logits = torch.randn(6, width).to(dtype).to(backend_device)
    before, dense = logits.clone(), torch.zeros(5, 1100, dtype=torch.bool, device=backend_device)
    for row, span in support_cases.row_ranges(support):
        dense[row, support.token_ids[span].long()] = True
    dense[1] = True  # without ids: everything
    inside = dense[rows][:, first : first + width]
    row_functions(forced(), logits).support_restrict(logits, first, rows, support.token_ids, support.offsets)
    assert torch.equal(logits[inside], before[inside]) and (logits[~inside] == -torch.inf).all()
    nothing = logits[:0]
    row_functions(forced(), nothing).support_restrict(nothing, 0, rows[:0], support.token_ids, support.offsets)
