"""Log-probabilities of several entries per row, and their gradients, from the logits that the backends gather.

With b the best entry of a row, whose log-probability g_b has all its digits because it was the target of the row's
statistics, g_k = g_b + (z_k - z_b). For upstream gradients u_k with the sum U the gradient of an entry is
(dz/dx) (-u_k expm1(g_k) - p_k (U - u_k)), that of any other logit (dz/dx) (-p U): `row_gradient` with c = U and no
target, and then the entries' own, which are written over it.

Without a softcap z_k - z_b is the slope dz/dx times x_k - x_b: at most four float32 roundings of numbers no larger than
|g_k|, since g_b and z_k - z_b are at most 0, so an error of at most 2^-22 |g_k|. Where numbers cancel, in U - u_k and,
with a softcap, in z_k - z_b, they are float64. All works on a piece of the entries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Best, Entries, Statistics, Support, Transform
from fastrl.backend.torch.rows import transformed
from fastrl.base import checks
from fastrl.planning.tiling import elementwise_bytes

#: In place of an id: nothing is asked for there; the token is not in its row's sampling_mask set.
NOTHING, NOT_IN_SET = -1, -2
#: Bytes per entry that a piece of the elementwise work holds: without a softcap, and with one.
_PIECE_ENTRY_BYTES, _SOFTCAP_ENTRY_BYTES = 64, 128


class EntryValues(NamedTuple):
    """The entries of a call's rows, and the place for their logits, or their gradients."""

    entries: Entries
    values: Tensor  # (nnz,) float32
    best: Best
    first: int = 0  # the vocabulary entry of the head's first row

    def gather(self, logits: Tensor, first: int, row_ids: Tensor, backend: str) -> Tensor:
        """Gather from the logits (n, v) of these rows, of the head's rows [first, first + v).

        Returns the targets (n,) of their statistics, the best of the entries.
        """
        arguments = (self.first + first, row_ids, self.entries, self.values, self.best)
        targets: Tensor = row_functions(backend, logits).gather_entries(logits[None], *arguments)
        return targets

    def scatter(self, gradient: Tensor, first: int, row_ids: Tensor, backend: str) -> None:
        """Write the entries' gradients into a tile of dL/dlogits (n, v) of these rows."""
        arguments = (self.values, self.first + first, row_ids, self.entries)
        row_functions(backend, gradient).scatter_entries(*arguments, gradient[None])


def no_best(count: int, like: Tensor) -> Best:
    """That of `count` rows of which nothing has been seen, on the device of `like`."""
    ids = torch.full((count,), -1, dtype=torch.int64, device=like.device)
    return Best(ids, torch.full((count,), -torch.inf, dtype=wide_dtype(like), device=like.device))


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of numbers formed from logits like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_entries(entries: Entries, mask: Tensor | None, vocab: int) -> None:
    """Checks ids if values may be read; those of rows that the mask (N,) leaves out are not.

    Raises IndexError for an id outside [0, vocab), ValueError for one outside its row's support.
    """
    ids = entries.token_ids
    if not ids.shape[0] or not checks.values_are_checked(ids):
        return
    lowest, highest = ids.aminmax()
    if int(lowest) >= NOTHING and int(highest) < vocab:
        return
    bad = ((ids < 0) | (ids >= vocab)) & (ids != NOTHING)
    if mask is not None:
        bad &= mask[entries.rows()]
    if bool(bad.any()):
        entry = int(bad.nonzero()[0])
        row, token = int(torch.searchsorted(entries.offsets, entry, right=True)) - 1, int(ids[entry])
        place = f"ids row {row} has at place {entry - int(entries.offsets[row])}"
        if token == NOT_IN_SET:
            raise ValueError(f"{place} an id that is not in the row's sampling_mask set")
        what = f"the id {token}" if token < torch.iinfo(torch.int32).max else "an id"
        raise IndexError(f"{place} {what} outside [0, {vocab}) (-1 means that nothing is there)")


def support_places(entries: Entries, first: int, support: Entries | Support) -> Tensor:
    """(nnz,) int64: where each entry is in the CSR of a support, ascending within its rows; -1 if it is not there.

    The support's ids count from the entry `first` of the vocabulary.
    """
    if not support.token_ids.shape[0]:
        return torch.full_like(entries.token_ids, -1, dtype=torch.int64)
    ids = entries.token_ids - first
    keys = (support.rows() << 32) | support.token_ids.long()
    wanted = (entries.rows() << 32) | ids.long().clamp_min(0)
    places = torch.searchsorted(keys, wanted).clamp_max_(keys.shape[0] - 1)
    return places.where((keys[places] == wanted) & (ids >= 0), -1)


def best_of(values: Tensor, entries: Entries, there: Tensor) -> Best:
    """The best entry of each row, from the logits (nnz,) of those that are `there` (nnz,) bool."""
    rows, there = entries.rows(), there & ~values.isnan()
    x = values.where(there, -torch.inf)
    largest = over_rows(x, entries, "max", -torch.inf)
    ids = entries.token_ids.double().where(there & (x == largest[rows]), torch.inf)
    lowest = over_rows(ids, entries, "min", torch.inf)
    return Best(lowest.where(lowest.isfinite(), -1).long(), largest)


def over_rows(values: Tensor, entries: Entries, reduction: str, initial: float) -> Tensor:
    """(N,): the sum, the max or the min of the values (nnz,) of each row, always in the same order."""
    if not values.shape[0]:
        return values.new_full((entries.offsets.shape[0] - 1,), initial)
    reduced: Tensor = torch.segment_reduce(values, reduction, offsets=entries.offsets, initial=initial, unsafe=True)
    return reduced


