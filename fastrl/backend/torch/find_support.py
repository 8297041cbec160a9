"""The vocabulary entries that a sampler keeps, in plain torch: `find_support` of `fastrl.backend.contract`.

Every cut is a pivot: the smallest z such that the entries <= z weigh more than a limit. The weights are 1 (top-k) or
the probability (top-p). The pivot is found without a sort, by bisection over integer keys in the order of the floats:
32 steps per cut, each one sweep over a block of rows. Probabilities are summed in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl.backend.contract import offsets_of
from fastrl.backend.torch.rows import row_blocks

_WRONG = {1: "a NaN", 2: "a +inf", 3: "nothing but -inf"}
_LEAST = -0x7F800000  # the key of the lowest finite float32


def _scaled(x: Tensor, temperature: float) -> Tensor:
    # Divide by a tensor: on CUDA, division by a number multiplies by its reciprocal, which makes different ties.
    x = x.float()
    return x / x.new_full((), temperature)


def _keys(z: Tensor) -> Tensor:
    """int64 keys in the order of float32 z; -0 and +0 have the same key."""
    bits = (z + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _pivot(keys: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """(n, 1): the smallest key such that the keys <= it weigh more than the limit, at most the largest key."""
    high = keys.amax(-1, keepdim=True)
    low = torch.full_like(high, _LEAST - 1)
    for _ in range(32):
        middle = (low + high) >> 1
        exceeds = weights.where(keys <= middle, 0).sum(-1, keepdim=True) > limit
        high, low = middle.where(exceeds, high), low.where(exceeds, middle)
    return high


def _top_p(z: Tensor, keys: Tensor, lowest: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The pivot among the entries with keys >= `lowest`, and how many entries equal to it are dropped."""
    masses = (z.double() - z.amax(-1, keepdim=True)).exp().where(keys >= lowest, 0.0)
    limit = (1.0 - top_p) * masses.sum(-1, keepdim=True)
    pivot = _pivot(keys, masses, limit)
    below = masses.where(keys < pivot, 0.0).sum(-1, keepdim=True)
    ties = keys == pivot
    mass = masses.where(ties, 0.0).amax(-1, keepdim=True)
    dropped = ((limit - below) / mass).floor().long()
    return pivot, torch.minimum(dropped.clamp_min(0), ties.sum(-1, keepdim=True) - 1)


def _cut(z: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """z's keys (n, V), the smallest key that is kept (n, 1), and how many entries with that key are dropped (n, 1)."""
    keys = _keys(z)
    pivot = torch.full_like(keys[:, :1], _LEAST)
    dropped = torch.zeros_like(pivot)
    if 0 < top_k < z.shape[-1]:
        finite = (keys >= _LEAST).long()
        pivot = _pivot(keys, finite, (finite.sum(-1, keepdim=True) - top_k).clamp_min(0))
    if top_p < 1:
        pivot, dropped = _top_p(z, keys, pivot, top_p)
    if min_p > 0:
        likely = z.double() >= z.amax(-1, keepdim=True).double() + math.log(min_p)
        bound = keys.where(likely, 1 << 31).amin(-1, keepdim=True)
        dropped = dropped.where(bound <= pivot, 0)
        pivot = torch.maximum(bound, pivot)
    return keys, pivot, dropped


def _kept(keys: Tensor, pivot: Tensor, dropped: Tensor) -> Tensor:
    ties = keys == pivot
    return (keys > pivot) | (ties & (ties.cumsum(-1) > dropped))


def _wrong(x: Tensor, z: Tensor) -> Tensor:
    """Why a row is not a distribution: a key of `_WRONG`; 0 if it is one."""
    largest = z.amax(-1)
    infinite = 3 * (largest == -torch.inf) + 2 * (largest == torch.inf)
    return torch.where(x.isnan().any(-1), 1, infinite)


def find_support(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """See `fastrl.backend.contract`.

    The host waits for the device once. A first pass stores 24 bytes per row that say what is kept; after the wait, a
    second pass writes the token ids.
    """
    a, b, vocab = logits.shape
    if vocab == 0 and a * b:
        raise ValueError("logits row 0 has nothing but -inf")
    cuts = torch.zeros(4, a * b, dtype=torch.int64, device=logits.device)  # pivot, dropped, count, key of _WRONG
    for x, rows in row_blocks(logits):
        z = _scaled(x, temperature)
        keys, pivot, dropped = _cut(z.nan_to_num(0.0, 0.0, -torch.inf), top_k, top_p, min_p)
        counts = _kept(keys, pivot, dropped).sum(-1)
        cuts[:, rows] = torch.stack([pivot[:, 0], dropped[:, 0], counts, _wrong(x, z)])
    pivots, dropped, counts, wrong = cuts
    offsets = offsets_of(counts)
    total, errors = torch.stack([offsets[-1], wrong.sum()]).tolist()
    if errors:
        row = int(wrong.nonzero()[0])
        raise ValueError(f"logits row {row} has {_WRONG[int(wrong[row])]}")
    columns = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    # The last slot takes all dropped entries, so that no size depends on the mask.
    token_ids = columns.new_empty(total + 1)
    for x, rows in row_blocks(logits):
        kept = _kept(_keys(_scaled(x, temperature)), pivots[rows, None], dropped[rows, None])
        places = (kept.cumsum(-1) - 1 + offsets[:-1][rows, None]).where(kept, total)
        token_ids[places] = columns.expand_as(places)
    return token_ids[:-1], offsets
