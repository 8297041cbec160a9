"""A policy loss from hidden states and the output head: the choice of its plan, and the code of each plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.backend.contract import LossTerms, Statistics
from fastrl.base import checks
from fastrl.base.responses import check_cu_seqlens
from fastrl.losses.problem import PolicyLoss, Problem, from_statistics, from_terms
from fastrl.losses.request import Request, planned, statistics
from fastrl.objectives.batch import Batch
from fastrl.objectives.evaluate import marks_of, objective_loss
from fastrl.objectives.objective import Objective
from fastrl.objectives.row_local import ANY, BATCH, RESPONSE, TOKEN, Given, row_objective, scope, slopes
from fastrl.passes import shards
from fastrl.passes.forward_gradient import (
    Chunk,
    Coefficients,
    active_chunks,
    active_rows,
    forward_gradient,
    gradient_by_torch,
    linear_forward_gradient,
    row_chunks,
    row_local_coefficients,
)
from fastrl.passes.head import Head, Order, Run, counted, order
from fastrl.passes.linear import support_linear_loss
from fastrl.passes.operator import attach_gradients
from fastrl.planning import plans
from fastrl.planning.plans import Plan

#: (rows, number) of a chunk -> its tokens as a batch, their weights w, and the rows' indices in that batch
_Part = Callable[[Tensor | slice, int], tuple[Batch, Tensor, Tensor | slice]]


class _Responses(NamedTuple):
    """What the host knows about each response, after at most one synchronisation."""

    counts: list[int]  # the number of valid tokens
    active: list[int]  # the same, but 0 for an idle response: one with only idle rows
    ends: list[int]  # the end of its rows, masked rows included


class _Rows(NamedTuple):
    """What the host asked about the rows of a row-local objective, all at once."""

    of_rows: Any  # what `row_objective` returned
    valid: int  # how many are valid
    active: int  # and how many of those are not idle


def policy_plan(
    problem: Problem, request: Request, over_ranks: bool
) -> tuple[Request, Plan, _Responses | _Rows | None]:
    """Chooses the plan for a checked problem that fits the request's budget; with what the host learned before it.

    over_ranks: whether the tokens of a response will lie over the ranks of a group.
    """
    depends = scope(problem.objective, Given.of(problem.batch)._replace(over_ranks=over_ranks))
    if torch.compiler.is_compiling() and (depends != TOKEN or not isinstance(problem.objective, Objective)):
        depends = ANY  # torch.compile cannot trace the Python that the other plans run between kernels
    asked: _Responses | _Rows | None = None
    count = longest = request.num_tokens
    if request.sampling_mask is not None:
        depends = RESPONSE  # no plan holds a response's support entries until its objective is known
    elif any(request.needs) and depends in (RESPONSE, BATCH):
        asked = _ask_of_responses(problem, request)
        if asked is not None:
            count, longest = sum(asked.counts), max(asked.counts, default=0)
    elif any(request.needs) and depends == TOKEN and not over_ranks:  # whose weights are not known yet
        asked = _ask_of_rows(problem, request)
        count = longest = count if asked is None else asked.valid
    request, plan = planned(request, depends, slopes(problem.objective), count, max(longest, 0))
    return request, plan, asked


def loss_by_plan(problem: Problem, request: Request, plan: Plan, asked: _Responses | _Rows | None) -> PolicyLoss:
    """The loss of the problem that the plan was chosen for."""
    if request.num_tokens >= 0 and request.mask is not None:
        # If the host cannot check the count, a wrong count must not train silently: it makes the loss NaN.
        wrong = problem.batch.own_tokens != request.num_tokens
        problem = problem._replace(weights=problem.weights.masked_fill_(wrong, torch.nan))
    with plans.run(plan):
        if plan.name == "forward-gradient":
            return _forward_gradient(problem, request, plan, asked if isinstance(asked, _Rows) else None)
        if plan.name == "whole-response":
            return _whole_response(problem, request, plan, asked if isinstance(asked, _Responses) else None)
        # Whether all rows have a support must not decide who computes the coefficients.
        if plan.name == "sparse" and request.shard is None and not request.batch_invariant:
            return _sparse(problem, request, plan)
        return from_statistics(problem, *statistics(request, plan)[:2])


def _ask_of_rows(problem: Problem, request: Request) -> _Rows | None:
    """Counts the rows in one synchronisation, if their number is not known; None while torch.compile traces."""
    mask, objective = request.mask, problem.objective
    if (
        mask is None
        or not request.may_synchronise
        or torch.compiler.is_compiling()
        or not isinstance(objective, Objective)
    ):
        return None
    of_rows = row_objective(objective, problem.batch, problem.weights)
    return _Rows(of_rows, *counted(mask, active_rows(of_rows[1])))


def _ask_of_responses(problem: Problem, request: Request) -> _Responses | None:
    """Reads all that the host needs in one synchronisation; None if it must not synchronise."""
    batch = problem.batch
    if request.targets.is_cuda:
        if request.num_tokens >= 0:
            return None
        if request.mask is None and batch.responses.offsets is None:
            length, size = batch.responses.length, batch.responses.count
            return _Responses([length] * size, [length] * size, [(i + 1) * length for i in range(size)])
    active = batch.counts
    if isinstance(problem.objective, Objective):
        _, inputs, *_ = row_objective(problem.objective, batch, problem.weights)
        not_idle = active_rows(inputs)
        active = batch.counts.where(batch.responses.sum(not_idle.to(batch.counts.dtype)) > 0, 0)
    size = batch.responses.count
    ends = batch.responses.offsets
    on_device = [batch.counts.double(), active.double(), *(() if ends is None else (ends[1:].double(),))]
    values = torch.cat(on_device).tolist()
    if math.isnan(sum(values)):  # the counts of responses that do not divide the tokens, which could not be read before
        with checks.check_inputs():
            check_cu_seqlens(problem.cu_seqlens, "targets", request.targets, request.mask)
    on_host = [int(x) for x in values]
    length = batch.responses.length
    rows = on_host[2 * size :] if ends is not None else [(i + 1) * length for i in range(size)]
    return _Responses(on_host[:size], on_host[size : 2 * size], rows)


def _forward_gradient(problem: Problem, request: Request, plan: Plan, asked: _Rows | None) -> PolicyLoss:
    """The forward-gradient plan: the forward computes the loss and its gradients."""
    head, targets, mask, transform, *_ = request
    if not isinstance(problem.objective, Objective):
        return _row_local_callable(problem, request, plan)
    of_rows = row_objective(problem.objective, problem.batch, problem.weights) if asked is None else asked.of_rows
    (spec, inputs, clamped, marks), active = of_rows, -1 if asked is None else asked.active
    run = Run(forced(), request.num_rows, plan)
    if request.shard is None:
        loss, *terms, _, _, _ = linear_forward_gradient(head, targets, mask, transform, inputs, spec, run, active)
        return from_terms(problem, LossTerms(*terms), loss, clamped=clamped, marks=marks)
    checks.targets_in_range(targets, mask, request.shard.total)
    used, chunks = active_chunks(mask, active_rows(inputs), run, active)
    coefficients = row_local_coefficients(spec, inputs)
    loss, result = attached(request, plan, used, chunks, coefficients, plan.one_chunk)
    return from_terms(problem, result, loss, clamped=clamped, marks=marks)


def _row_local_callable(problem: Problem, request: Request, plan: Plan) -> PolicyLoss:
    """The same of a row-local callable, which runs in torch between each chunk's statistics and its gradient."""
    used = order(request.mask, request.targets.shape[0], request.num_rows)
    chunks = row_chunks(used.count, used.count, plan.tiles["forward-gradient"].rows)

    def part(where: Tensor | slice, number: int) -> tuple[Batch, Tensor, Tensor | slice]:
        return problem.batch.rows(where), problem.weights[where], slice(None)

    return _forward_gradient_in_torch(problem, request, plan, used, chunks, part, {})


