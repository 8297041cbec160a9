"""Calls with a sampling mask: which rows gather their support's entries, and which use the dense kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import Support, entry_rows
from fastrl.base import checks
from fastrl.linear.head import Head
from fastrl.losses.arguments import VocabularyArguments
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.support import support_row_statistics
from fastrl.sampling_mask.csr import offsets_of
from fastrl.sampling_mask.mask import SamplingMask

#: Gathering one entry of the logits, by row and column, costs 40 bytes; the dense kernels read and write 4 to 8.
_WIDEST_FROM_LOGITS = 1 / 100


class Supports(NamedTuple):
    """The recorded support, split into rows whose entries are gathered and rows for the dense kernels."""

    support: Support
    dense: Tensor | None  # (N,) bool; None: no row is dense
    num_dense: int  # the number of dense rows, -1 if the host does not know it
    dense_support: DenseSupport | None  # of the dense rows that have a support


def checked_mask(sampling_mask: object, args: VocabularyArguments, vocab: int) -> SamplingMask | None:
    """Returns the sampling mask, checked against the call; None if there is none or it records nothing."""
    if sampling_mask is None:
        return None
    if not isinstance(sampling_mask, SamplingMask):
        raise TypeError(f"sampling_mask must be a fastrl.SamplingMask, got {type(sampling_mask).__name__}")
    rows = args.targets.shape[0]
    if len(sampling_mask) != rows:
        raise ValueError(f"sampling_mask must have one row per target, {rows}, got {len(sampling_mask)}")
    checks.same_device("sampling_mask", sampling_mask.token_ids, args.targets, "targets")
    sampling_mask.check_vocab(vocab)
    return sampling_mask if sampling_mask.token_ids.shape[0] else None


def split(
    mask: SamplingMask, args: VocabularyArguments, widest: int, asks: bool, gathers_wide: Callable[[int, int], bool]
) -> Supports:
    """Splits the rows. A support of more than `widest` ids is wide, and dense unless `gathers_wide(rows, ids)`.

    `asks`: whether the host may synchronise for the number of dense rows. If there may be wide rows, it synchronises
    for their number anyway.
    """
    valid = torch.ones_like(args.targets, dtype=torch.bool) if args.mask is None else args.mask
    if not mask.unrecorded and mask.longest <= widest:
        return Supports(Support(mask.token_ids, mask.offsets, valid), None, 0, None)
    lengths = mask.lengths
    recorded = (lengths > 0) & valid
    is_wide = None
    if mask.longest > widest and not torch.compiler.is_compiling():
        is_wide = recorded & (lengths > widest)
        rows_and_ids = torch.stack([is_wide.sum(), lengths.where(is_wide, 0).sum()]).tolist()
        if not rows_and_ids[0] or gathers_wide(*rows_and_ids):
            is_wide = None
    dense, num_dense = None, 0
    if mask.unrecorded or is_wide is not None:
        dense, num_dense = valid & ~recorded if is_wide is None else valid & (~recorded | is_wide), -1
        if checks.values_are_checked(dense) or (asks and not torch.compiler.is_compiling()):
            num_dense = int(dense.sum())
            dense = dense if num_dense else None
    if is_wide is None:
        return Supports(Support(mask.token_ids, mask.offsets, recorded), dense, num_dense, None)
    of_wide = is_wide[entry_rows(mask.offsets, mask.token_ids.shape[0])]
    narrow, wide = (
        (mask.token_ids[chosen], offsets_of(lengths.where(rows, 0)))
        for chosen, rows in ((~of_wide, ~is_wide), (of_wide, is_wide))
    )
    all_rows = torch.arange(len(mask), device=mask.device)
    return Supports(Support(*narrow, recorded & ~is_wide), dense, num_dense, DenseSupport(*wide, all_rows))


def split_support(sampling_mask: object, args: VocabularyArguments, vocab: int) -> Supports | None:
    """Splits the checked mask's rows for the entry points from logits; None if nothing is recorded.

    If any row has a wide support, rows without a support are added to `dense_support.rows`, and `dense` is None.
    """
    mask = checked_mask(sampling_mask, args, vocab)
    if mask is None:
        return None
    supports = split(mask, args, max(int(vocab * _WIDEST_FROM_LOGITS), 64), False, lambda rows, ids: False)
    if supports.dense_support is None or supports.dense is None:
        return supports
    rows = supports.dense.nonzero()[:, 0]
    return supports._replace(dense=None, num_dense=0, dense_support=supports.dense_support._replace(rows=rows))


def logits_over_support(
    rows: Tensor, args: VocabularyArguments, supports: Supports, backend: str, consume: bool
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) from logits (A, B, V)."""
    targets, _, transform = args
    stats = support_row_statistics(
        rows, targets, supports.dense, transform, supports.support, supports.dense_support, backend, consume
    )
    return stats.logprobs, stats.entropy


def unit_strides(head: Head) -> tuple[Head, int]:
    """The head with rows of unit stride, which the kernels for support entries need, and the bytes of the copies."""
    tensors, total = [], 0
    for x in head:
        strided = x is not None and x.stride(-1) != 1 and x.shape[-1] > 1
        tensors.append(x.contiguous() if strided and x is not None else x)
        total += 2 * x.numel() * x.element_size() if strided and x is not None else 0  # the copy and its gradient's
    return Head(*tensors), total  # type: ignore[arg-type]
