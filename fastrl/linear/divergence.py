"""Divergences between the vocabulary distributions of two heads: a tile of both logits at a time, no (N, V) tensor.

`divergence_forward_gradient` forms the student's gradients while both rows are in memory (3U of the student, 1U of the
teacher). `divergence_statistics` has a backward that forms both logits again, tile by tile. Gradients are the
student's alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import Divergence, PairStatistics, Transform
from fastrl.linear import head as products
from fastrl.linear.backward import Passes, order_of_active
from fastrl.linear.forward_gradient import GradientSums, fake_gradients, gradients_backward, row_chunks, save_gradients
from fastrl.linear.head import Head, Held, slices
from fastrl.linear.operators import HeadGradients, head_backward
from fastrl.linear.operators import fake_gradients as fake_head_gradients
from fastrl.linear.statistics import active_first, order, pass_tile
from fastrl.operators.operator import operator
from fastrl.operators.rows import upstream
from fastrl.planning.tiling import Needs, PassBudget, Teacher, Tile


def teacher_sizes(teacher: Head, float32_logits: bool) -> Teacher:
    """What the planner knows of a teacher."""
    return Teacher(teacher.hidden.shape[1], teacher.hidden.element_size(), float32_logits)


class HeldPair(Held):
    """Memory for a chunk's hidden states and a tile of its logits, of a student and a teacher."""

    def __init__(
        self,
        head: Head,
        teacher: Head,
        tile: Tile,
        gathers: bool,
        backend: str,
        budget: PassBudget,
        teacher_float32: bool,
        forms_gradient: bool,
        mapped: bool = False,
    ) -> None:
        # The kernels for pairs take contiguous tiles.
        super().__init__(head, tile, gathers, backend, mapped, budget.float32_logits, forms_gradient, pitched=False)
        self._teacher = Held(teacher, tile, gathers, backend, mapped, teacher_float32, pitched=False)
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

        def of(transform: Transform) -> Transform:
            t = transform.temperatures
            return transform if t is None else transform._replace(temperatures=t[rows])

        stats = None if self.statistics is None else PairStatistics(*(x[rows] for x in self.statistics))
        return _Rows(of(self.transform), of(self.teacher_transform), None if self.c is None else self.c[rows], stats)


def _whole(head: Head) -> slice:
    return slice(0, head.weight.shape[0])


@operator()
def divergence_statistics(
    head: Head,
    teacher: Head,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    teacher_float32: bool,
    backend: str,
    num_tokens: int,
    waits: bool,
    plan: str,
    budget: PassBudget,
) -> PairStatistics:
    """The divergence of each row, which is differentiable, and what its gradient needs; 0 for masked rows."""
    head, n = head.unpadded(), head.hidden.shape[0]
    out = PairStatistics(
        *(torch.zeros(n, dtype=torch.float32, device=head.hidden.device) for _ in PairStatistics._fields)
    )
    used = order(mask, n, num_tokens)
    if used.count == 0:
        return out
    tile = pass_tile("statistics", head, used, budget, teacher=teacher_sizes(teacher, teacher_float32))
    gathers = used.index is not None
    held = HeldPair(head, teacher, tile, gathers, backend, budget, teacher_float32, False, budget.mapped)
    rows = _Rows(transform, teacher_transform).part(used.index)
    for part in slices(used.count, tile.rows):
        where, inputs = used.rows(part), rows.part(part)
        logits = held.logits(held.hidden(where), _whole(head))
        stats = kernels(backend, logits).pair_statistics(
            logits, held.teacher_logits(_whole(head)), inputs.transform, inputs.teacher_transform, divergence
        )
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
        teacher_float32: bool,
        backend: str,
        num_tokens: int,
        budget: PassBudget,
    ) -> None:
        assert rows.statistics is not None and rows.c is not None
        active = order_of_active(mask, rows.c, num_tokens)
        rows, undo = rows.part(active.index), None
        if head.hidden.dtype == torch.float16 and active.count:
            assert rows.c is not None and rows.statistics is not None
            # Of a reverse KL, the |dD/dz| sum up to about twice the divergence. An infinite forward KL has finite ones.
            divergences = rows.statistics.divergence.nan_to_num(0.0, 0.0, 0.0)
            scale = products.float16_scale(rows.c.abs() * (1 + divergences), rows.transform)
            rows, undo = rows._replace(c=rows.c * scale), 1 / scale
        super().__init__(head, active, needs, backend, budget, undo)
        self.teacher, self.teacher_float32 = teacher, teacher_float32
        self.divergence, self.rows = divergence, rows

    def _rows(self, part: slice) -> _Rows:
        return self.rows.part(part)

    def _tile(self, kind: str) -> Tile:
        teacher = teacher_sizes(self.teacher, self.teacher_float32)
        return pass_tile(kind, self.head, self.order, self.budget, needs=self.needs, teacher=teacher)

    def _held(self, tile: Tile) -> HeldPair:
        memory = (tile, self.order.index is not None, self.backend, self.budget)
        return HeldPair(self.head, self.teacher, *memory, self.teacher_float32, True, self.budget.mapped)

    def _gradient(self, hidden: Tensor, rows: _Rows, columns: slice, held: Held) -> Tensor:
        assert isinstance(held, HeldPair)
        logits = held.logits(hidden, columns)
        gradient = held.gradient(logits)
        kernels(self.backend, logits).pair_gradient(
            logits,
            held.teacher_logits(columns),
            rows.transform,
            rows.teacher_transform,
            self.divergence,
            rows.statistics,
            rows.c,
            gradient,
        )
        return gradient