def _pieces(entries: Entries, rows: Tensor, mask: Tensor | None, each: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Pieces of the entries, of `each` bytes per entry: (positions, their rows, which of them are asked for)."""
    nnz, device = entries.token_ids.shape[0], entries.token_ids.device
    step = elementwise_bytes(device.type) // each
    for first in range(0, nnz, step):
        part = slice(first, min(first + step, nnz))
        there = entries.token_ids[part] != NOTHING
        yield part, rows[part], there if mask is None else there & mask.index_select(0, rows[part])


def _entry_bytes(transform: Transform) -> int:
    return _SOFTCAP_ENTRY_BYTES if transform.softcap else _PIECE_ENTRY_BYTES


def _times_slope(x: Tensor, rows: Tensor, transform: Transform) -> Tensor:
    """x (n,) of entries in these rows, times dz/dx where there is no softcap; may be x itself, changed."""
    if transform.temperatures is not None:
        slope_of_rows = (transform.logit_scale / transform.temperatures.double()).to(x.dtype)
        return x.mul_(slope_of_rows.index_select(0, rows))
    slope = transform.logit_scale / transform.temperature
    return x if slope == 1 else x.mul_(slope)


def _softcapped(x: Tensor, rows: Tensor, transform: Transform) -> tuple[Tensor, Tensor]:
    """z and dz/dx, float64, of logits (n,) of entries in these rows."""
    t = transform.temperatures
    z, slope = transformed(
        x.double()[:, None], transform if t is None else transform._replace(temperatures=t.double()[rows])
    )
    return z[:, 0], slope[:, 0]


def entry_logprobs(
    values: Tensor,  # (nnz,), the logits
    entries: Entries,
    mask: Tensor | None,  # (N,) bool
    best: Best,
    best_logprobs: Tensor,  # (N,)
    transform: Transform,
    vocab: int,
) -> Tensor:
    """Log-probabilities (nnz,): 0 for nothing and in rows that do not count, NaN for an id that should not be there."""
    out, of_entries = torch.empty_like(values), entries.rows()
    checked = checks.values_are_checked(entries.token_ids)  # then there are no other ids
    # An infinite best logit makes its row's log-probabilities -inf or NaN; inf - inf would make NaN of -inf.
    best_values = best.values.masked_fill(best.values.isinf(), 0.0)
    for part, rows, there in _pieces(entries, of_entries, mask, _entry_bytes(transform)):
        x = values[part]
        if transform.softcap:
            best_x = best.values[rows]
            (z, _), (best_z, _) = (_softcapped(y, rows, transform) for y in (x, best_x))
            logprobs = (z - best_z).where(x != best_x, 0.0)
        else:
            logprobs = _times_slope(x - best_values.index_select(0, rows), rows, transform)
        logprobs += best_logprobs.index_select(0, rows)
        if not checked:
            ids = entries.token_ids[part]
            logprobs = logprobs.where((ids >= 0) & (ids < vocab), torch.nan)
        out[part] = logprobs.where(there, 0.0)
    return out


class EntryGradients(NamedTuple):
    """What the gradients of logits, or of hidden states, are formed from."""

    entries: Tensor  # (nnz,): dL/dlogits of the entries
    totals: Tensor  # (N,): U
    largest: Tensor  # (N,): the largest |u_k|, because U may be 0 where the gradient is not
    flags: Tensor  # (N,): NaN for a row with a NaN log-probability, 0 for the others

    def statistics(self, maximum: Tensor, log_sum: Tensor) -> Statistics:
        """What `row_gradient` reads: a NaN log-probability makes the row NaN, others are not used without a target."""
        return Statistics(self.flags, log_sum, maximum, log_sum)


def entry_gradients(
    upstream: Tensor,  # (nnz,)
    logprobs: Tensor,  # (nnz,)
    values: Tensor,  # (nnz,)
    entries: Entries,
    mask: Tensor | None,
    transform: Transform,
    slopes_best: Tensor | None = None,  # (N,) int64
) -> EntryGradients:
    """From the gradients of the log-probabilities.

    With `slopes_best`, which names the best entries, those of what is left beside U times the gradient of the best
    entry's log-probability: (dz/dx) (u_k - U 1[k is the best]).
    """
    u, out = torch.empty_like(upstream, dtype=torch.float64), torch.empty_like(values)
    of_entries, each, dtype = entries.rows(), _entry_bytes(transform), values.dtype
    for part, _, there in _pieces(entries, of_entries, mask, each):
        u[part] = upstream[part].where(there, 0.0)
    totals = over_rows(u, entries, "sum", 0.0)
    nan = over_rows(logprobs, entries, "sum", 0.0).isnan()  # none is +inf, and where nothing is asked for it is 0
    flags = torch.zeros_like(nan, dtype=dtype).masked_fill_(nan, torch.nan)
    flagged = totals + flags
    for part, rows, there in _pieces(entries, of_entries, mask, each):
        u_k = u[part]
        if slopes_best is None:
            g, others = logprobs[part], (flagged.index_select(0, rows) - u_k).to(dtype)
            gradient = -(torch.expm1(g).mul_(u_k.to(dtype)).addcmul_(g.exp(), others))
        else:
            best = entries.token_ids[part] == slopes_best.index_select(0, rows)
            gradient = (u_k - flagged.index_select(0, rows).where(best, 0.0)).to(dtype)
        if transform.softcap:
            gradient = gradient * _softcapped(values[part], rows, transform)[1]
        else:
            gradient = _times_slope(gradient, rows, transform)
        out[part] = gradient.where(there, 0.0)
    return EntryGradients(out, totals.to(dtype), over_rows(u.abs_(), entries, "max", 0.0).to(dtype), flags)