def _sparse(problem: Problem, request: Request, plan: Plan) -> PolicyLoss:
    """The sparse plan: for a row-local objective, the forward computes the loss and the support logits' gradient."""
    objective, supports = problem.objective, request.supports
    if not isinstance(objective, Objective) or scope(objective, Given.of(problem.batch)) != TOKEN or supports is None:
        return from_statistics(problem, *statistics(request, plan)[:2])
    spec, inputs, clamped, marks = row_objective(objective, problem.batch, problem.weights)
    arguments = (request.targets, request.transform, supports.support, inputs, spec, forced())
    loss, *terms, _ = support_linear_loss(request.head, *arguments)
    return from_terms(problem, LossTerms(*terms), loss, clamped=clamped, marks=marks)


def _whole_response(problem: Problem, request: Request, plan: Plan, asked: _Responses | None) -> PolicyLoss:
    """The whole-response plan: a chunk holds the logits of whole responses until their objective is known."""
    batch, targets, total = problem.batch, request.targets, request.targets.shape[0]
    if asked is None:  # one chunk of all rows
        used = order(request.mask, total, request.num_tokens)
        chunks, spans, ends = [Chunk(0, used.count, used.count)], [(0, batch.responses.count)], [total]
    else:
        spans, ends = spans_of(asked.counts, plan.tiles["forward-gradient"].rows), asked.ends
        chunks = chunks_of(spans, asked.counts, asked.active)
        used = _order_of_responses(problem, request, asked, spans)
    marks = {name: torch.zeros(total, device=targets.device) for name in marks_of(problem.objective)}

    def part(where: Tensor | slice, number: int) -> tuple[Batch, Tensor, Tensor | slice]:
        first, last = spans[number]
        rows = slice(ends[first - 1] if first else 0, ends[last - 1] if len(spans) > 1 else total)
        places = slice(None) if isinstance(where, slice) else where - rows.start
        return batch.part(first, last, rows), problem.weights[rows], places

    return _forward_gradient_in_torch(problem, request, plan, used, chunks, part, marks)