@operator()
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
    teacher_float32: bool,
    backend: str,
    num_tokens: int,
    waits: bool,
    plan: str,
    budget: PassBudget,
) -> HeadGradients:
    """The backward of `divergence_statistics`."""
    rows = _Rows(transform, teacher_transform, c, statistics)
    known = -1 if waits else num_tokens
    backward = _Backward(head, teacher, mask, rows, divergence, needs, teacher_float32, backend, known, budget)
    return HeadGradients.of(backward.run(plan), head.hidden)


divergence_gradient.register_fake(fake_head_gradients)


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {**inputs, "statistics": PairStatistics(*results)}


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


@operator()
def divergence_forward_gradient(
    head: Head,
    teacher: Head,
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    c: Tensor,  # (N,) float32: the weight of each row; 0 where masked
    needs: Needs,
    teacher_float32: bool,
    backend: str,
    num_tokens: int,
    num_active: int,
    budget: PassBudget,
    one_chunk: bool,
) -> LinearDivergence:
    """The weighted sum of the rows' divergences, differentiable once. Not for float16, whose sums need a scale.

    num_active: the number of valid rows whose c is not 0, or -1.
    """
    n, device = head.hidden.shape[0], head.hidden.device
    used, active = active_first(mask, c != 0, n, num_tokens, num_active)
    tile = Tile(max(used.count, 1), head.entries)
    if not one_chunk and used.count:
        # There may be fewer rows than were planned, but the sums are float32 as planned.
        sizes = teacher_sizes(teacher, teacher_float32)
        tile = pass_tile("forward-gradient", head, used, budget, needs=needs, summed=True, teacher=sizes)
    chunks = row_chunks(used.count, active, tile.rows)
    out = torch.zeros(n, dtype=torch.float32, device=device)
    sums = GradientSums(head, used, needs, one_chunk, active == n, backend, None)
    head = head.unpadded()
    tile = Tile(min(tile.rows, used.count), tile.columns)
    held = HeldPair(head, teacher, tile, used.index is not None, backend, budget, teacher_float32, True)
    rows = _Rows(transform, teacher_transform, c).part(used.index)
    for chunk in chunks:
        places = slice(chunk.start, chunk.stop)
        where, inputs = used.rows(places), rows.part(places)
        hidden = held.hidden(where)
        logits = held.logits(hidden, _whole(head))
        arguments = (logits, held.teacher_logits(_whole(head)), *inputs[:2], divergence)
        row_kernels = kernels(backend, logits)
        if not chunk.active:
            out[where] = row_kernels.pair_statistics(*arguments).divergence
            continue
        gradient = held.gradient(logits)
        beside = None if gradient is logits else gradient
        out[where] = row_kernels.pair_forward_gradient(*arguments, inputs.c, beside).divergence
        positions = slice(chunk.start, chunk.start + chunk.active)
        sums.add(positions, hidden[: chunk.active], gradient[: chunk.active], False)
    gradients = (head.hidden.new_empty(0) if g is None else g for g in sums.finish())
    return LinearDivergence(weighted_sum(out, c), out, *gradients)


@divergence_forward_gradient.register_fake
def _(head: Head, needs: Needs, one_chunk: bool, **_: Any) -> LinearDivergence:
    results = (head.hidden.new_empty(shape, dtype=torch.float32) for shape in ((), head.hidden.shape[:1]))
    return LinearDivergence(*results, *fake_gradients(head, needs, one_chunk))  # type: ignore[call-arg]


divergence_forward_gradient.register_autograd(gradients_backward, save_gradients, differentiable=1)
