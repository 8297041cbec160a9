"""From hidden states and the output head, a tile of logits at a time: statistics of rows, and their backward.

No (N, V) tensor exists, and masked rows never enter a matrix product. Rows with a recorded support read its entries
only (`Supports`); the others take the passes over tiles, whose gradients are written first, and the rows with a support
add theirs, so that no second (V, H) buffer exists. `planning.plans` chooses the plan, which is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Entries, LossTerms, Statistics, Support, Transform
from fastrl.base import checks
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import add_parts
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective
from fastrl.passes.backward import Backward
from fastrl.passes.combined import Combined
from fastrl.passes.entries import EntryValues
from fastrl.passes.head import Head, Workspace, empty_tile, order, pieces, slices, slope_scale, store_product
from fastrl.passes.logits import coefficients, empty_statistics, upstream
from fastrl.passes.operator import Operator, saved
from fastrl.passes.rows import Rows, rows_of
from fastrl.passes.supports import Supports, check_targets, outside, together
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import ELEMENTWISE_BYTES, PIECE_BYTES, Needs

# --- the forward ------------------------------------------------------------------------------------------------------


def _zeros(targets: Tensor) -> Statistics:
    return Statistics(*(torch.zeros(targets.shape, dtype=torch.float32, device=targets.device) for _ in range(4)))


def dense_statistics(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    num_rows: int,
    plan: Plan,
    wide: Entries | None = None,
    entries: EntryValues | None = None,
    make: Callable[..., Workspace] = Workspace,
) -> Statistics:
    """Row statistics (N,) from hidden states, with one product (1U); 0 for masked rows.

    Of a shard, those of its entries alone, for targets counted from its first. With `entries` their logits are
    gathered, and the targets are the best of them, whatever `targets` says.
    """
    out, used = _zeros(targets), order(mask, targets.shape[0], num_rows)
    if used.count == 0:
        return out
    tile = plan.tile("statistics", used.count)
    workspace = make(head, tile, used.index is not None, backend, plan.mapped, plan.call.float32_logits)
    rows = rows_of(used, targets, transform, wide=wide, entries=entries)
    for part in slices(used.count, tile.rows):
        where = used.rows(part)
        chunk = _chunk_statistics(workspace, workspace.hidden(where), rows.part(part), tile.columns, backend)
        for total, values in zip(out, chunk, strict=True):
            total[where] = values
    return out


def _chunk_statistics(workspace: Workspace, hidden: Tensor, rows: Rows, step: int, backend: str) -> Statistics:
    """Statistics of a chunk of rows, computed one slice of the vocabulary after another."""
    vocab = workspace.head.weight.shape[0]
    if vocab == 0:
        return no_statistics(rows.targets)
    combined = None if step >= vocab else Combined(rows.targets)
    for columns in slices(vocab, step):
        logits = workspace.logits(hidden, columns)
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


def no_statistics(targets: Tensor) -> Statistics:
    """The statistics (N,) of no logits at all, as of an empty shard: a maximum of -inf, which `Combined` leaves out."""
    zeros = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    return Statistics(zeros, zeros, torch.full_like(zeros, -torch.inf), zeros)


def statistics_of(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    backend: str,
    num_rows: int,
    plan: Plan,
) -> tuple[Statistics, Tensor]:
    """The statistics of rows of an unpadded head, and the logits of the supports' entries; nothing is checked."""
    if supports is None:
        stats = dense_statistics(head, targets, mask, transform, backend, num_rows, plan)
        return stats, stats.logprobs.new_empty(0)
    support, dense, wide, count = supports
    rest = None
    if dense is not None:
        rest = dense_statistics(head, targets, dense, transform, backend, count, plan, wide)
    functions: Any = row_functions(backend, head.hidden)
    values: Tensor = functions.support_products(*head[:3], support)
    return together(rest, functions.support_statistics(values, targets, support, transform)), values


#: With `_slope_inputs`, the row-local objective whose gradient is that of logp (c = 1) or of the entropy (h = 1).
_SLOPE = RowObjective("reinforce")


def _slope_inputs(vector: int, like: Tensor, scale: float | Tensor) -> RowInputs:
    """Inputs with which the gradient of `_SLOPE` is d logp (vector 0) or d entropy (vector 1), times `scale`."""
    zeros = torch.zeros_like(like, dtype=torch.float32)
    minus = -scale if isinstance(scale, Tensor) else torch.full_like(zeros, -scale)
    return RowInputs(zeros, zeros, entropy_weights=minus) if vector else RowInputs(minus, torch.ones_like(zeros))


