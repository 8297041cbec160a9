"""Rows with a recorded support: which of them are gathered, and which take the dense kernels; what both paths share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Entries, Statistics, Support, Transform, entry_rows, offsets_of
from fastrl.base import checks
from fastrl.distributed.shards import VocabularyShard


class Supports(NamedTuple):
    """The recorded supports of a call's rows. Rows without a support, or with one too wide to gather, are dense."""

    support: Support  # valid: the rows whose entries are gathered
    dense: Tensor | None = None  # (N,) bool: the valid rows that take the dense kernels; None: no row does
    wide: Entries | None = None  # the supports of dense rows that have one (rows without ids have none); None: none has
    dense_rows: Tensor | None = None  # (n,) int64, of `wide` from logits: known to the backward without synchronisation


class RowOptions(NamedTuple):
    """What holds for the rows of a call, beside their targets."""

    mask: Tensor | None  # (N,) bool: the rows that count; those of the supports are among them
    transform: Transform
    supports: Supports | None = None

    @property
    def entries(self) -> int:
        """The number of the supports' entries."""
        return 0 if self.supports is None else self.supports.support.token_ids.shape[0]

    @property
    def dense(self) -> tuple[Tensor | None, Entries | None]:
        """The mask of the rows that take the dense kernels, and the supports of those that have one."""
        return (self.mask, None) if self.supports is None else (self.supports.dense, self.supports.wide)


def restrict(logits: Tensor, first: int, rows: Tensor, wide: Entries, backend: str) -> None:
    """Write -inf outside their supports into the logits (n, v) of these rows, of entries [first, first + v)."""
    row_functions(backend, logits).support_restrict(logits, first, rows, wide.token_ids, wide.offsets)


def together(dense: Statistics | None, support: Statistics) -> Statistics:
    """Merges statistics in which each row is 0 in one of the two; copies a lone one, as `row_statistics` does."""
    pairs = zip(dense or support, support, strict=True)
    return Statistics(*(b.clone() if dense is None else a + b for a, b in pairs))


def without_target(targets: Tensor, entries: Entries | Support) -> Tensor:
    """(N,) bool: rows that have entries but not their target among them."""
    rows = entries.rows()
    hits = (entries.token_ids == targets[rows]).to(torch.int32)
    return (entries.offsets.diff() > 0) & (torch.zeros_like(targets, dtype=torch.int32).index_add_(0, rows, hits) == 0)


def outside(targets: Tensor, supports: Supports) -> Tensor:
    """(N,) bool: valid rows whose target is not in their support."""
    support, dense, wide, _ = supports
    valid = support.valid if dense is None else support.valid | dense
    return without_target(targets, support if wide is None else wide) & valid


def check_targets(targets: Tensor, supports: Supports, vocab: int) -> None:
    """Checks targets if values may be read.

    Raises IndexError for a target outside [0, vocab), ValueError for one outside its support.
    """
    if not checks.values_are_checked(targets):
        return
    support, dense, wide, _ = supports
    checks.targets_in_range(targets, support.valid if dense is None else support.valid | dense, vocab)
    missing = outside(targets, supports)
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        offsets = support.offsets if wide is None else wide.offsets
        raise ValueError(
            f"targets row {row} is {int(targets[row])}, which is not in its sampling_mask set of"
            f" {int(offsets[row + 1] - offsets[row])} ids (SamplingMask.with_targets adds tokens that were forced,"
            " not drawn)"
        )


def of_shard(supports: Supports, shard: VocabularyShard) -> Supports:
    """The entries that this rank holds, counted from its first one; one synchronisation on a GPU for each kind of row.

    Which rows are gathered and which are dense stays what it is for the whole vocabulary, on every rank alike. A
    gathered row without an entry here has no ids, and its statistics are those of an empty slice. A dense row with a
    support that has no entry here gets the id `shard.size`, just past the rank's: without ids it would count as whole.
    """
    support, wide = supports.support, supports.wide
    narrow = _in_shard(support, shard, never_empty=False)
    if wide is not None:
        wide = _in_shard(wide, shard, never_empty=True)
    return supports._replace(support=Support(*narrow, support.valid), wide=wide)


def _in_shard(entries: Entries | Support, shard: VocabularyShard, never_empty: bool) -> Entries:
    offsets = entries.offsets
    rows = entry_rows(offsets, entries.token_ids.shape[0])
    ids = entries.token_ids - shard.start
    stays = here = (ids >= 0) & (ids < shard.size)
    lengths = torch.zeros_like(offsets[1:]).index_add_(0, rows, here.long())
    if never_empty:
        lacking = (lengths == 0) & (offsets.diff() > 0)
        first = torch.arange(rows.shape[0], device=rows.device) == offsets[rows]
        stays, ids, lengths = here | (lacking[rows] & first), ids.where(here, shard.size), lengths + lacking
    return Entries(ids[stays], offsets_of(lengths))


def elsewhere(supports: Supports) -> Tensor:
    """(N,) bool: over a group, rows of which this rank holds nothing: all of their entries are on other ranks."""
    here = supports.support.offsets.diff() > 0
    return ~here if supports.dense is None else ~(here | supports.dense)
