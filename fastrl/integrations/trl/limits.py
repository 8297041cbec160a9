"""Which of TRL's heads fastrl computes, and the log that says why another one is left to TRL."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fastrl.base import checks

log = logging.getLogger("fastrl.trl")
#: The version that the tests ran against; others are accepted if they have the same layout.
TESTED = "1.16.0"


def why_not_fused(hidden: Tensor, logit_scale: float) -> str | None:
    """The reason why fastrl cannot compute this head, or None."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled  # whoever has TRL has transformers

    autocast = torch.is_autocast_enabled(hidden.device.type)
    if not autocast and hidden.dtype not in checks.LOGIT_DTYPES:
        return f"the hidden states are {hidden.dtype}"
    if not logit_scale > 0:
        return f"the model scales its logits by {logit_scale}"
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3 shards the head, which is whole in the forward only"
    return None
