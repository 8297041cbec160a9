"""The policy losses: from log-probabilities, from logits, and from hidden states and the output head.

docs/design.md follows a call of `linear_policy_loss` down to a kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.choice import forced, row_functions
from fastrl.backend.contract import LossTerms
from fastrl.base import checks
from fastrl.losses.linear import loss_by_plan, policy_plan
from fastrl.losses.logprobs import logits_stats
from fastrl.losses.problem import PolicyLoss, Problem, from_statistics, from_terms, make_problem
from fastrl.losses.request import (
    ALONE,
    TensorParallel,
    VocabularyArguments,
    checked_cp_group,
    checked_logits,
    forms_gradient,
    linear_request,
    vocabulary_arguments,
)
from fastrl.losses.spread import agreed_logits, over_cp_group, over_tp_group, same_problem
from fastrl.losses.supports import split_support
from fastrl.objectives.evaluate import CustomObjective
from fastrl.objectives.objective import CovarianceClip, Objective
from fastrl.objectives.other_tokens import drawn
from fastrl.objectives.row_local import Given, row_objective, why_not_row_local
from fastrl.passes import consumed
from fastrl.passes.logits import as_rows
from fastrl.passes.operator import attach_gradients
from fastrl.sampling_mask.mask import SamplingMask


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
    group_ids: Tensor | Sequence[Hashable] | None = None,
    cp_group: Any = None,
    position_ids: Tensor | None = None,
) -> PolicyLoss:
    """Computes a policy loss from log-probabilities: `sum_t m_t w_t (omega_t f_t + beta kl_t - alpha H_t)`.

    `objective` defines f, kl, alpha and w. The last dimension of logprobs runs over a response's tokens. With
    `cu_seqlens`, responses are packed; without it, 1-D logprobs are one response. The gradient is computed by autograd.

    A callable objective is aggregated as its attribute `aggregate` says (default "token-mean"). Its attribute
    `row_local = True` promises that each token's loss depends on that token alone.

    A response without a valid token is one of those that the aggregation divides by, as in TRL; verl leaves it out, and
    so does its adapter. With "prompt-mean" all responses to a prompt must be in one call. Where they lie in several
    micro-batches, use token-mean with denominator (B,): for each response, the whole batch's number of prompts times
    its number of valid tokens of the prompt. torch.compile compiles anew for each list of group_ids, not for each
    tensor.

    Over a cp_group the tokens of a response may be cut anywhere and in any order, and a rank may have none of them. The
    number of responses, their order, and advantages (B,) are the same on every rank. Every sum over a response or the
    batch, denominators and metrics run over the group, and every rank gets the whole loss, to the same bits. Its
    gradient is that of the whole loss with respect to the rank's own tokens, so parameters get the rank's part: sum it
    over the group, or multiply the loss by the number of ranks if a wrapper takes the mean. Either all ranks run the
    backward or none. A callable must have row_local = True.

    Args:
        logprobs: (B, T) or (N,), floating point, in nats: of the current policy, with their graph.
        objective: an `Objective`, such as the preset `fastrl.GRPO()`; or a callable `(log_ratio, advantages, context)
            -> loss per token` in torch, whose context is a `LossContext`.
        advantages: (B,), one per response, or (B, T) or (N,), one per token; floating point, detached. With B == N, as
            a packed batch may have, they are one per response.
        mask: (B, T) or (N,), bool or 0/1: 1 = valid; None: all are. What is masked is not read; its gradient is 0.
        old_logprobs: (B, T) or (N,), floating point, in nats, detached: of the policy before the update. None:
            on-policy, the current ones.
        ref_logprobs: (B, T) or (N,), floating point, in nats, detached: of the reference; required by a KL term to it.
        rollout_logprobs: (B, T) or (N,), floating point, in nats, detached: of the inference engine; required by a
            rollout correction, and read by gates whose ratio is to the rollout policy.
        entropy: (B, T) or (N,), floating point, in nats, with its graph; required by terms and thresholds of the
            entropy.
        token_weights: (B, T) or (N,), floating point, detached; multiply the policy term only. None: 1.
        entropy_weights: (B, T) or (N,), floating point, detached; replace w in the entropy term. None: w.
        entropy_threshold: in nats, a number or a 0-dim tensor: tokens below it have no policy term. None: what the
            objective's `top_entropy_fraction` says.
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.
        denominator: above 0, a number or a tensor, 0-dim or (B,): replaces the local number of tokens, prompts or
            responses that the aggregation divides by, so that micro-batches and ranks add up.
        group_ids: (B,), the prompt of each response, an integer tensor or a list of anything hashable; required by the
            aggregation "prompt-mean", otherwise not read.
        cp_group: a torch.distributed.ProcessGroup over whose ranks the tokens of each response lie (context
            parallelism): each rank passes its own tokens. None: they lie on one.
        position_ids: (B, T) or (N,) integers that rise along each response; required beside a cp_group by objectives
            that depend on the order of tokens (FIPO), otherwise not read.

    Returns:
        PolicyLoss. A batch with no valid token gives loss 0 and zero gradients.

    Raises:
        TypeError, ValueError: the message names the argument, the value and what was expected.
        RuntimeError: another rank of cp_group raised an error, which the message has.
        NotImplementedError: a cp_group under torch.compile.
    """
    cp_group = None if cp_group is None else checked_cp_group(cp_group, None)
    with ALONE.reporting(cp_group):
        logprobs = checks.tensor("logprobs", logprobs)
        dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
        if entropy is not None:
            entropy = checks.same_layout("entropy", entropy, logprobs, "logprobs").to(dtype)
        others = (old_logprobs, ref_logprobs, rollout_logprobs)
        weights = (token_weights, entropy_weights, entropy_threshold)
        of_batch = (cu_seqlens, denominator, group_ids, position_ids)
        of_logprobs = ("logprobs", entropy is not None, dtype)
        problem = make_problem(objective, logprobs, advantages, mask, others, weights, *of_batch, *of_logprobs)
        checks.values("logprobs", logprobs, problem.batch.mask, logprob=True)
        if entropy is not None:
            checks.values("entropy", entropy, problem.batch.mask)
        needs_gradient = torch.is_grad_enabled() and logprobs.requires_grad
        problem = _drawn(problem, cp_group, needs_gradient, advantages, denominator)
    return from_statistics(problem, logprobs.to(dtype), entropy)


def _drawn(
    problem: Problem, cp_group: Any, needs_gradient: bool, advantages: Tensor, denominator: float | Tensor | None
) -> Problem:
    """The last step before a loss is computed: over a cp_group the problem of all ranks; and what is drawn at random.

    So a call that is refused draws nothing, and the objective may be evaluated several times with the same numbers.
    """
    if cp_group is not None:
        problem = over_cp_group(problem, cp_group, needs_gradient, advantages, denominator)
    rule = problem.settings.covariance
    if not isinstance(rule, CovarianceClip):
        return problem
    return problem._replace(batch=replace(problem.batch, draws=drawn(rule, problem.batch)))


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
    group_ids: Tensor | Sequence[Hashable] | None = None,
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    inplace: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
    cp_group: Any = None,
    position_ids: Tensor | None = None,
) -> PolicyLoss:
    """Computes `policy_loss` from logits (..., V); the only (N, V) tensors are the logits and their gradient.

    The loss and the gradient are those of `policy_loss(token_logprobs(logits, targets))`. For a row-local objective
    (each token's loss depends on that token only) the forward reads every row once and computes the gradient, which
    activation checkpointing drops and computes again. For other objectives, for float16, with a sampling mask and over
    a tp_group, the backward computes it. With `inplace=True` the gradient overwrites logits that need one, in the
    forward already if that computes it. Nothing may read them afterwards, and checkpointing must compute them
    anew. Without it the gradient has its own buffer. Second derivatives (create_graph=True) are not supported. A second
    backward (retain_graph=True) raises RuntimeError if the forward computed the gradient, or if the first backward
    overwrote the logits.

    Over a tp_group every rank gets the whole loss, to the bit: everything but the logits is the same on all ranks.

    Args:
        logits: (..., V) float32, bfloat16 or float16, with any leading strides.
        targets: (B, T) or (N,) int64 in [0, V), not read where masked. Nothing is shifted: row t predicts targets[t].
        objective: an `Objective`, such as the preset `fastrl.GRPO()`; or a callable `(log_ratio, advantages, context)
            -> loss per token` in torch, whose context is a `LossContext`.
        advantages: (B,), one per response, or (B, T) or (N,), one per token; floating point, detached. With B == N, as
            a packed batch may have, they are one per response.
        mask: (B, T) or (N,), bool or 0/1: 1 = valid; None: all are. What is masked is not read; its gradient is 0.
        old_logprobs: (B, T) or (N,), floating point, in nats, detached: of the policy before the update. None:
            on-policy, the current ones.
        ref_logprobs: (B, T) or (N,), floating point, in nats, detached: of the reference; required by a KL term to it.
        rollout_logprobs: (B, T) or (N,), floating point, in nats, detached: of the inference engine; required by a
            rollout correction, and read by gates whose ratio is to the rollout policy.
        token_weights: (B, T) or (N,), floating point, detached; multiply the policy term only. None: 1.
        entropy_weights: (B, T) or (N,), floating point, detached; replace w in the entropy term. None: w.
        entropy_threshold: in nats, a number or a 0-dim tensor: tokens below it have no policy term. None: what the
            objective's `top_entropy_fraction` says.
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.
        denominator: above 0, a number or a tensor, 0-dim or (B,): replaces the local number of tokens, prompts or
            responses that the aggregation divides by, so that micro-batches and ranks add up.
        group_ids: (B,), the prompt of each response, an integer tensor or a list of anything hashable; required by the
            aggregation "prompt-mean", otherwise not read.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        logit_scale: above 0, multiplies the logits, before the softcap (Cohere, Granite).
        softcap: above 0, bounds the logits smoothly (Gemma 2); None: no bound.
        inplace: whether the gradient overwrites the logits, if they need one; nothing may read them afterwards. It has
            no effect under torch.compile.
        tp_group: a torch.distributed.ProcessGroup over whose ranks the vocabulary is split: logits (..., V_r) are this
            rank's columns; all else is the same on every rank. None: it is not split.
        vocab_start: the id of this rank's first vocabulary entry, checked; None: where those of earlier ranks end.
        vocab_size: the size of the whole vocabulary: rows of the head, or columns of the logits, beyond it are padding,
            which has no probability and gradient 0. None: there is no padding.
        reduce_hidden_grad: has no effect, as there are no hidden states; the functions from hidden states take it too.
        cp_group: a torch.distributed.ProcessGroup over whose ranks the tokens of each response lie (context
            parallelism): each rank passes its own tokens. None: they lie on one.
        position_ids: (B, T) or (N,) integers that rise along each response; required beside a cp_group by objectives
            that depend on the order of tokens (FIPO), otherwise not read.

    Returns:
        PolicyLoss. A batch with no valid token gives loss 0 and zero gradients.

    Raises:
        TypeError, ValueError: the message names the argument, the value and what was expected.
        IndexError: a valid target outside [0, V), under the conditions of `token_logprobs`.
        RuntimeError: another rank of a group raised an error, which the message has.
        NotImplementedError: a tp_group or a cp_group under torch.compile.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    cp_group = None if cp_group is None else checked_cp_group(cp_group, tp_group)
    with tp.reporting(cp_group):
        tp.check()
        logits, targets = checked_logits(logits, targets, inplace, may_be_empty=tp.group is not None)
        arguments = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap)
        valid = None if arguments.mask is None else arguments.mask.view(targets.shape)
        logprobs = (old_logprobs, ref_logprobs, rollout_logprobs)
        weights = (token_weights, entropy_weights, entropy_threshold)
        of_batch = (cu_seqlens, denominator, group_ids, position_ids)
        problem = make_problem(objective, targets, advantages, valid, logprobs, weights, *of_batch)
        consume = inplace and forms_gradient(logits)
        shard = None
        if tp.group is not None:
            same = {"inplace": inplace, **same_problem(problem, denominator)}
            rows = as_rows(logits, consume)
            shard = agreed_logits(tp, rows, arguments, targets.shape, sampling_mask, same)
        vocab = tp.counted("logits", logits.shape[-1], shard)
        supports = split_support(sampling_mask, arguments.targets, arguments.mask, vocab)
        if cp_group is not None:  # else the operators check
            checks.targets_in_range(targets, valid, vocab)
        needs_gradient = torch.is_grad_enabled() and logits.requires_grad
        problem = _drawn(problem, cp_group, needs_gradient, advantages, denominator)
    dense = shard is None and supports is None and logits.numel() > 0 and logits.dtype != torch.float16
    row_local = isinstance(objective, Objective) and why_not_row_local(objective, Given.of(problem.batch)) is None
    try:
        if dense and row_local and forms_gradient(logits):
            return _logits_forward_gradient(problem, logits, arguments, vocab, forced(), consume)
        rows = as_rows(logits, consume)
        return from_statistics(problem, *logits_stats(rows, arguments, supports, vocab, forced(), consume, shard))
    except IndexError as error:
        raise checks.in_shape(error, targets, valid, vocab) from error.__cause__


