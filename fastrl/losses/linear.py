"""A policy loss from hidden states and the output head: the code of each plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced, kernels
from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.base import checks
from fastrl.base.responses import check_cu_seqlens
from fastrl.distributed.shards import VocabularyShard
from fastrl.linear import forward_gradient as forward_gradient_ops
from fastrl.linear import statistics as forward
from fastrl.linear.forward_gradient import Chunk, ChunkGradient, linear_forward_gradient, row_local_gradients
from fastrl.linear.head import Head
from fastrl.linear.sharded import start_statistics, write_gradient
from fastrl.linear.statistics import Order
from fastrl.linear.supports import support_linear_loss
from fastrl.losses.arguments import VocabularyArguments
from fastrl.losses.call import LinearCall, PlannedCall, planned
from fastrl.losses.problem import PolicyLoss, Problem, from_statistics, from_terms
from fastrl.objectives.batch import Batch
from fastrl.objectives.dependence import ANY, BATCH, RESPONSE, TOKEN, Given, scope, slopes
from fastrl.objectives.evaluate import marks_of, objective_loss, row_objective
from fastrl.objectives.objective import Objective
from fastrl.operators.attach import attach_gradients
from fastrl.planning import plans

#: (rows, number) of a chunk -> its tokens as a batch, their weights w, and the rows' indices in that batch
_Part = Callable[[Tensor | slice, int], tuple[Batch, Tensor, Tensor | slice]]

#: (statistics, rows, number) of a chunk -> its rows' terms (len(TERMS), n), c (n,), and h (n,) or None
Coefficients = Callable[[Statistics, Tensor | slice, int], tuple[Tensor, Tensor, Tensor | None]]


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


class PlannedLoss(NamedTuple):
    """The plan of a loss, and what the host learned before it."""

    by_plan: PlannedCall
    responses: _Responses | None = None
    rows: _Rows | None = None

    def loss(self, problem: Problem) -> PolicyLoss:
        """The loss of the problem that the plan was chosen for."""
        call = self.by_plan.call
        if call.num_tokens >= 0 and call.args.mask is not None:
            # If the host cannot check the count, a wrong count must not train silently: it makes the loss NaN.
            wrong = problem.batch.own_tokens != call.num_tokens
            problem = problem._replace(weights=problem.weights.masked_fill_(wrong, torch.nan))
        with plans.run(self.by_plan.inputs, self.by_plan.plan):
            return CODE[self.by_plan.plan.name](problem, self)


def planned_loss(problem: Problem, call: LinearCall, over_ranks: bool) -> PlannedLoss:
    """Chooses the plan for a checked problem that fits the call's budget.

    over_ranks: whether the tokens of a response will lie over the ranks of a group.
    """
    depends = scope(problem.objective, Given.of(problem.batch)._replace(over_ranks=over_ranks))
    if torch.compiler.is_compiling() and (depends != TOKEN or not isinstance(problem.objective, Objective)):
        depends = ANY  # torch.compile cannot trace the Python that the other plans run between kernels
    responses, rows, count = None, None, call.num_tokens
    if call.sampling_mask is not None:
        depends = RESPONSE  # no plan holds a response's support entries until its objective is known
    elif any(call.needs) and depends in (RESPONSE, BATCH):
        responses = _ask_of_responses(problem, call)
        count = count if responses is None else sum(responses.counts)
    elif any(call.needs) and depends == TOKEN and not over_ranks:  # whose weights are not known yet
        rows = _ask_of_rows(problem, call)
        count = count if rows is None else rows.valid
    longest = max(count, 0) if responses is None else max(responses.counts, default=0)
    return PlannedLoss(planned(call, depends, slopes(problem.objective), count, longest), responses, rows)


def _from_statistics(problem: Problem, chosen: PlannedLoss) -> PolicyLoss:
    return from_statistics(problem, *chosen.by_plan.statistics()[:2])


def _ask_of_rows(problem: Problem, call: LinearCall) -> _Rows | None:
    """Counts the rows in one synchronisation, if their number is not known; None while torch.compile traces."""
    mask, objective = call.args.mask, problem.objective
    if mask is None or not call.waits or torch.compiler.is_compiling() or not isinstance(objective, Objective):
        return None
    of_rows = row_objective(objective, problem.batch, problem.weights)
    return _Rows(of_rows, *forward.counted(mask, forward_gradient_ops.active_rows(of_rows[1])))


def _ask_of_responses(problem: Problem, call: LinearCall) -> _Responses | None:
    """Reads all that the host needs in one synchronisation; None if it must not synchronise."""
    batch = problem.batch
    if call.args.targets.is_cuda:
        if call.num_tokens >= 0:
            return None
        if call.args.mask is None and batch.responses.offsets is None:
            length, size = batch.responses.length, batch.responses.count
            return _Responses([length] * size, [length] * size, [(i + 1) * length for i in range(size)])
    active = batch.counts
    if isinstance(problem.objective, Objective):
        _, inputs, *_ = row_objective(problem.objective, batch, problem.weights)
        not_idle = forward_gradient_ops.active_rows(inputs)
        active = batch.counts.where(batch.responses.sum(not_idle.to(batch.counts.dtype)) > 0, 0)
    size = batch.responses.count
    ends = batch.responses.offsets
    on_device = [batch.counts.double(), active.double(), *(() if ends is None else (ends[1:].double(),))]
    values = torch.cat(on_device).tolist()
    if math.isnan(sum(values)):  # the counts of responses that do not divide the tokens, which could not be read before
        with checks.check_inputs():
            check_cu_seqlens(problem.cu_seqlens, "targets", call.args.targets, call.args.mask)
    on_host = [int(x) for x in values]
    length = batch.responses.length
    rows = on_host[2 * size :] if ends is not None else [(i + 1) * length for i in range(size)]
    return _Responses(on_host[:size], on_host[size : 2 * size], rows)


def _forward_gradient(problem: Problem, chosen: PlannedLoss) -> PolicyLoss:
    """The forward-gradient plan: the forward computes the loss and its gradients."""
    by_plan, _, rows = chosen
    call, plan = by_plan.call, by_plan.plan
    if isinstance(problem.objective, Objective):
        of_rows = row_objective(problem.objective, problem.batch, problem.weights) if rows is None else rows.of_rows
        (spec, inputs, clamped, marks), known = of_rows, (by_plan.rows, -1 if rows is None else rows.active)
        arguments = (*call.args, inputs, spec, call.needs, forced(), *known, plan.pass_budget, plan.one_chunk)
        if call.shard is not None:
            compute = partial(row_local_gradients, shard=call.shard)
            loss, result = _attached(call, lambda head: compute(head, *arguments))
            return from_terms(problem, result, loss, clamped=clamped, marks=marks)
        loss, *terms, _, _, _ = linear_forward_gradient(call.head, *arguments)
        return from_terms(problem, LossTerms(*terms), loss, clamped=clamped, marks=marks)
    # A row-local callable runs in torch between each chunk's statistics and its gradient.
    used = forward.order(call.args.mask, call.args.targets.shape[0], by_plan.rows)
    chunks = forward_gradient_ops.row_chunks(used.count, used.count, plan.tiles["forward-gradient"].rows)

    def part(where: Tensor | slice, number: int) -> tuple[Batch, Tensor, Tensor | slice]:
        return problem.batch.rows(where), problem.weights[where], slice(None)

    return _forward_gradient_in_torch(problem, call, used, chunks, part, {})


def _sparse(problem: Problem, chosen: PlannedLoss) -> PolicyLoss:
    """The sparse plan: for a row-local objective, the forward computes the loss and the support logits' gradient."""
    by_plan, objective = chosen.by_plan, problem.objective
    head, args, *_ = by_plan.call
    row_local = isinstance(objective, Objective) and scope(objective, Given.of(problem.batch)) == TOKEN
    if not row_local or by_plan.supports is None or by_plan.call.shard is not None:
        return _from_statistics(problem, chosen)
    assert isinstance(objective, Objective)
    spec, inputs, clamped, marks = row_objective(objective, problem.batch, problem.weights)
    support = by_plan.supports.support
    loss, *terms, _ = support_linear_loss(head, args.targets, args.transform, support, inputs, spec, forced())
    return from_terms(problem, LossTerms(*terms), loss, clamped=clamped, marks=marks)