def frozen_head(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    backend: str,
    num_rows: int,
    plan: Plan,
    all_statistics: bool,
    entries: EntryValues | None = None,
) -> tuple[Statistics, list[Tensor]]:
    """Row statistics, and d logp / d hidden (N, H); with two `slopes` in the plan's call also d entropy / d hidden.

    These are in hidden's dtype, times `slope_scale`. A row's statistics and each of its slopes are one visit by
    `row_forward_gradient`, which does not give the maximum and the log-sum: without `all_statistics` these are empty.
    `entries` as in `dense_statistics`.
    """
    count, wide = plan.call.slopes, plan.call.float32_logits
    out, used = _zeros(targets), order(mask, targets.shape[0], num_rows)
    slopes = [torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) for _ in range(count)]
    if not all_statistics:
        out = out._replace(maximum=out.maximum.new_empty(0), log_sum=out.log_sum.new_empty(0))
    if used.count == 0:
        return out, slopes
    tile = plan.tile("frozen", used.count)
    workspace = Workspace(head, tile, used.index is not None, backend, float32_logits=wide, forms_gradient=True)
    second = empty_tile(*tile, head.weight, backend) if count == 2 and not wide else None
    rows = rows_of(used, targets, transform, entries=entries)
    for places in slices(used.count, tile.rows):
        where, part = used.rows(places), rows.part(places)
        logits = workspace.logits(workspace.hidden(where), slice(0, tile.columns))
        if part.entries is not None and part.row_ids is not None:
            # Any target will do in a row without one: nothing reads its slope.
            part = part._replace(targets=part.entries.gather(logits, 0, part.row_ids, backend).clamp_min(0))
        functions: Any = row_functions(backend, logits)
        scale = slope_scale(head.hidden.dtype, part.transform)
        row = (logits[None], part.targets, None, part.transform)
        if all_statistics:
            for total, values in zip(out, functions.row_statistics(*row), strict=True):
                total[where] = values
        for vector in reversed(range(count)):  # the first slope last, because it may overwrite the logits
            gradient = workspace.gradient(logits) if second is None or vector == 0 else second[: logits.shape[0]]
            beside = None if gradient is logits else gradient[None]
            inputs = _slope_inputs(vector, part.targets, scale)
            terms: LossTerms = functions.row_forward_gradient(*row, _SLOPE, inputs, beside)
            out.logprobs[where], out.entropy[where] = terms.logprobs, terms.entropy
            store_product(slopes[vector], where, gradient, head.weight)
    return out, slopes


