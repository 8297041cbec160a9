"""Checks of tensors with a number per token, of masks and of packed responses; sums along a response."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fastrl.base import checks

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def token_mask(mask: object, like_name: str, like: Tensor) -> Tensor:
    """A mask with the shape and device of `like`, as bool. Raises TypeError for None, else as `checks.mask`."""
    if mask is None:
        raise TypeError("mask must be a bool or 0/1 tensor, got NoneType")
    checked = checks.mask(mask, like, like_name)
    assert checked is not None
    return checked


def check_cu_seqlens(cu_seqlens: object, name: str, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `cu_seqlens` `(B+1,)` int32 on the device of the `tokens` `(N,)` it divides; errors call these `name`.

    Its values are checked if they may be read: 0 first, never decreasing, the number of tokens last, or less where the
    mask `(N,)`, bool, leaves out all tokens behind.
    """
    if tokens.ndim != 1:
        raise ValueError(f"{name} must have shape (tokens,) beside cu_seqlens, got {tuple(tokens.shape)}")
    cu_seqlens = checks.tensor("cu_seqlens", cu_seqlens, (torch.int32,))
    least = 1 + (tokens.numel() > 0)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < least:
        raise ValueError(
            f"cu_seqlens must have shape (responses + 1,), at least ({least},) for {tokens.numel()} tokens, got"
            f" {tuple(cu_seqlens.shape)}"
        )
    checks.same_device("cu_seqlens", cu_seqlens, tokens, name)
    if checks.values_are_checked(cu_seqlens):
        ends = cu_seqlens.tolist()
        place = 0 if ends[0] else next((i for i, (a, b) in enumerate(pairwise((*ends, tokens.numel()))) if a > b), -1)
        if place >= 0 or (ends[-1] < tokens.numel() and (mask is None or bool(mask[ends[-1] :].any()))):
            place %= len(ends)  # the last one leaves out tokens that count
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens, {tokens.numel()}, or to less where mask leaves"
                f" out the tokens behind, got {ends[place]} at {place}, among {ends[max(place - 2, 0) : place + 3]}"
            )
    return cu_seqlens


def discounted_sum(x: Tensor, key: Tensor, decay: float | Tensor) -> Tensor:
    """`y_t = x_t + decay_t y_{t+1}` within each run of equal keys, `(N,)`, by doubling: log2(N) steps instead of N.

    decay: a number, or `(N,)` with one number in each run.
    """
    total, step = x, 1
    rate = decay if isinstance(decay, Tensor) else x.new_full(x.shape, decay)
    # After k rounds total_t holds the first 2^k terms. Where the rate is 0, 0 * NaN would reach other tokens.
    while step < x.numel():
        reaches = (key[step:] == key[:-step]) & (rate[:-step] > 0)
        total = torch.cat([total[:-step] + torch.where(reaches, rate[:-step] * total[step:], 0.0), total[-step:]])
        rate, step = rate * rate, 2 * step
    return total
