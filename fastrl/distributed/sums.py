"""Sums over the ranks of a group, with their gradients. Every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.distributed.groups import gather

#: The most bytes of all ranks' parts that a sum in the order of the ranks holds at once, by device: no more than a plan
#: counts for work on the statistics of all ranks, `planning.tiling.elementwise_bytes`.
PIECE_BYTES = {"cpu": 2 << 20, "cuda": 32 << 20}


def group_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of x over the ranks, added in float64, in the dtype of x.

    Differentiable: each rank's loss may depend on the sum, so the backward sums the upstream gradients of all ranks.
    All ranks must run the backward, or none.
    """
    return _Sum.apply(x, group)


def add_parts(total: Tensor, group: ProcessGroup, ordered: bool = False) -> None:
    """total (n, k) becomes its sum over the ranks, in place, in its own dtype.

    The library chooses the order of additions, by an element's place too; `ordered`: that of the ranks, everywhere.
    """
    start_add_parts(total, group, ordered)()


def start_add_parts(total: Tensor, group: ProcessGroup, ordered: bool = False) -> Callable[[], Any]:
    """Starts `add_parts`; the call of what it returns waits for the sum, on a GPU without stopping the host."""
    if ordered and group.size() > 2:  # two numbers have one sum
        piece = PIECE_BYTES.get(total.device.type, PIECE_BYTES["cpu"])
        for rows in total.split(max(1, piece // max(group.size() * total[:1].nbytes, 1))):
            first, *others = gather(rows, group)
            rows.copy_(first)
            for other in others:
                rows += other
        return lambda: None
    wait: Callable[[], Any] = dist.all_reduce(total, group=group, async_op=True).wait
    return wait


def whole_sum(x: Tensor, largest: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The sum of x (k,) over the ranks, with the gradient of this rank's x alone, and the maximum of `largest` (m,).

    The sum is for a loss, which every rank's backward starts from. A NaN is a maximum. One collective.
    """
    return _WholeSum.apply(x, largest, group)


def _summed(parts: Tensor) -> Tensor:
    """(ranks, ...) -> (...), in float64: the same order of additions on every rank, whose tensors have one shape."""
    return parts.double().sum(0).to(parts.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(gather(x.detach(), group))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return group_sum(upstream, ctx.group), None


class _WholeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        parts = gather(torch.cat([x.detach(), largest.detach().to(x.dtype)]), group)
        maximum = parts[:, x.shape[0] :].amax(0).to(largest.dtype)
        ctx.mark_non_differentiable(maximum)
        return _summed(parts[:, : x.shape[0]]), maximum

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, unused: Tensor) -> tuple[Tensor, None, None]:
        return upstream, None, None
