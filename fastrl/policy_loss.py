"""The policy losses: from log-probabilities, from logits, and from hidden states and the output head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .batch import Batch, make_batch
from .objective_loss import (
    CustomObjective,
    check_requirements,
    metrics,
    objective_loss,
    row_objective,
    settings_of,
    why_not_row_local,
)
from .objectives import Objective
from .ops import linear as linear_ops
from .ops import rows as row_ops
from .ops.attach import attach_gradients
from .ops.backend import forced, kernels
from .ops.contract import Statistics, Transform, Visit
from .ops.linear import ChunkVisit, Head, Needs
from .ops.visits import linear_visit
from .token_logprobs import (
    VocabularyArguments,
    checked_head,
    checked_logits,
    consumes,
    linear_stats,
    vocabulary_arguments,
)


class PolicyLoss(NamedTuple):
    """A loss and what a trainer logs beside it."""

    loss: Tensor
    """0-dim; call backward() on it."""
    metrics: dict[str, Tensor]
    """Detached float32 scalars on the inputs' device: reading one synchronises, making them does not.

    policy_loss (the weighted sum of the gate's losses); kl and entropy (nats), ratio_mean, gate_mean (the effective
    weight on grad log pi, 1 on-policy), approx_kl (k3, old to new), clip_frac, clip_frac_low, clip_frac_high: means
    over unmasked tokens; ratio_max; ratio_clamped, masked_off_policy, tokens: counts of tokens.
    """
    logprobs: Tensor
    """Detached float32, shaped like targets; 0 where masked."""
    entropy: Tensor | None
    """Detached float32 nats, shaped like targets; None where it was not given to `policy_loss`."""


class _Problem(NamedTuple):
    """A checked policy loss: what to minimise over which batch, with the aggregation's weights (N,)."""

    objective: Objective | CustomObjective
    batch: Batch
    weights: Tensor
    cu_seqlens: Tensor | None


def _problem(
    objective: Objective | CustomObjective, targets: Tensor, targets_name: str, has_entropy: bool,
    denominator: float | Tensor | None, dtype: torch.dtype, **inputs: Any,
) -> _Problem:  # fmt: skip
    settings = settings_of(objective)
    if isinstance(denominator, Tensor):
        if denominator.dim() != 0:
            raise ValueError(f"denominator must be a number or 0-dim, got shape {tuple(denominator.shape)}")
    elif denominator is not None:
        denominator = checks.number("denominator", denominator, positive=True)
    batch = make_batch(targets, targets_name, dtype=dtype, **inputs)
    check_requirements(settings, batch, has_entropy)
    weights = batch.aggregation_weights(settings, denominator).to(dtype)
    return _Problem(objective, batch, weights, inputs["cu_seqlens"])


def _from_statistics(problem: _Problem, logprobs: Tensor, entropy: Tensor | None) -> PolicyLoss:
    """The loss of differentiable log-probabilities and entropies (N,)."""
    batch = problem.batch
    logp = batch.flat(logprobs)
    flat_entropy = None if entropy is None else batch.flat(entropy)
    terms, dropped = objective_loss(problem.objective, batch, logp, flat_entropy, problem.weights, problem.cu_seqlens)
    loss = terms[0].sum()
    if not isinstance(problem.objective, Objective):  # a callable may return what depends on nothing
        loss = loss + torch.nan_to_num(0 * logp).sum()
    return PolicyLoss(
        loss,
        metrics(terms, batch, entropy, dropped),
        logp.detach().float().view(batch.shape),
        None if flat_entropy is None else flat_entropy.detach().float().view(batch.shape),
    )


