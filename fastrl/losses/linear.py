"""A policy loss from hidden states and the output head, by the plan that `fastrl.planning` chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backends.choice import forced, kernels
from fastrl.backends.contract import LossTerms, Statistics, Transform
from fastrl.base import checks
from fastrl.linear import forward_gradient as forward_gradient_ops
from fastrl.linear import statistics as forward
from fastrl.linear.forward_gradient import Chunk, ChunkGradient, linear_forward_gradient
from fastrl.linear.head import Head
from fastrl.linear.statistics import Order
from fastrl.losses.arguments import VocabularyArguments, counted_rows, plan_call
from fastrl.losses.logprobs import linear_stats
from fastrl.losses.problem import PolicyLoss, Problem, from_statistics, from_terms
from fastrl.losses.supports import linear_over_support
from fastrl.objectives.batch import Batch
from fastrl.objectives.dependence import ANY, BATCH, RESPONSE, TOKEN, Given, scope, slopes
from fastrl.objectives.evaluate import objective_loss, row_objective
from fastrl.objectives.objective import Objective
from fastrl.operators.attach import attach_gradients
from fastrl.planning import plans as memory
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import Needs

#: (rows, number) of a chunk -> its tokens as a batch, their weights w, cu_seqlens, and the rows' indices in that batch
_Part = Callable[[Tensor | slice, int], tuple[Batch, Tensor, Tensor | None, Tensor | slice]]


class _Host(NamedTuple):
    """What the host knows about each response, after at most one synchronisation."""

    counts: list[int]  # the number of valid tokens
    active: list[int]  # the same, but 0 for an idle response: one with only idle rows
    ends: list[int]  # the end of its rows, masked rows included


def planned_linear_loss(
    problem: Problem,
    head: Head,
    args: VocabularyArguments,
    sampling_mask: object,
    num_tokens: int | None,
    budget: int | None,
    copied: int,
) -> PolicyLoss:
    """Computes the loss of a checked problem. num_tokens is the caller's, `copied` the bytes copied so far."""
    count = _known_count(num_tokens, args)
    if count >= 0 and args.mask is not None:
        # If the host cannot check the count, a wrong count must not train silently: it makes the loss NaN.
        known = torch.where(problem.batch.tokens == count, 0.0, torch.nan)
        problem = problem._replace(weights=problem.weights + known.to(problem.weights.dtype))
    supports = linear_over_support(head, args, sampling_mask, RESPONSE, budget, copied)
    if supports is not None:
        return from_statistics(problem, *supports)
    needs = Needs(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in head))
    depends = scope(problem.objective, Given.of(problem.batch))
    if torch.compiler.is_compiling() and (depends != TOKEN or not isinstance(problem.objective, Objective)):
        depends = ANY  # torch.compile cannot trace the Python that the other plans run between kernels
    host = _ask(problem, args, count) if any(needs) and depends in (RESPONSE, BATCH) else None
    rows = count if host is None else sum(host.counts)
    call = plan_call(
        head,
        args,
        rows,
        scope=depends,
        longest=max(host.counts, default=0) if host is not None else max(rows, 0),
        slopes=slopes(problem.objective),
        copied=copied,
    )
    plan = memory.choose(call, budget)
    if plan.name == "whole-response":
        return _whole_response(problem, head, args, needs, plan, host, count)
    if plan.name == "forward-gradient":
        return _forward_gradient(problem, head, args, needs, plan, count)
    return from_statistics(problem, *linear_stats(head, args, plan, call.slopes, rows, waits=count < 0))


def _known_count(num_tokens: int | None, args: VocabularyArguments) -> int:
    """Returns num_tokens, checked if that needs no synchronisation; -1 for None."""
    if num_tokens is None:
        return -1
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens must be an int, got {type(num_tokens).__name__}")
    count = counted_rows(args) if args.mask is None or checks.values_are_checked(args.mask) else None
    if num_tokens < 0 or (count is not None and count != num_tokens):
        raise ValueError(f"num_tokens must be the number of unmasked tokens, {count}, got {num_tokens}")
    return num_tokens


