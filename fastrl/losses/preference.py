"""Preference losses of pairs, from log-probabilities or hidden states; the Bradley-Terry loss of reward models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.responses import INTEGER_DTYPES
from fastrl.losses.request import TensorParallel
from fastrl.losses.whole_responses import CheckedResponses, loss_of_units, wide
from fastrl.objectives.preferences import DPO, Preference
from fastrl.sampling_mask.mask import SamplingMask


class PreferenceLoss(NamedTuple):
    """A loss over B pairs and its metrics, float64 if the log-probabilities are, else float32.

    A response's score is what the objective reads: its log-probability, less the reference's if the objective has one,
    as a sum over its tokens or their mean.
    """

    loss: Tensor
    """0-dim, the mean over pairs, plus the likelihood term; call backward() on it."""
    chosen_rewards: Tensor
    """(B,) beta times the score of the chosen responses, detached; for DPO `beta (logp - ref)`."""
    rejected_rewards: Tensor
    """(B,) the same for the rejected responses, detached."""
    margins: Tensor
    """(B,) chosen minus rejected rewards, detached."""
    losses: Tensor
    """(B,) each pair's loss, without the likelihood term, detached."""
    chosen_logprobs: Tensor
    """(B,) the policy's log-probabilities of the chosen responses, summed over their tokens, detached."""
    rejected_logprobs: Tensor
    """(B,) the same for the rejected responses, detached."""
    nll: Tensor | None = None
    """0-dim, the negative log-likelihood per token, detached; None if the objective has no such term."""


class DPOLoss(NamedTuple):
    """A DPO loss over B pairs and its metrics, the first four fields of a `PreferenceLoss`."""

    loss: Tensor
    """0-dim, the mean over pairs; call backward() on it."""
    chosen_rewards: Tensor
    """(B,) `beta (logp - ref)` of the chosen responses, detached."""
    rejected_rewards: Tensor
    """(B,) the same for the rejected responses, detached."""
    margins: Tensor
    """(B,) chosen minus rejected rewards, detached."""


def preference_loss(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor | None = None,  # (B,)
    ref_rejected: Tensor | None = None,  # (B,)
    *,
    objective: Preference,
    chosen_lengths: Tensor | None = None,  # (B,)
    rejected_lengths: Tensor | None = None,  # (B,)
    denominator: float | Tensor | None = None,
    nll_denominator: float | Tensor | None = None,
) -> PreferenceLoss:
    """Computes a preference loss over pairs of responses from their log-probabilities.

    It is the mean over pairs of the objective's formula, plus its `nll_coef` times the negative log-likelihood of the
    chosen responses, a mean over all of their tokens. Slopes keep their digits at any margin. The mean over a response
    without tokens is 0, and so is its likelihood, whatever its log-probabilities.

    Args:
        chosen: (B,), floating point, in nats, differentiable: the policy's log-probabilities of the chosen responses,
            summed over tokens.
        rejected: (B,), floating point, in nats, differentiable: the policy's log-probabilities of the rejected
            responses, summed over tokens.
        ref_chosen: (B,), floating point, in nats, detached: the reference's log-probabilities of the chosen responses,
            summed over tokens; required by an objective with a reference.
        ref_rejected: (B,), floating point, in nats, detached: the reference's log-probabilities of the rejected
            responses, summed over tokens; required by an objective with a reference.
        objective: a `Preference`, such as the preset `fastrl.IPO(beta=0.1)`.
        chosen_lengths: (B,), integers or floating point: the number of tokens of each chosen response; required by
            means over tokens and by a likelihood term.
        rejected_lengths: (B,), integers or floating point: the number of tokens of each rejected response; required by
            means over tokens.
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of pairs, so that micro-batches and
            ranks add up.
        nll_denominator: above 0, a number or a 0-dim tensor: replaces the local number of tokens of the likelihood
            term.

    Returns:
        PreferenceLoss. The loss of no pairs is 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value, or a missing one.
    """
    return _from_sums(
        _checked(objective),
        {"chosen": chosen, "rejected": rejected},
        {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected},
        {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths},
        denominator,
        nll_denominator,
    )


