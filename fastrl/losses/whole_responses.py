"""Losses of whole responses, or of pairs of them, from hidden states and the output head.

A token's gradient is known when the sums over its response, or over its pair, are. The plan "whole-response" keeps the
logits of whole units, responses or pairs, until then (3U); the others compute the logits again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fastrl.backend.contract import Statistics
from fastrl.base import checks
from fastrl.base.responses import check_cu_seqlens, token_mask
from fastrl.losses.linear import attached, chunks_of, order_by, spans_of
from fastrl.losses.request import Request, linear_request, planned, statistics
from fastrl.losses.spread import over_tp_group
from fastrl.objectives.batch import Responses
from fastrl.objectives.row_local import ANY, RESPONSE
from fastrl.objectives.rows import TERMS
from fastrl.passes.head import Order
from fastrl.planning import plans
from fastrl.planning.budget import BudgetTooSmall
from fastrl.planning.plans import Plan


class CheckedResponses(NamedTuple):
    """The checked arguments that say which tokens belong to which response."""

    targets: Tensor
    """(R, T), or (N,) packed."""
    mask: Tensor
    """bool, like targets."""
    responses: Responses

    @classmethod
    def of(cls, targets: object, mask: Tensor, cu_seqlens: object) -> CheckedResponses:
        """Raises TypeError or ValueError for an argument of the wrong type, shape, device or value."""
        targets = checks.tensor("targets", targets, (torch.int64,))
        if cu_seqlens is None and targets.ndim != 2:
            raise ValueError(
                f"targets must have shape (responses, time) without cu_seqlens, got {tuple(targets.shape)}"
            )
        valid = token_mask(mask, "targets", targets)
        checked = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, "targets", targets, valid)
        return cls(targets, valid, Responses(targets.shape, checked, targets.device, mask))

    def per_response(self, name: str, value: object) -> Tensor:
        """The value, checked to be floating point with one number per response."""
        value = checks.tensor(name, value)
        checks.shape(name, value, (self.responses.count,), "one per response, summed")
        checks.same_device(name, value, self.targets, "targets")
        return value

    def lengths(self) -> Tensor:
        """(R,) float32, the number of valid tokens of each response."""
        return self.responses.number(self.mask.reshape(-1), torch.float32)

    def sums(self, logprobs: Tensor, also: Tensor | None = None) -> Tensor:
        """(R,), of the valid tokens alone; logprobs (N,) are 0 at all others but those of `also`."""
        if also is not None:  # not a product: a token outside the response may have any log-probability
            logprobs = logprobs.where(self.mask.reshape(-1), 0.0)
        return self.responses.sum(logprobs)


def wide(x: Tensor) -> Tensor:
    """x in float64 if the device has it (Apple's GPUs do not): responses are few, so that digits cost nothing."""
    return x.float() if x.device.type == "mps" else x.double()


class _Loss(Protocol):
    """A NamedTuple whose field `loss`, 0-dim, is the only one with a gradient."""

    @property
    def loss(self) -> Tensor: ...

    def _replace(self, *, loss: Tensor) -> Any: ...


_L = TypeVar("_L", bound=_Loss)


def loss_of_units(
    head: tuple[Tensor, Tensor, Tensor | None],
    targets: Tensor,
    mask: Tensor,
    options: tuple[Any, ...],
    units: Tensor,
    count: int,
    loss_of: Callable[[Tensor], _L],
) -> _L:
    """A loss of the log-probabilities of targets, whose units do not depend on each other, by the plan that fits.

    Args:
        head: hidden, weight and bias.
        targets, mask, options: as `linear_request` takes them; targets and mask are checked.
        units: (N,) int64 in [0, count), the unit of each token.
        count: the number of units.
        loss_of: the loss of (N,) log-probabilities, which are 0 where masked. Its derivative in a token's is the same
            whatever the log-probabilities of other units are.
    """
    request = over_tp_group(linear_request(*head, targets, mask, *options), options[-1], targets.shape)
    request, plan, counts = _planned(request, units, count)
    try:
        with plans.run(plan):
            if plan.name != "whole-response":
                return loss_of(statistics(request, plan).logprobs)
            return _whole_units(request, plan, units, counts, loss_of)
    except IndexError as error:
        raise checks.in_shape(error, targets, mask, request.vocab) from error.__cause__


def _planned(request: Request, units: Tensor, count: int) -> tuple[Request, Plan, list[int]]:
    """The plan, and the number of valid tokens of each unit, for which the host synchronises, if it depends on that."""
    if torch.compiler.is_compiling() or request.sampling_mask is not None or not any(request.needs):
        return *planned(request, ANY), []
    valid = request.mask
    ones = torch.ones(units.shape, dtype=torch.float64, device=units.device) if valid is None else valid.double()
    counts = [int(n) for n in ones.new_zeros(count).index_add_(0, units, ones).tolist()]
    try:
        whole = planned(request, RESPONSE, rows=sum(counts), longest=max(counts, default=0))
        if whole[1].name == "whole-response":
            return *whole, counts
    except BudgetTooSmall as error:
        if plans.forced() == "whole-response":
            raise
        try:
            return *planned(request, ANY), []
        except BudgetTooSmall as other:
            raise min(error, other, key=lambda error: error.least) from None
    return *planned(request, ANY), []


def _whole_units(request: Request, plan: Plan, units: Tensor, counts: list[int], loss_of: Callable[[Tensor], _L]) -> _L:
    """The whole-response plan: a chunk holds the logits of whole units until their loss is known."""
    checks.targets_in_range(request.targets, request.mask, request.vocab)
    spans = spans_of(counts, plan.tiles["forward-gradient"].rows)
    chunks, used = chunks_of(spans, counts, counts), _order(units, request.mask, spans, sum(counts))

    def coefficients(stats: Statistics, where: Tensor | slice, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.enable_grad():
            logp = stats.logprobs.detach().requires_grad_()
            # Other chunks' log-probabilities are 0 here, which changes no derivative of this one's.
            none = logp.new_zeros(request.targets.shape)
            all_rows = logp if isinstance(where, slice) else none.index_copy(0, where, logp)
            (c,) = torch.autograd.grad(loss_of(all_rows).loss, logp)
        c = c.contiguous()  # of one response it is one number, expanded
        return logp.new_zeros(len(TERMS), len(logp)), c, None

    arguments = (request, plan, used, chunks, coefficients, len(chunks) <= 1)
    loss, result = attached(*arguments, lambda result: loss_of(result.logprobs).loss)
    with_metrics: _L = loss_of(result.logprobs)._replace(loss=loss)
    return with_metrics


def _order(units: Tensor, mask: Tensor | None, spans: list[tuple[int, int]], count: int) -> Order:
    """The valid rows, span by span."""
    if count == units.shape[0] and len(spans) <= 1:
        return Order(None, count)
    return order_by([number for number, span in enumerate(spans) for _ in range(*span)], units, mask, count)