def _ask(problem: Problem, args: VocabularyArguments, count: int) -> _Host | None:
    """Reads all that the host needs in one synchronisation; None if it must not synchronise."""
    if args.targets.is_cuda and count >= 0:
        return None
    batch = problem.batch
    active = batch.counts
    if isinstance(problem.objective, Objective):
        _, inputs, _ = row_objective(problem.objective, batch, problem.weights)
        not_idle = ~forward_gradient_ops.idle_rows(inputs)
        active = batch.counts.where(batch.responses.sum(not_idle.to(batch.counts.dtype)) > 0, 0)
    size = batch.responses.count
    ends = batch.responses.offsets
    on_device = [batch.counts.double(), active.double(), *(() if ends is None else (ends[1:].double(),))]
    on_host = [int(x) for x in torch.cat(on_device).tolist()]
    length = batch.responses.length
    rows = on_host[2 * size :] if ends is not None else [(i + 1) * length for i in range(size)]
    return _Host(on_host[:size], on_host[size : 2 * size], rows)


def _forward_gradient(
    problem: Problem, head: Head, args: VocabularyArguments, needs: Needs, plan: Plan, num_tokens: int
) -> PolicyLoss:
    """The forward-gradient plan: the forward computes the loss and its gradients."""
    if not isinstance(problem.objective, Objective):
        return _forward_gradient_by_callable(problem, head, args, needs, plan, num_tokens)
    spec, inputs, clamped = row_objective(problem.objective, problem.batch, problem.weights)
    loss, *terms, _, _, _ = linear_forward_gradient(head, *args, inputs, spec, needs, forced(), num_tokens, plan.limits)
    return from_terms(problem, LossTerms(*terms), loss, clamped=clamped)


def _forward_gradient_by_callable(
    problem: Problem, head: Head, args: VocabularyArguments, needs: Needs, plan: Plan, num_tokens: int
) -> PolicyLoss:
    """The same plan; a row-local callable runs in torch between each chunk's statistics and its gradient."""
    used = forward.order(args.mask, args.targets.shape[0], num_tokens)
    chunks = forward_gradient_ops.row_chunks(used.count, used.count, plan.tiles["forward-gradient"].rows)

    def part(where: Tensor | slice, number: int) -> tuple[Batch, Tensor, Tensor | None, Tensor | slice]:
        return problem.batch.rows(where), problem.weights[where], None, slice(None)

    return _forward_gradient_in_torch(problem, head, args, needs, used, chunks, part, None)


def _whole_response(
    problem: Problem,
    head: Head,
    args: VocabularyArguments,
    needs: Needs,
    plan: Plan,
    host: _Host | None,
    num_tokens: int,
) -> PolicyLoss:
    """The whole-response plan: a chunk holds the logits of whole responses until their objective is known."""
    batch, total = problem.batch, args.targets.shape[0]
    if host is None:  # one chunk of all rows
        used = forward.order(args.mask, total, num_tokens)
        chunks, spans = [Chunk(0, used.count, used.count)], [(0, batch.responses.count)]
        ends = [total]
    else:
        spans = _spans(host.counts, plan.tiles["forward-gradient"].rows)
        chunks, start = [], 0
        for first, last in spans:
            stop = start + sum(host.counts[first:last])
            chunks.append(Chunk(start, stop, sum(host.active[first:last])))
            start = stop
        used, ends = _order_of_responses(problem, args, host, spans), host.ends
    dropped = torch.zeros(total, device=args.targets.device) if _drops(problem) else None

    def part(where: Tensor | slice, number: int) -> tuple[Batch, Tensor, Tensor | None, Tensor | slice]:
        first, last = spans[number]
        rows = slice(ends[first - 1] if first else 0, ends[last - 1] if len(spans) > 1 else total)
        places = slice(None) if isinstance(where, slice) else where - rows.start
        chunk_batch, offsets = batch.part(first, last, rows, problem.cu_seqlens)
        return chunk_batch, problem.weights[rows], offsets, places

    return _forward_gradient_in_torch(problem, head, args, needs, used, chunks, part, dropped)


def _drops(problem: Problem) -> bool:
    return isinstance(problem.objective, Objective) and problem.objective.off_policy_delta is not None