def _logits_forward_gradient(
    problem: Problem, logits: Tensor, arguments: VocabularyArguments, vocab: int, backend: str, consume: bool
) -> PolicyLoss:
    """Computes the gradient in the forward, over the logits or in a buffer of its own."""
    checks.targets_in_range(arguments.targets, arguments.mask, vocab)
    assert isinstance(problem.objective, Objective)
    spec, inputs, clamped, marks = row_objective(problem.objective, problem.batch, problem.weights)

    def run(logits: Tensor) -> tuple[Tensor, list[Tensor | consumed.Written], LossTerms]:
        rows = as_rows(logits.detach(), consume)
        consumed.refuse(rows)
        out = None if consume else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        with consumed.marks_stay(rows):
            own = None if out is None else out[..., :vocab]
            functions = row_functions(backend, rows)
            result: LossTerms = functions.row_forward_gradient(rows[..., :vocab], *arguments, spec, inputs, own)
            (rows if out is None else out)[..., vocab:].zero_()
            if consume:  # so that autograd raises if another operation saved the logits for its backward
                torch.autograd.graph.increment_version(rows)
        if out is not None:
            return result.terms[0].sum(), [out.view(logits.shape)], result
        written = consumed.Written(rows.data.view(logits.shape), rows, consumed.mark(rows))
        return result.terms[0].sum(), [written], result

    loss, result = attach_gradients(run, (logits,), backend)
    return from_terms(problem, result, loss, clamped=clamped, marks=marks)


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
    group_ids: Tensor | Sequence[Hashable] | None = None,
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,  # (V,)
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
    num_tokens: int | None = None,
    cp_group: Any = None,
    position_ids: Tensor | None = None,
) -> PolicyLoss:
    """Computes `policy_loss` from hidden states and the output head in chunks of rows, without an (N, V) tensor.

    The loss and the gradients are those of `policy_loss(linear_token_logprobs(hidden, weight, targets))`. The plan with
    the fewest products that fits `memory_budget` in useful tiles is used (`fastrl.plan_memory` shows the plans). If
    tokens, or responses, do not depend on each other, the forward computes the gradients while it holds the logits
    (3U, U = 2 N V H operations); otherwise the backward computes the logits again (4U or 5U). Gradients of weight and
    bias are summed in float32. Masked rows enter no matrix product. Idle rows, whose gradient is 0 (A = 0 without a KL
    or an entropy term, or clipped if that is known in time), enter none of the products of the gradients. A weight that
    needs no gradient costs no product for it. Second derivatives (create_graph=True) are not supported. A second
    backward (retain_graph=True) raises RuntimeError if the forward has computed the gradients; `policy_loss` of
    `linear_token_logprobs` always allows it.

    num_tokens saves the host synchronisations for counting rows (one here, one in a backward that computes the logits
    again); idle rows are then not left out, as without a mask. If a sampling_mask has rows that are not recorded, a GPU
    still synchronises for their number. Without num_tokens, it also does for the lengths of packed responses whose
    tokens depend on each other.

    Over a cp_group the gradients of weight and bias are this rank's part. Objectives that are not row-local then
    compute the logits again in the backward (4U), and so do those of a sequence ratio on-policy.

    Args:
        hidden: (..., H) float32, bfloat16 or float16. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        targets: (B, T) or (N,) int64 in [0, V), not read where masked. Nothing is shifted: row t predicts targets[t].
        objective: an `Objective`, such as the preset `fastrl.GRPO()`; or a callable `(log_ratio, advantages, context)
            -> loss per token` in torch, whose context is a `LossContext`.
        advantages: (B,), one per response, or (B, T) or (N,), one per token; floating point, detached. With B == N, as
            a packed batch may have, they are one per response.
        mask: (B, T) or (N,), bool or 0/1: 1 = valid; None: all are. What is masked is not read; its gradient is 0.
        old_logprobs: (B, T) or (N,), floating point, in nats, detached: of the policy before the update. None:
            on-policy, the current ones.
        ref_logprobs: (B, T) or (N,), floating point, in nats, detached: of the reference; required by a KL term to it.
        rollout_logprobs: (B, T) or (N,), floating point, in nats, detached: of the inference engine; required by a
            rollout correction, and read by gates whose ratio is to the rollout policy.
        token_weights: (B, T) or (N,), floating point, detached; multiply the policy term only. None: 1.
        entropy_weights: (B, T) or (N,), floating point, detached; replace w in the entropy term. None: w.
        entropy_threshold: in nats, a number or a 0-dim tensor: tokens below it have no policy term. None: what the
            objective's `top_entropy_fraction` says.
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.
        denominator: above 0, a number or a tensor, 0-dim or (B,): replaces the local number of tokens, prompts or
            responses that the aggregation divides by, so that micro-batches and ranks add up.
        group_ids: (B,), the prompt of each response, an integer tensor or a list of anything hashable; required by the
            aggregation "prompt-mean", otherwise not read.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        logit_scale: above 0, multiplies the logits, before the softcap (Cohere, Granite).
        softcap: above 0, bounds the logits smoothly (Gemma 2); None: no bound.
        bias: (V,) with hidden's dtype; None: no bias.
        logits_dtype: None: logits are rounded to the head's dtype. torch.float32: they are the float32 sums of the
            products, as in an engine that computes its head in float32.
        memory_budget: bytes, or text such as "256MiB", for temporary memory beyond inputs, outputs and their gradients.
            None: a sixteenth of the device's memory, or what the plan that needs least takes if that is more.
        batch_invariant: whether a row's log-probability and entropy have the same bits whatever else is computed, and
            so has the gradient of its hidden state for given dL/dlogp and dL/dentropy: `docs/batch_invariance.md`.
        tp_group: a torch.distributed.ProcessGroup over whose ranks the vocabulary is split: weight and bias are this
            rank's rows; all else is the same on every rank. None: it is not split.
        vocab_start: the id of this rank's first vocabulary entry, checked; None: where those of earlier ranks end.
        vocab_size: the size of the whole vocabulary: rows of the head, or columns of the logits, beyond it are padding,
            which has no probability and gradient 0. None: there is no padding.
        reduce_hidden_grad: whether the gradient of hidden is summed over the tp_group; False leaves each rank its part.
        num_tokens: the number of valid tokens (of this rank), if known: saves a GPU with a mask the host
            synchronisations for counting them. A wrong number is an error on a CPU, and a loss of NaN on a GPU.
        cp_group: a torch.distributed.ProcessGroup over whose ranks the tokens of each response lie (context
            parallelism): each rank passes its own tokens. None: they lie on one.
        position_ids: (B, T) or (N,) integers that rise along each response; required beside a cp_group by objectives
            that depend on the order of tokens (FIPO), otherwise not read.

    Returns:
        PolicyLoss, differentiable in hidden, weight and bias. A batch with no valid token gives loss 0 and zero
        gradients.

    Raises:
        TypeError, ValueError: the message names the argument, the value and what was expected. A memory_budget too
            small for any plan is one: the message names the smallest that works.
        IndexError: a valid target outside [0, V), under the conditions of `token_logprobs`.
        RuntimeError: another rank of a group raised an error, which the message has.
        NotImplementedError: a tp_group or a cp_group under torch.compile.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    cp_group = None if cp_group is None else checked_cp_group(cp_group, tp_group)
    with tp.reporting(cp_group):
        of_logits = (temperature, logit_scale, softcap)
        options = (of_logits, sampling_mask, logits_dtype, memory_budget, batch_invariant, tp, num_tokens)
        request = linear_request(hidden, weight, bias, targets, mask, *options)
        valid = None if request.mask is None else request.mask.view(targets.shape)
        logprobs = (old_logprobs, ref_logprobs, rollout_logprobs)
        weights = (token_weights, entropy_weights, entropy_threshold)
        of_batch = (cu_seqlens, denominator, group_ids, position_ids)
        problem = make_problem(objective, targets, advantages, valid, logprobs, weights, *of_batch)
        if tp.group is not None:  # same_problem reads all values, which torch.compile cannot trace
            request = over_tp_group(request, tp, targets.shape, **same_problem(problem, denominator))
        if cp_group is not None:  # else the operators check
            checks.targets_in_range(targets, valid, request.vocab)
        request, plan, asked = policy_plan(problem, request, cp_group is not None)
        problem = _drawn(problem, cp_group, any(request.needs), advantages, denominator)
    try:
        return loss_by_plan(problem, request, plan, asked)
    except IndexError as error:
        raise checks.in_shape(error, targets, valid, request.vocab) from error.__cause__
