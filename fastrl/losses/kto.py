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

    A mismatched response is one put to a prompt that it does not answer (in the paper, the next prompt of the batch).
    Their mean log-ratio is taken as 0 if it is negative or there are none. For micro-batches, pass z: otherwise it is
    not the same in all of them. The paper keeps the ratio of desirable_weight to undesirable_weight, times that of the
    numbers of responses, between 1 and 4/3.

    Args:
        logprobs: (B,), floating point, in nats, differentiable: of the policy, summed over each response's tokens.
        ref_logprobs: (B,), floating point, in nats, detached: of the reference policy, summed over each response's
            valid tokens.
        desirable: (B,), bool or 0/1: 1 = the response is desirable.
        kl: z, in nats, a number or a 0-dim tensor; or (M,), the log-ratios `logp - ref` of M mismatched responses, of
            which z is the mean, at least 0. None: z is 0.
        beta: above 0, multiplies the log-ratios.
        desirable_weight: above 0, multiplies the losses of desirable responses.
        undesirable_weight: above 0, multiplies the losses of the other responses.
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of responses, so that micro-batches
            and ranks add up.

    Returns:
        KTOLoss. The loss of no responses is 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, device or value.
    """
    logprobs = checks.tensor("logprobs", logprobs)
    if logprobs.ndim != 1:
        raise ValueError(f"logprobs must have shape (responses,), got {tuple(logprobs.shape)}")
    ref = checks.same_layout("ref_logprobs", ref_logprobs, logprobs, "logprobs")
    for name, value in (("logprobs", logprobs), ("ref_logprobs", ref)):
        checks.values(name, value, logprob=True)
    numbers = (kl, beta, desirable_weight, undesirable_weight)
    divisor = checks.divisor("denominator", denominator, logprobs.shape[0])
    return loss_of_sums(desirable, numbers, ref, divisor, "logprobs")(logprobs)


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
    batch_invariant: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
) -> KTOLoss:
    """Computes `kto_loss` from hidden states and the output head in chunks of rows, without an (N, V) tensor.

    The logits of a response are formed once (3U), with the exceptions of `linear_preference_loss`.

    The mismatched responses' log-ratios, for `kl`, come from `linear_token_logprobs` under `torch.no_grad()`.

    Args:
        hidden: (B, T, H), or (N, H) packed, float32, bfloat16 or float16. Under autocast, hidden, weight and bias are
            cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        targets: (B, T) or (N,) int64 in [0, V), not read where masked. Nothing is shifted: row t predicts targets[t].
        mask: bool or 0/1, shaped like targets: 1 = a token of the response, 0 = prompt or padding, which is not read.
        ref_logprobs: (B,), floating point, in nats, detached: of the reference policy, summed over each response's
            valid tokens.
        desirable: (B,), bool or 0/1: 1 = the response is desirable.
        kl: z, in nats, a number or a 0-dim tensor; or (M,), the log-ratios `logp - ref` of M mismatched responses, of
            which z is the mean, at least 0. None: z is 0.
        beta: above 0, multiplies the log-ratios.
        desirable_weight: above 0, multiplies the losses of desirable responses.
        undesirable_weight: above 0, multiplies the losses of the other responses.
        cu_seqlens: (B + 1,) int32, the start of each packed response, from 0 on, and the end of the last; the mask must
            leave out tokens behind it. None: not packed.
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of responses, so that micro-batches
            and ranks add up.
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
        KTOLoss, differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, IndexError: as `kto_loss` and `linear_token_logprobs`.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        tokens = CheckedResponses.of(targets, mask, cu_seqlens)
        ref = tokens.per_response("ref_logprobs", ref_logprobs)
        checks.values("ref_logprobs", ref, logprob=True)
        count = tokens.responses.count
        numbers = (kl, beta, desirable_weight, undesirable_weight)
        loss = loss_of_sums(desirable, numbers, ref, checks.divisor("denominator", denominator, count), "ref_logprobs")
        options = ((temperature, logit_scale, softcap), sampling_mask, logits_dtype, memory_budget, batch_invariant, tp)
        units = tokens.responses.owners(tokens.targets.device)
        head, of_sums = (hidden, weight, bias), lambda logprobs: loss(tokens.sums(logprobs))
        return loss_of_units(head, tokens.targets, tokens.mask, options, units, count, of_sums)


def loss_of_sums(
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
    checks.values("kl", kl)
    kl = wide(kl.detach())
    return kl if kl.ndim == 0 else (kl.sum() / max(len(kl), 1)).clamp_min(0)
