"""From hidden states and the output head, a tile of logits at a time: statistics of rows, and their backward.

No (N, V) tensor exists, and masked rows never enter a matrix product. Rows with a recorded support read its entries
only (`Supports`); the others take the passes over tiles, whose gradients are written first, and the rows with a support
add theirs, so that no second (V, H) buffer exists. `planning.plans` chooses the plan, which is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import LossTerms, Statistics, Support, Transform
from fastrl.base import checks
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective
from fastrl.passes.backward import Backward
from fastrl.passes.combined import sliced_statistics, tile_statistics
from fastrl.passes.entries import EntryValues
from fastrl.passes.head import (
    Head,
    HeadGradients,
    Run,
    Workspace,
    empty_tile,
    order,
    pieces,
    slices,
    slope_scale,
    store_product,
)
from fastrl.passes.logits import RowStatistics, coefficients, empty_statistics, upstream
from fastrl.passes.operator import Operator, saved
from fastrl.passes.rows import Rows
from fastrl.passes.supports import RowOptions, Supports, check_targets, outside, together
from fastrl.planning.tiling import Needs, elementwise_bytes

# --- the forward ------------------------------------------------------------------------------------------------------


def _zeros(targets: Tensor) -> Statistics:
    return Statistics(*(torch.zeros(targets.shape, dtype=torch.float32, device=targets.device) for _ in range(4)))


def dense_statistics(
    head: Head,
    targets: Tensor,
    options: RowOptions,
    run: Run,
    entries: EntryValues | None = None,
    make: Callable[..., Workspace] = Workspace,
) -> Statistics:
    """Statistics (N,) of the rows that take the dense kernels, with one product (1U); 0 for the others.

    Of a shard, those of its entries alone, for targets counted from its first. With `entries` their logits are
    gathered, and the targets are the best of them, whatever `targets` says.
    """
    (backend, num_rows, plan), (mask, wide) = run, options.dense
    out, used = _zeros(targets), order(mask, targets.shape[0], num_rows)
    if used.count == 0:
        return out
    tile = plan.tile("statistics", used.count)
    memory = (head, tile, used.index is not None, backend, plan.mapped, plan.call.float32_logits)
    workspace = make(*memory, block=plan.call.block)
    rows = Rows(targets, options.transform, wide=wide, entries=entries).ordered(used)
    for part in slices(used.count, tile.rows):
        where = used.rows(part)
        hidden, vocab = workspace.hidden(where), head.weight.shape[0]
        chunk = sliced_statistics(partial(workspace.logits, hidden), rows.part(part), vocab, tile.columns, backend)
        for total, values in zip(out, chunk, strict=True):
            total[where] = values
    return out


def statistics_of(head: Head, targets: Tensor, options: RowOptions, run: Run) -> RowStatistics:
    """The statistics of rows of an unpadded head; nothing is checked."""
    supports = options.supports
    if supports is None:
        stats = dense_statistics(head, targets, options, run)
        return RowStatistics(*stats, stats.logprobs.new_empty(0))
    dense = None if supports.dense is None else dense_statistics(head, targets, options, run)
    functions: Any = row_functions(run.backend, head.hidden)
    values: Tensor = functions.support_products(*head[:3], supports.support)
    return RowStatistics(
        *together(dense, functions.support_statistics(values, targets, supports.support, options.transform)), values
    )


#: With `_slope_inputs`, the row-local objective whose gradient is that of logp (c = 1) or of the entropy (h = 1).
_SLOPE = RowObjective("reinforce")


def _slope_inputs(vector: int, like: Tensor, scale: float | Tensor) -> RowInputs:
    """Inputs with which the gradient of `_SLOPE` is d logp (vector 0) or d entropy (vector 1), times `scale`."""
    zeros = torch.zeros_like(like, dtype=torch.float32)
    minus = -scale if isinstance(scale, Tensor) else torch.full_like(zeros, -scale)
    return RowInputs(zeros, zeros, entropy_weights=minus) if vector else RowInputs(minus, torch.ones_like(zeros))


class FrozenHead:
    """Row statistics, and d logp / d hidden (N, H); with two `slopes` in the plan's call also d entropy / d hidden.

    These are in hidden's dtype, times `slope_scale`. A row's statistics and each of its slopes are one visit by
    `row_forward_gradient`, which does not give the maximum and the log-sum: without `all_statistics` these are empty.
    `entries` as in `dense_statistics`. Where statistics are those of slices, which the visit does not give either, or
    of all ranks, they come first.
    """

    first = 0  # the vocabulary entry of the head's first row

    def __init__(
        self,
        head: Head,
        targets: Tensor,
        options: RowOptions,
        run: Run,
        all_statistics: bool,
        entries: EntryValues | None = None,
    ) -> None:
        self.head, self.backend, self.plan, self.all_statistics = head, run.backend, run.plan, all_statistics
        self.step = run.plan.call.step
        self.statistics_first = self.step < head.entries
        self.order, self.out = order(options.mask, targets.shape[0], run.num_rows), _zeros(targets)
        self.rows = Rows(targets, options.transform, entries=entries).ordered(self.order)
        count = run.plan.call.slopes
        self.slopes = [torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) for _ in range(count)]

    def run(self) -> tuple[Statistics, list[Tensor]]:
        """The statistics and the slopes."""
        out = self.out
        if self.order.count:
            self._run()
        if not self.all_statistics:
            self.out = out._replace(maximum=out.maximum.new_empty(0), log_sum=out.log_sum.new_empty(0))
        return self.out, self.slopes

    def _run(self) -> None:
        head, used, float32_logits = self.head, self.order, self.plan.call.float32_logits
        tile, vocab = self.plan.tile("frozen", used.count), head.weight.shape[0]
        memory = (head, tile, used.index is not None, self.backend)
        block = self.plan.call.block
        workspace = Workspace(*memory, False, float32_logits, forms_gradient=True, block=block, step=self.step)
        beside = None
        if len(self.slopes) == 2 and not float32_logits:
            beside = empty_tile(tile.rows, vocab, head.weight, self.backend)
        for places in slices(used.count, tile.rows):
            where, rows = used.rows(places), self.rows.part(places)
            logits = workspace.logits(workspace.hidden(where), slice(0, vocab))
            if rows.entries is not None and rows.row_ids is not None and not self.statistics_first:
                rows = rows._replace(targets=rows.entries.gather(logits, 0, rows.row_ids, self.backend))
            rows = rows._replace(statistics=self._statistics(logits, rows))
            if rows.entries is not None:
                # Those of slices were gathered with their statistics. Any target will do in a row without one: nothing
                # reads its slope.
                targets = rows.entries.best.ids[rows.row_ids] if self.statistics_first else rows.targets
                rows = rows._replace(targets=targets.clamp_min(0))
            if rows.statistics is not None:
                for total, values in zip(self.out, rows.statistics, strict=True):
                    total[where] = values
            scale = slope_scale(head.hidden.dtype, rows.transform)
            for vector in reversed(range(len(self.slopes))):  # the first slope last: it may overwrite the logits
                second = vector == 1 and beside is not None
                gradient = beside[: logits.shape[0]] if second else workspace.gradient(logits)  # type: ignore[index]
                self._write_gradient(vector, logits, rows, where, scale, gradient)
                self._store(vector, places, where, gradient)

    def _statistics(self, logits: Tensor, rows: Rows) -> Statistics | None:
        """The statistics of a chunk of rows if they need a visit of their own."""
        if not self.all_statistics and not self.statistics_first:
            return None
        return tile_statistics(logits, rows, self.step, self.backend)

    def _write_gradient(
        self, vector: int, logits: Tensor, rows: Rows, where: Tensor | slice, scale: float | Tensor, out: Tensor
    ) -> None:
        """Write d logp (vector 0) or d entropy (vector 1) / d logits (n, v), times `scale`."""
        if self.statistics_first:
            stats = rows.statistics
            assert stats is not None
            one = scale if isinstance(scale, Tensor) else torch.full_like(stats.logprobs, scale)
            c, h = (torch.zeros_like(one), one) if vector else (one, None)
            rows._replace(c=c, h=h).write_gradient(logits, self.first, self.backend, out)
            return
        beside, inputs = None if out is logits else out[None], _slope_inputs(vector, rows.targets, scale)
        arguments = (logits[None], rows.targets, None, rows.transform, _SLOPE, inputs, beside)
        terms: LossTerms = row_functions(self.backend, logits).row_forward_gradient(*arguments)
        self.out.logprobs[where], self.out.entropy[where] = terms.logprobs, terms.entropy

    def _store(self, vector: int, places: slice, where: Tensor | slice, gradient: Tensor) -> None:
        """Store the product of the gradient of a chunk of logits in a slope."""
        store_product(self.slopes[vector], where, gradient, self.head.weight, block=self.plan.call.block)


class LinearStatistics(NamedTuple):
    """`RowStatistics`, and what the backward of a frozen head reads."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor  # empty with slopes, unless all statistics were asked for
    log_sum: Tensor  # the same
    values: Tensor
    logprobs_slope: Tensor  # (N, H) d logp / d hidden, or empty
    entropy_slope: Tensor  # (N, H) d entropy / d hidden, or empty


