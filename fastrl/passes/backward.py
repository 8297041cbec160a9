"""The backward from hidden states and the output head: from c and h of each row; the logits are computed again.

Rows whose c and h are 0 enter no matrix product. Sums over tiles are float32 and cast once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.contract import Statistics
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts
from fastrl.passes.blocks import block_product
from fastrl.passes.head import (
    Head,
    HeadSums,
    Order,
    Run,
    Workspace,
    add_product,
    empty,
    float16_scale,
    order,
    scratch,
    slices,
    store_product,
    store_rows,
)
from fastrl.passes.rows import Rows
from fastrl.passes.supports import RowOptions
from fastrl.planning.tiling import Needs, Tile

#: The plan that forms dL/dhidden and dL/dweight in separate passes, so that the float32 sums of neither are held whole.
TWO_PASS = "two-pass"


def order_of_active(
    mask: Tensor | None, c: Tensor, num_tokens: int, h: Tensor | None = None, results: Tensor | None = None
) -> Order:
    """Rows with a nonzero c or h; on a GPU all unmasked rows if their number is known, to avoid a synchronisation.

    Rows whose results (N,) are NaN are included: a clip may have set their c to 0, and the NaN must not be lost.
    """
    if c.is_cuda and (num_tokens >= 0 or mask is None):
        return order(mask, c.shape[0], num_tokens)
    active = c != 0
    if results is not None:
        active |= results.isnan()
    if h is not None:
        active |= h != 0
    return order(active if mask is None else active & mask, c.shape[0])


class Passes(ABC):
    """The passes that sum dL/dlogits over the tiles of a head; a subclass says what a tile's gradient is.

    order: the rows that have a gradient. rows: what row functions read for them. undo: the factor that undoes the scale
    of the gradient, if it has one. shard: of the vocabulary, if the head is one; then dL/dhidden is summed over its
    group if it says so.
    """

    def __init__(
        self,
        head: Head,
        order: Order,
        rows: Any,
        needs: Needs,
        run: Run,
        undo: Tensor | None = None,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.padded, self.head = head, head.unpadded()
        self.order, self.rows, self.needs, self.undo = order, rows, needs, undo
        self.backend, _, self.plan = run
        self.block = self.plan.call.block
        self.group = shard.group if shard is not None and shard.reduces else None
        # dL/dhidden is then a part of a sum, which needs a wider dtype than that of the factors.
        self.partial = self.group is not None and head.hidden.dtype != torch.float32
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._due: list[int] = []  # the rows of each sum over the group that is still to come

    @abstractmethod
    def _gradient(self, hidden: Tensor, rows: Any, columns: slice, workspace: Workspace) -> Tensor:
        """dL/dlogits of a tile (n, v)."""

    def _output(self, like: Tensor, needed: bool, filled: int) -> Tensor | None:
        """Memory for a gradient, of which the passes fill so many rows if any row is computed."""
        if not needed:
            return None
        if filled and self.order.count:
            out = empty(tuple(like.shape), like.dtype, like, self.backend)
            out[filled:].zero_()
            return out
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)

    def run(self) -> tuple[Tensor | None, ...]:
        """Runs the plan's passes; returns dL/d(hidden, weight, bias) in their dtypes, None if not needed.

        After an error the other ranks of a group get NaN: they wait for this rank's part.
        """
        if self.group is None:
            return self._run()
        self._due = self._sums()
        try:
            return self._run()
        except Exception:
            for rows in self._due:
                shape = (rows, self.head.hidden.shape[1])
                nan = torch.full(shape, torch.nan, dtype=torch.float32, device=self.head.hidden.device)
                add_parts(nan, self.group, self.block > 0)
            raise

    def _sums(self) -> list[int]:
        """The rows of each sum of dL/dhidden over the group."""
        if not self.needs.hidden or not self.order.count:
            return []
        if not self.partial:
            return [self.head.hidden.shape[0]]
        step = self._tile("hidden").rows if self.plan.name == TWO_PASS else self.order.count
        return [part.stop - part.start for part in slices(self.order.count, step)]

    def _add(self, total: Tensor) -> None:
        """Sum parts of dL/dhidden over the group."""
        assert self.group is not None
        self._due.pop(0)
        add_parts(total, self.group, self.block > 0)

    def _run(self) -> tuple[Tensor | None, ...]:
        (hidden, weight, _, _), needs, vocab = self.padded, self.needs, self.head.entries
        whole = self.order.index is None and vocab > 0
        self.hidden = self._output(hidden, needs.hidden, filled=hidden.shape[0] if whole else 0)
        self.weight = self._output(weight, needs.weight, filled=vocab)
        self.bias = self._output(weight[:, 0], needs.bias, filled=vocab)
        needs_head = self.needs.weight or self.needs.bias
        if self.order.count:
            if self.needs.hidden and (needs_head or self.group) and self.plan.name != TWO_PASS:
                self._weight_pass(self._tile("both"), with_hidden=True)
            else:
                if self.needs.hidden:
                    self._hidden_pass(self._tile("hidden"))
                if needs_head:
                    self._weight_pass(self._tile("weight"), with_hidden=False)
        return self.hidden, self.weight, self.bias

    def _tile(self, kind: str) -> Tile:
        return self.plan.tile(kind, self.order.count, self.needs)

    def _workspace(self, tile: Tile, block: int) -> Workspace:
        memory = (self.head, tile, self.order.index is not None, self.backend, self.plan.mapped)
        return Workspace(*memory, self.plan.call.float32_logits, forms_gradient=True, block=block)

    def _chunks(self, workspace: Workspace, size: int) -> Iterator[tuple[slice, Tensor | slice, Tensor, Any]]:
        """Yield (positions in the order, row indices, hidden states (n, H), inputs of row functions)."""
        for part in slices(self.order.count, size):
            where = self.order.rows(part)
            yield part, where, workspace.hidden(where), self.rows.part(part)

    def _hidden_pass(self, tile: Tile) -> None:
        """dL/dhidden, one chunk of rows after another, summed over slices of the vocabulary."""
        assert self.hidden is not None
        workspace, vocab, block = self._workspace(tile, self.block), self.head.weight.shape[0], self.block
        whole = tile.columns >= vocab and not self.partial
        sums = None if whole else self._float32(tile.rows)
        for _, where, hidden, rows in self._chunks(workspace, tile.rows):
            total = None if sums is None else sums[: hidden.shape[0]]
            if total is not None and vocab == 0:
                total.zero_()
            for columns in slices(vocab, tile.columns):
                gradient = self._gradient(hidden, rows, columns, workspace)
                if total is None:
                    store_product(self.hidden, where, gradient, self.head.weight, self.undo, block)
                else:
                    add_product(total, gradient, self.head.weight[columns], columns.start == 0, block)
            if total is not None:
                if self.partial:
                    self._add(total)
                store_rows(self.hidden, where, total, self.undo)
        if self.group is not None and not self.partial:
            self._add(self.hidden)

    def _float32(self, rows: int) -> Tensor:
        """Uninitialised memory for float32 sums (rows, H)."""
        hidden, make = self.head.hidden, scratch if self.plan.mapped else empty
        return make((rows, hidden.shape[1]), torch.float32, hidden, self.backend)

    def _weight_pass(self, tile: Tile, with_hidden: bool) -> None:
        """dL/dweight and dL/dbias, slice by slice, each written once; `with_hidden`: also dL/dhidden, summed."""
        count, vocab = self.order.count, self.head.weight.shape[0]
        workspace = self._workspace(tile, self.block if with_hidden else 0)
        whole = tile.columns >= vocab and not self.partial
        narrow = self.head.hidden.dtype != torch.float32
        total = self._float32(count) if with_hidden and not whole and narrow else None
        if total is not None and vocab == 0:
            total.zero_()
        direct = self.undo is None and tile.rows >= count  # a single product needs no sum
        sums = self._float32(min(tile.columns, vocab)) if self.needs.weight and narrow and not direct else None
        for columns in slices(vocab, tile.columns):
            outer = self._outer(columns, sums, direct)
            for part, where, hidden, rows in self._chunks(workspace, tile.rows):
                gradient = self._gradient(hidden, rows, columns, workspace)
                outer.add(gradient, hidden)
                if with_hidden and whole:
                    assert self.hidden is not None
                    store_product(self.hidden, where, gradient, self.head.weight, self.undo, self.block)
                elif with_hidden:
                    self._add_hidden(total, part, where, gradient, columns)
            outer.finish()
        if with_hidden and self.group is not None:
            assert self.hidden is not None
            self._add(self.hidden if total is None else total)
        if total is not None:
            assert self.hidden is not None
            store_rows(self.hidden, self.order.rows(slice(0, count)), total, self.undo)

    def _add_hidden(
        self, total: Tensor | None, part: slice, where: Tensor | slice, gradient: Tensor, columns: slice
    ) -> None:
        """Add a slice's part of dL/dhidden to the float32 sums, or to the gradient if that is float32 itself."""
        assert self.hidden is not None
        weight, first = self.head.weight[columns], columns.start == 0
        if total is not None:
            add_product(total[part], gradient, weight, first, self.block)
        elif isinstance(where, slice):
            add_product(self.hidden[where], gradient, weight, first, self.block)
        else:  # inactive rows were set to 0; no row occurs twice, so no two additions collide
            self.hidden.index_add_(0, where, block_product(gradient, weight, self.block))

    def _outer(self, columns: slice, sums: Tensor | None, direct: bool) -> HeadSums:
        weight = None if self.weight is None else self.weight[columns]
        bias = None if self.bias is None else self.bias[columns]
        return HeadSums(
            weight, bias, sums if weight is None or sums is None else sums[: weight.shape[0]], direct, self.undo
        )