def _from_sums(
    objective: Preference,
    sums: dict[str, Any],
    ref: dict[str, Any],
    lengths: dict[str, Any],
    denominator: object = None,
    nll_denominator: object = None,
) -> PreferenceLoss:
    """The loss of chosen and rejected responses' arguments, each by the name that errors call it."""
    like_name, like = next(iter(sums.items()))
    like = checks.tensor(like_name, like)
    if like.ndim != 1:
        raise ValueError(f"{like_name} must have shape (pairs,), got {tuple(like.shape)}")

    def checked(pair: dict[str, Any], needed: list[bool], why: str, dtypes: Any = None) -> list[Tensor]:
        for (name, value), is_needed in zip(pair.items(), needed, strict=True):
            if value is None and is_needed:
                raise TypeError(f"{name} is needed by {why}, got None")
        given = {name: checks.tensor(name, value, dtypes) for name, value in pair.items() if value is not None}
        for name, value in given.items():
            checks.shape(name, value, like.shape, f"the shape of {like_name}")
            checks.same_device(name, value, like, like_name)
        return [given.get(name, like.new_zeros(like.shape)) for name in pair]

    both = [checks.same_layout(name, value, like, like_name) for name, value in sums.items()]
    both_ref = checked(ref, [objective.reference] * 2, "an objective with a reference")
    needed, dtypes = [objective.needs_lengths, objective.average], (*INTEGER_DTYPES, torch.float32, torch.float64)
    both_lengths = checked(lengths, needed, "an objective with means over tokens", dtypes)
    for pair in (sums, ref) if objective.reference else (sums,):
        for (name, value), length in zip(pair.items(), both_lengths, strict=True):
            checks.values(name, value, length > 0 if objective.average else None, logprob=True)
    tokens: float | Tensor = wide(both_lengths[0]).sum() if objective.nll_coef else 1
    divisor = checks.divisor("nll_denominator", nll_denominator, tokens)
    nll = -wide(both[0]).where(both_lengths[0] > 0, 0.0).sum() / divisor if objective.nll_coef else None
    pairs = checks.divisor("denominator", denominator, like.shape[0])
    return _of_pairs(objective, both, both_ref, both_lengths, nll, pairs)


def _checked(objective: object) -> Preference:
    if not isinstance(objective, Preference):
        raise TypeError(f"objective must be a Preference such as fastrl.DPO(), got {objective!r}")
    return objective


def _of_pairs(
    objective: Preference,
    sums: list[Tensor],
    ref: list[Tensor] | None,
    lengths: list[Tensor] | None,
    nll: Tensor | None,
    denominator: float | Tensor,
) -> PreferenceLoss:
    """The loss of checked [chosen, rejected] sums; None for those of a reference, or lengths, that it does not read."""
    dtype = torch.float64 if sums[0].dtype == torch.float64 else torch.float32
    scores = [wide(x) for x in sums]
    if objective.reference and ref is not None:
        scores = [x - wide(y.detach()) for x, y in zip(scores, ref, strict=True)]
    if objective.average and lengths is not None:
        scores = [(x / wide(n).clamp_min(1)).where(n > 0, 0.0) for x, n in zip(scores, lengths, strict=True)]
    losses = objective.losses(*scores)
    loss = losses.sum() / denominator
    if nll is not None:
        loss = loss + objective.nll_coef * nll
    chosen, rejected = (objective.beta * x.detach() for x in scores)
    metrics = (chosen, rejected, chosen - rejected, losses, *sums, *(() if nll is None else (nll,)))
    return PreferenceLoss(loss.to(dtype), *(x.detach().to(dtype) for x in metrics))


