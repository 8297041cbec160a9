"""Liger's distillation loss with its own name and signature, computed by fastrl; see `fastrl.integrations.liger`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastrl import linear_cross_entropy, linear_divergence
from fastrl.base import checks
from fastrl.integrations.distillation_options import divergence_of
from fastrl.planning.announce import announces_plan
from fastrl.planning.budget import parse_budget


class LigerFusedLinearJSDLoss(torch.nn.Module):
    """Cross-entropy of the labels plus a divergence from a teacher, from the hidden states and heads of both.

    The loss is `weight_hard_loss * hard + weight_soft_loss * soft`, both means over the labels that are not
    `ignore_index`. hard is the student's cross-entropy. soft is a generalised JSD: for beta 0 the forward
    KL(teacher || student), for 1 the reverse KL(student || teacher), between them the JSD with the mixture
    `beta * teacher + (1 - beta) * student`; `temperature` divides the logits of both, for soft alone.

    Args:
        compiled, chunk_size: no effect.
        return_soft_hard_loss: return the loss with the detached soft and hard losses.
        memory_budget: bytes or text such as "1GiB", as in `fastrl.linear_divergence`, for each of the two losses. The
            copy of the student's weight that a larger vocabulary of the teacher's costs is not counted.

    Raises:
        TypeError, ValueError: beta is not a number in [0, 1], or temperature not positive.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        super().__init__()
        self.weight_hard_loss, self.weight_soft_loss = weight_hard_loss, weight_soft_loss
        self.divergence = divergence_of(beta)
        self.ignore_index = ignore_index
        self.temperature = checks.number("temperature", temperature, positive=True)
        self.return_soft_hard_loss = return_soft_hard_loss
        self.memory_budget = parse_budget(memory_budget)

    @announces_plan("Liger's JSD")
    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """student_input (N, H), student_weight (V, H), teacher_input (N, H_t), teacher_weight (V, H_t).

        true_labels (N,) are already shifted; student_bias and teacher_bias are (V,). If the teacher's vocabulary is
        larger, as a padded one is, the student's further logits are 0. Returns the loss, or (loss, soft, hard).
        """
        labels = true_labels.long()
        missing = max(teacher_weight.shape[0] - student_weight.shape[0], 0)
        soft = linear_divergence(
            student_input,
            pad(student_weight, (0, 0, 0, missing)) if missing else student_weight,
            teacher_input.detach(),
            teacher_weight,
            bias=pad(student_bias, (0, missing)) if missing and student_bias is not None else student_bias,
            teacher_bias=teacher_bias,
            mask=labels != self.ignore_index,
            temperature=self.temperature,
            memory_budget=self.memory_budget,
            **self.divergence,
        ).loss
        if self.weight_hard_loss == 0 and not self.return_soft_hard_loss:
            return self.weight_soft_loss * soft
        hard = linear_cross_entropy(
            student_input,
            student_weight,
            labels,
            ignore_index=self.ignore_index,
            bias=student_bias,
            memory_budget=self.memory_budget,
        )
        loss = self.weight_hard_loss * hard + self.weight_soft_loss * soft
        return (loss, soft.detach(), hard.detach()) if self.return_soft_hard_loss else loss
