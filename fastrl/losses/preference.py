"""Preference losses of pairs, from log-probabilities or hidden states; the Bradley-Terry loss of reward models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.responses import INTEGER_DTYPES
from fastrl.losses.response_sums import CheckedResponses, wide
from fastrl.losses.spread import TensorParallel
from fastrl.losses.whole_responses import loss_of_units
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
    chosen responses, a mean over all of their tokens. Slopes keep their digits at any margin.

    Args:
        chosen: (B,) floating point, the policy's log-probabilities of the chosen responses, in nats, summed over each
            response's tokens. Differentiable.
        rejected: (B,), the same of the rejected responses.
        ref_chosen: (B,), the reference policy's log-probabilities of the chosen responses; no gradient. Required if
            `objective.reference`, otherwise not used.
        ref_rejected: (B,), the same of the rejected responses.
        objective: a `Preference`, for example `fastrl.IPO(beta=0.1)`.
        chosen_lengths: (B,), the number of tokens of each chosen response; required if `objective.average`, or if it
            has an `nll_coef`. The mean over a response without tokens is 0, and so is its likelihood, whatever its
            log-probabilities.
        rejected_lengths: (B,), of each rejected response; required if `objective.average`.
        denominator: replaces B; for micro-batches, the number of pairs of all of them.
        nll_denominator: replaces the number of tokens of the chosen responses in the likelihood term.

    Returns:
        PreferenceLoss. The loss of no pairs is 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value, or a missing one.
    """
    chosen = checks.tensor("chosen", chosen)
    return _from_named(
        _checked(objective),
        {"chosen": chosen, "rejected": rejected},
        {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected},
        {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths},
        denominator,
        nll_denominator,
    )


def _from_named(
    objective: Preference,
    sums: dict[str, Any],
    ref: dict[str, Any],
    lengths: dict[str, Any],
    denominator: object = None,
    nll_denominator: object = None,
) -> PreferenceLoss:
    """The loss of chosen and rejected responses' arguments, each by the name that errors call it."""
    first_name, first = next(iter(sums.items()))
    if first.ndim != 1:
        raise ValueError(f"{first_name} must have shape (pairs,), got {tuple(first.shape)}")

    def checked(name: str, value: object, kinds: Any = None) -> Tensor:
        value = checks.tensor(name, value, kinds)
        checks.shape(name, value, first.shape, f"the shape of {first_name}")
        checks.same_device(name, value, first, first_name)
        return value

    def all_or_none(given: dict[str, Any], needed: list[bool], why: str, kinds: Any = None) -> list[Tensor] | None:
        for (name, value), is_needed in zip(given.items(), needed, strict=True):
            if value is None and is_needed:
                raise TypeError(f"{name} is needed by {why}, got None")
        tensors = [None if value is None else checked(name, value, kinds) for name, value in given.items()]
        found = [first.new_zeros(first.shape) if x is None else x for x in tensors]
        return found if any(needed) else None

    both = [checked(name, value) for name, value in sums.items()]
    with_ref = all_or_none(ref, [objective.reference] * 2, "an objective with a reference")
    counts = (*INTEGER_DTYPES, torch.float32, torch.float64)
    needed = [objective.needs_lengths, objective.average]
    of_length = all_or_none(lengths, needed, "an objective with means over tokens", counts)
    nll = None
    if objective.nll_coef:
        assert of_length is not None
        likely = wide(both[0]).where(of_length[0] > 0, 0.0)
        nll = -likely.sum() / checks.divisor("nll_denominator", nll_denominator, wide(of_length[0]).sum())
    elif nll_denominator is not None:
        checks.divisor("nll_denominator", nll_denominator, 1)
    pairs = checks.divisor("denominator", denominator, first.shape[0])
    return _of_pairs(objective, both, with_ref, of_length if objective.average else None, nll, pairs)


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
    """The loss of checked [chosen, rejected] sums, those of the reference, and lengths, (B,) each."""
    dtype = torch.float64 if sums[0].dtype == torch.float64 else torch.float32
    scores = [wide(x) for x in sums]
    if ref is not None:
        scores = [x - wide(y.detach()) for x, y in zip(scores, ref, strict=True)]
    if lengths is not None:
        scores = [(x / wide(n).clamp_min(1)).where(n > 0, 0.0) for x, n in zip(scores, lengths, strict=True)]
    losses = objective.losses(*scores)
    loss = losses.sum() / denominator
    if nll is not None:
        loss = loss + objective.nll_coef * nll
    rewards = [objective.beta * x.detach() for x in scores]
    return PreferenceLoss(
        loss=loss.to(dtype),
        chosen_rewards=rewards[0].to(dtype),
        rejected_rewards=rewards[1].to(dtype),
        margins=(rewards[0] - rewards[1]).to(dtype),
        losses=losses.detach().to(dtype),
        chosen_logprobs=sums[0].detach().to(dtype),
        rejected_logprobs=sums[1].detach().to(dtype),
        nll=None if nll is None else nll.detach().to(dtype),
    )


