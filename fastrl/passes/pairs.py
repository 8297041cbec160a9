"""Divergences between the vocabulary distributions of two heads: a tile of both logits at a time, no (N, V) tensor.

`divergence_forward_gradient` forms the student's gradients while both rows are in memory (3U of the student, 1U of the
teacher). `divergence_statistics` has a backward that forms both logits again, tile by tile. Gradients are the
student's alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Divergence, Pair, PairStatistics, Transform
from fastrl.passes.backward import Passes, order_of_active
from fastrl.passes.forward_gradient import (
    GradientSums,
    active_chunks,
    fake_gradients,
    gradients_backward,
    save_gradients,
)
from fastrl.passes.head import Head, HeadGradients, Order, Run, Workspace, float16_scale, order, slices
from fastrl.passes.linear import fake_gradients as fake_head_gradients
from fastrl.passes.linear import head_backward, saved_run
from fastrl.passes.logits import upstream
from fastrl.passes.operator import Operator
from fastrl.planning.tiling import Call, Needs, Tile


class PairWorkspace(Workspace):
    """Memory for a chunk's hidden states and a tile of its logits, of a student and a teacher."""

    def __init__(
        self,
        head: Head,
        teacher: Head,
        tile: Tile,
        used: Order,
        backend: str,
        call: Call,
        gradient: bool,
        mapped: bool,
        block: int,
    ) -> None:
        # The kernels for pairs take contiguous tiles.
        memory = (tile, used.index is not None, backend, mapped)
        super().__init__(head, *memory, call.float32_logits, gradient, pitched=False, block=block)
        self._teacher = Workspace(teacher, *memory, call.teacher.float32_logits, pitched=False, block=block)
        self._teacher_hidden = teacher.hidden[:0]

    def hidden(self, where: Tensor | slice) -> Tensor:
        """The student's hidden states (n, H) of these rows; `teacher_logits` are then those of the same rows."""
        self._teacher_hidden = self._teacher.hidden(where)
        return super().hidden(where)

    def teacher_logits(self, columns: slice) -> Tensor:
        """The teacher's logits (n, v) of these vocabulary entries, for the rows last passed to `hidden`."""
        return self._teacher.logits(self._teacher_hidden, columns)


class _Rows(NamedTuple):
    """The inputs of the row functions other than the logits, for the rows of an order."""

    transform: Transform
    teacher_transform: Transform
    c: Tensor | None = None
    statistics: PairStatistics | None = None

    def part(self, rows: Tensor | slice | None) -> _Rows:
        """The inputs of some of the rows; None: all."""
        if rows is None:
            return self
        stats = None if self.statistics is None else PairStatistics(*(x[rows] for x in self.statistics))
        c = None if self.c is None else self.c[rows]
        return _Rows(self.transform.of(rows), self.teacher_transform.of(rows), c, stats)


def _whole(head: Head) -> slice:
    return slice(0, head.weight.shape[0])


@Operator
def divergence_statistics(
    head: Head,
    teacher: Head,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    run: Run,
    may_synchronise: bool,  # in the backward, to learn which rows are idle
) -> PairStatistics:
    """The divergence of each row, which is differentiable, and what its gradient needs; 0 for masked rows."""
    backend, num_rows, plan = run
    head, n = head.unpadded(), head.hidden.shape[0]
    zeros = (torch.zeros(n, dtype=torch.float32, device=head.hidden.device) for _ in PairStatistics._fields)
    out, used = PairStatistics(*zeros), order(mask, n, num_rows)
    if used.count == 0:
        return out
    tile = plan.tile("statistics", used.count)
    workspace = PairWorkspace(head, teacher, tile, used, backend, plan.call, False, plan.mapped, plan.call.block)
    rows = _Rows(transform, teacher_transform).part(used.index)
    for part in slices(used.count, tile.rows):
        where, inputs = used.rows(part), rows.part(part)
        logits = workspace.logits(workspace.hidden(where), _whole(head))
        pair = Pair(logits, workspace.teacher_logits(_whole(head)), *inputs[:2], divergence)
        stats = row_functions(backend, logits).pair_statistics(pair)
        for total, values in zip(out, stats, strict=True):
            total[where] = values
    return out


def _empty_statistics(head: Head, **_: Any) -> PairStatistics:
    n = head.hidden.shape[:1]
    return PairStatistics(*(head.hidden.new_empty(n, dtype=torch.float32) for _ in PairStatistics._fields))


divergence_statistics.register_fake(_empty_statistics)


