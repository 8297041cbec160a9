"""The functions over support entries of `fastrl.backend.contract` in plain torch: the torch backend.

A few rows at a time are padded with -inf to a block, to which the row functions apply. float64 works too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastrl.backend.contract import ByToken, LossTerms, Statistics, Support, Transform
from fastrl.backend.torch.rows import BLOCK_ENTRIES, row_gradient, row_statistics, row_terms
from fastrl.objectives.rows import RowInputs, RowObjective


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _blocks(support: Support) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Blocks of rows: (rows, entries, the row of each entry within the block, its position within the row)."""
    lengths = support.offsets.diff()
    longest = int(lengths.max()) if lengths.shape[0] else 0
    step = max(1, BLOCK_ENTRIES // max(longest, 1))
    for start in range(0, lengths.shape[0], step):
        rows = slice(start, min(start + step, lengths.shape[0]))
        first, last = int(support.offsets[rows.start]), int(support.offsets[rows.stop])
        if first == last:
            continue
        row = torch.arange(rows.stop - rows.start, device=lengths.device).repeat_interleave(lengths[rows])
        place = torch.arange(first, last, device=lengths.device) - support.offsets[rows][row]
        yield rows, slice(first, last), row, place


def _padded(
    values: Tensor, support: Support, row: Tensor, place: Tensor, rows: slice, targets: Tensor
) -> tuple[Tensor, ...]:
    """Values (1, n, L) padded with -inf, the targets' positions (-1: outside the support), which rows take part."""
    lengths = support.offsets[rows.start : rows.stop + 1].diff()
    block = values.new_full((rows.stop - rows.start, int(lengths.max())), -torch.inf)
    block[row, place] = values
    first = int(support.offsets[rows.start])
    hits = support.token_ids[first : first + row.shape[0]] == targets[rows][row]
    places = targets.new_full((rows.stop - rows.start,), -1).index_put((row[hits],), place[hits])
    return block[None], places, support.valid[rows] & (lengths > 0)


def _of_rows(transform: Transform, rows: slice) -> Transform:
    t = transform.temperatures
    return transform if t is None else transform._replace(temperatures=t[rows])


def support_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, support: Support) -> Tensor:
    """See `fastrl.backend.contract`."""
    rows, dtype = support.rows(), _wide(hidden)
    values = torch.zeros(rows.shape[0], dtype=dtype, device=hidden.device)
    for part in torch.arange(rows.shape[0], device=rows.device).split(max(1, BLOCK_ENTRIES // hidden.shape[1])):
        ids, row = support.token_ids[part].long(), rows[part]
        product = (hidden[row].to(dtype) * weight[ids].to(dtype)).sum(-1)
        values[part] = (product if bias is None else product + bias[ids].to(dtype)).where(support.valid[row], 0.0)
    return values


def support_statistics(values: Tensor, targets: Tensor, support: Support, transform: Transform) -> Statistics:
    """See `fastrl.backend.contract`."""
    out = torch.zeros(4, targets.shape[0], dtype=values.dtype, device=values.device)
    for rows, entries, row, place in _blocks(support):
        block, places, valid = _padded(values[entries], support, row, place, rows, targets)
        out[:, rows] = torch.stack(row_statistics(block, places, valid, _of_rows(transform, rows)))
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
    for rows, entries, row, place in _blocks(support):
        block, places, valid = _padded(values[entries], support, row, place, rows, targets)
        known = Statistics(*(s[rows] for s in statistics))
        row_gradient(
            block, places, valid, _of_rows(transform, rows), known, c[rows], None if h is None else h[rows], block
        )
        out[entries] = block[0][row, place]


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
    takes_part = support.valid & (support.offsets.diff() > 0)
    terms, c, h = row_terms(statistics.logprobs, statistics.entropy, takes_part, objective, inputs)
    slopes = c, None if inputs.entropy_weights is None else h
    support_gradient(values, targets, support, transform, statistics, *slopes, out)
    return LossTerms(statistics.logprobs.clone(), statistics.entropy.clone(), terms)  # no result of which keeps others


def by_token(support: Support, vocab: int) -> ByToken:
    """See `fastrl.backend.contract`."""
    takes_part = support.valid.repeat_interleave(support.offsets.diff(), output_size=support.token_ids.shape[0])
    ids, entries = support.token_ids.where(takes_part, vocab).sort(stable=True)
    rows = torch.searchsorted(support.offsets, entries, right=True, out_int32=True)
    return ByToken(ids, entries, rows.sub_(1))


def support_hidden(gradient: Tensor, weight: Tensor, support: Support, out: Tensor, keep: bool) -> None:
    """See `fastrl.backend.contract`."""
    valid = support.valid & (support.offsets.diff() > 0)
    for row in valid.nonzero()[:, 0].tolist():
        entries = slice(int(support.offsets[row]), int(support.offsets[row + 1]))
        total = torch.zeros(weight.shape[1], dtype=_wide(weight), device=weight.device)
        for part in range(entries.start, entries.stop, max(1, BLOCK_ENTRIES // weight.shape[1])):
            chunk = slice(part, min(part + max(1, BLOCK_ENTRIES // weight.shape[1]), entries.stop))
            total += gradient[chunk].to(total.dtype) @ weight[support.token_ids[chunk].long()].to(total.dtype)
        out[row] = total


def support_weight(
    gradient: Tensor, hidden: Tensor, by_token: ByToken, out: Tensor | None, out_bias: Tensor | None, add: bool
) -> None:
    """See `fastrl.backend.contract`."""
    by_vocab = out if out is not None else out_bias
    if by_vocab is None:
        return
    dtype, step = _wide(hidden), max(1, BLOCK_ENTRIES // hidden.shape[1])
    tokens, lengths = by_token.token_ids.unique_consecutive(return_counts=True)
    start = 0
    for token, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        stop = start + length
        if token < by_vocab.shape[0]:
            g = gradient[by_token.entries[start:stop]].to(dtype)
            if out_bias is not None:
                out_bias[token] = g.sum() + (out_bias[token].to(dtype) if add else 0)
            if out is not None:
                total = out[token].to(dtype) if add else torch.zeros_like(out[token], dtype=dtype)
                for part in range(0, length, step):
                    rows = by_token.rows[start + part : min(start + part + step, stop)].long()
                    total = total + g[part : part + step] @ hidden[rows].to(dtype)
                out[token] = total
        start = stop


def support_restrict(logits: Tensor, first: int, rows: Tensor, token_ids: Tensor, offsets: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    for place, row in enumerate(rows.tolist()):
        ids = token_ids[int(offsets[row]) : int(offsets[row + 1])].long() - first
        if ids.shape[0]:
            outside = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            outside[ids[(ids >= 0) & (ids < logits.shape[1])]] = False
            logits[place].masked_fill_(outside, -torch.inf)
