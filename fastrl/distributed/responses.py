"""Responses whose tokens lie over the ranks of a group (context parallel), each rank holding any of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from fastrl.base.responses import Responses
from fastrl.distributed.groups import gather
from fastrl.distributed.sums import group_sum, whole_sum


class SpreadResponses(Responses):
    """This rank's tokens of each response; every sum runs over the tokens of all ranks, one collective each.

    Nothing here depends on which tokens a rank holds, nor on their order. The number of responses and their order are
    the same on every rank; a response may have no tokens on some.
    """

    over_ranks = True

    def __init__(self, own: Responses, group: ProcessGroup, sizes: list[int]) -> None:
        """`sizes`: by rank, how many tokens it holds, masked ones included."""
        vars(self).update(vars(own))
        self._group, self._sizes = group, sizes

    def ranks_sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; differentiable, by all ranks together."""
        return group_sum(x, self._group)

    def all_tokens(self, x: Tensor, filler: float) -> Tensor:
        """(..., N) -> (..., ranks * the largest N): the values of all tokens, each rank's filled up with `filler`."""
        missing = max(self._sizes) - x.shape[-1]
        return gather(pad(x.detach(), (0, missing), value=filler), self._group).movedim(0, -2).flatten(-2)

    def number_of_all(self, own: int) -> int:
        """The largest N of a rank, times the number of ranks."""
        return len(self._sizes) * max(self._sizes)

    def own_of_all(self, x: Tensor, own: int) -> Tensor:
        """(ranks * the largest N,) -> (N,): this rank's."""
        first = self._group.rank() * max(self._sizes)
        return x[first : first + own]

    def totals(self, loss: Tensor, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The whole loss 0-dim, sums (k,) and maxima (m,), from those of each rank's tokens; one collective."""
        whole, maxima = whole_sum(torch.cat([loss[None], sums.to(loss.dtype)]), largest, self._group)
        return whole[0], whole[1:].detach().to(sums.dtype), maxima