def dpo_loss(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """Computes the direct preference optimisation (DPO) loss: the mean over pairs of `-log sigmoid(beta Delta)`.

    `Delta` is `logp - ref` of the chosen response minus that of the rejected one (Rafailov et al., 2023,
    arXiv:2305.18290). It is `preference_loss` with the objective `DPO(beta)`.

    Args:
        chosen_logprobs: (B,) floating point, the policy's log-probabilities of the chosen responses, in nats, summed
            over each response's tokens. Differentiable.
        rejected_logprobs: (B,), the same of the rejected responses.
        ref_chosen: (B,), chosen_logprobs under the reference policy; no gradient.
        ref_rejected: (B,), rejected_logprobs under the reference policy; no gradient.
        beta: above 0; the larger, the closer the policy stays to the reference.

    Returns:
        A scalar, float64 for float64 log-probabilities, else float32; 0 if there are no pairs.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    first = checks.tensor("chosen_logprobs", chosen_logprobs)
    ref = {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    for name, value in ref.items():
        checks.in_memory(name, value)
    return _from_named(
        DPO(checks.number("beta", beta, positive=True)),
        {"chosen_logprobs": first, "rejected_logprobs": rejected_logprobs},
        ref,
        {"chosen_lengths": None, "rejected_lengths": None},
    ).loss


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
            rejected ones in the same order.
        weight: (V, H), the output head, with hidden's dtype.
        targets: (2B, T) or (N,) int64 in [0, V), in the order of hidden; not read where the mask is 0.
        mask: bool or 0/1, shaped like targets: 1 = a token of the response, 0 = prompt or padding.
        ref_logprobs: (2B,), log-probabilities under the reference, summed over each response's valid tokens; required
            if `objective.reference`, otherwise not used. The mean over a response without tokens is 0 here too.
        objective: a `Preference`, for example `fastrl.IPO(beta=0.1)`.
        cu_seqlens: (2B + 1,) int32 for packed responses, rising from 0 to N, or to less: the mask must leave out the
            tokens behind, as at the end of padded packs.
        nll_mask: bool or 0/1, shaped like targets: the tokens of the likelihood term of an objective with an
            `nll_coef`; the default is those of the chosen responses.
        denominator: replaces B; for micro-batches, the number of pairs of all of them.
        nll_denominator: replaces the number of tokens of the likelihood term.
        bias: (V,) with hidden's dtype.
        temperature: above 0, a number or a floating tensor shaped like targets; as in `linear_token_logprobs`.
        sampling_mask: a `SamplingMask` with one row per target; as in `linear_token_logprobs`.
        logit_scale: above 0, multiplies the logits.
        softcap: above 0, bounds the logits smoothly; None: no bound.
        logits_dtype: None or torch.float32; as in `linear_token_logprobs`.
        memory_budget: bytes, or text such as "256MiB"; as in `linear_token_logprobs`.
        tp_group: a ProcessGroup over whose ranks the vocabulary is split; as in `linear_token_logprobs`.
        vocab_start: the id of this rank's first entry, checked; as in `linear_token_logprobs`.
        vocab_size: the size of the whole vocabulary, without padding; as in `linear_token_logprobs`.
        reduce_hidden_grad: whether the gradient of hidden is summed over the group; as in `linear_token_logprobs`.

    Returns:
        PreferenceLoss, differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, IndexError: as `preference_loss` and `linear_token_logprobs`.
    """
    with TensorParallel.of(tp_group).reporting():
        objective = _checked(objective)
        tokens = CheckedResponses.of(targets, mask, cu_seqlens)
        if tokens.responses.count % 2:
            raise ValueError(
                f"targets must hold chosen and rejected responses, an even number, got {tokens.responses.count}"
            )
        if ref_logprobs is None and objective.reference:
            raise TypeError("ref_logprobs is needed by an objective with a reference, got None")
        ref = None if ref_logprobs is None else tokens.per_response("ref_logprobs", ref_logprobs)
        likely = checks.mask(nll_mask, tokens.targets, name="nll_mask")
        pairs = checks.divisor("denominator", denominator, tokens.responses.count // 2)
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
            with_ref = None if ref is None or not objective.reference else _halves(ref)
            return _of_pairs(objective, sums, with_ref, lengths if objective.average else None, nll, pairs)

        count = tokens.responses.count // 2
        return loss_of_units(
            hidden,
            weight,
            tokens.targets,
            tokens.mask if likely is None else tokens.mask | likely,
            tokens.responses.owners(tokens.targets.device) % max(count, 1),
            count,
            loss_of,
            bias=bias,
            temperature=temperature,
            sampling_mask=sampling_mask,
            logit_scale=logit_scale,
            softcap=softcap,
            logits_dtype=logits_dtype,
            memory_budget=memory_budget,
            tp_group=tp_group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            reduce_hidden_grad=reduce_hidden_grad,
        )


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
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
) -> DPOLoss:
    """Computes `linear_preference_loss` with the objective `DPO(beta)`: `dpo_loss` without an (N, V) tensor.

    Args:
        hidden: (2B, T, H), or (N, H) packed, float32, bfloat16 or float16, as in `linear_preference_loss`.
        weight: (V, H), the output head, with hidden's dtype.
        targets: (2B, T) or (N,) int64 in [0, V), in the order of hidden; not read where the mask is 0.
        mask: bool or 0/1, shaped like targets, as in `linear_preference_loss`.
        ref_logprobs: (2B,), in nats, as in `linear_preference_loss`.
        beta: above 0, as in `dpo_loss`.
        cu_seqlens: (2B + 1,) int32 for packed responses, as in `linear_preference_loss`.
        denominator: replaces B, as in `linear_preference_loss`.
        bias: (V,) with hidden's dtype.
        temperature: above 0, a number or a floating tensor shaped like targets; as in `linear_token_logprobs`.
        sampling_mask: a `SamplingMask` with one row per target; as in `linear_token_logprobs`.
        logit_scale: above 0, multiplies the logits.
        softcap: above 0, bounds the logits smoothly; None: no bound.
        logits_dtype: None or torch.float32; as in `linear_token_logprobs`.
        memory_budget: bytes, or text such as "256MiB"; as in `linear_token_logprobs`.
        tp_group: a ProcessGroup over whose ranks the vocabulary is split; as in `linear_token_logprobs`.
        vocab_start: the id of this rank's first entry, checked; as in `linear_token_logprobs`.
        vocab_size: the size of the whole vocabulary, without padding; as in `linear_token_logprobs`.
        reduce_hidden_grad: whether the gradient of hidden is summed over the group; as in `linear_token_logprobs`.

    Returns:
        DPOLoss, differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, IndexError: as `linear_preference_loss`.
    """
    with TensorParallel.of(tp_group).reporting():
        found = linear_preference_loss(
            hidden,
            weight,
            targets,
            mask,
            ref_logprobs,
            objective=DPO(checks.number("beta", beta, positive=True)),
            cu_seqlens=cu_seqlens,
            denominator=denominator,
            bias=bias,
            temperature=temperature,
            sampling_mask=sampling_mask,
            logit_scale=logit_scale,
            softcap=softcap,
            logits_dtype=logits_dtype,
            memory_budget=memory_budget,
            tp_group=tp_group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            reduce_hidden_grad=reduce_hidden_grad,
        )
    return DPOLoss(found.loss, found.chosen_rewards, found.rejected_rewards, found.margins)


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
    wide = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    same = prompts[:, None] == prompts
    pairs = same & (ranks[:, None] < ranks)
    losses = -torch.nn.functional.logsigmoid(wide[:, None] - wide).where(pairs, 0.0)
    # A pair's weight is 1 / (its prompt's pairs), so that all prompts that have pairs have the same weight.
    of_response = pairs.sum(1)
    of_prompt = (same * of_response).sum(1)
    prompts_with_pairs = (1 / same.sum(1)).where(of_prompt > 0, 0.0).sum().round()  # a whole number
    return (losses.sum(1) / of_prompt.clamp_min(1)).sum() / prompts_with_pairs.clamp_min(1)