@Operator
def linear_statistics(
    head: Head,  # with supports, unit stride on H
    targets: Tensor,  # (N,) int64
    options: RowOptions,
    run: Run,
    may_synchronise: bool,  # in the backward, to learn which rows are idle
    all_statistics: bool,
) -> LinearStatistics:
    """`row_statistics` of the logits hidden weight^T + bias, which never exist whole; the first two are differentiable.

    The plan of a frozen head forms d logp / d hidden, and d entropy / d hidden if its call has two slopes, so that the
    backward only scales their rows.
    """
    head, supports = head.unpadded(), options.supports
    if supports is None:
        checks.targets_in_range(targets, options.mask, head.entries)
    else:
        check_targets(targets, supports, head.entries)
    slopes: list[Tensor] = []
    if run.plan.name == "frozen-head":
        dense, slopes = FrozenHead(head, targets, options, run, all_statistics).run()
        stats = RowStatistics(*dense, dense.logprobs.new_empty(0))
    else:
        stats = statistics_of(head, targets, options, run)
    if supports is not None and supports.wide is not None:
        stats.logprobs.masked_fill_(outside(targets, supports), torch.nan)
    slopes += [head.hidden.new_empty(0) for _ in range(2 - len(slopes))]
    return LinearStatistics(*stats, *slopes)


