"""Calls with recorded vocabulary sets: which rows gather their entries, which take the dense kernels, by which plan."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .arguments import VocabularyArguments, plan_call
from .memory import choose
from .ops.backend import forced
from .ops.contract import Kept
from .ops.kept import kept_linear_statistics, kept_row_statistics
from .ops.products import Head
from .ops.tiling import widest_kept
from .sampling_mask import SamplingMask


class Sampled(NamedTuple):
    """Recorded vocabulary sets, split into rows whose entries are gathered and rows for the dense kernels."""

    kept: Kept
    dense: Tensor | None  # (N,) bool; None: no row is dense
    num_dense: int  # their number, -1 where the host does not know
    restricts: bool  # whether some dense rows have sets, too wide to gather


def sampled_rows(
    sampling_mask: object, args: VocabularyArguments, vocab: int, widest: int | None = None, asks: bool = False
) -> Sampled | None:
    """A checked sampling mask; None without one, or where it records nothing.

    Rows with more than `widest` ids are dense. `asks`: whether a GPU may be asked how many rows are.
    """
    if sampling_mask is None:
        return None
    if not isinstance(sampling_mask, SamplingMask):
        raise TypeError(f"sampling_mask must be a fastrl.SamplingMask, got {type(sampling_mask).__name__}")
    rows = args.targets.shape[0]
    if len(sampling_mask) != rows:
        raise ValueError(f"sampling_mask must have one row a target, {rows}, got {len(sampling_mask)}")
    checks.same_device("sampling_mask", sampling_mask.token_ids, args.targets, "targets")
    sampling_mask.check_vocab(vocab)
    if sampling_mask.token_ids.shape[0] == 0:
        return None
    lengths = sampling_mask.lengths
    gathered = lengths > 0
    restricts = False
    if widest is not None and sampling_mask.longest > widest:
        gathered, restricts = gathered & (lengths <= widest), True
    dense: Tensor | None = None
    num_dense = 0
    if restricts or sampling_mask.unrecorded:
        dense, num_dense = ~gathered if args.mask is None else args.mask & ~gathered, -1
        if checks.values_are_checked(dense) or (asks and not torch.compiler.is_compiling()):
            num_dense = int(dense.sum())
            dense = dense if num_dense else None
    counts = gathered if args.mask is None else gathered & args.mask
    return Sampled(Kept(sampling_mask.token_ids, sampling_mask.offsets, counts), dense, num_dense, restricts)


def sampled_logits(
    rows: Tensor, args: VocabularyArguments, sampled: Sampled, backend: str, consume: bool
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) from logits (A, B, V)."""
    transform = args.transform
    logprobs, entropies, *_ = kept_row_statistics(
        rows, args.targets, sampled.dense, transform.temperatures, *sampled.kept, transform.temperature,
        transform.logit_scale, transform.softcap, backend, consume,
    )  # fmt: skip
    return logprobs, entropies


def sampled_linear(
    head: Head, args: VocabularyArguments, sampling_mask: object, scope: str, budget: int | None, copied: int
) -> tuple[Tensor, Tensor] | None:
    """The same from hidden states and the output head, by a plan within the budget; None where nothing is recorded.

    `scope` says whether an objective follows, whose numbers are in the budget too.
    """
    vocab = head.weight.shape[0]
    sampled = sampled_rows(sampling_mask, args, vocab, widest_kept(vocab, head.weight.device.type), asks=True)
    if sampled is None:
        return None
    entries = sampled.kept.token_ids.shape[0]
    plan = choose(plan_call(head, args, sampled.num_dense, scope=scope, kept=entries, copied=copied), budget)
    transform = args.transform
    logprobs, entropies, *_ = kept_linear_statistics(
        *head, args.targets, sampled.dense, transform.temperatures, *sampled.kept, transform.temperature,
        transform.logit_scale, transform.softcap, forced(), sampled.restricts, sampled.num_dense, plan.name,
        plan.limits,
    )  # fmt: skip
    return logprobs, entropies