class LinearStatistics(NamedTuple):
    """The statistics of the rows, each (N,) float32 as in `Statistics`, and what a backward reads beside them."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor  # empty with slopes, unless all statistics were asked for
    log_sum: Tensor  # the same
    values: Tensor  # (nnz,) float32, the logits of the supports' entries; empty without supports
    logprobs_slope: Tensor  # (N, H) d logp / d hidden, or empty
    entropy_slope: Tensor  # (N, H) d entropy / d hidden, or empty


@Operator
def linear_statistics(
    head: Head,  # with supports, unit stride on H
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool; not read with supports
    transform: Transform,
    supports: Supports | None,
    backend: str,
    num_rows: int,  # the number of valid rows, or -1
    waits: bool,  # whether the backward may synchronise to learn which rows are idle
    plan: Plan,
    all_statistics: bool,
) -> LinearStatistics:
    """`row_statistics` of the logits hidden weight^T + bias, which never exist whole; the first two are differentiable.

    The plan of a frozen head forms d logp / d hidden, and d entropy / d hidden if its call has two slopes, so that the
    backward only scales their rows.
    """
    head = head.unpadded()
    if supports is None:
        checks.targets_in_range(targets, mask, head.entries)
    else:
        check_targets(targets, supports, head.entries)
    slopes: list[Tensor] = []
    if plan.name == "frozen-head":
        stats, slopes = frozen_head(head, targets, mask, transform, backend, num_rows, plan, all_statistics)
        values = stats.logprobs.new_empty(0)
    else:
        stats, values = statistics_of(head, targets, mask, transform, supports, backend, num_rows, plan)
    if supports is not None and supports.wide is not None:
        stats.logprobs.masked_fill_(outside(targets, supports), torch.nan)
    slopes += [head.hidden.new_empty(0) for _ in range(2 - len(slopes))]
    return LinearStatistics(*stats, values, *slopes)


@linear_statistics.register_fake
def _(
    head: Head, targets: Tensor, supports: Supports | None, plan: Plan, all_statistics: bool, **_: Any
) -> LinearStatistics:
    count = plan.call.slopes if plan.name == "frozen-head" else 0
    slopes = (head.hidden.new_empty(head.hidden.shape if i < count else (0,)) for i in range(2))
    stats = empty_statistics(targets, supports)
    if count and not all_statistics:
        stats = stats._replace(maximum=stats.maximum.new_empty(0), log_sum=stats.log_sum.new_empty(0))
    return LinearStatistics(*stats, *slopes)


# --- the backward -----------------------------------------------------------------------------------------------------


def gradients_of(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    statistics: Statistics,
    values: Tensor,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
    backend: str,
    num_rows: int,
    plan: Plan,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias) from c and h (N,); over a group that of hidden is summed, if the shard says so."""
    given = (transform, statistics, c, h, needs, backend)
    if supports is None:
        return Backward(head, targets, mask, *given, num_rows, plan, None, shard).run()
    support, dense, wide, _ = supports
    of_dense = None
    if dense is not None:
        alone = None if shard is None else replace(shard, reduces=False)  # entries are added before the sum
        of_dense = Backward(head, targets, dense, *given, -1, plan, wide, alone).run()
    gradient = torch.empty_like(values)
    row_functions(backend, values).support_gradient(values, targets, support, transform, statistics, c, h, gradient)
    return over_group(support_products(head, support, gradient, needs, backend, of_dense), shard)


def over_group(gradients: tuple[Tensor | None, ...], shard: VocabularyShard | None) -> tuple[Tensor | None, ...]:
    """The gradients, that of hidden summed over the shard's group, if the shard says so."""
    hidden, *rest = gradients
    if hidden is None or shard is None or not shard.reduces:
        return gradients
    total = hidden.float()
    add_parts(total, shard.group)
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


class HeadGradients(NamedTuple):
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor for each that is not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, gradients: Iterable[Tensor | None], hidden: Tensor) -> HeadGradients:
        """From gradients of which those not needed are None."""
        return cls(*(hidden.new_empty(0) if g is None else g for g in gradients))


@Operator
def linear_gradient(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    supports: Supports | None,
    statistics: Statistics,
    values: Tensor,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
    backend: str,
    num_rows: int,
    plan: Plan,
) -> HeadGradients:
    """The backward of `linear_statistics`."""
    arguments = (statistics, values, c, h, needs, backend, num_rows, plan)
    return HeadGradients.of(gradients_of(head, targets, mask, transform, supports, *arguments), head.hidden)


def fake_gradients(head: Head, needs: Needs, **_: Any) -> HeadGradients:
    """Uninitialised gradients; empty if not needed."""
    shapes = (head.hidden.shape, head.weight.shape, head.weight.shape[:1])
    return HeadGradients(*(head.hidden.new_empty(s if need else (0,)) for s, need in zip(shapes, needs, strict=True)))


linear_gradient.register_fake(fake_gradients)


@Operator
def combine_slopes(slopes: list[Tensor], coefficients: list[Tensor]) -> Tensor:
    """The sum of slopes (N, H) times coefficients (N,), computed in float32, in the dtype of the slopes."""
    out = torch.empty_like(slopes[0])
    if len(slopes) == 1 and out.is_cuda:  # which casts as it multiplies; a CPU would copy its operands
        return torch.mul(slopes[0], coefficients[0][:, None], out=out)
    piece_bytes = ELEMENTWISE_BYTES.get(out.device.type, PIECE_BYTES)
    for part in pieces(out.shape[0], 8 * out.shape[1], piece_bytes):
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


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    plan: Plan = inputs["plan"]
    if plan.name == "frozen-head":  # the backward reads nothing else
        return {"slopes": results[5 : 5 + plan.call.slopes], "transform": inputs["transform"]}
    kept = {name: value for name, value in inputs.items() if name not in ("waits", "all_statistics")}
    known = -1 if inputs["waits"] else inputs["num_rows"]
    return {**kept, "num_rows": known, "statistics": Statistics(*results[:4]), "values": results[4]}


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
