"""Losses of whole responses, or of pairs of them, from hidden states and the output head.

A token's gradient is known when the sums over its response, or over its pair, are. The plan "whole-response" keeps the
logits of whole units, responses or pairs, until then (3U); the others compute the logits again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.backend.contract import Statistics
from fastrl.base import checks
from fastrl.linear.forward_gradient import Chunk, forward_gradient
from fastrl.linear.head import Head
from fastrl.linear.statistics import Order
from fastrl.losses.call import LinearCall, PlannedCall, linear_call, over_tp_group, planned
from fastrl.losses.linear import gradient_by_torch, spans_of
from fastrl.losses.spread import TensorParallel
from fastrl.objectives.dependence import ANY, RESPONSE
from fastrl.objectives.rows import TERMS
from fastrl.operators.attach import attach_gradients
from fastrl.planning import plans
from fastrl.planning.budget import BudgetTooSmall


class _Loss(Protocol):
    """A NamedTuple whose field `loss`, 0-dim, is the only one with a gradient."""

    @property
    def loss(self) -> Tensor: ...

    def _replace(self, *, loss: Tensor) -> Any: ...


_L = TypeVar("_L", bound=_Loss)


def loss_of_units(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    units: Tensor,
    count: int,
    loss_of: Callable[[Tensor], _L],
    *,
    tp_group: Any,
    vocab_start: int | None,
    vocab_size: int | None,
    reduce_hidden_grad: bool,
    **options: Any,
) -> _L:
    """A loss of the log-probabilities of targets, whose units do not depend on each other, by the plan that fits.

    Args:
        hidden, weight, targets, mask, and the keywords: as in `linear_token_logprobs`; targets and mask are checked.
        units: (N,) int64 in [0, count), the unit of each token.
        loss_of: the loss of (N,) log-probabilities, which are 0 where masked. Its derivative in a token's is the same
            whatever the log-probabilities of other units are.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        call = linear_call(hidden, weight, targets, mask=mask, tp=tp, **options)
        call = over_tp_group(call, tp, targets.shape)
    by_plan, counts = _planned(call, units, count)
    with plans.run(by_plan.inputs, by_plan.plan):
        if by_plan.plan.name != "whole-response":
            return loss_of(by_plan.statistics().logprobs)
        return _whole_units(by_plan, units, counts, loss_of)


def _planned(call: LinearCall, units: Tensor, count: int) -> tuple[PlannedCall, list[int]]:
    """The plan, and the number of valid tokens of each unit, for which the host synchronises, if it depends on that."""
    if torch.compiler.is_compiling() or call.sampling_mask is not None or not any(call.needs):
        return planned(call, ANY), []
    valid = call.args.mask
    ones = torch.ones(units.shape, dtype=torch.float64, device=units.device) if valid is None else valid.double()
    counts = [int(n) for n in ones.new_zeros(count).index_add_(0, units, ones).tolist()]
    try:
        by_plan = planned(call, RESPONSE, rows=sum(counts), longest=max(counts, default=0))
        if by_plan.plan.name == "whole-response":
            return by_plan, counts
    except BudgetTooSmall as whole:
        if plans.forced() == "whole-response":
            raise
        try:
            return planned(call, ANY), []
        except BudgetTooSmall as other:
            raise min(whole, other, key=lambda error: error.least) from None
    return planned(call, ANY), []


def _whole_units(by_plan: PlannedCall, units: Tensor, counts: list[int], loss_of: Callable[[Tensor], _L]) -> _L:
    """The whole-response plan: a chunk holds the logits of whole units until their loss is known."""
    call, backend = by_plan.call, forced()
    needs = call.needs  # before autograd's function switches gradients off
    targets, mask, transform = call.args
    checks.targets_in_range(targets, mask, call.vocab)
    spans = spans_of(counts, by_plan.plan.tiles["forward-gradient"].rows)
    chunks, start = [], 0
    for first, last in spans:
        stop = start + sum(counts[first:last])
        chunks.append(Chunk(start, stop, stop - start))
        start = stop
    used = _order(units, mask, spans, start)

    def coefficients(stats: Statistics, where: Tensor | slice, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.enable_grad():
            logp = stats.logprobs.detach().requires_grad_()
            # Other chunks' log-probabilities are 0 here, which changes no derivative of this one's.
            all_rows = logp if isinstance(where, slice) else logp.new_zeros(targets.shape).index_copy(0, where, logp)
            (c,) = torch.autograd.grad(loss_of(all_rows).loss, logp)
        c = c.contiguous()  # of one response it is one number, expanded
        return logp.new_zeros(len(TERMS), len(logp)), c, None

    def run(*inputs: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor]:
        result, gradients = forward_gradient(
            Head.of(inputs, call.head.vocab),
            targets,
            transform,
            used,
            chunks,
            gradient_by_torch(coefficients, backend, call.shard),
            needs,
            len(chunks) <= 1,
            backend,
            call.shard,
            call.float32_logits,
        )
        return loss_of(result.logprobs).loss, gradients, result.logprobs

    loss, logprobs = attach_gradients(run, call.head.tensors, backend)
    found: _L = loss_of(logprobs)._replace(loss=loss)
    return found


def _order(units: Tensor, mask: Tensor | None, spans: list[tuple[int, int]], count: int) -> Order:
    """The valid rows, span by span."""
    total = units.shape[0]
    if count == total and len(spans) <= 1:
        return Order(None, total)
    numbers = torch.tensor([number for number, span in enumerate(spans) for _ in range(*span)], dtype=torch.int64)
    key = numbers.to(units.device, non_blocking=True)[units]
    if mask is not None:
        key = key.where(mask, len(spans))
    return Order(key.argsort(stable=True)[:count], count)