class Backward(Passes):
    """Computes the gradients of the rows that take the dense kernels, pass by pass, from c and h (N,) or None.

    shard: of the vocabulary, if the head is one; then targets count from its first entry, and dL/dhidden is summed over
    its group if it says so.
    """

    def __init__(
        self,
        head: Head,
        targets: Tensor,
        options: RowOptions,
        stats: Statistics,
        c: Tensor,
        h: Tensor | None,
        needs: Needs,
        run: Run,
        shard: VocabularyShard | None = None,
    ) -> None:
        mask, wide = options.dense
        active, undo = order_of_active(mask, c, run.num_rows, h, stats.logprobs), None
        rows = Rows(targets, options.transform, stats, c, h, wide).ordered(active)
        if head.hidden.dtype == torch.float16 and active.count:
            c, h = active.of(c), None if h is None else active.of(h)
            bounds = c.abs() if h is None else c.abs() + h.abs() * (1 + active.of(stats.entropy))
            scale = float16_scale(bounds, rows.transform)
            rows, undo = rows._replace(c=c * scale, h=None if h is None else h * scale), 1 / scale
        super().__init__(head, active, rows, needs, run, undo, shard)

    def _gradient(self, hidden: Tensor, rows: Rows, columns: slice, workspace: Workspace) -> Tensor:
        return row_gradient_of(workspace, hidden, rows, columns, self.backend)


def row_gradient_of(workspace: Workspace, hidden: Tensor, rows: Rows, columns: slice, backend: str) -> Tensor:
    """dL/dlogits of a tile (n, v), from the statistics, c and h of its rows."""
    logits = workspace.logits(hidden, columns)
    rows.restrict(logits, columns.start, backend)
    gradient = workspace.gradient(logits)
    rows.write_gradient(logits, columns.start, backend, gradient)
    return gradient