def policy_loss(
    logprobs: Tensor,
    *,
    objective: Objective | CustomObjective,
    advantages: Tensor,
    mask: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy_weights: Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> PolicyLoss:
    """A policy loss from log-probabilities: `sum_t m_t w_t (omega_t f_t + beta kl_t - alpha H_t)`, by autograd.

    `objective` says what f, kl, alpha and w are (a preset such as `fastrl.GRPO()`; the papers are named there), or is
    a callable `(log_ratio, advantages, context) -> per-token loss` in torch, aggregated by its attribute `aggregate`
    (default "token-mean"). The last dimension of logprobs runs over a response's tokens; with `cu_seqlens`, responses
    are packed; 1-D without it is one response.

    Args:
        logprobs: (B, T) or (N,), floating point, with a graph: the current policy's.
        advantages: (B,), one a response, or shaped like logprobs; (B,) it is where a packed batch has B == N.
        mask: shaped like logprobs, bool or 0/1, 1 = counts. Nothing is read where it is 0.
        old_logprobs: shaped like logprobs; None means on-policy, the detached logprobs.
        ref_logprobs: shaped like logprobs; needed by a KL term to a reference.
        rollout_logprobs: shaped like logprobs, the inference engine's; needed by a rollout correction.
        entropy: shaped like logprobs, nats; needed by an entropy term.
        token_weights: shaped like logprobs; multiply the policy term only.
        entropy_weights: shaped like logprobs; replace w on the entropy term.
        entropy_threshold: train only on tokens with at least this entropy (instead of `top_entropy_fraction`'s own).
        cu_seqlens: (B + 1,) int32, rising from 0 to N.
        denominator: replaces the local count of tokens (token-mean) or of responses (the others).

    Returns:
        PolicyLoss; no tokens or an all-masked batch give loss 0 and zero gradients.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    logprobs = checks.tensor("logprobs", logprobs)
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    if entropy is not None:
        entropy = checks.tensor("entropy", entropy)
        checks.shape("entropy", entropy, logprobs.shape, "the shape of logprobs")
        checks.same_device("entropy", entropy, logprobs, "logprobs")
        entropy = entropy.to(dtype)
    problem = _problem(
        objective, logprobs, "logprobs", entropy is not None, denominator, dtype, advantages=advantages, mask=mask,
        old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, rollout_logprobs=rollout_logprobs,
        token_weights=token_weights, entropy_weights=entropy_weights, entropy_threshold=entropy_threshold,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return _from_statistics(problem, logprobs.to(dtype), entropy)


def logits_policy_loss(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...)
    *,
    objective: Objective | CustomObjective,
    advantages: Tensor,
    mask: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy_weights: Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    denominator: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    sampling_mask: object = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    inplace: bool = False,
) -> PolicyLoss:
    """`policy_loss` from logits (..., V): no other (N, V) tensor is held than they and their gradient.

    Same loss and gradient as `policy_loss(token_logprobs(logits, targets))`. With `inplace=True` the logits are
    consumed if they need a gradient: for a row-local objective (each token's loss depends on that token only) the
    forward visits every row once and leaves the gradient in its place; otherwise, and for float16, the backward writes
    it there. A second backward then raises RuntimeError. Without it the gradient gets its own buffer in the backward,
    and `retain_graph=True` works.

    Args: those of `policy_loss` but `entropy`, which is computed here (targets in place of logprobs), and those of
        `token_logprobs`.

    Returns, raises: as `policy_loss` and `token_logprobs`.
    """
    logits, targets = checked_logits(logits, targets, inplace)
    checks.unsupported(sampling_mask=sampling_mask)
    args = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap)
    problem = _problem(
        objective, targets, "targets", True, denominator, torch.float32, advantages=advantages, mask=mask,
        old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, rollout_logprobs=rollout_logprobs,
        token_weights=token_weights, entropy_weights=entropy_weights, entropy_threshold=entropy_threshold,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    backend = forced()
    consume = consumes(logits, inplace)
    rows = row_ops.as_rows(logits, consume)
    visited = consume and logits.numel() > 0 and logits.dtype != torch.float16 and isinstance(objective, Objective)
    if visited and why_not_row_local(objective, problem.batch) is None:
        return _visit_logits(problem, logits, rows, args, backend)
    transform = args.transform
    logprobs, entropy, *_ = row_ops.row_statistics(
        rows, args.targets, args.mask, transform.temperatures, transform.temperature, transform.logit_scale,
        transform.softcap, backend, consume,
    )  # fmt: skip
    return _from_statistics(problem, logprobs, entropy)


def _visit_logits(
    problem: _Problem, logits: Tensor, rows: Tensor, args: VocabularyArguments, backend: str
) -> PolicyLoss:
    """One visit a row: the gradient takes the logits' place in the forward."""
    checks.targets_in_range(args.targets, args.mask, logits.shape[-1])
    assert isinstance(problem.objective, Objective)
    spec, inputs, clamped = row_objective(problem.objective, problem.batch, problem.weights)
    rows = rows.detach()
    found: list[Visit] = []

    def run(logits: Tensor) -> tuple[Tensor, list[Tensor]]:
        visit: Visit = kernels(backend, rows).row_visit(rows, args.targets, args.mask, args.transform, spec, inputs)
        # Autograd sees that the logits changed, and protects their other readers.
        torch.autograd.graph.increment_version(rows)
        found.append(visit)
        return visit.terms[0].sum(), [rows.view(logits.shape)]

    loss = attach_gradients(run, (logits,), backend, consume=True)
    return _visited(problem, found[0], clamped, loss)


def _visited(problem: _Problem, found: Visit, clamped: Tensor | None, loss: Tensor) -> PolicyLoss:
    """A PolicyLoss from what a visit found."""
    batch, terms = problem.batch, found.terms
    if clamped is not None:
        terms = torch.cat([terms[:-1], torch.maximum(terms[-1], clamped.where(batch.mask, 0.0))[None]])
    return PolicyLoss(
        loss, metrics(terms, batch, found.entropy, None), found.logprobs.view(batch.shape),
        found.entropy.view(batch.shape),
    )  # fmt: skip


def linear_policy_loss(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    *,
    objective: Objective | CustomObjective,
    advantages: Tensor,
    mask: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy_weights: Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    denominator: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    sampling_mask: object = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,  # (V,)
    memory_budget: int | str | None = None,
    tp_group: Any = None,
    num_tokens: int | None = None,
) -> PolicyLoss:
    """`policy_loss` from hidden states and the output head, a chunk of rows at a time: no (N, V) tensor exists.

    Same loss and gradients as `policy_loss(linear_token_logprobs(hidden, weight, targets))`. A row-local objective gets
    its gradients in the forward, while a chunk's logits are at hand (3U, U = 2 N V H); another, and float16, rebuilds
    the logits in the backward (4U). Gradients of weight and bias are summed in float32. Masked rows never enter a
    matrix product.

    Args: those of `policy_loss` but `entropy`, those of `linear_token_logprobs` but `extras`, and
        num_tokens: the number of unmasked tokens, if the caller knows it; saves the one host synchronisation that
            leaving masked rows out costs on a GPU, where a wrong number makes the loss NaN.

    Returns, raises: as `policy_loss` and `linear_token_logprobs`.
    """
    head, targets = checked_head(hidden, weight, bias, targets)
    checks.unsupported(sampling_mask=sampling_mask, memory_budget=memory_budget, tp_group=tp_group)
    args = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap)
    problem = _problem(
        objective, targets, "targets", True, denominator, torch.float32, advantages=advantages, mask=mask,
        old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, rollout_logprobs=rollout_logprobs,
        token_weights=token_weights, entropy_weights=entropy_weights, entropy_threshold=entropy_threshold,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    count = _known_count(num_tokens, args)
    if count >= 0 and args.mask is not None:
        # Where the count cannot be looked at, a wrong one must not train silently.
        known = torch.where(problem.batch.tokens == count, 0.0, torch.nan)
        problem = problem._replace(weights=problem.weights + known.to(problem.weights.dtype))
    inputs = (head.hidden, head.weight, head.bias)
    needs = Needs(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs))
    # float16 gradients are scaled by the largest coefficient, which is known only after all statistics; a callable runs
    # between kernels, where torch.compile does not look.
    visited = head.hidden.dtype != torch.float16
    if not isinstance(objective, Objective):
        visited = visited and not torch.compiler.is_compiling()
    if any(needs) and visited and why_not_row_local(objective, problem.batch) is None:
        return _visit_linear(problem, head, args, needs, count)
    return _from_statistics(problem, *linear_stats(head, args, count))


def _known_count(num_tokens: int | None, args: VocabularyArguments) -> int:
    """num_tokens, checked where that is free; -1 for None."""
    if num_tokens is None:
        return -1
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens must be an int, got {type(num_tokens).__name__}")
    known = args.targets.shape[0] if args.mask is None else None
    if known is None and checks.values_are_checked(args.targets):
        known = int(args.mask.sum()) if args.mask is not None else 0
    if num_tokens < 0 or (known is not None and known != num_tokens):
        raise ValueError(f"num_tokens must be the number of unmasked tokens, {known}, got {num_tokens}")
    return num_tokens


def _visit_linear(
    problem: _Problem, head: Head, args: VocabularyArguments, needs: Needs, num_tokens: int
) -> PolicyLoss:
    """The forward-gradient plan: gradients are ready when the loss is."""
    if not isinstance(problem.objective, Objective):
        return _visit_linear_by_callable(problem, head, args, needs, num_tokens)
    spec, inputs, clamped = row_objective(problem.objective, problem.batch, problem.weights)
    transform = args.transform
    loss, logprobs, entropy, terms, *_ = linear_visit(
        *head, args.targets, args.mask, transform.temperatures, *inputs, spec.gate, list(spec.gate_parameters), spec.kl,
        spec.rollout, spec.rollout_low, spec.rollout_high, spec.max_log_ratio, list(needs), transform.temperature,
        transform.logit_scale, transform.softcap, forced(), num_tokens,
    )  # fmt: skip
    return _visited(problem, Visit(logprobs, entropy, terms), clamped, loss)


def _visit_linear_by_callable(
    problem: _Problem, head: Head, args: VocabularyArguments, needs: Needs, num_tokens: int
) -> PolicyLoss:
    """The same plan with a callable in torch between each chunk's statistics and its gradient."""
    checks.targets_in_range(args.targets, args.mask, head.weight.shape[0])
    backend = forced()
    found: list[Visit] = []

    def run(*inputs: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        visit, gradients = linear_ops.visit(
            Head(*inputs), args.targets, args.mask, args.transform, _custom_visit(problem, backend), needs, num_tokens,  # type: ignore[arg-type]
        )  # fmt: skip
        found[:] = [visit]
        return visit.terms[0].sum(), gradients

    loss = attach_gradients(run, head, backend, consume=False)
    return _visited(problem, found[0], None, loss)


def _custom_visit(problem: _Problem, backend: str) -> ChunkVisit:
    """A ChunkVisit that runs a callable in torch between a chunk's statistics and its gradient."""

    def visit_chunk(logits: Tensor, targets: Tensor, transform: Transform, index: Tensor | slice) -> Visit:
        backend_kernels = kernels(backend, logits)
        stats: Statistics = backend_kernels.row_statistics(logits, targets, None, transform)
        with torch.enable_grad():
            logp, entropy = stats.logprobs.requires_grad_(), stats.entropy.requires_grad_()
            terms, _ = objective_loss(
                problem.objective, problem.batch.rows(index), logp, entropy, problem.weights[index], None
            )
            c, h = (
                torch.autograd.grad(terms[0].sum(), (logp, entropy), allow_unused=True)
                if terms.requires_grad
                else (None, None)
            )
        stats = Statistics(*(s.detach() for s in stats))
        c = torch.zeros_like(stats.logprobs) if c is None else c
        backend_kernels.row_gradient(logits, targets, None, transform, stats, c, h, logits)
        return Visit(stats.logprobs, stats.entropy, terms.detach())

    return visit_chunk
