"""Statistics of a head with a low-rank addition: two products per tile, logits = hidden weight^T + down up^T + bias.

The weight is neither copied nor changed, and needs no gradient for the addition's: the backward computes a tile again
(recompute), and of its gradient also the narrow products for down and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.passes.backward import Backward
from fastrl.passes.head import Head, Run, Workspace, add_outer, add_product, pieces
from fastrl.passes.linear import dense_statistics
from fastrl.passes.logits import coefficients
from fastrl.passes.operator import Once, saved
from fastrl.passes.rows import Rows
from fastrl.passes.supports import RowOptions
from fastrl.planning.tiling import Needs, Tile, elementwise_bytes


class LowRank(NamedTuple):
    """The addition to a head of vocabulary V, of any floating dtype: down (N, r), up (V, r)."""

    down: Tensor
    up: Tensor


class _TwoProducts(Workspace):
    """Memory for a tile of logits of both products."""

    def __init__(self, low_rank: LowRank, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.low_rank = low_rank
        self.down: Tensor | None = None  # (n, r), of the last rows that `hidden` returned

    def hidden(self, where: Tensor | slice) -> Tensor:
        self.down = self.low_rank.down[where]
        return super().hidden(where)

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        assert self.down is not None
        out = super().logits(hidden, columns)
        return out.addmm_(self.down.to(out.dtype), self.low_rank.up[columns].to(out.dtype).t())


class _Backward(Backward):
    """The backward of the head, which sums the gradients of down and up from the same tiles."""

    def __init__(self, low_rank: LowRank, *args: Any) -> None:
        super().__init__(*args)
        self.low_rank = low_rank
        device, rank = low_rank.up.device, low_rank.up.shape[1]
        # Rows by their position in the order.
        self.sums = LowRank(
            torch.zeros(self.order.count, rank, dtype=torch.float32, device=device),
            torch.zeros(low_rank.up.shape, dtype=torch.float32, device=device),
        )

    def _workspace(self, tile: Tile, block: int) -> Workspace:
        memory = (self.head, tile, self.order.index is not None, self.backend, self.plan.mapped)
        return _TwoProducts(self.low_rank, *memory, self.plan.call.float32_logits, forms_gradient=True, block=block)

    def _chunks(self, *args: Any) -> Iterator[tuple[slice, Tensor | slice, Tensor, Any]]:
        for chunk in super()._chunks(*args):
            self.part = chunk[0]
            yield chunk

    def _gradient(self, hidden: Tensor, rows: Rows, columns: slice, workspace: Workspace) -> Tensor:
        gradient = super()._gradient(hidden, rows, columns, workspace)
        assert isinstance(workspace, _TwoProducts) and workspace.down is not None
        # PEFT keeps adapters of a narrow head in float32, and so are their products here: rounded factors would leave
        # errors in every entry, where those of the tile's gradient average out.
        dtype = torch.promote_types(gradient.dtype, self.low_rank.up.dtype)
        up, down = self.low_rank.up[columns].to(dtype), workspace.down.to(dtype)
        row_bytes = 0 if dtype == gradient.dtype else 4 * gradient.shape[1]
        for rows_of_tile in pieces(gradient.shape[0], row_bytes, elementwise_bytes(gradient.device.type)):
            part = gradient[rows_of_tile].to(dtype)
            add_product(self.sums.down[self.part][rows_of_tile], part, up, first=False)
            add_outer(self.sums.up[columns], part, down[rows_of_tile], first=False)
        return gradient

    def low_rank_gradients(self) -> LowRank:
        """dL/d(down, up) in their dtypes, after `run`."""
        if self.undo is not None:
            for total in self.sums:
                total.mul_(self.undo)
        down = torch.zeros_like(self.low_rank.down)
        down[self.order.rows(slice(0, self.order.count))] = self.sums.down.to(down.dtype)
        return LowRank(down, self.sums.up.to(self.low_rank.up.dtype))


def low_rank_statistics(
    head: Head, low_rank: LowRank, targets: Tensor, options: RowOptions, run: Run
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) float32, 0 where masked; differentiable once in the head, down and up."""

    def forward(*tensors: Any) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        head, low_rank = Head.of(tensors[:3]), LowRank(*tensors[3:])
        stats = dense_statistics(head, targets, options, run, make=partial(_TwoProducts, low_rank))
        to_save = {"low_rank": low_rank, "of_call": (head, targets, options, stats), "run": run._replace(num_rows=-1)}
        return (stats.logprobs, stats.entropy), to_save

    logprobs, entropy = Once.apply(forward, _backward, 2, *head[:3], *low_rank)
    return logprobs, entropy


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs, ch = saved(ctx), coefficients(d_logprobs, d_entropy)
    # The pass that forms dL/dhidden always runs: down comes from hidden, or is all that has a gradient.
    needs = Needs(True, *ctx.needs[1:3])
    backward = _Backward(inputs["low_rank"], *inputs["of_call"], ch["c"], ch["h"], needs, inputs["run"])
    return *backward.run(), *backward.low_rank_gradients()
