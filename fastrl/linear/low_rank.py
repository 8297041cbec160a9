"""Statistics of a head with a low-rank addition: two products per tile, logits = hidden weight^T + down up^T + bias.

The weight is neither copied nor changed, and needs no gradient for the addition's: the backward computes a tile again
(recompute), and of its gradient also the narrow products for down and up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import Statistics, Transform
from fastrl.linear import head as products
from fastrl.linear.backward import Backward
from fastrl.linear.head import Head, Held, slices
from fastrl.linear.statistics import Rows, chunk_statistics, order, pass_tile
from fastrl.operators.rows import coefficients
from fastrl.operators.saved import keep, refuse_second_order, resumed, saved
from fastrl.planning.tiling import ELEMENTWISE_BYTES, PIECE_BYTES, Needs, PassBudget, Tile


def piece_bytes(device: str) -> int:
    """Bytes of a tile's rows that are copied to a wider dtype at once."""
    return ELEMENTWISE_BYTES.get(device, PIECE_BYTES)


class LowRank(NamedTuple):
    """The addition to a head of vocabulary V, of any floating dtype: down (N, r), up (V, r)."""

    down: Tensor
    up: Tensor


class _HeldTwice(Held):
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
        self.part = slice(0, 0)

    def _held(self, tile: Tile) -> Held:
        _, _, mapped, wide = self.budget
        gathers = self.order.index is not None
        return _HeldTwice(self.low_rank, self.head, tile, gathers, self.backend, mapped, wide, forms_gradient=True)

    def _rows(self, part: slice) -> Rows:
        self.part = part
        return super()._rows(part)

    def _gradient(self, hidden: Tensor, rows: Rows, columns: slice, held: Held) -> Tensor:
        gradient = super()._gradient(hidden, rows, columns, held)
        assert isinstance(held, _HeldTwice) and held.down is not None
        # PEFT keeps adapters of a narrow head in float32, and so are their products here: rounded factors would leave
        # errors in every entry, where those of the tile's gradient average out.
        wide = torch.promote_types(gradient.dtype, self.low_rank.up.dtype)
        up, down = self.low_rank.up[columns].to(wide), held.down.to(wide)
        row_bytes = 0 if wide == gradient.dtype else 4 * gradient.shape[1]
        for rows_of_tile in products.pieces(gradient.shape[0], row_bytes, piece_bytes(gradient.device.type)):
            part = gradient[rows_of_tile].to(wide)
            products.add_inner(self.sums.down[self.part][rows_of_tile], part, up, first=False)
            products.add_outer(self.sums.up[columns], part, down[rows_of_tile], first=False)
        return gradient

    def low_rank_gradients(self) -> LowRank:
        """dL/d(down, up) in their dtypes, after `run`."""
        if self.undo is not None:
            for total in self.sums:
                total.mul_(self.undo)
        down = torch.zeros_like(self.low_rank.down)
        down[self.order.rows(slice(0, self.order.count))] = self.sums.down.to(down.dtype)
        return LowRank(down, self.sums.up.to(self.low_rank.up.dtype))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, down, up, targets, mask, transform, backend, num_tokens, budget = inputs
        head, low_rank = Head(hidden, weight, bias), LowRank(down, up)
        used = order(mask, targets.shape[0], num_tokens)
        stats = Statistics(*(torch.zeros(targets.shape, device=targets.device) for _ in range(4)))
        if used.count:
            tile = pass_tile("statistics", head, used, budget)
            gathers = used.index is not None
            held = _HeldTwice(low_rank, head, tile, gathers, backend, budget.mapped, budget.float32_logits)
            rows = Rows(used.of(targets), used.of(transform.temperatures))  # type: ignore[arg-type]
            for part in slices(used.count, tile.rows):
                where = used.rows(part)
                chunk = chunk_statistics(held, held.hidden(where), rows.part(part), transform, tile.columns, backend)
                for total, values in zip(stats, chunk, strict=True):
                    total[where] = values
        given = (head, targets, mask, transform, stats)
        keep(ctx, {"low_rank": low_rank, "given": given, "options": (backend, -1, budget)})
        return stats.logprobs, stats.entropy

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_logprobs is None and d_entropy is None:
            return (None,) * 11
        refuse_second_order(d_logprobs, d_entropy)
        kept, slopes = saved(ctx), coefficients(d_logprobs, d_entropy)
        # The pass that forms dL/dhidden always runs: down comes from hidden, or is all that has a gradient.
        needs = Needs(True, ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        with resumed(ctx):
            of_tiles = _Backward(kept["low_rank"], *kept["given"], slopes["c"], slopes["h"], needs, *kept["options"])
            d_head = of_tiles.run("recompute")
            gradients = (*d_head, *of_tiles.low_rank_gradients())
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None, None, None, None


def low_rank_statistics(
    head: Head,
    low_rank: LowRank,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    num_tokens: int,
    budget: PassBudget,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) float32, 0 where masked; differentiable once in the head, down and up.

    num_tokens: the number of valid rows, or -1.
    """
    result: tuple[Tensor, Tensor] = _Statistics.apply(
        *head.tensors, *low_rank, targets, mask, transform, backend, num_tokens, budget
    )
    return result