def _spans(counts: list[int], most: int) -> list[tuple[int, int]]:
    """Spans [first, last) of responses with at most `most` tokens in total, or one longer response."""
    spans, first, held = [], 0, 0
    for i, count in enumerate(counts):
        if held + count > most and i > first:
            spans.append((first, i))
            first, held = i, 0
        held += count
    return [*spans, (first, len(counts))]


def _order_of_responses(
    problem: Problem, args: VocabularyArguments, host: _Host, spans: list[tuple[int, int]]
) -> Order:
    """The valid rows, span by span; within a span, rows of idle responses come last."""
    count, total = sum(host.counts), args.targets.shape[0]
    if count == total and host.active == host.counts:
        return Order(None, total)
    keys = [2 * number + (host.active[i] == 0) for number, span in enumerate(spans) for i in range(*span)]
    key = problem.batch.responses.spread(torch.tensor(keys).to(args.targets.device, non_blocking=True))
    if args.mask is not None:
        key = key.where(args.mask, 2 * len(spans))
    return Order(key.argsort(stable=True)[:count], count)


def _forward_gradient_in_torch(
    problem: Problem,
    head: Head,
    args: VocabularyArguments,
    needs: Needs,
    used: Order,
    chunks: list[Chunk],
    part: _Part,
    dropped: Tensor | None,
) -> PolicyLoss:
    """Forward-gradient; the objective runs in torch, between a chunk's statistics and its gradient."""
    checks.targets_in_range(args.targets, args.mask, head.weight.shape[0])
    backend = forced()
    forward_terms: list[LossTerms] = []
    chunk_gradient = _gradient_by_torch(problem, backend, part, dropped)

    def run(*inputs: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        result, gradients = forward_gradient_ops.forward_gradient(
            Head(*inputs),  # type: ignore[arg-type]
            args.targets,
            args.transform,
            used,
            chunks,
            chunk_gradient,
            needs,
            backend,
        )
        forward_terms[:] = [result]
        return result.terms[0].sum(), gradients

    batch = problem.batch
    reads = (
        args.targets,
        args.mask,
        args.transform.temperatures,
        problem.weights,
        batch.advantages,
        batch.old,
        batch.ref,
        batch.rollout,
        batch.token_weights,
        batch.entropy_weights,
        batch.entropy_threshold,
    )
    loss = attach_gradients(run, head, backend, consume=False, reads=reads)
    return from_terms(problem, forward_terms[0], loss, dropped=dropped)


def _gradient_by_torch(problem: Problem, backend: str, part: _Part, dropped: Tensor | None) -> ChunkGradient:
    """Returns a ChunkGradient that runs the objective in torch."""

    def chunk_gradient(
        logits: Tensor, targets: Tensor, transform: Transform, where: Tensor | slice, number: int
    ) -> LossTerms:
        row_kernels: Any = kernels(backend, logits)
        stats: Statistics = row_kernels.row_statistics(logits, targets, None, transform)
        batch, weights, offsets, places = part(where, number)
        with torch.enable_grad():
            logp, entropy = stats.logprobs.requires_grad_(), stats.entropy.requires_grad_()
            terms, chunk_dropped = objective_loss(
                problem.objective,
                batch,
                _placed(logp, places, batch),
                _placed(entropy, places, batch),
                weights,
                offsets,
            )
            c, h = (
                torch.autograd.grad(terms[0].sum(), (logp, entropy), allow_unused=True)
                if terms.requires_grad
                else (None, None)
            )
        if dropped is not None and chunk_dropped is not None:
            dropped[where] = chunk_dropped[places]
        stats = Statistics(*(s.detach() for s in stats))
        c = torch.zeros_like(stats.logprobs) if c is None else c
        row_kernels.row_gradient(logits, targets, None, transform, stats, c, h, logits)
        return LossTerms(stats.logprobs, stats.entropy, terms.detach()[:, places])

    return chunk_gradient


def _placed(x: Tensor, places: Tensor | slice, batch: Batch) -> Tensor:
    """Per-row values (n,) scattered to `places` in a batch's tokens, 0 elsewhere; differentiable."""
    return x if isinstance(places, slice) else x.new_zeros(batch.mask.shape).index_copy(0, places, x)
