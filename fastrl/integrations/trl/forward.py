"""A loss inside TRL's own forward: it takes the inputs of TRL's fused head, and the forward returns its result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fastrl.integrations.trl.patches import replaced_head

#: The argument of the forward that `add_loss_forward` adds.
LOSS = "fastrl_loss"


@dataclass
class HeadCall:
    """The inputs that TRL's fused forward passes to its head."""

    hidden: Tensor  # (N, H)
    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float


class _LossHead:
    """Replaces TRL's head for one forward: computes the loss, and returns only zeros for TRL to sum."""

    def __init__(self, loss: Callable[[HeadCall], dict[str, Tensor]]) -> None:
        self.loss = loss
        self.found: dict[str, Tensor] | None = None

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """As `FusedHead.apply`, with zeros for log-probabilities."""
        self.found = self.loss(HeadCall(hidden, weight, bias, temperature, softcap, logit_scale))
        return hidden.new_zeros(hidden.shape[0], dtype=torch.float32), None, None, None, None


def add_loss_forward(model: Any) -> None:
    """Give the model's forward an argument `fastrl_loss`; with it the forward returns that loss's dictionary.

    The loss runs inside the forward and is its output, because wrappers (DDP, accelerate's autocast) act on both.
    """
    fused_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = kwargs.pop(LOSS, None)
        if loss is None:
            return fused_forward(*args, **kwargs)
        head = _LossHead(loss)
        with replaced_head(head):
            fused_forward(*args, fused_lm_head=True, **kwargs)
        return head.found

    model.forward = MethodType(forward, model)