def _whole_response(problem: Problem, chosen: PlannedLoss) -> PolicyLoss:
    """The whole-response plan: a chunk holds the logits of whole responses until their objective is known."""
    by_plan, responses, _ = chosen
    call, batch = by_plan.call, problem.batch
    targets, mask, _ = call.args
    total = targets.shape[0]
    if responses is None:  # one chunk of all rows
        used = forward.order(mask, total, call.num_tokens)
        chunks, spans = [Chunk(0, used.count, used.count)], [(0, batch.responses.count)]
        ends = [total]
    else:
        spans = spans_of(responses.counts, by_plan.plan.tiles["forward-gradient"].rows)
        chunks, start = [], 0
        for first, last in spans:
            stop = start + sum(responses.counts[first:last])
            chunks.append(Chunk(start, stop, sum(responses.active[first:last])))
            start = stop
        used, ends = _order_of_responses(problem, call.args, responses, spans), responses.ends
    marks = {name: torch.zeros(total, device=targets.device) for name in marks_of(problem.objective)}

    def part(where: Tensor | slice, number: int) -> tuple[Batch, Tensor, Tensor | slice]:
        first, last = spans[number]
        rows = slice(ends[first - 1] if first else 0, ends[last - 1] if len(spans) > 1 else total)
        places = slice(None) if isinstance(where, slice) else where - rows.start
        chunk_batch = batch.part(first, last, rows)
        return chunk_batch, problem.weights[rows], places

    return _forward_gradient_in_torch(problem, call, used, chunks, part, marks)


