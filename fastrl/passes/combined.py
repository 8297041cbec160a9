"""Statistics of slices of the vocabulary, combined into those of whole rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Statistics
from fastrl.passes.head import slices
from fastrl.passes.rows import Rows

_LOG2_E = 1 / math.log(2)


class Combined:
    """Combines the statistics of vocabulary slices into those of whole rows, in float64.

    Let l = log sum exp of a slice. The target's log-probability is the one within its own slice minus
    log1p(exp(rest - l)), where rest is the l of all other slices together: a confident token keeps its digits. The
    entropy is log sum exp - mean z, and the mean z of a slice is its l - H. A later slice may have another target: the
    one before no longer counts.

    On a CPU `exp` and `logsumexp` hand even a few hundred numbers to all of MKL's threads, which takes milliseconds
    where one of them waits for a core; `logaddexp` and `exp2` do not.
    """

    def __init__(self, targets: Tensor) -> None:
        zeros = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
        self.maximum = torch.full_like(zeros, -torch.inf)
        self.total, self.rest = self.maximum, self.maximum  # log sum exp of all slices, and of all but the target's
        self.mean = zeros
        # Of the target's slice: its l, and the log-probability within it.
        self.of_target = self.logprob = torch.full_like(zeros, torch.nan)

    def add(self, stats: Statistics, has_target: Tensor) -> None:
        """Add slices: their statistics (S, n), or (n,) of one; `has_target`, of the same shape: where the target is."""
        one = stats.maximum.dim() == 1
        logprobs, entropy, maximum, log_sum = (x[None] if one else x for x in (y.double() for y in stats))
        has_target = has_target[None] if one else has_target
        empty = maximum == -torch.inf  # all logits are -inf: the other statistics are NaN
        l = (maximum + log_sum).where(~empty, -torch.inf)  # noqa: E741
        before, self.total = self.total, reduce(torch.logaddexp, l, self.total)
        possible = self.total > -torch.inf
        possible |= self.total.isnan()
        shares = ((torch.cat([before[None], l]) - self.total) * _LOG2_E).exp2().where(possible, 0.0)
        means = torch.cat([self.mean[None], (l - entropy).where(~empty, 0.0)])
        self.mean = (means * shares).sum(0)
        self.maximum = torch.maximum(self.maximum, maximum.amax(0))
        here = has_target.any(0)
        rest = before.where(here, self.rest)  # the same, unless the target has moved here from an earlier slice
        self.rest = reduce(torch.logaddexp, l.where(~has_target, -torch.inf), rest)
        self.of_target = l.where(has_target, 0.0).sum(0).where(here, self.of_target)
        self.logprob = logprobs.where(has_target & ~empty, 0.0).sum(0).where(here, self.logprob)

    def finish(self) -> Statistics:
        """The statistics (n,) of the whole rows."""
        logprob = self.logprob - torch.nn.functional.softplus(self.rest - self.of_target)
        # A mean above log sum exp is rounding: the entropy is 0 there.
        entropy = self.total - torch.minimum(self.mean, self.total)
        stats = (logprob, entropy, self.maximum, self.total - self.maximum)
        return Statistics(*(x.float() for x in stats))


def no_statistics(targets: Tensor) -> Statistics:
    """The statistics (N,) of no logits at all, as of an empty shard: a maximum of -inf, which `Combined` leaves out."""
    zeros = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    return Statistics(zeros, zeros, torch.full_like(zeros, -torch.inf), zeros)


def sliced_statistics(
    logits_of: Callable[[slice], Tensor], rows: Rows, vocab: int, step: int, backend: str
) -> Statistics:
    """Statistics of a chunk of rows, of one slice of the vocabulary after another, whose logits (n, v) are given."""
    if vocab == 0:
        return no_statistics(rows.targets)
    combined = None if step >= vocab else Combined(rows.targets)
    for columns in slices(vocab, step):
        logits = logits_of(columns)
        rows.restrict(logits, columns.start, backend)
        targets = rows.targets - columns.start if columns.start else rows.targets
        if rows.entries is not None and rows.row_ids is not None:
            targets = rows.entries.gather(logits, columns.start, rows.row_ids, backend)
        stats: Statistics = row_functions(backend, logits).row_statistics(logits[None], targets, None, rows.transform)
        if combined is None:
            return stats
        combined.add(stats, (targets >= 0) & (targets < logits.shape[1]))
    assert combined is not None
    return combined.finish()


def tile_statistics(logits: Tensor, rows: Rows, step: int, backend: str, first: int = 0) -> Statistics:
    """`sliced_statistics` of rows whose logits (n, v) are formed; `first` is the vocabulary entry of their first."""
    if first:
        rows = rows._replace(targets=rows.targets - first)
    return sliced_statistics(lambda columns: logits[:, columns], rows, logits.shape[1], step, backend)
