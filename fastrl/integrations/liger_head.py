"""What classes with Liger's names share: the output head as Liger takes it, and log-probabilities without a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import linear_token_logprobs


def head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """weight and bias in the hidden states' dtype, as in Liger."""
    return {"weight": weight.to(hidden.dtype), "bias": None if bias is None else bias.to(hidden.dtype)}


@torch.no_grad()
def scored(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Log-probabilities (B, T) without a graph."""
    return linear_token_logprobs(hidden, targets=targets, mask=mask, **head(hidden, weight, bias), **options).logprobs