class _Backward(Passes):
    """The gradients of one call from c = dL/dD (N,)."""

    def __init__(
        self,
        head: Head,
        teacher: Head,
        mask: Tensor | None,
        rows: _Rows,
        divergence: Divergence,
        needs: Needs,
        run: Run,
    ) -> None:
        assert rows.statistics is not None and rows.c is not None
        active = order_of_active(mask, rows.c, run.num_rows)
        rows, undo = rows.part(active.index), None
        if head.hidden.dtype == torch.float16 and active.count:
            assert rows.c is not None and rows.statistics is not None
            # Of a reverse KL, the |dD/dz| sum up to about twice the divergence. An infinite forward KL has finite ones.
            divergences = rows.statistics.divergence.nan_to_num(0.0, 0.0, 0.0)
            scale = float16_scale(rows.c.abs() * (1 + divergences), rows.transform)
            rows, undo = rows._replace(c=rows.c * scale), 1 / scale
        super().__init__(head, active, rows, needs, run, undo)
        self.teacher, self.divergence = teacher, divergence

    def _workspace(self, tile: Tile, block: int) -> PairWorkspace:
        memory = (tile, self.order, self.backend, self.plan.call)
        return PairWorkspace(self.head, self.teacher, *memory, True, self.plan.mapped, block)

    def _gradient(self, hidden: Tensor, rows: _Rows, columns: slice, workspace: Workspace) -> Tensor:
        assert isinstance(workspace, PairWorkspace)
        logits = workspace.logits(hidden, columns)
        gradient = workspace.gradient(logits)
        pair = Pair(logits, workspace.teacher_logits(columns), *rows[:2], self.divergence)
        row_functions(self.backend, logits).pair_gradient(pair, rows.statistics, rows.c, gradient)
        return gradient


@Operator
def divergence_gradient(
    head: Head,
    teacher: Head,
    mask: Tensor | None,
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    statistics: PairStatistics,
    c: Tensor,  # (N,) float32, dL/dD
    needs: Needs,
    run: Run,
) -> HeadGradients:
    """The backward of `divergence_statistics`."""
    rows = _Rows(transform, teacher_transform, c, statistics)
    backward = _Backward(head, teacher, mask, rows, divergence, needs, run)
    return HeadGradients.of(backward.run(), head.hidden)


divergence_gradient.register_fake(fake_head_gradients)


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    run = saved_run(inputs["run"], inputs.pop("may_synchronise"))
    return {**inputs, "run": run, "statistics": PairStatistics(*results)}


def _gradient(ctx: Any, d_divergence: Tensor) -> Head:
    return head_backward(divergence_gradient, ctx, c=upstream(d_divergence))


divergence_statistics.register_autograd(_gradient, _save, differentiable=1)


class LinearDivergence(NamedTuple):
    """A sum of divergences with its gradients; an empty tensor for each gradient that is not needed."""

    loss: Tensor  # ()
    divergence: Tensor  # (N,)
    d_hidden: Tensor  # (N, H), in hidden's dtype
    d_weight: Tensor  # (V, H) float32; with one chunk in weight's dtype
    d_bias: Tensor  # (V,) float32


def weighted_sum(divergence: Tensor, c: Tensor) -> Tensor:
    """The sum of c (N,) times the divergences (N,); where c is 0, the divergence does not count, be it infinite."""
    return (c * divergence.where(c != 0, 0.0)).sum()


@Operator
def divergence_forward_gradient(
    head: Head,
    teacher: Head,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    c: Tensor,  # (N,) float32: the weight of each row; 0 where masked
    run: Run,
    num_active: int,
) -> LinearDivergence:
    """The weighted sum of the rows' divergences, differentiable once. Not for float16, whose sums need a scale.

    num_active: the number of valid rows whose c is not 0, or -1.
    """
    (backend, _, plan), vocab = run, head.entries
    used, chunks = active_chunks(mask, c != 0, run, num_active)
    out = torch.zeros(c.shape, dtype=torch.float32, device=head.hidden.device)
    sums = GradientSums(head, used, chunks, plan, plan.one_chunk, backend)
    head, tile = head.unpadded(), Tile(sums.longest, vocab)
    workspace = PairWorkspace(head, teacher, tile, used, backend, plan.call, True, False, plan.call.block)
    rows = _Rows(transform, teacher_transform, c).part(used.index)
    for chunk in chunks:
        places = slice(chunk.start, chunk.stop)
        where, inputs = used.rows(places), rows.part(places)
        hidden = workspace.hidden(where)
        logits = workspace.logits(hidden, _whole(head))
        pair = Pair(logits, workspace.teacher_logits(_whole(head)), *inputs[:2], divergence)
        row_kernels = row_functions(backend, logits)
        if not chunk.active:
            out[where] = row_kernels.pair_statistics(pair).divergence
            continue
        gradient = workspace.gradient(logits)
        beside = None if gradient is logits else gradient
        out[where] = row_kernels.pair_forward_gradient(pair, inputs.c, beside).divergence
        sums.add(chunk, hidden, gradient)
    return LinearDivergence(weighted_sum(out, c), out, *HeadGradients.of(sums.gradients, head.hidden))


@divergence_forward_gradient.register_fake
def _(head: Head, run: Run, **_: Any) -> LinearDivergence:
    results = (head.hidden.new_empty(shape, dtype=torch.float32) for shape in ((), head.hidden.shape[:1]))
    return LinearDivergence(*results, *fake_gradients(head, run.plan))  # type: ignore[call-arg]


divergence_forward_gradient.register_autograd(gradients_backward, save_gradients, differentiable=1)
