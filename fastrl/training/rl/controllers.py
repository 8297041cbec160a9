"""Coefficients that change during training: an adaptive KL weight, and an entropy weight learned towards a target.

Each is a 0-dim tensor that the objective holds and the losses read on the device. Every step ends with `update`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fastrl.training.config.algorithm import EntropyConfig, KLConfig


class AdaptiveKL:
    """The weight beta of a KL term, adapted to keep the KL near a target."""

    def __init__(self, config: KLConfig, device: torch.device) -> None:
        self.config = config
        self.coef = torch.tensor(config.coef, device=device)

    def update(self, kl: float, tokens: float, responses: int) -> None:
        """Adapt to a step's mean KL per token (nats), over this many tokens and responses. Does nothing without tokens.

        schulman: halve beta below target / 1.5, double it above 1.5 target (Schulman et al., 2017, arXiv:1707.06347,
        section 4). rlhf: beta *= 1 + clip(KL / target - 1, -0.2, 0.2) n / horizon, with the KL per response (Ziegler
        et al., 2019, arXiv:1909.08593, section 2.2).
        """
        target = self.config.target
        if target is None or not tokens or not math.isfinite(kl):
            return
        if self.config.adaptive == "schulman":
            factor = 0.5 if kl < target / 1.5 else 2.0 if kl > 1.5 * target else 1.0
        else:
            error = kl * tokens / responses / target - 1
            factor = 1 + min(max(error, -0.2), 0.2) * responses / self.config.horizon
        self.coef.mul_(factor)

    def state(self) -> dict[str, float]:
        """The state that `load` restores, as plain numbers."""
        return {"coef": self.coef.item()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.coef.fill_(float(state["coef"]))


class LearnedEntropy:
    """The weight alpha of the entropy bonus, learned towards a target entropy by `L = log(alpha) sg[H - H_target]`.

    SAC's automatic temperature (Haarnoja et al., 2018, arXiv:1812.05905, section 5), for tokens. Adam moves log alpha,
    so alpha stays positive.
    """

    def __init__(self, config: EntropyConfig, start: float, device: torch.device) -> None:
        self.config = config
        self.logarithm: Tensor = torch.tensor(math.log(start), device=device, requires_grad=True)
        self.coef = self.logarithm.detach().exp()
        self.optimizer = torch.optim.Adam([self.logarithm], config.lr)

    def update(self, entropy: float) -> None:
        """Update alpha from a step's mean entropy per token (nats)."""
        if not math.isfinite(entropy):
            return
        # The slope of L in log alpha is alpha times this. Adam would treat that factor as the gradient's scale,
        # and its moments from a larger alpha would keep a small alpha from growing again.
        self.logarithm.grad = torch.full_like(self.logarithm, entropy - self.config.target)
        self.optimizer.step()
        self.coef.copy_(self.logarithm.detach().exp())

    def state(self) -> dict[str, float]:
        """The state that `load` restores, as plain numbers."""
        moments = self.optimizer.state.get(self.logarithm, {})
        return {"logarithm": self.logarithm.item(), **{name: float(value) for name, value in moments.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        moments = {name: float(value) for name, value in state.items()}
        with torch.no_grad():
            self.logarithm.fill_(moments.pop("logarithm"))
            self.coef.copy_(self.logarithm.exp())
        if moments:
            tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in moments.items()}
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": {0: tensors}, "param_groups": groups})
