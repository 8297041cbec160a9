"""Each token's response, in three layouts: padded `(B, T)`, packed `(N,)` with `cu_seqlens`, or one response `(N,)`.

The functions of `fastrl/advantages/` work on flattened tokens and a response number per token, so that the
three layouts share one code path and none of them needs the longest length on the host.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fastrl.base import checks

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def same_layout(name: str, value: object, like_name: str, like: Tensor) -> Tensor:
    """Return the value if it is a floating-point tensor with the shape and the device of `like`."""
    value = checks.tensor(name, value)
    checks.shape(name, value, like.shape, f"the shape of {like_name}")
    checks.same_device(name, value, like, like_name)
    return value


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


class Responses:
    """The responses of a padded (G, T) or packed batch: sums per response, and their values spread over the tokens."""

    def __init__(
        self, shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device, mask: Tensor | None = None
    ) -> None:
        """`cu_seqlens` and `mask`, as given, are checked; masked tokens behind the last response become its own."""
        self.count, self.length = 1, shape.numel()
        self.offsets: Tensor | None = None
        wrong = checks.wrong_mask(mask)
        #: bool (): cu_seqlens or the mask are wrong, where they may not be read on the host
        self.wrong = None if wrong is None else wrong.any()
        if cu_seqlens is not None:
            self.count = cu_seqlens.shape[0] - 1
            self.offsets = given = cu_seqlens.long()
            position = torch.arange(shape.numel(), device=device)
            if not checks.values_are_checked(cu_seqlens):
                # An index out of range would end the process's work on its GPU: results become NaN instead.
                self.offsets = given.clamp(0, shape.numel()).cummax(0).values
                behind = given[-1] < shape.numel() if mask is None else ((mask != 0) & (position >= given[-1])).any()
                bad = (given != self.offsets).any() | (given[0] != 0) | behind
                self.wrong = bad if self.wrong is None else self.wrong | bad
            if mask is not None:
                self.offsets[-1] = shape.numel()
            self.owner = torch.searchsorted(self.offsets[1:].contiguous(), position, right=True)
            if self.wrong is not None:
                self.owner.clamp_max_(max(self.count - 1, 0))
        elif len(shape) > 1:
            self.count, self.length = shape[:-1].numel(), shape[-1]

    #: Whether further tokens of these responses lie on other ranks (`fastrl.distributed.responses`).
    over_ranks = False

    def sum(self, *summands: Tensor) -> Tensor:
        """(N,) each -> (G,): their sums over each response, in a fixed order, added up; 0 for an empty response."""
        return self.ranks_sum(sum(map(self._own_sum, summands[1:]), start=self._own_sum(summands[0])))

    def _own_sum(self, x: Tensor) -> Tensor:
        if self.offsets is None:
            return self.right(x.reshape(self.count, self.length).sum(-1))
        if x.numel() == 0:
            return x.new_zeros(self.count) + x.sum()
        return self.right(torch.segment_reduce(x, "sum", offsets=self.offsets, initial=0, axis=0))

    def right(self, y: Tensor) -> Tensor:
        """y of any shape, or NaN if cu_seqlens do not divide the tokens, or the mask holds neither 0 nor 1."""
        return y if self.wrong is None or not y.is_floating_point() else y.masked_fill(self.wrong, torch.nan)

    def ranks_sum(self, x: Tensor) -> Tensor:
        """x, which was computed from these tokens, summed over all ranks that hold tokens of the responses."""
        return x

    def all_tokens(self, x: Tensor, filler: float) -> Tensor:
        """(..., N) -> (..., M): all tokens' values, without a gradient; of `filler` any number, between them."""
        return x

    def number_of_all(self, own: int) -> int:
        """M of `all_tokens`, for `own` tokens of this batch."""
        return own

    def own_of_all(self, x: Tensor, own: int) -> Tensor:
        """(M,) -> (N,): of values in the order of `all_tokens` those of this batch's `own` tokens."""
        return x

    def totals(self, loss: Tensor, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss 0-dim, sums (k,) and maxima (m,) over all tokens from those over these tokens.

        The gradient of the loss alone stays, with respect to these tokens.
        """
        return loss, sums, largest

    def spread(self, y: Tensor) -> Tensor:
        """(G,) -> (N,): each token gets its response's value."""
        return self.shared(y).reshape(-1)

    def shared(self, y: Tensor) -> Tensor:
        """`spread` without a copy if it can be: (N,), or a view (G, T)."""
        return y[:, None].expand(self.count, self.length) if self.offsets is None else self.right(y)[self.owner]

    def number(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """(N,) bool -> (G,): how many of these tokens are chosen."""
        if self.offsets is None:
            return chosen.reshape(self.count, self.length).sum(-1, dtype=dtype)
        return self._own_sum(chosen.to(dtype))

    def divided(self, x: Tensor, y: Tensor) -> Tensor:
        """x (N,) / y (G,): each token by its response's value."""
        each = self.shared(y)
        return (x.view_as(each) / each).reshape(-1)

    def owners(self, device: torch.device) -> Tensor:
        """(N,) int64: the response of each token."""
        if self.offsets is not None:
            return self.owner
        return torch.arange(self.count, device=device).repeat_interleave(self.length)


def responses_of(name: str, tokens: Tensor, cu_seqlens: Tensor | None, mask: Tensor) -> Responses:
    """The responses that the tokens belong to.

    Args:
        name: the name of `tokens` in errors.
        tokens: `(B, T)`; or `(N,)`, packed if `cu_seqlens` is given and otherwise one response.
        cu_seqlens: int32 `(B+1,)`, the start of each packed response, and the end of the last.
        mask: like `tokens`, checked by `token_mask`, but as given.

    Raises:
        TypeError, ValueError: as `check_cu_seqlens`, and for another number of dimensions.
    """
    if cu_seqlens is None and tokens.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (responses, time) or (tokens,), got {tuple(tokens.shape)}")
    checked = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, name, tokens, mask)
    return Responses(tokens.shape, checked, tokens.device, mask)


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
