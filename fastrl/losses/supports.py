"""Calls with a recorded support: which rows gather its entries, which take the dense kernels, by which plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backends.choice import forced
from fastrl.backends.contract import Support, entry_rows
from fastrl.base import checks
from fastrl.linear.head import Head
from fastrl.linear.supports import support_linear_statistics
from fastrl.losses.arguments import VocabularyArguments, plan_call
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.support import support_row_statistics
from fastrl.planning.plans import choose
from fastrl.planning.tiling import gathers, widest_support
from fastrl.sampling_mask.csr import offsets_of
from fastrl.sampling_mask.mask import SamplingMask

#: Of logits, an entry is gathered at 40 bytes, by the row and the column; the dense kernels read and write 4 to 8.
_WIDEST_FROM_LOGITS = 1 / 100


class Supports(NamedTuple):
    """The recorded support, split into rows whose entries are gathered and rows for the dense kernels."""

    support: Support
    dense: Tensor | None  # (N,) bool; None: no row is dense
    num_dense: int  # their number, -1 where the host does not know
    dense_support: DenseSupport | None  # of dense rows that have one


def checked_mask(sampling_mask: object, args: VocabularyArguments, vocab: int) -> SamplingMask | None:
    """A sampling mask that fits the call; None without one, or where it records nothing."""
    if sampling_mask is None:
        return None
    if not isinstance(sampling_mask, SamplingMask):
        raise TypeError(f"sampling_mask must be a fastrl.SamplingMask, got {type(sampling_mask).__name__}")
    rows = args.targets.shape[0]
    if len(sampling_mask) != rows:
        raise ValueError(f"sampling_mask must have one row a target, {rows}, got {len(sampling_mask)}")
    checks.same_device("sampling_mask", sampling_mask.token_ids, args.targets, "targets")
    sampling_mask.check_vocab(vocab)
    return sampling_mask if sampling_mask.token_ids.shape[0] else None


def _split(
    mask: SamplingMask, args: VocabularyArguments, widest: int, asks: bool, gathers_wide: Callable[[int, int], bool]
) -> Supports:
    """The support of rows with more than `widest` ids is wide, unless `gathers_wide(rows, ids)` says that they are few.

    `asks`: whether a GPU may be asked how many rows are dense; it is where there may be wide ones.
    """
    lengths = mask.lengths
    valid = torch.ones_like(lengths, dtype=torch.bool) if args.mask is None else args.mask
    recorded = (lengths > 0) & valid
    is_wide = None
    if mask.longest > widest and not torch.compiler.is_compiling():
        is_wide = recorded & (lengths > widest)
        numbers = torch.stack([is_wide.sum(), lengths.where(is_wide, 0).sum()]).tolist()
        if not numbers[0] or gathers_wide(*numbers):
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
    everything = torch.arange(len(mask), device=mask.device)
    return Supports(Support(*narrow, recorded & ~is_wide), dense, num_dense, DenseSupport(*wide, everything))


def split_support(sampling_mask: object, args: VocabularyArguments, vocab: int) -> Supports | None:
    """For the entry points from logits: the checked mask's rows, None where nothing is recorded.

    Where any row has a wide support, the rows without one go its way: `dense` is None, and they are among its rows.
    """
    mask = checked_mask(sampling_mask, args, vocab)
    if mask is None:
        return None
    found = _split(mask, args, max(int(vocab * _WIDEST_FROM_LOGITS), 64), False, lambda rows, ids: False)
    if found.dense_support is None or found.dense is None:
        return found
    rows = found.dense.nonzero()[:, 0]
    return found._replace(dense=None, num_dense=0, dense_support=found.dense_support._replace(rows=rows))


def logits_over_support(
    rows: Tensor, args: VocabularyArguments, supports: Supports, backend: str, consume: bool
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) from logits (A, B, V)."""
    transform = args.transform
    logprobs, entropies, *_ = support_row_statistics(
        rows,
        args.targets,
        supports.dense,
        transform.temperatures,
        *supports.support,
        list(supports.dense_support or ()),
        transform.temperature,
        transform.logit_scale,
        transform.softcap,
        backend,
        consume,
    )
    return logprobs, entropies


def _unit_strides(head: Head) -> tuple[Head, int]:
    """The head with rows of unit stride, as the kernels for support entries read them, and the bytes of the copies."""
    found, total = [], 0
    for x in head:
        strided = x is not None and x.stride(-1) != 1 and x.shape[-1] > 1
        found.append(x.contiguous() if strided and x is not None else x)
        total += 2 * x.numel() * x.element_size() if strided and x is not None else 0  # and its gradient's
    return Head(*found), total  # type: ignore[arg-type]


def linear_over_support(
    head: Head, args: VocabularyArguments, sampling_mask: object, scope: str, budget: int | None, copied: int
) -> tuple[Tensor, Tensor] | None:
    """The same from hidden states and the output head, by a plan within the budget; None where nothing is recorded.

    `scope` says whether an objective follows, whose numbers are in the budget too.
    """
    vocab, device = head.weight.shape[0], head.weight.device.type
    mask = checked_mask(sampling_mask, args, vocab)
    if mask is None:
        return None
    head, more = _unit_strides(head)
    supports = _split(
        mask,
        args,
        widest_support(vocab, device, head.weight.element_size()),
        True,
        lambda rows, ids: gathers(rows, ids, head.sizes(rows)),
    )
    call = plan_call(
        head, args, supports.num_dense, scope=scope, support_entries=mask.token_ids.shape[0], copied=copied + more
    )
    plan = choose(call, budget)
    transform = args.transform
    logprobs, entropies, *_ = support_linear_statistics(
        *head,
        args.targets,
        supports.dense,
        transform.temperatures,
        *supports.support,
        list(supports.dense_support or ()),
        transform.temperature,
        transform.logit_scale,
        transform.softcap,
        forced(),
        supports.num_dense,
        plan.name,
        plan.limits,
    )
    return logprobs, entropies