@linear_statistics.register_fake
def _(head: Head, targets: Tensor, options: RowOptions, run: Run, all_statistics: bool, **_: Any) -> LinearStatistics:
    count = run.plan.call.slopes if run.plan.name == "frozen-head" else 0
    slopes = (head.hidden.new_empty(head.hidden.shape if i < count else (0,)) for i in range(2))
    stats = empty_statistics(targets, options)
    if count and not all_statistics:
        stats = stats._replace(maximum=stats.maximum.new_empty(0), log_sum=stats.log_sum.new_empty(0))
    return LinearStatistics(*stats, *slopes)


# --- the backward -----------------------------------------------------------------------------------------------------


def gradients_of(
    head: Head,
    targets: Tensor,
    options: RowOptions,
    statistics: RowStatistics,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
    run: Run,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias) from c and h (N,); over a group that of hidden is summed, if the shard says so."""
    stats, values, supports = Statistics(*statistics[:4]), statistics.values, options.supports
    if supports is None:
        return Backward(head, targets, options, stats, c, h, needs, run, shard).run()
    dense = None
    if supports.dense is not None:
        alone = None if shard is None else replace(shard, reduces=False)  # entries are added before the sum
        dense = Backward(head, targets, options, stats, c, h, needs, run._replace(num_rows=-1), alone).run()
    gradient, functions = torch.empty_like(values), row_functions(run.backend, values)
    functions.support_gradient(values, targets, supports.support, options.transform, stats, c, h, gradient)
    gradients = support_products(head, supports.support, gradient, needs, run.backend, dense)
    return over_group(gradients, shard, run.plan.call.block > 0)


def over_group(
    gradients: tuple[Tensor | None, ...], shard: VocabularyShard | None, ordered: bool
) -> tuple[Tensor | None, ...]:
    """The gradients, that of hidden summed over the shard's group if it says so; `ordered` as in `add_parts`."""
    hidden, *rest = gradients
    if hidden is None or shard is None or not shard.reduces:
        return gradients
    total = hidden.float()
    add_parts(total, shard.group, ordered)
    return hidden.copy_(total), *rest


