"""Supervised cross-entropy from hidden states and the output head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.losses.logprobs import linear_token_logprobs
from fastrl.losses.policy import linear_policy_loss
from fastrl.losses.request import TensorParallel
from fastrl.objectives.presets import REINFORCE

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    bias: Tensor | None = None,  # (V,)
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
    num_tokens: int | None = None,
) -> Tensor:
    """Computes the cross-entropy of `hidden @ weight.T + bias`, in nats, in chunks of rows.

    It is the policy loss of REINFORCE with advantage 1: for "mean" and "sum", the forward computes the gradients (3U,
    U = 2 N V H operations). `hidden[t]` predicts `targets[t]`: nothing is shifted.

    Args:
        hidden: (..., H) float32, bfloat16 or float16. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        targets: (...) int64 in [0, V), or `ignore_index`. Nothing is shifted: row t predicts targets[t].
        ignore_index: tokens with this target are not valid; any integer.
        reduction: "mean" over the valid tokens (or over denominator), "sum", or "none" for one loss per token (0 where
            ignored; 4U).
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of valid tokens, so that
            micro-batches and ranks add up.
        bias: (V,) with hidden's dtype; None: no bias.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
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
        num_tokens: the number of valid tokens (of this rank), if known: saves a GPU with a mask the host
            synchronisations for counting them. A wrong number is an error on a CPU, and a loss of NaN on a GPU.

    Returns:
        A float32 scalar, or (...) for "none".

    Raises:
        TypeError, ValueError, IndexError: as `linear_token_logprobs`.
    """
    with TensorParallel.of(tp_group).reporting():
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
        if denominator is not None and reduction != "mean":
            raise ValueError(f"denominator goes with reduction='mean', got reduction={reduction!r}")
        targets = checks.tensor("targets", targets, (torch.int64,))
        if targets.dim() == 0 and reduction != "none" and isinstance(hidden, Tensor):  # a policy loss sums over tokens
            hidden, targets = hidden[None], targets[None]
            temperature = temperature[None] if isinstance(temperature, Tensor) else temperature
        options: dict[str, Any] = {"bias": bias, "mask": targets != ignore_index, "logits_dtype": logits_dtype}
        options |= {"temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
        options |= {"memory_budget": memory_budget, "batch_invariant": batch_invariant}
        options |= {"tp_group": tp_group, "vocab_start": vocab_start}
        options |= {"vocab_size": vocab_size, "reduce_hidden_grad": reduce_hidden_grad}
        if reduction == "none":
            return -linear_token_logprobs(hidden, weight, targets, **options).logprobs
        options |= {"num_tokens": num_tokens, "denominator": 1.0 if reduction == "sum" else denominator}
        advantages = torch.ones(targets.shape, dtype=torch.float32, device=targets.device)
        loss = linear_policy_loss(hidden, weight, targets, objective=REINFORCE(), advantages=advantages, **options)
        return loss.loss
