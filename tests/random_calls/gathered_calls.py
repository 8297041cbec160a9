"""Random calls of `gathered_logprobs` and `linear_gathered_logprobs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comparing import Comparison
from drawing import Draw, lay
from exact_vocabulary import UNIT, Gradient, statistics
from logprob_calls import draw_shape, draw_upstream
from policy_calls import backward, made
from torch import Tensor
from vocabulary_draw import Vocabulary, draw_backend

import fastrl


def gathered_call(draw: Draw, compare: Comparison, *, linear: bool) -> None:
    """Any number of ids a row: repeated, nothing there, or ragged; each is exact as a target of its own."""
    inplace = not linear and draw.often(0.25)
    work = Vocabulary(draw, draw_shape(draw), linear=linear, inplace=inplace)
    n, k = work.tokens, draw.choice((0, 1, 2, 5, 17))
    ids = _ids(draw, work, n, k)
    ragged = k > 0 and draw.often(0.3)
    draw.tell(k=k, ragged=ragged)
    given: Any
    if ragged:
        lists = [sorted({x for x in row if x >= 0}) for row in ids.tolist()]
        ids = torch.full((n, k), -1)
        for row, of_row in zip(ids, lists, strict=True):
            row[: len(of_row)] = torch.tensor(of_row, dtype=torch.int64)
        given = fastrl.SamplingMask.from_lists(lists)
    else:
        written = ids.clone()
        if "mask" in work.options and draw.often(0.5):
            written[~work.mask] = work.vocab + 7  # not read
        given = lay(draw, written.view(*work.shape, k))
    work.arguments[-1] = given
    rows = [
        statistics(work.x, work.x_error, column.clamp(min=0), work.mask & (column >= 0), work.settings)
        for column in ids.t()
    ]
    with draw_backend(draw):
        out = made(draw, fastrl.linear_gathered_logprobs if linear else fastrl.gathered_logprobs, work)
        there = (ids >= 0).flatten() if ragged else torch.ones(n * k, dtype=torch.bool)
        if k:
            exact, allowed = (torch.stack([getattr(x, name) for x in rows], 1) for name in ("logp", "logp_error"))
            # The best entry's own error, and that of the difference to it.
            allowed = allowed + torch.where(exact != 0, allowed.amin(1, keepdim=True), 0.0)
            shape = (-1,) if ragged else (*work.shape, k)
            compare.close("logprobs", out, exact.flatten()[there].view(shape), allowed.flatten()[there].view(shape))
        else:
            compare.equal("shape", tuple(out.shape), (*work.shape, k))
        if not work.differentiable:
            return
        u = [draw_upstream(draw, n) for _ in range(k)]
        stacked = torch.stack(u, 1) if k else torch.zeros(n, 0, dtype=torch.float64)
        total = (out.flatten() * stacked.flatten()[there].float()).sum()
        factor = backward(draw, total, work, 1.0)
        zero = torch.zeros(n, dtype=torch.float64)
        own, whole = work.rows, work.slopes(zero, zero, zero, zero)
        for x, row in zip(u, rows, strict=True):
            work.rows = row
            whole = _sum(whole, work.slopes(factor * x * (row.logp != 0), zero, zero, zero))
        work.rows = own
        if linear and k and not any(work.needs(name) for name in ("weight", "bias") if name in work.given):
            total = sum((abs(factor) * x.abs() * (row.logp != 0) for x, row in zip(u, rows, strict=True)), zero)
            whole = replace(whole, error=whole.error + UNIT[work.dtype] * _at_best(work, ids) * total[:, None])
        work.compare_gradients(compare, whole)


def _at_best(work: Vocabulary, ids: Tensor) -> Tensor:
    """(N, V), 1 at the likeliest of each row's ids: a frozen head's gradient is that of this entry, and differences."""
    logits = work.x.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    return torch.zeros_like(work.x).scatter(1, ids.clamp(min=0).gather(1, logits.argmax(1, keepdim=True)), 1.0)


def _ids(draw: Draw, work: Vocabulary, n: int, k: int) -> Tensor:
    """(n, k) of possible entries: of a row's recorded set, and not those of probability 0; some are nothing."""
    possible = work.x > -torch.inf
    if work.settings.support is not None:
        possible &= work.settings.support
    ids = (draw.floats(n, k, work.vocab) * possible[:, None]).argmax(-1) if n * k else torch.zeros(n, k).long()
    nothing = draw.choice((0.0, 0.3, 1.0))
    return ids.masked_fill(draw.floats(n, k) < nothing, -1)


def _sum(a: Gradient, b: Gradient) -> Gradient:
    parts = (a.value + b.value, a.error + b.error, a.parts + b.parts)
    return replace(a, value=parts[0], error=parts[1], parts=parts[2], largest=max(a.largest, b.largest))