def support_products(
    head: Head,
    support: Support,
    gradient: Tensor,
    needs: Needs,
    backend: str,
    dense: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias) from dL/d(support logits) (nnz,), added to those of the dense rows, if any."""
    (hidden, weight, _, _), functions, vocab = head, row_functions(backend, gradient), head.entries
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    d_hidden, d_weight, d_bias = dense or (
        functions.blank(tuple(shape), hidden.dtype, hidden) if need else None
        for shape, need in zip(shapes, needs, strict=True)
    )
    if d_hidden is not None:
        functions.support_hidden(gradient, weight, support, d_hidden, dense is not None)
    if d_weight is not None or d_bias is not None:
        by_token = functions.by_token(support, vocab)
        entries = (None if x is None else x[:vocab] for x in (d_weight, d_bias))
        functions.support_weight(gradient, hidden, by_token, *entries, dense is not None)
        for x in (d_weight, d_bias) if dense is None else ():
            if x is not None and vocab < x.shape[0]:
                x[vocab:].zero_()
    return d_hidden, d_weight, d_bias


@Operator
def linear_gradient(
    head: Head,
    targets: Tensor,
    options: RowOptions,
    statistics: RowStatistics,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
    run: Run,
) -> HeadGradients:
    """The backward of `linear_statistics`."""
    return HeadGradients.of(gradients_of(head, targets, options, statistics, c, h, needs, run), head.hidden)


def fake_gradients(head: Head, needs: Needs, **_: Any) -> HeadGradients:
    """Uninitialised gradients; empty if not needed."""
    return HeadGradients.uninitialised(head, needs)


linear_gradient.register_fake(fake_gradients)


@Operator
def combine_slopes(slopes: list[Tensor], coefficients: list[Tensor]) -> Tensor:
    """The sum of slopes (N, H) times coefficients (N,), computed in float32, in the dtype of the slopes."""
    out = torch.empty_like(slopes[0])
    if len(slopes) == 1 and out.is_cuda:  # which casts as it multiplies; a CPU would copy its operands
        return torch.mul(slopes[0], coefficients[0][:, None], out=out)
    for part in pieces(out.shape[0], 8 * out.shape[1], elementwise_bytes(out.device.type)):
        total = slopes[0][part] * coefficients[0][part, None]
        for slope, coefficient in zip(slopes[1:], coefficients[1:], strict=True):
            total += slope[part] * coefficient[part, None]
        out[part] = total
    return out


combine_slopes.register_fake(lambda slopes, coefficients: torch.empty_like(slopes[0]))


def gradient_of_slopes(slopes: Sequence[Tensor], c: Tensor | None, h: Tensor | None, transform: Transform) -> Tensor:
    """dL/dhidden (N, H) of a frozen head, whose slopes are times `slope_scale`, from c and h (N,) or None."""
    assert h is None or len(slopes) == 2, "the entropy's slope was not asked for"
    pairs = [(s, u) for s, u in zip(slopes, (upstream(c), upstream(h)), strict=False) if u is not None]
    factors = [u for _, u in pairs]
    if slopes[0].dtype == torch.float16:
        scale = slope_scale(slopes[0].dtype, transform)
        factors = [u / scale for u in factors]
    return combine_slopes([s for s, _ in pairs], factors)


def saved_run(run: Run, may_synchronise: bool) -> Run:
    """How the backward runs; it counts the rows with a gradient unless it may not synchronise."""
    return run._replace(num_rows=-1) if may_synchronise else run


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    run = saved_run(inputs["run"], inputs["may_synchronise"])
    if run.plan.name == "frozen-head":  # the backward reads nothing else
        return {"slopes": results[5 : 5 + run.plan.call.slopes], "transform": inputs["options"].transform}
    to_save = {name: inputs[name] for name in ("head", "targets", "options")}
    return {**to_save, "run": run, "statistics": RowStatistics(*results[:5])}


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> Head:
    if "slopes" not in ctx.values:
        return head_backward(linear_gradient, ctx, **coefficients(d_logprobs, d_entropy))
    return Head(gradient_of_slopes(**saved(ctx), c=d_logprobs, h=d_entropy), None, None)  # type: ignore[arg-type]


def head_backward(gradient: Operator[..., HeadGradients], ctx: Any, **upstream: Tensor | None) -> Head:
    """The backward by `gradient`, from what was saved and the upstream gradients by name."""
    needs = Needs(*ctx.needs[:3])
    gradients = gradient(**saved(ctx), **upstream, needs=needs)
    return Head(*(g if need else None for g, need in zip(gradients, needs, strict=True)))  # type: ignore[arg-type]


linear_statistics.register_autograd(_backward, _save, differentiable=2)


# --- a loss over supports ---------------------------------------------------------------------------------------------


class SupportLoss(NamedTuple):
    """A loss from hidden states whose rows all have a recorded support."""

    loss: Tensor  # ()
    logprobs: Tensor  # (N,)
    entropy: Tensor  # (N,)
    terms: Tensor  # (len(TERMS), N)
    gradient: Tensor  # (nnz,) float32, dL/d(support logits)


@Operator
def support_linear_loss(
    head: Head,  # unit stride on H
    targets: Tensor,  # (N,) int64
    transform: Transform,
    support: Support,
    inputs: RowInputs,
    objective: RowObjective,
    backend: str,
) -> SupportLoss:
    """The loss of a row-local objective, differentiable once. A row's gradient is formed with its statistics.

    The backward multiplies it by the upstream scalar before the products with the head, so that dH and dW are rounded
    once and float16 takes the caller's loss scale.
    """
    head = head.unpadded()
    check_targets(targets, Supports(support), head.entries)
    functions: Any = row_functions(backend, head.hidden)
    values = functions.support_products(*head[:3], support)
    arguments = (values, targets, support, transform, objective, inputs, values)
    results: LossTerms = functions.support_forward_gradient(*arguments)
    return SupportLoss(results.terms[0].sum(), *results, values)


@support_linear_loss.register_fake
def _(head: Head, targets: Tensor, support: Support, **_: Any) -> SupportLoss:
    n = targets.shape[0]
    shapes = ((), (n,), (n,), (len(TERMS), n), support.token_ids.shape)
    return SupportLoss(*(head.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes))


@Operator
def support_linear_products(
    head: Head, support: Support, gradient: Tensor, upstream: Tensor, needs: Needs, backend: str
) -> HeadGradients:
    """The backward of `support_linear_loss`, from dL/d(support logits) (nnz,) and the upstream scalar."""
    return HeadGradients.of(support_products(head, support, gradient * upstream, needs, backend), head.hidden)


support_linear_products.register_fake(fake_gradients)


def _save_loss(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {name: inputs[name] for name in ("head", "support", "backend")} | {"gradient": results[-1]}


def _loss_backward(ctx: Any, upstream: Tensor) -> Head:
    return head_backward(support_linear_products, ctx, upstream=upstream.float())


support_linear_loss.register_autograd(_loss_backward, _save_loss, differentiable=1)
