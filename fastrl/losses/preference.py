"""Preference losses: DPO from log-probabilities or hidden states, and the Bradley-Terry loss of reward models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.responses import INTEGER_DTYPES, Responses, check_cu_seqlens
from fastrl.losses.logprobs import linear_token_logprobs
from fastrl.losses.spread import TensorParallel
from fastrl.sampling_mask.mask import SamplingMask


class PreferenceLoss(NamedTuple):
    """A DPO loss over B pairs and its metrics, all float32."""

    loss: Tensor
    """0-dim, the mean over pairs; call backward() on it."""
    chosen_rewards: Tensor
    """(B,) `beta (logp - ref)` of the chosen responses, detached."""
    rejected_rewards: Tensor
    """(B,) the same for the rejected responses, detached."""
    margins: Tensor
    """(B,) chosen minus rejected rewards, detached."""


def dpo_loss(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """Computes the direct preference optimisation (DPO) loss: the mean over pairs of `-log sigmoid(beta Delta)`.

    `Delta` is `logp - ref` of the chosen response minus that of the rejected one (Rafailov et al., 2023,
    arXiv:2305.18290).

    Args:
        chosen_logprobs, rejected_logprobs: (B,) floating point, the policy's log-probabilities, summed over each
            response's tokens. Differentiable.
        ref_chosen, ref_rejected: (B,), the same under the reference policy; they get no gradient.
        beta: > 0; the larger, the closer the policy stays to the reference.

    Returns:
        A scalar, float64 for float64 log-probabilities, else float32; 0 if there are no pairs.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    first = checks.tensor("chosen_logprobs", chosen_logprobs)
    if first.ndim != 1:
        raise ValueError(f"chosen_logprobs must have shape (pairs,), got {tuple(first.shape)}")
    others = {"rejected_logprobs": rejected_logprobs, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    for name, value in others.items():
        checks.tensor(name, value)
        checks.shape(name, value, first.shape, "the shape of chosen_logprobs")
        checks.same_device(name, value, first, "chosen_logprobs")
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    chosen, rejected = first.to(dtype) - ref_chosen.detach(), rejected_logprobs.to(dtype) - ref_rejected.detach()
    return _mean_over_pairs(checks.number("beta", beta, positive=True) * (chosen - rejected))


def _mean_over_pairs(margins: Tensor) -> Tensor:
    return -torch.nn.functional.logsigmoid(margins).sum() / max(margins.shape[0], 1)


def linear_dpo_loss(
    hidden: Tensor,  # (2B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (2B, T), or (N,)
    mask: Tensor,  # like targets
    ref_logprobs: Tensor,  # (2B,)
    *,
    beta: float = 0.1,
    cu_seqlens: Tensor | None = None,
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
    """Computes `dpo_loss` from hidden states and the output head in chunks of rows, without an (N, V) tensor.

    Args:
        hidden, weight, bias, targets, temperature, sampling_mask, logit_scale, softcap, logits_dtype, memory_budget,
            tp_group, vocab_start, vocab_size, reduce_hidden_grad: as in `linear_token_logprobs`, for 2B responses: the
            chosen ones first, then the rejected ones in the same order.
        mask: bool or 0/1, shaped like targets: 1 = a token of the response, 0 = prompt or padding.
        ref_logprobs: (2B,), log-probabilities under the reference, summed over each response's valid tokens.
        beta: as in `dpo_loss`.
        cu_seqlens: (2B + 1,) int32 for packed responses, rising from 0 to N.

    Returns:
        PreferenceLoss, differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, IndexError: as `dpo_loss` and `linear_token_logprobs`.
    """
    with TensorParallel.of(tp_group).reporting():
        targets = checks.tensor("targets", targets, (torch.int64,))
        if cu_seqlens is None and targets.ndim != 2:
            raise ValueError(
                f"targets must have shape (responses, time) without cu_seqlens, got {tuple(targets.shape)}"
            )
        checked = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, "targets", targets)
        responses = Responses(targets.shape, checked, targets.device)
        if responses.count % 2:
            raise ValueError(f"targets must hold chosen and rejected responses, an even number, got {responses.count}")
        if mask is None:
            raise TypeError("mask must be a bool or 0/1 tensor, got NoneType")
        ref = checks.tensor("ref_logprobs", ref_logprobs)
        checks.shape("ref_logprobs", ref, (responses.count,), "one per response, summed")
        checks.same_device("ref_logprobs", ref, targets, "targets")
        beta = checks.number("beta", beta, positive=True)

        stats = linear_token_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            mask=mask,
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
        rewards = beta * (responses.sum(stats.logprobs.reshape(-1)) - ref.detach().float())
        chosen, rejected = rewards.chunk(2) if responses.count else (rewards, rewards)
        margins = chosen - rejected
        return PreferenceLoss(_mean_over_pairs(margins), chosen.detach(), rejected.detach(), margins.detach())


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
