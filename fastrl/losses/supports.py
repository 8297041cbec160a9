"""Calls with a sampling mask: which rows gather their support's entries, and which use the dense kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import Support, entry_rows
from fastrl.base import checks
from fastrl.distributed.shards import VocabularyShard
from fastrl.linear.head import Head
from fastrl.losses.arguments import VocabularyArguments
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.sharded import sharded_row_statistics
from fastrl.operators.support import check_targets, support_row_statistics, without_target
from fastrl.planning.tiling import Sizes
from fastrl.sampling_mask.csr import offsets_of
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


class Supports(NamedTuple):
    """The recorded support, split into rows whose entries are gathered and rows for the dense kernels."""

    support: Support
    dense: Tensor | None  # (N,) bool; None: no row is dense
    num_dense: int  # the number of dense rows, -1 if the host does not know it
    dense_support: DenseSupport | None  # of the dense rows that have a support


def widest_support(vocab: int, device: str, itemsize: int) -> int:
    """The largest support of a row for which gathering its entries is cheaper than dense products."""
    return max(int(vocab * _WIDEST.get(device, _WIDEST["cpu"])[itemsize]), 1)


def gathers(rows: int, entries: int, sizes: Sizes) -> bool:
    """Whether gathering `rows` rows with wide supports, of `entries` entries in total, is still cheaper."""
    fixed_rows = _ROWS_OF_A_HEAD.get(sizes.device, _ROWS_OF_A_HEAD["cpu"])
    return entries <= (rows + fixed_rows) * widest_support(sizes.vocab, sizes.device, sizes.itemsize)


def checked_mask(sampling_mask: object, args: VocabularyArguments, vocab: int | None) -> SamplingMask | None:
    """Returns the sampling mask, checked against the call; None if there is none or it records nothing.

    With a vocab of None, which a rank does not know before the others told theirs, ids are not checked.
    """
    if sampling_mask is None:
        return None
    if not isinstance(sampling_mask, SamplingMask):
        raise TypeError(f"sampling_mask must be a fastrl.SamplingMask, got {type(sampling_mask).__name__}")
    rows = args.targets.shape[0]
    if len(sampling_mask) != rows:
        raise ValueError(f"sampling_mask must have one row per target, {rows}, got {len(sampling_mask)}")
    checks.same_device("sampling_mask", sampling_mask.token_ids, args.targets, "targets")
    if vocab is not None:
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


def local_supports(supports: Supports, shard: VocabularyShard) -> Supports:
    """The entries that this rank holds, counted from its first one; one synchronisation on a GPU for each kind of row.

    Which rows are gathered and which are dense stays what it is for the whole vocabulary, on every rank alike. A
    gathered row without an entry here has no ids, and its statistics are those of an empty slice. A dense row with a
    support that has no entry here gets the id `shard.size`, just past the rank's: without ids it would count as whole.
    """
    support, wide = supports.support, supports.dense_support
    narrow = _local_entries(support.token_ids, support.offsets, shard, False)
    if wide is not None:
        ids, offsets = _local_entries(wide.token_ids, wide.offsets, shard, True)
        wide = wide._replace(token_ids=ids, offsets=offsets)
    return supports._replace(support=Support(*narrow, support.valid), dense_support=wide)


def _local_entries(
    token_ids: Tensor, offsets: Tensor, shard: VocabularyShard, never_empty: bool
) -> tuple[Tensor, Tensor]:
    rows = entry_rows(offsets, token_ids.shape[0])
    ids = token_ids - shard.start
    kept = here = (ids >= 0) & (ids < shard.size)
    lengths = torch.zeros_like(offsets[1:]).index_add_(0, rows, here.long())
    if never_empty:
        lacking = (lengths == 0) & (offsets.diff() > 0)
        first = torch.arange(rows.shape[0], device=rows.device) == offsets[rows]
        kept, ids, lengths = here | (lacking[rows] & first), ids.where(here, shard.size), lengths + lacking
    return ids[kept], offsets_of(lengths)


def outside_support(targets: Tensor, supports: Supports) -> Tensor:
    """(N,) bool: rows whose target is not in their support, of which a rank that lacks the target would not know."""
    outside = without_target(targets, supports.support.token_ids, supports.support.offsets)
    if (wide := supports.dense_support) is not None:
        outside |= without_target(targets, wide.token_ids, wide.offsets)
    return outside


def logits_over_support(
    rows: Tensor, args: VocabularyArguments, supports: Supports, vocab: int, backend: str, consume: bool
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) from logits (A, B, V)."""
    targets, _, transform = args
    stats = support_row_statistics(
        rows, targets, supports.dense, transform, supports.support, supports.dense_support, vocab, backend, consume
    )
    return stats.logprobs, stats.entropy


def sharded_stats(
    rows: Tensor,
    args: VocabularyArguments,
    supports: Supports | None,
    backend: str,
    consume: bool,
    shard: VocabularyShard,
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) from a rank's logits (A, B, V_r).

    `supports` are of the whole vocabulary, for which targets are checked, so that all ranks raise or none.
    """
    if supports is None:
        checks.targets_in_range(args.targets, args.mask, shard.total)
        return sharded_row_statistics(rows, *args, shard, backend, consume)
    check_targets(args.targets, supports.dense, supports.support, supports.dense_support, shard.total)
    own = local_supports(supports, shard)
    outside = outside_support(args.targets, supports)
    return sharded_row_statistics(
        rows, *args, shard, backend, consume, own.dense, own.support, own.dense_support, outside
    )


def unit_strides(head: Head) -> tuple[Head, int]:
    """The head with rows of unit stride, which the kernels for support entries need, and the bytes of the copies."""
    tensors, total = [], 0
    for x in head.tensors:
        strided = x is not None and x.stride(-1) != 1 and x.shape[-1] > 1
        tensors.append(x.contiguous() if strided and x is not None else x)
        total += 2 * x.numel() * x.element_size() if strided and x is not None else 0  # the copy and its gradient's
    return Head.of(tensors, head.vocab), total
