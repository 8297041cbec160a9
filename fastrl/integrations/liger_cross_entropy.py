"""Cross-entropies from hidden states, as trainers call them with Liger (0.8.5): verl's and slime's backends, and SFT.

    from fastrl.integrations.liger import LigerFusedLinearScaledCrossEntropyTPFunction   # was: liger_kernel.ops
    nll, entropy = LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        hidden, weight, labels, process_group, temperature=0.7, ignore_index=-100, return_entropy=True
    )

Both functions are `linear_scaled_cross_entropy` with Liger's arguments in Liger's order, whose numbers of tiles have no
effect. Entropies are float32; Liger's have the dtype of the hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import linear_cross_entropy, linear_token_logprobs
from fastrl.integrations.liger_head import head
from fastrl.integrations.megatron import group_or_default
from fastrl.planning.announce import announces_plan
from fastrl.planning.budget import parse_budget


@announces_plan("cross-entropy and entropy of each token")
def linear_scaled_cross_entropy(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (...)
    process_group: Any = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    *,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`-log p` of each label, and the entropy of each token if it is asked for: float32 (...), both differentiable.

    Args:
        hidden: (..., H) float32, bfloat16 or float16.
        weight: (V, H), with hidden's dtype; with a process_group this rank's rows, (V_r, H).
        labels: (...) integers, ids in the whole vocabulary, or ignore_index: 0 there, and no gradient.
        process_group: over whose ranks the vocabulary lies (tensor parallelism), or None. The gradient of hidden is
            summed over it.
        temperature: divides the logits, > 0.
        ignore_index: the label of a token that does not count.
        return_entropy: whether to return entropies too.
        logits_dtype, memory_budget: as in `fastrl.linear_token_logprobs`.

    Returns:
        nll, or (nll, entropy).

    Raises:
        As `fastrl.linear_token_logprobs`.
    """
    stats = linear_token_logprobs(
        hidden,
        weight,
        labels.long(),
        mask=labels != ignore_index,
        temperature=temperature,
        entropy=return_entropy,
        logits_dtype=logits_dtype,
        memory_budget=memory_budget,
        tp_group=process_group,
    )
    return -stats.logprobs if stats.entropy is None else (-stats.logprobs, stats.entropy)


class LigerFusedLinearScaledCrossEntropyFunction:
    """`linear_scaled_cross_entropy` on one device, which verl calls for its backend "liger"."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """_input (M, H), weight (V, H), target (M,) int64; m_tiles_per_cluster has no effect."""
        return linear_scaled_cross_entropy(_input, weight, target, None, temperature, ignore_index, return_entropy)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """`linear_scaled_cross_entropy` over a tensor parallel group, which verl calls for its backend "liger"."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        tp_group: Any,
        temperature: float = 1.0,
        ignore_index: int = -100,
        tiles_per_reduce: int = 1,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """_input (M, H), weight (V_r, H) this rank's rows, target (M,) int64; tiles_per_reduce has no effect.

        As in Liger, a tp_group of None is torch.distributed's default group; if that is not initialised, there is none.
        """
        group = group_or_default(tp_group)
        return linear_scaled_cross_entropy(_input, weight, target, group, temperature, ignore_index, return_entropy)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """`fastrl.linear_cross_entropy` with the arguments of `liger_kernel.transformers`' class of this name.

    Args:
        ignore_index, reduction, softcap: as in `fastrl.linear_cross_entropy`.
        accum_dtype: has no effect: gradients of the head are summed in float32.
        memory_budget: as in `fastrl.linear_token_logprobs`.
        others: class weights, z-loss, label smoothing and further results are not computed here.

    Raises:
        NotImplementedError: for one of the others that is not off.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        super().__init__()
        others = {
            "ce_weight": ce_weight is not None,
            "lse_square_scale": lse_square_scale,
            "label_smoothing": label_smoothing,
            "return_z_loss": return_z_loss,
            "use_token_scaling": use_token_scaling,
            "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
        }
        for name, on in others.items():
            if on:
                raise NotImplementedError(f"{name} is not built: leave it at its default, or use Liger's own class")
        self.ignore_index, self.reduction, self.softcap = ignore_index, reduction, softcap
        self.memory_budget = parse_budget(memory_budget)

    @announces_plan("Liger's cross-entropy")
    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        """lin_weight (V, H) before _input (..., H), target (...), bias (V,): 0-dim, or (...) for "none"."""
        return linear_cross_entropy(
            _input,
            targets=target.long(),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            softcap=self.softcap,
            memory_budget=self.memory_budget,
            **head(_input, lin_weight, bias),
        )
