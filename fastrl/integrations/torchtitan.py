"""torchtitan's chunked cross-entropy (0.3), computed by fastrl: from hidden states and the head, without chunks.

    from fastrl.integrations.torchtitan import FusedCrossEntropyLoss

    config.loss = FusedCrossEntropyLoss.Config(memory_budget="1GiB")     # was: ChunkedLossWrapper.Config()

torchtitan's trainer hands the head to the loss, and tells the model to return hidden states, if the loss is a
`ChunkedLossWrapper`, as this one is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl import linear_cross_entropy
from fastrl.models.patching import as_forward
from fastrl.planning.announce import announces_plan
from fastrl.planning.budget import parse_budget

try:
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
except ModuleNotFoundError as error:
    told = f"fastrl.integrations.torchtitan needs torchtitan ({error}): pip install torchtitan"
    raise ModuleNotFoundError(told, name=error.name) from error

__all__ = ["FusedCrossEntropyLoss"]


class FusedCrossEntropyLoss(ChunkedLossWrapper):
    """The summed cross-entropy over `global_valid_tokens`, and its gradients, in one pass over the logits.

    The forward forms the gradients (3U); the logits are never held whole, whatever the length, which no number of
    chunks has to divide. The head's gradient is summed in float32. Its weight is read in its module's forward, where
    FSDP2 has gathered it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """memory_budget: bytes or text, as in `fastrl.linear_cross_entropy`."""

        memory_budget: int | str | None = None

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        """compile_config has no effect: nothing is compiled."""
        self.memory_budget, self.lm_head = parse_budget(config.memory_budget), None

    @announces_plan("torchtitan's cross-entropy")
    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """pred (..., H) hidden states, labels (...) with -100 for tokens that do not count: the loss, and no metrics.

        Without global_valid_tokens (validation) it is the sum. loss_inputs are not read, as by torchtitan's loss.

        Raises:
            RuntimeError: before `set_lm_head`. TypeError: for a head that is not a plain linear layer, or hidden states
            that are a DTensor, as with tensor parallelism.
        """
        head: Any = self.lm_head
        if head is None:
            raise RuntimeError("set_lm_head must be called first: torchtitan's trainer does")
        if not isinstance(head, torch.nn.Linear):
            raise TypeError(f"the model must have a linear output head, got {type(head).__name__}")
        if type(pred).__name__ == "DTensor":
            raise TypeError("pred must be a plain tensor: tensor parallelism is not supported by this loss")

        def compute(hidden: Tensor) -> Tensor:
            options: dict[str, Any] = {"bias": head.bias, "memory_budget": self.memory_budget}
            return linear_cross_entropy(hidden, head.weight, labels, reduction="sum", **options)

        loss = as_forward(head, compute, pred)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}
