"""Kahneman-Tversky optimisation: a loss of single responses that are desirable or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.losses.request import TensorParallel
from fastrl.losses.whole_responses import CheckedResponses, loss_of_units, wide
from fastrl.objectives.preference_formulas import shortfall
from fastrl.sampling_mask.mask import SamplingMask


class KTOLoss(NamedTuple):
    """A KTO loss over B responses and its metrics, float64 if the log-probabilities are, else float32."""

    loss: Tensor
    """0-dim, the mean over responses; call backward() on it."""
    rewards: Tensor
    """(B,) `beta (logp - ref)`, detached."""
    losses: Tensor
    """(B,) each response's loss, detached."""
    kl: Tensor
    """0-dim, the z that the loss read, in nats, detached."""
    logprobs: Tensor
    """(B,) the policy's log-probabilities, summed over each response's tokens, detached."""


def kto_loss(
    logprobs: Tensor,  # (B,)
    ref_logprobs: Tensor,  # (B,)
    desirable: Tensor,  # (B,)
    *,
    kl: float | Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    denominator: float | Tensor | None = None,
) -> KTOLoss:
    """Computes the KTO loss (Ethayarajh et al., 2024, arXiv:2402.01306, eq. 8) of unpaired responses.

    The mean over responses of `weight (1 - sigmoid(beta (logp - ref - z)))` for a desirable one and
    `weight (1 - sigmoid(beta (z - logp + ref)))` for another; z estimates the KL divergence from the reference to the
    policy, and gets no gradient. With `kl=None` z is 0, which is the unpaired APO-zero of TRL.

    Args:
        logprobs: (B,) floating point, the policy's log-probabilities, summed over each response's tokens.
            Differentiable.
        ref_logprobs: (B,), the same under the reference; they get no gradient.
        desirable: (B,), bool or 0/1.
        kl: None: z is 0. A number or a 0-dim tensor: z itself, in nats. (M,): the log-ratios `logp - ref` of mismatched
            responses, each put to a prompt that it does not answer (in the paper, the next prompt of the batch); z is
            their mean, or 0 if that is negative or M is 0.
        beta: above 0.
        desirable_weight: above 0; the paper keeps its ratio to undesirable_weight, times that of the numbers of
            responses, between 1 and 4/3.
        undesirable_weight: above 0.
        denominator: replaces B; for micro-batches, the number of responses of all of them (z is the same in all of them
            only if you pass it).

    Returns:
        KTOLoss. The loss of no responses is 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    logprobs = checks.tensor("logprobs", logprobs)
    if logprobs.ndim != 1:
        raise ValueError(f"logprobs must have shape (responses,), got {tuple(logprobs.shape)}")
    ref = checks.same_layout("ref_logprobs", ref_logprobs, logprobs, "logprobs")
    numbers = (kl, beta, desirable_weight, undesirable_weight)
    divisor = checks.divisor("denominator", denominator, logprobs.shape[0])
    return _loss(desirable, numbers, ref, divisor, "logprobs")(logprobs)


def linear_kto_loss(
    hidden: Tensor,  # (B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (B, T), or (N,)
    mask: Tensor,  # like targets
    ref_logprobs: Tensor,  # (B,)
    desirable: Tensor,  # (B,)
    *,
    kl: float | Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
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
) -> KTOLoss:
    """Computes `kto_loss` from hidden states and the output head in chunks of rows, without an (N, V) tensor.

    The logits of a response are formed once (3U), with the exceptions of `linear_preference_loss`.

    The mismatched responses' log-ratios, for `kl`, come from `linear_token_logprobs` under `torch.no_grad()`.

    Args:
        hidden: (B, T, H), or (N, H) packed, float32, bfloat16 or float16.
        weight: (V, H), the output head, with hidden's dtype.
        targets: (B, T) or (N,) int64 in [0, V); not read where the mask is 0.
        mask: bool or 0/1, shaped like targets: 1 = a token of the response, 0 = prompt or padding.
        ref_logprobs: (B,), log-probabilities under the reference, summed over each response's valid tokens.
        desirable: (B,), bool or 0/1.
        kl: z, or the log-ratios of mismatched responses, in nats; as in `kto_loss`.
        beta: above 0.
        desirable_weight: above 0; as in `kto_loss`.
        undesirable_weight: above 0; as in `kto_loss`.
        cu_seqlens: (B + 1,) int32 for packed responses, rising from 0 to N, or to less: the mask must leave out the
            tokens behind, as at the end of padded packs.
        denominator: replaces B, as in `kto_loss`.
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
        KTOLoss, differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, IndexError: as `kto_loss` and `linear_token_logprobs`.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        tokens = CheckedResponses.of(targets, mask, cu_seqlens)
        ref = tokens.per_response("ref_logprobs", ref_logprobs)
        count = tokens.responses.count
        numbers = (kl, beta, desirable_weight, undesirable_weight)
        loss = _loss(desirable, numbers, ref, checks.divisor("denominator", denominator, count), "ref_logprobs")
        options = ((temperature, logit_scale, softcap), sampling_mask, logits_dtype, memory_budget, tp)
        units = tokens.responses.owners(tokens.targets.device)
        head, of_sums = (hidden, weight, bias), lambda logprobs: loss(tokens.sums(logprobs))
        return loss_of_units(head, tokens.targets, tokens.mask, options, units, count, of_sums)


def _loss(
    desirable: object,
    numbers: tuple[object, object, object, object],
    ref: Tensor,
    denominator: float | Tensor,
    like_name: str,
) -> Callable[[Tensor], KTOLoss]:
    """The loss of sums (B,), by its other arguments, which are checked here against `ref`; errors call it `like_name`.

    numbers: kl, beta, desirable_weight and undesirable_weight.
    """
    is_desirable = checks.mask(desirable, ref, like_name, name="desirable")
    if is_desirable is None:
        raise TypeError("desirable must be a bool or 0/1 tensor, got NoneType")
    z = _estimate(numbers[0], ref, like_name)
    names = ("beta", "desirable_weight", "undesirable_weight")
    beta, desirable_weight, undesirable_weight = (
        checks.number(name, x, positive=True) for name, x in zip(names, numbers[1:], strict=True)
    )
    ref = wide(checks.nan_where_wrong(ref.detach(), desirable))

    def loss(logprobs: Tensor) -> KTOLoss:
        dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
        log_ratios = wide(logprobs) - ref
        shifted = beta * (log_ratios - z)
        weights = torch.full_like(shifted, undesirable_weight).masked_fill(is_desirable, desirable_weight)
        losses = weights * shortfall(torch.where(is_desirable, shifted, -shifted))
        mean, rewards = losses.sum() / denominator, beta * log_ratios.detach()
        return KTOLoss(*(x.to(dtype) for x in (mean, rewards, losses.detach(), z, logprobs.detach())))

    return loss


def _estimate(kl: object, like: Tensor, like_name: str) -> Tensor:
    """z, 0-dim and detached."""
    if not isinstance(kl, Tensor):
        return wide(like).new_full((), 0.0 if kl is None else checks.number("kl", kl))
    kl = checks.tensor("kl", kl)
    checks.same_device("kl", kl, like, like_name)
    if kl.ndim > 1:
        raise ValueError(f"kl must be 0-dim, or have shape (mismatched responses,), got {tuple(kl.shape)}")
    kl = wide(kl.detach())
    return kl if kl.ndim == 0 else (kl.sum() / max(len(kl), 1)).clamp_min(0)
