"""Calls with a sampling mask: which rows gather their support's entries, and which use the dense kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.backend.contract import Entries, Support, entry_rows, offsets_of
from fastrl.base import checks
from fastrl.passes.head import Head
from fastrl.passes.supports import Supports
from fastrl.sampling_mask.mask import SamplingMask

#: Gathering one entry of the logits, by row and column, costs 40 bytes; the dense kernels read and write 4 to 8.
_WIDEST_FROM_LOGITS = 1 / 100
#: The share of the vocabulary up to which a row's recorded entries are gathered, by bytes per element. Measured on two
#: cores of an EPYC at 128 to 512 rows x 512 and 1024 x 151936: 200 to 400 ns per entry, 4 ms per dense row in float32
#: and 1.2 ms in bfloat16. For a GPU, calculated from the speed of its memory and tensor cores; not measured.
_WIDEST = {"cpu": {4: 1 / 10, 2: 1 / 25}, "cuda": {4: 1 / 40, 2: 1 / 150}}
#: The number of dense rows whose products take as long as reading the head and writing its gradient: the fixed cost of
#: having any dense rows.
_ROWS_OF_A_HEAD = {"cpu": 32, "cuda": 275}


def widest_support(vocab: int, device: str, itemsize: int) -> int:
    """The largest support of a row for which gathering its entries is cheaper than dense products."""
    return max(int(vocab * _WIDEST.get(device, _WIDEST["cpu"])[itemsize]), 1)


def gathers(rows: int, entries: int, vocab: int, device: str, itemsize: int) -> bool:
    """Whether gathering `rows` rows with wide supports, of `entries` entries in total, is still cheaper."""
    fixed_rows = _ROWS_OF_A_HEAD.get(device, _ROWS_OF_A_HEAD["cpu"])
    return entries <= (rows + fixed_rows) * widest_support(vocab, device, itemsize)


def checked_mask(
    sampling_mask: object, targets: Tensor, vocab: int | None, keeps_empty: bool = False
) -> SamplingMask | None:
    """Returns the sampling mask, checked against targets (N,); None if there is none.

    One that records nothing is none, unless `keeps_empty`. With a vocab of None, which a rank does not know before the
    others told theirs, ids are not checked.
    """
    if sampling_mask is None:
        return None
    if not isinstance(sampling_mask, SamplingMask):
        raise TypeError(f"sampling_mask must be a fastrl.SamplingMask, got {type(sampling_mask).__name__}")
    rows = targets.shape[0]
    if len(sampling_mask) != rows:
        raise ValueError(f"sampling_mask must have one row per target, {rows}, got {len(sampling_mask)}")
    checks.same_device("sampling_mask", sampling_mask.token_ids, targets, "targets")
    if vocab is not None:
        sampling_mask.check_vocab(vocab)
    return sampling_mask if keeps_empty or sampling_mask.token_ids.shape[0] else None


def split(
    recorded: SamplingMask,
    targets: Tensor,
    mask: Tensor | None,
    widest: int,
    asks: bool,
    gathers_wide: Callable[[int, int], bool],
) -> tuple[Supports, int]:
    """Splits the rows; also returns the number of dense rows, -1 if the host does not know it.

    A support of more than `widest` ids is wide, and dense unless `gathers_wide(rows, ids)`. `asks`: whether the host
    may synchronise for the number of dense rows. If there may be wide rows, it synchronises for their number anyway.
    """
    ids, offsets = recorded.token_ids, recorded.offsets
    valid = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    if not recorded.unrecorded and recorded.longest <= widest:
        return Supports(Support(ids, offsets, valid)), 0
    lengths = recorded.lengths
    has_support = (lengths > 0) & valid
    is_wide = None
    if recorded.longest > widest and not torch.compiler.is_compiling():
        is_wide = has_support & (lengths > widest)
        rows_and_ids = torch.stack([is_wide.sum(), lengths.where(is_wide, 0).sum()]).tolist()
        if not rows_and_ids[0] or gathers_wide(*rows_and_ids):
            is_wide = None
    dense, num_dense = None, 0
    if recorded.unrecorded or is_wide is not None:
        dense, num_dense = valid & ~has_support if is_wide is None else valid & (~has_support | is_wide), -1
        if checks.values_are_checked(dense) or (asks and not torch.compiler.is_compiling()):
            num_dense = int(dense.sum())
            dense = dense if num_dense else None
    if is_wide is None:
        return Supports(Support(ids, offsets, has_support), dense), num_dense
    narrow = ~is_wide[entry_rows(offsets, ids.shape[0])]
    support = Support(ids[narrow], offsets_of(lengths.where(~is_wide, 0)), has_support & ~is_wide)
    return Supports(support, dense, Entries(ids, offsets)), num_dense


def split_support(sampling_mask: object, targets: Tensor, mask: Tensor | None, vocab: int) -> Supports | None:
    """Splits the checked mask's rows for the entry points from logits; None if nothing is recorded."""
    recorded = checked_mask(sampling_mask, targets, vocab)
    if recorded is None:
        return None
    widest = max(int(vocab * _WIDEST_FROM_LOGITS), 64)
    supports, _ = split(recorded, targets, mask, widest, False, lambda rows, ids: False)
    if supports.wide is None or supports.dense is None:
        return supports
    return supports._replace(dense_rows=supports.dense.nonzero()[:, 0])


def unit_strides(head: Head) -> tuple[Head, int]:
    """The head with rows of unit stride, which the kernels for support entries need, and the bytes of the copies."""
    tensors, total = [], 0
    for x in head[:3]:
        strided = x is not None and x.stride(-1) != 1 and x.shape[-1] > 1
        tensors.append(x.contiguous() if strided and x is not None else x)
        total += 2 * x.numel() * x.element_size() if strided and x is not None else 0  # the copy and its gradient's
    return Head.of(tensors, head.vocab), total
