"""The policy losses of separate responses, by the exact evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from exact_policy import Batch, exact_loss
from torch import Tensor

from fastrl.objectives.objective import Objective


@dataclass
class Response:
    """One response's unmasked tokens: (T_i,) tensors, float64; old, ref and rollout may be None."""

    logp: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    rollout: Tensor | None = None
    entropy: Tensor | None = None
    token_weights: Tensor | None = None
    prompt: int = 0


def policy_loss(responses: list[Response], objective: Objective, entropy_threshold: float | None = None) -> Tensor:
    """The loss of a batch of responses, by the definition: sum_t w_t (omega_t f_t + beta kl_t - alpha H_t)."""
    lengths = [len(r.logp) for r in responses]
    rows = [row.tolist() for row in torch.arange(sum(lengths)).split(lengths)]
    joined = {
        name: None if value is None else torch.cat([vars(r)[name] for r in responses])
        for name, value in vars(responses[0]).items()
        if name != "prompt"
    }
    logp, entropy = joined.pop("logp"), joined.pop("entropy")
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    batch = Batch(rows, mask, threshold=entropy_threshold, groups=[r.prompt for r in responses], **joined)
    return exact_loss(objective, batch, logp, entropy)
