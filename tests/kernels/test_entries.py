"""The entries that are asked for in each row, on every backend: their logits, and which of them is the best."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Best, Entries

VOCAB, ROWS = 700, 6
SLICES = [(0, VOCAB)], [(0, 256), (256, VOCAB)], [(512, VOCAB), (0, 512)]


def _entries(generator: torch.Generator) -> Entries:
    """Ids in any order, distinct within a row: of all rows but the last, which asks for none."""
    counts = [1, 3, 130, 200, VOCAB, 0]
    ids = [torch.randperm(VOCAB, generator=generator)[:count] for count in counts]
    return Entries(torch.cat(ids).int(), torch.tensor([0, *counts]).cumsum(0))


def _best(logits: Tensor, entries: Entries) -> list[tuple[int, float]]:
    """Of each row, one id after the other."""
    found = []
    for row in range(ROWS):
        ids = sorted(entries.token_ids[entries.offsets[row] : entries.offsets[row + 1]].tolist())
        values = {i: float(logits[row, i]) for i in ids if not logits[row, i].isnan()}
        largest = max(values.values(), default=-torch.inf)
        found.append((next((i for i, value in values.items() if value == largest), -1), largest))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_of_equal_entries_the_lowest_is_the_best(
    slices: list[tuple[int, int]], dtype: torch.dtype, backend: str, backend_device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    entries = _entries(generator)
    logits = torch.randint(-1, 2, (ROWS, VOCAB), generator=generator).to(dtype)  # few numbers: many are equal
    logits[1], logits[2, ::3] = torch.nan, torch.nan
    expected = _best(logits, entries)
    entries = Entries(*(x.to(backend_device) for x in entries))
    rows = torch.arange(ROWS, device=backend_device)
    values = torch.full(entries.token_ids.shape, 7.0, device=backend_device)
    best = Best(torch.full_like(rows, -1), torch.full((ROWS,), -torch.inf, device=backend_device))
    for first, end in slices:
        part = logits[:, first:end].to(backend_device)
        targets = row_functions(backend, part).gather_entries(part[None], first, rows, entries, values, best)
        here = (best.ids >= first) & (best.ids < end)
        assert torch.equal(targets, (best.ids - first).where(here, -1))
    assert list(zip(best.ids.tolist(), best.values.tolist(), strict=True)) == expected
    asked = logits.to(backend_device)[entries.rows(), entries.token_ids.long()].float()
    assert torch.equal(values.nan_to_num(9.0), asked.nan_to_num(9.0))


@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_each_gradient_reaches_its_entry(slices: list[tuple[int, int]], backend: str, backend_device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    entries = _entries(generator)
    gradient = torch.randn(entries.token_ids.shape, generator=generator)
    expected = torch.zeros(ROWS, VOCAB).index_put((entries.rows(), entries.token_ids.long()), gradient)
    entries, gradient = Entries(*(x.to(backend_device) for x in entries)), gradient.to(backend_device)
    rows = torch.arange(ROWS, device=backend_device)
    for first, end in slices:
        out = torch.zeros(1, ROWS, end - first, device=backend_device)
        row_functions(backend, out).scatter_entries(gradient, first, rows, entries, out)
        assert torch.equal(out[0].cpu(), expected[:, first:end])