def spans_of(counts: list[int], most: int) -> list[tuple[int, int]]:
    """Spans [first, last) of responses with at most `most` tokens in total, or one longer response."""
    spans, first, held = [], 0, 0
    for i, count in enumerate(counts):
        if held + count > most and i > first:
            spans.append((first, i))
            first, held = i, 0
        held += count
    return [*spans, (first, len(counts))]


def chunks_of(spans: list[tuple[int, int]], counts: list[int], active: list[int]) -> list[Chunk]:
    """A chunk of an order for each span of responses, from the numbers of their valid and of their active tokens."""
    stops = accumulate((sum(counts[first:last]) for first, last in spans), initial=0)
    idle_last = [sum(active[first:last]) for first, last in spans]
    return [Chunk(*rows, number) for rows, number in zip(pairwise(stops), idle_last, strict=True)]


def _order_of_responses(
    problem: Problem, request: Request, responses: _Responses, spans: list[tuple[int, int]]
) -> Order:
    """The valid rows, span by span; within a span, rows of idle responses come last."""
    count, total = sum(responses.counts), request.targets.shape[0]
    if count == total and responses.active == responses.counts:
        return Order(None, total)
    keys = [2 * number + (responses.active[i] == 0) for number, span in enumerate(spans) for i in range(*span)]
    return order_by(keys, problem.batch.responses.owners(request.targets.device), request.mask, count)


def order_by(keys: list[int], units: Tensor, mask: Tensor | None, count: int) -> Order:
    """The `count` valid rows by the key of their unit (N,), rows of equal keys in their own order."""
    key = torch.tensor(keys, dtype=torch.int64).to(units.device, non_blocking=True)[units]
    if mask is not None:
        key = key.where(mask, max(keys, default=0) + 1)
    return Order(key.argsort(stable=True)[:count], count)


def _forward_gradient_in_torch(
    problem: Problem,
    request: Request,
    plan: Plan,
    used: Order,
    chunks: list[Chunk],
    part: _Part,
    marks: dict[str, Tensor],
) -> PolicyLoss:
    """Forward-gradient; the objective runs in torch, between a chunk's statistics and its gradient."""
    checks.targets_in_range(request.targets, request.mask, request.vocab)
    coefficients = _coefficients(problem, part, marks)
    loss, result = attached(request, plan, used, chunks, coefficients, len(chunks) <= 1)
    return from_terms(problem, result, loss, marks=marks)


def attached(
    request: Request,
    plan: Plan,
    used: Order,
    chunks: list[Chunk],
    coefficients: Coefficients,
    one_chunk: bool,
    loss_of: Callable[[LossTerms], Tensor] = lambda result: result.terms[0].sum(),
) -> tuple[Tensor, LossTerms]:
    """The loss, attached to the gradients that are formed with it by the coefficients of each chunk; the rows' results.

    loss_of: the loss of the rows' results.
    """

    def run(*tensors: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...], LossTerms]:
        head = Head.of(tensors, request.head.vocab)
        rows = (head, request.targets, request.transform, used, chunks)
        how = (one_chunk, plan, forced())
        if request.shard is None:
            result, gradients = forward_gradient(*rows, gradient_by_torch(coefficients, plan.call.step, forced()), *how)
        else:
            result, gradients = shards.forward_gradient(*rows, coefficients, *how, request.shard)
        return loss_of(result), gradients, result

    return attach_gradients(run, request.head[:3], forced())


def _coefficients(problem: Problem, part: _Part, marks: dict[str, Tensor]) -> Coefficients:
    """The objective of a policy loss, in torch."""

    def coefficients(stats: Statistics, where: Tensor | slice, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """A chunk's terms (len(TERMS), n), c (n,) and h (n,) or None."""
        batch, weights, places = part(where, number)
        with torch.enable_grad():
            logp, entropy = (x.detach().requires_grad_() for x in stats[:2])
            terms, chunk_marks = objective_loss(
                problem.objective, batch, _placed(logp, places, batch), _placed(entropy, places, batch), weights
            )
            c, h = (
                torch.autograd.grad(terms[0].sum(), (logp, entropy), allow_unused=True)
                if terms.requires_grad
                else (None, None)
            )
        for name, x in chunk_marks.items():
            marks[name][where] = x[places].to(marks[name].dtype)
        return terms.detach()[:, places], torch.zeros_like(stats.logprobs) if c is None else c, h

    return coefficients


def _placed(x: Tensor, places: Tensor | slice, batch: Batch) -> Tensor:
    """Per-row values (n,) scattered to `places` in a batch's tokens, 0 elsewhere; differentiable."""
    return x if isinstance(places, slice) else x.new_zeros(batch.mask.shape).index_copy(0, places, x)
