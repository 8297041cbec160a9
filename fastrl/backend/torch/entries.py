"""The functions over the entries asked for of `fastrl.backend.contract` in plain torch; float64 works too."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.contract import Best, Entries


def _here(logits: Tensor, first: int, rows: Tensor, entries: Entries) -> tuple[Tensor, Tensor, Tensor]:
    """Of the entries that lie in these logits (A, B, V): their positions, the rows of the logits, and the columns."""
    count = entries.offsets.shape[0] - 1
    place_of = rows.new_full((count,), -1).index_copy(0, rows, torch.arange(rows.shape[0], device=rows.device))
    places, columns = place_of[entries.rows()], entries.token_ids.long() - first
    (chosen,) = ((places >= 0) & (columns >= 0) & (columns < logits.shape[-1])).nonzero(as_tuple=True)
    return chosen, places[chosen], columns[chosen]


def gather_entries(logits: Tensor, first: int, rows: Tensor, entries: Entries, values: Tensor, best: Best) -> Tensor:
    """See `fastrl.backend.contract`."""
    inner = logits.shape[1]
    chosen, places, columns = _here(logits, first, rows, entries)
    x = logits[places // inner, places % inner, columns].to(values.dtype)
    values[chosen] = x
    x, places, columns = (y[~x.isnan()] for y in (x, places, columns))
    none = torch.iinfo(torch.int64).max
    largest = x.new_full(rows.shape, -torch.inf).scatter_reduce(0, places, x, "amax")
    ids = columns.where(x == largest[places], none)
    lowest = columns.new_full(rows.shape, none).scatter_reduce(0, places, ids, "amin")
    best_ids, best_values = best.ids[rows], best.values[rows]
    better = (largest > best_values) | ((largest == best_values) & (lowest + first < best_ids))
    moved = (lowest < none) & ((best_ids < 0) | better)
    best.ids[rows] = (lowest + first).where(moved, best_ids)
    best.values[rows] = largest.where(moved, best_values)
    return lowest.where(moved, -1)


def scatter_entries(gradient: Tensor, first: int, rows: Tensor, entries: Entries, out: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    inner = out.shape[1]
    chosen, places, columns = _here(out, first, rows, entries)
    out[places // inner, places % inner, columns] = gradient[chosen].to(out.dtype)