def spans_of(counts: list[int], most: int) -> list[tuple[int, int]]:
    """Spans [first, last) of responses with at most `most` tokens in total, or one longer response."""
    spans, first, held = [], 0, 0
    for i, count in enumerate(counts):
        if held + count > most and i > first:
            spans.append((first, i))
            first, held = i, 0
        held += count
    return [*spans, (first, len(counts))]


def _order_of_responses(
    problem: Problem, args: VocabularyArguments, responses: _Responses, spans: list[tuple[int, int]]
) -> Order:
    """The valid rows, span by span; within a span, rows of idle responses come last."""
    count, total = sum(responses.counts), args.targets.shape[0]
    if count == total and responses.active == responses.counts:
        return Order(None, total)
    keys = [2 * number + (responses.active[i] == 0) for number, span in enumerate(spans) for i in range(*span)]
    key = problem.batch.responses.spread(torch.tensor(keys).to(args.targets.device, non_blocking=True))
    if args.mask is not None:
        key = key.where(args.mask, 2 * len(spans))
    return Order(key.argsort(stable=True)[:count], count)


def _forward_gradient_in_torch(
    problem: Problem, call: LinearCall, used: Order, chunks: list[Chunk], part: _Part, marks: dict[str, Tensor]
) -> PolicyLoss:
    """Forward-gradient; the objective runs in torch, between a chunk's statistics and its gradient."""
    targets, mask, transform = call.args
    checks.targets_in_range(targets, mask, call.vocab)
    backend, needs = forced(), call.needs
    chunk_gradient = gradient_by_torch(_coefficients(problem, part, marks), backend, call.shard)

    def run(head: Head) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
        return forward_gradient_ops.forward_gradient(
            head,
            targets,
            transform,
            used,
            chunks,
            chunk_gradient,
            needs,
            len(chunks) <= 1,
            backend,
            call.shard,
            call.float32_logits,
        )

    loss, result = _attached(call, run)
    return from_terms(problem, result, loss, marks=marks)


def _attached(
    call: LinearCall, compute: Callable[[Head], tuple[LossTerms, tuple[Tensor | None, ...]]]
) -> tuple[Tensor, LossTerms]:
    """The loss, attached to the gradients that `compute` forms with it, and the rows' results."""

    def run(*inputs: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...], LossTerms]:
        result, gradients = compute(Head.of(inputs, call.head.vocab))
        return result.terms[0].sum(), gradients, result

    return attach_gradients(run, call.head.tensors, forced())


def gradient_by_torch(coefficients: Coefficients, backend: str, shard: VocabularyShard | None) -> ChunkGradient:
    """Returns a ChunkGradient whose coefficients are computed between a chunk's statistics and its gradient."""

    def begin(
        logits: Tensor, targets: Tensor, transform: Transform, where: Tensor | slice, number: int, out: Tensor
    ) -> Callable[[], LossTerms]:
        row_kernels: Any = kernels(backend, logits)
        if shard is None:
            stats: Statistics = row_kernels.row_statistics(logits, targets, None, transform)
            statistics = None
        else:
            statistics = start_statistics(logits, targets, transform, backend, shard)

        def end() -> LossTerms:
            whole = stats if statistics is None else statistics()
            terms, c, h = coefficients(whole, where, number)
            if shard is None:
                row_kernels.row_gradient(logits, targets, None, transform, whole, c, h, out)
            else:
                write_gradient(logits, targets, transform, whole, c, h, backend, shard, out)
            return LossTerms(whole.logprobs, whole.entropy, terms)

        return end

    return begin


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


#: What follows each plan: the checked problem and the planned call -> the loss.
CODE: dict[str, Callable[[Problem, PlannedLoss], PolicyLoss]] = {
    "forward": _from_statistics,
    "forward-gradient": _forward_gradient,
    "whole-response": _whole_response,
    "frozen-head": _from_statistics,
    "recompute": _from_statistics,
    "two-pass": _from_statistics,
    "sparse": _sparse,
}
