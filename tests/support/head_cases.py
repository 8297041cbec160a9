"""What the tests of statistics per token share: the arguments that transform logits, and a small head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MASK = torch.tensor([[1, 0, 1], [0, 1, 1]])
#: For targets (2, 3).
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperature per token": {"temperature": torch.tensor([[0.5, 1.0, 1.7], [0.9, 2.0, 0.3]])},
    "softcap, scale": {"softcap": 4.0, "logit_scale": 0.8, "temperature": 1.3},
    "mask": {"mask": MASK},
}


def moved(given: dict[str, Any], device: str) -> dict[str, Any]:
    """The same with its tensors on the device."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}


def random_head(dtype: torch.dtype, biased: bool = False, vocab: int = 77) -> dict[str, Tensor]:
    """Hidden states (2, 3, 16), a weight and perhaps a bias: logits of two units, and some more."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(2, 3, 16, generator=g), torch.randn(vocab, 16, generator=g) / 2 + 0.1
    bias = {"bias": torch.randn(vocab, generator=g)} if biased else {}
    return {k: x.to(dtype) for k, x in {"hidden": hidden, "weight": weight, **bias}.items()}
