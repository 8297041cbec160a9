"""The functions over support entries, and over entries asked for, of `fastrl.backend.contract` in plain torch.

A few rows of a support at a time are padded with -inf to a block, to which the row functions apply. float64 works too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastrl.backend.contract import Best, ByToken, Entries, LossTerms, Statistics, Support, Transform
from fastrl.backend.torch.rows import BLOCK_ENTRIES, row_gradient, row_statistics, row_terms, wide
from fastrl.objectives.rows import RowInputs, RowObjective


def _takes_part(support: Support) -> Tensor:
    return support.valid & (support.offsets.diff() > 0)


def _blocks(
    values: Tensor, targets: Tensor, support: Support, transform: Transform
) -> Iterator[tuple[slice, slice, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Transform]]]:
    """Blocks of rows: (rows, entries, the row and the column of each entry in the block, the block).

    The block is what the row functions take: values (1, n, L) padded with -inf, the columns of the targets (-1: outside
    the support), which rows take part, and the transform.
    """
    lengths, valid = support.offsets.diff(), _takes_part(support)
    longest = int(lengths.max()) if lengths.shape[0] else 0
    step = max(1, BLOCK_ENTRIES // max(longest, 1))
    for start in range(0, lengths.shape[0], step):
        rows = slice(start, min(start + step, lengths.shape[0]))
        entries = slice(int(support.offsets[rows.start]), int(support.offsets[rows.stop]))
        if entries.start == entries.stop:
            continue
        row = torch.arange(rows.stop - start, device=lengths.device).repeat_interleave(lengths[rows])
        column = torch.arange(entries.start, entries.stop, device=lengths.device) - support.offsets[rows][row]
        block = values.new_full((rows.stop - start, int(lengths[rows].max())), -torch.inf)
        block[row, column] = values[entries]
        hits = support.token_ids[entries] == targets[rows][row]
        columns = torch.full_like(targets[rows], -1).index_put((row[hits],), column[hits])
        yield rows, entries, (row, column), (block[None], columns, valid[rows], transform.of(rows))


def support_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, support: Support) -> Tensor:
    """See `fastrl.backend.contract`."""
    rows, dtype = support.rows(), wide(hidden)
    values = torch.zeros(rows.shape[0], dtype=dtype, device=hidden.device)
    for part in torch.arange(rows.shape[0], device=rows.device).split(max(1, BLOCK_ENTRIES // hidden.shape[1])):
        ids, row = support.token_ids[part].long(), rows[part]
        product = (hidden[row].to(dtype) * weight[ids].to(dtype)).sum(-1)
        values[part] = (product if bias is None else product + bias[ids].to(dtype)).where(support.valid[row], 0.0)
    return values


def support_statistics(values: Tensor, targets: Tensor, support: Support, transform: Transform) -> Statistics:
    """See `fastrl.backend.contract`."""
    out = torch.zeros(4, targets.shape[0], dtype=values.dtype, device=values.device)
    for rows, _, _, block in _blocks(values, targets, support, transform):
        out[:, rows] = torch.stack(row_statistics(*block))
    return Statistics(*out)


def support_gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    out: Tensor,
) -> None:
    """See `fastrl.backend.contract`."""
    for rows, entries, places, block in _blocks(values, targets, support, transform):
        known = Statistics(*(s[rows] for s in statistics))
        row_gradient(*block, known, c[rows], None if h is None else h[rows], block[0])
        out[entries] = block[0][0][places]


def support_forward_gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor,
) -> LossTerms:
    """See `fastrl.backend.contract`."""
    statistics = support_statistics(values, targets, support, transform)
    terms, c, h = row_terms(statistics.logprobs, statistics.entropy, _takes_part(support), objective, inputs)
    coefficients = c, None if inputs.entropy_weights is None else h
    support_gradient(values, targets, support, transform, statistics, *coefficients, out)
    return LossTerms(statistics.logprobs.clone(), statistics.entropy.clone(), terms)  # no result of which keeps others


def by_token(support: Support, vocab: int) -> ByToken:
    """See `fastrl.backend.contract`."""
    takes_part = support.valid.repeat_interleave(support.offsets.diff(), output_size=support.token_ids.shape[0])
    ids, entries = support.token_ids.where(takes_part, vocab).sort(stable=True)
    rows = torch.searchsorted(support.offsets, entries, right=True, out_int32=True)
    return ByToken(ids, entries, rows.sub_(1))


def _add_products(total: Tensor, gradient: Tensor, matrix: Tensor, rows: Tensor) -> Tensor:
    """total (H,) + gradient (n,) @ matrix[rows] (n, H), a few rows at a time, in the dtype of the total."""
    step = max(1, BLOCK_ENTRIES // matrix.shape[1])
    for part, chosen in zip(gradient.split(step), rows.split(step), strict=True):
        total = total + part.to(total.dtype) @ matrix[chosen.long()].to(total.dtype)
    return total


def support_hidden(gradient: Tensor, weight: Tensor, support: Support, out: Tensor, keep: bool) -> None:
    """See `fastrl.backend.contract`."""
    zeros = torch.zeros(weight.shape[1], dtype=wide(weight), device=weight.device)
    for row in _takes_part(support).nonzero()[:, 0].tolist():
        entries = slice(int(support.offsets[row]), int(support.offsets[row + 1]))
        out[row] = _add_products(zeros, gradient[entries], weight, support.token_ids[entries])


def support_weight(
    gradient: Tensor, hidden: Tensor, by_token: ByToken, out: Tensor | None, out_bias: Tensor | None, add: bool
) -> None:
    """See `fastrl.backend.contract`."""
    by_vocab = out if out is not None else out_bias
    if by_vocab is None:
        return
    dtype = wide(hidden)
    tokens, counts = by_token.token_ids.unique_consecutive(return_counts=True)
    lengths = counts.tolist()
    for token, entries, rows in zip(
        tokens.tolist(), by_token.entries.split(lengths), by_token.rows.split(lengths), strict=True
    ):
        if token >= by_vocab.shape[0]:
            continue
        g = gradient[entries].to(dtype)
        if out_bias is not None:
            out_bias[token] = g.sum() + (out_bias[token].to(dtype) if add else 0)
        if out is not None:
            before = out[token].to(dtype) if add else torch.zeros_like(out[token], dtype=dtype)
            out[token] = _add_products(before, g, hidden, rows)


def support_restrict(logits: Tensor, first: int, rows: Tensor, token_ids: Tensor, offsets: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    for place, row in enumerate(rows.tolist()):
        ids = token_ids[int(offsets[row]) : int(offsets[row + 1])].long() - first
        if ids.shape[0]:
            outside = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            outside[ids[(ids >= 0) & (ids < logits.shape[1])]] = False
            logits[place].masked_fill_(outside, -torch.inf)


# --- entries asked for ------------------------------------------------------------------------------------------------


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