def dpo_loss(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """Computes the direct preference optimisation (DPO) loss: the mean over pairs of `-log sigmoid(beta Delta)`.

    `Delta` is `logp - ref` of the chosen response minus that of the rejected one (Rafailov et al., 2023,
    arXiv:2305.18290). It is `preference_loss` with the objective `DPO(beta)`.

    Args:
        chosen_logprobs: (B,), floating point, in nats, differentiable: the policy's log-probabilities of the chosen
            responses, summed over tokens.
        rejected_logprobs: (B,), floating point, in nats, differentiable: the policy's log-probabilities of the rejected
            responses, summed over tokens.
        ref_chosen: (B,), floating point, in nats, detached: the reference's log-probabilities of the chosen responses,
            summed over tokens; required by an objective with a reference.
        ref_rejected: (B,), floating point, in nats, detached: the reference's log-probabilities of the rejected
            responses, summed over tokens; required by an objective with a reference.
        beta: above 0, multiplies the log-ratios.

    Returns:
        A scalar, float64 for float64 log-probabilities, else float32; 0 if there are no pairs.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    ref = {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    for name, value in ref.items():
        checks.in_memory(name, value)
    sums = {"chosen_logprobs": chosen_logprobs, "rejected_logprobs": rejected_logprobs}
    no_lengths = {"chosen_lengths": None, "rejected_lengths": None}
    return _from_sums(DPO(checks.number("beta", beta, positive=True)), sums, ref, no_lengths).loss


def linear_preference_loss(
    hidden: Tensor,  # (2B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (2B, T), or (N,)
    mask: Tensor,  # like targets
    ref_logprobs: Tensor | None = None,  # (2B,)
    *,
    objective: Preference,
    cu_seqlens: Tensor | None = None,
    nll_mask: Tensor | None = None,  # like targets
    denominator: float | Tensor | None = None,
    nll_denominator: float | Tensor | None = None,
    bias: Tensor | None = None,  # (V,)
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
) -> PreferenceLoss:
    """Computes `preference_loss` from hidden states and the head in chunks of rows, without an (N, V) tensor.

    A chunk holds the logits of whole pairs until their loss is known, so that logits are formed once (3U, U = 2 N V H
    operations). In float16, with a sampling mask, under torch.compile and in a budget too small for a pair, the
    backward forms them again (4U). On a GPU the host waits once, for the pairs' lengths. The loss is differentiable
    once.

    Args:
        hidden: (2B, T, H), or (N, H) packed, float32, bfloat16 or float16: the chosen responses first, then the
            rejected ones in the same order. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        targets: (2B, T) or (N,) int64 in [0, V), not read where masked. Nothing is shifted: row t predicts targets[t].
        mask: bool or 0/1, shaped like targets: 1 = a token of the response, 0 = prompt or padding, which is not read.
        ref_logprobs: (2B,), floating point, in nats, detached: of the reference policy, summed over each response's
            valid tokens; required by an objective with a reference.
        objective: a `Preference`, such as the preset `fastrl.IPO(beta=0.1)`.
        cu_seqlens: (2B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask
            must leave out tokens behind it. None: not packed.
        nll_mask: bool or 0/1, shaped like targets: the tokens of the likelihood term; None: the chosen responses'.
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of pairs, so that micro-batches and
            ranks add up.
        nll_denominator: above 0, a number or a 0-dim tensor: replaces the local number of tokens of the likelihood
            term.
        bias: (V,) with hidden's dtype; None: no bias.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        logit_scale: above 0, multiplies the logits, before the softcap (Cohere, Granite).
        softcap: above 0, bounds the logits smoothly (Gemma 2); None: no bound.
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

    Returns:
        PreferenceLoss, differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, IndexError: as `preference_loss` and `linear_token_logprobs`.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        head, responses, likelihood = (hidden, weight, bias), (targets, mask, cu_seqlens), (nll_mask, nll_denominator)
        options = ((temperature, logit_scale, softcap), sampling_mask, logits_dtype, memory_budget, batch_invariant, tp)
        return _linear_loss(_checked(objective), head, responses, ref_logprobs, denominator, likelihood, options)


def _linear_loss(
    objective: Preference,
    head: tuple[Tensor, Tensor, Tensor | None],
    responses: tuple[Tensor, Tensor, Tensor | None],
    ref_logprobs: Tensor | None,
    denominator: object,
    likelihood: tuple[Tensor | None, object],
    options: tuple[Any, ...],
) -> PreferenceLoss:
    """The loss of a head (hidden, weight, bias), responses (targets, mask, cu_seqlens) and an objective.

    likelihood: nll_mask and nll_denominator.
    """
    nll_mask, nll_denominator = likelihood
    tokens = CheckedResponses.of(*responses)
    count, odd = divmod(tokens.responses.count, 2)
    if odd:
        raise ValueError(
            f"targets must hold chosen and rejected responses, an even number, got {tokens.responses.count}"
        )
    if ref_logprobs is None and objective.reference:
        raise TypeError("ref_logprobs is needed by an objective with a reference, got None")
    ref = None if ref_logprobs is None else _halves(tokens.per_response("ref_logprobs", ref_logprobs))
    if ref_logprobs is not None and objective.reference:
        read = tokens.lengths() > 0 if objective.average else None
        checks.values("ref_logprobs", ref_logprobs, read, logprob=True)
    likely = checks.mask(nll_mask, tokens.targets, name="nll_mask")
    pairs = checks.divisor("denominator", denominator, count)
    lengths = _halves(tokens.lengths()) if objective.needs_lengths else None
    nll_tokens: float | Tensor = 1
    if lengths is not None:
        nll_tokens = wide(lengths[0]).sum() if likely is None else likely.sum()
    nll_tokens = checks.divisor("nll_denominator", nll_denominator, nll_tokens)
    if not objective.nll_coef:
        likely = None

    def loss_of(logprobs: Tensor) -> PreferenceLoss:
        sums = _halves(tokens.sums(logprobs, likely))
        nll = None
        if objective.nll_coef:
            counted = sums[0]
            if likely is not None:
                marked = checks.nan_where_wrong(logprobs, nll_mask).where(likely.reshape(-1), 0.0)
                counted = tokens.responses.sum(marked)
            nll = -wide(counted).sum() / nll_tokens
        return _of_pairs(objective, sums, ref, lengths, nll, pairs)

    units = tokens.responses.owners(tokens.targets.device) % max(count, 1)
    valid = tokens.mask if likely is None else tokens.mask | likely
    return loss_of_units(head, tokens.targets, valid, options, units, count, loss_of)


def _halves(x: Tensor) -> list[Tensor]:
    """(2B,) -> chosen and rejected, (B,) each."""
    return [x[: x.shape[0] // 2], x[x.shape[0] // 2 :]]


def linear_dpo_loss(
    hidden: Tensor,  # (2B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (2B, T), or (N,)
    mask: Tensor,  # like targets
    ref_logprobs: Tensor,  # (2B,)
    *,
    beta: float = 0.1,
    cu_seqlens: Tensor | None = None,
    denominator: float | Tensor | None = None,
    bias: Tensor | None = None,  # (V,)
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
) -> DPOLoss:
    """Computes `linear_preference_loss` with the objective `DPO(beta)`: `dpo_loss` without an (N, V) tensor.

    Args:
        hidden: (2B, T, H), or (N, H) packed, float32, bfloat16 or float16: the chosen responses first, then the
            rejected ones in the same order. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        targets: (2B, T) or (N,) int64 in [0, V), not read where masked. Nothing is shifted: row t predicts targets[t].
        mask: bool or 0/1, shaped like targets: 1 = a token of the response, 0 = prompt or padding, which is not read.
        ref_logprobs: (2B,), floating point, in nats, detached: of the reference policy, summed over each response's
            valid tokens; required by an objective with a reference.
        beta: above 0, multiplies the log-ratios.
        cu_seqlens: (2B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask
            must leave out tokens behind it. None: not packed.
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of pairs, so that micro-batches and
            ranks add up.
        bias: (V,) with hidden's dtype; None: no bias.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        logit_scale: above 0, multiplies the logits, before the softcap (Cohere, Granite).
        softcap: above 0, bounds the logits smoothly (Gemma 2); None: no bound.
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

    Returns:
        DPOLoss, differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, IndexError: as `linear_preference_loss`.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        objective = DPO(checks.number("beta", beta, positive=True))
        options = ((temperature, logit_scale, softcap), sampling_mask, logits_dtype, memory_budget, batch_invariant, tp)
        head, responses = (hidden, weight, bias), (targets, mask, cu_seqlens)
        loss = _linear_loss(objective, head, responses, ref_logprobs, denominator, (None, None), options)
    return DPOLoss(*loss[:4])


def reward_model_loss(scores: Tensor, ranks: Tensor, prompt_ids: Tensor) -> Tensor:
    """Computes the K-wise Bradley-Terry loss: `-log sigmoid(score_i - score_j)` per pair of responses, i preferred.

    The loss is averaged over each prompt's pairs, then over prompts (Ouyang et al., 2022, arXiv:2203.02155, section
    3.5, where all pairs of a prompt stay together in a batch).

    Args:
        scores: (B,) floating point, the model's score of each response. Differentiable.
        ranks: (B,), real; 1 = best, a smaller rank is preferred. Equal ranks make no pair.
        prompt_ids: (B,) integers; responses with equal ids answer the same prompt. They need not be adjacent.

    Returns:
        A scalar, float64 for float64 scores, else float32. Without any pair it is 0, with zero gradients.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    scores = checks.tensor("scores", scores)
    if scores.ndim != 1:
        raise ValueError(f"scores must have shape (responses,), got {tuple(scores.shape)}")
    ranks = checks.in_memory("ranks", ranks)
    if ranks.is_complex():
        raise TypeError(f"ranks must be real, got {ranks.dtype}")
    prompts = checks.tensor("prompt_ids", prompt_ids, INTEGER_DTYPES)
    for name, value in (("ranks", ranks), ("prompt_ids", prompts)):
        checks.shape(name, value, scores.shape, "the shape of scores")
        checks.same_device(name, value, scores, "scores")
        checks.values(name, value)
    checks.values("scores", scores)
    wide = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    same = prompts[:, None] == prompts
    pairs = same & (ranks[:, None] < ranks)
    losses = -torch.nn.functional.logsigmoid(wide[:, None] - wide).where(pairs, 0.0)
    # A pair's weight is 1 / (its prompt's pairs), so that all prompts that have pairs have the same weight.
    of_response = pairs.sum(1)
    of_prompt = (same * of_response).sum(1)
    prompts_with_pairs = (1 / same.sum(1)).where(of_prompt > 0, 0.0).sum().round()  # a whole number
    return (losses.sum(1) / of_prompt.clamp_min(1)).sum() / prompts_with_pairs.clamp_min(1)
